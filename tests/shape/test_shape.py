"""The shape of the code: who may import whom, and what is banned. Reads the source, runs none of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtally.errors import CODES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvtally"

PURE = ("kvtally.core", "kvtally.wire")
# Value modules only. Time, randomness, files, sockets, threads and logs are the shell's.
PURE_MAY_IMPORT = {
    *("kvtally.core", "kvtally.wire", "kvtally.errors", "blake3", "msgspec", "numpy", "xxhash"),
    *("__future__", "abc", "array", "bisect", "collections", "dataclasses", "enum", "functools", "hashlib", "heapq"),
    *("itertools", "math", "operator", "struct", "sys", "typing"),
}
# Programs that other processes start inside an engine's environment; nothing imports them.
INSIDE_ENGINES = (
    "kvtally.testing.runner",
    "kvtally.bench.engine",
)
SIBLINGS = ("kvtally.store", "kvtally.router", "kvtally.vllm")
ENGINE_SIDE = ("kvtally.client", "kvtally.connection", "kvtally.link", "kvtally.shm", "kvtally.device")
PICKLES = ("pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve")

# Where anything may be caught: the engine's edge and the supervisors of threads and tasks. Each logs what it caught.
MAY_CATCH_ALL = {
    ("kvtally.store.mover", "_outcome"),
    ("kvtally.vllm.connector", "guarded"),
    ("kvtally.vllm.inquiry", "_run"),
    ("kvtally.vllm.worker", "_run"),
    ("kvtally.vllm.worker", "_turn"),
}

Rule = Callable[[str, ast.Module], Iterator[str]]


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def within(name: str, packages: tuple[str, ...] | set[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def imports(tree: ast.Module) -> Iterator[str]:
    """Every dotted name that is imported, anywhere in the module; `from a import b` may name the module a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or '.'}.{alias.name}" for alias in node.names)


def pure_core(module: str, tree: ast.Module) -> Iterator[str]:
    if within(module, PURE):
        yield from (f"imports {name}" for name in imports(tree) if not within(name, PURE_MAY_IMPORT))


def import_direction(module: str, tree: ast.Module) -> Iterator[str]:
    for name in imports(tree):
        for sibling in SIBLINGS:
            if within(name, (sibling,)) and within(module, SIBLINGS) and not within(module, (sibling,)):
                yield f"imports {name}, a sibling"
        if within(module, ENGINE_SIDE) and within(name, ("kvtally.store",)):
            yield f"imports {name}: an engine talks to a store, it does not contain one"
        if within(name, ("vllm",)) and not within(module, ("kvtally.vllm", *INSIDE_ENGINES)):
            yield f"imports {name}: only kvtally.vllm knows the engine"


def no_pickle(module: str, tree: ast.Module) -> Iterator[str]:
    yield from (f"imports {name}" for name in imports(tree) if within(name, PICKLES))


def no_broad_except(module: str, tree: ast.Module) -> Iterator[str]:
    allowed = {
        handler
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (module, node.name) in MAY_CATCH_ALL
        for handler in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node not in allowed:
            names = {part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)} if node.type else {"(all)"}
            if broad := names & {"Exception", "BaseException", "(all)"}:
                yield f"line {node.lineno} catches {', '.join(sorted(broad))}"


def has_docstring(module: str, tree: ast.Module) -> Iterator[str]:
    if not ast.get_docstring(tree):
        yield "has no docstring"


def known_codes(module: str, tree: ast.Module) -> Iterator[str]:
    known = {*CODES, "KV-000"}  # the base class's own, which nothing raises
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            unknown = set(re.findall(r"KV-\d{3}", node.value)) - known
            yield from (f"line {node.lineno} uses {code}, which errors.CODES does not explain" for code in unknown)


RULES: dict[Rule, tuple[str, str]] = {
    # rule: a module and a source that break it
    pure_core: ("kvtally.core.keys", "import time"),
    import_direction: ("kvtally.client", "from kvtally.store import arena"),
    no_pickle: ("kvtally.bench.store", "def f():\n    from pickle import loads"),
    no_broad_except: ("kvtally.store.mover", "try:\n    pass\nexcept (OSError, Exception):\n    pass"),
    has_docstring: ("kvtally.config", "import os"),
    known_codes: ("kvtally.config", "code = 'KV-999'"),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module_keeps(rule: Rule) -> None:
    broken = [
        f"{module} {problem}"
        for module, path in modules().items()
        for problem in rule(module, ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_finds_what_it_is_for(rule: Rule) -> None:
    module, source = RULES[rule]
    assert list(rule(module, ast.parse(source)))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvtally.store.server", "import kvtally.router.app"),
        ("kvtally.router.app", "from kvtally import vllm"),
        ("kvtally.store.server", "from vllm import LLM"),
        ("kvtally.device.cuda", "import kvtally.store"),
    ],
)
def test_wrong_directions_are_found(module: str, source: str) -> None:
    assert list(import_direction(module, ast.parse(source)))


def test_every_code_is_explained_to_operators() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert [code for code in CODES if f"`{code}`" not in text] == []
