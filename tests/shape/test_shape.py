"""The shape of the code: who may import whom, and what is banned. Reads the source, runs none of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from kvtally.errors import CODES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvtally"
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")

EVERYBODY_MAY_IMPORT = ("errors", "__version__")
# What is pure may import: values only. Time, randomness, files, sockets, threads and logs are the shell's.
VALUES = {
    *("kvtally.errors", "blake3", "msgspec", "numpy", "xxhash"),
    *("__future__", "abc", "array", "bisect", "collections", "dataclasses", "enum", "functools", "hashlib"),
    *("heapq", "itertools", "math", "operator", "struct", "sys", "typing"),
}
PURE = ("kvtally.core", "kvtally.wire")
PURE_IN_TIERS = ("kvtally.store.tiers.pool.format", "kvtally.store.tiers.pool.search")
# Run in the engine's own threads, and have none.
WITHOUT_THREADS = ("kvtally.client", "kvtally.shm")
THREADS = ("asyncio", "concurrent", "multiprocessing", "queue", "threading", "uvloop")
KNOW_VLLM = ("kvtally.vllm", "kvtally.testing.runner", "kvtally.bench.engine")
PICKLES = ("pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve")

# Where anything may be caught: the engine's edge and the supervisors of threads and tasks. Each logs what it caught.
MAY_CATCH_ALL = {
    ("kvtally.store.mover", "_outcome"),
    ("kvtally.vllm.connector", "guarded"),
    ("kvtally.vllm.adapters", "_run"),
    ("kvtally.vllm.lookup_thread", "_run"),
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
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


@cache
def may_import() -> dict[str, frozenset[str]]:
    """The table of architecture.md: for each package, those that it may import."""
    rows = re.findall(r"^\| (`kvtally\..*) \| .* \| (.*) \|$", ARCHITECTURE, re.MULTILINE)
    named = [([name.removeprefix("kvtally.") for name in words(left)], right) for left, right in rows]
    everybody = frozenset(name for left, _ in named for name in left)
    found: dict[str, frozenset[str]] = {}
    for left, right in named:
        if right.startswith("anything"):
            allowed = everybody.difference(words(right))
        else:
            assert right == "nothing" or right == ", ".join(f"`{name}`" for name in words(right)), right
            allowed = frozenset(words(right))
        assert allowed <= everybody, f"{right} names what the table does not have"
        for name in left:
            assert name not in found, f"{name} is in the table twice"
            found[name] = allowed.union(left)
    return found


def words(text: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", text)


@cache
def deciders() -> tuple[list[str], list[str]]:
    """Of the store's modules: those that decide, and those that carry out, as architecture.md has them."""
    row = re.search(
        r"^\| `kvtally\.store` \| the daemon\. (.*) decide and do no I/O; (.*) carry out \|", ARCHITECTURE, re.M
    )
    assert row is not None
    return words(row[1]), words(row[2])


def package(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def import_direction(module: str, tree: ast.Module) -> Iterator[str]:
    if module == "kvtally":
        return
    allowed = may_import().get(package(module))
    if allowed is None:
        yield "is in no row of architecture.md's table"
        return
    for name in imports(tree):
        if name.startswith("."):
            yield f"imports {name}: say where it is from the top"
        if within(name, ("kvtally",)) and package(name) not in {*allowed, *EVERYBODY_MAY_IMPORT, ""}:
            yield f"imports {name}, which architecture.md does not allow"


def pure_parts(module: str, tree: ast.Module) -> Iterator[str]:
    decide = {f"kvtally.store.{name}" for name in deciders()[0]}
    allowed = {*VALUES, *PURE}
    if module in decide or module == "kvtally.store.tiers.base" or module in PURE_IN_TIERS:
        allowed |= {*decide, "kvtally.store.tiers.base"}
    elif not within(module, PURE):
        return
    yield from (f"imports {name}" for name in imports(tree) if not within(name, allowed))


def no_threads(module: str, tree: ast.Module) -> Iterator[str]:
    if within(module, WITHOUT_THREADS):
        yield from (f"imports {name}" for name in imports(tree) if within(name, THREADS))


def only_the_connector_knows_vllm(module: str, tree: ast.Module) -> Iterator[str]:
    if not within(module, KNOW_VLLM):
        yield from (f"imports {name}" for name in imports(tree) if within(name, ("vllm",)))


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
        if isinstance(node, ast.ExceptHandler) and node not in allowed and is_broad(node):
            yield f"line {node.lineno} catches everything"


def is_broad(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = {part.id for part in ast.walk(handler.type) if isinstance(part, ast.Name)}
    return bool(names & {"Exception", "BaseException"})


def has_docstring(module: str, tree: ast.Module) -> Iterator[str]:
    if not ast.get_docstring(tree):
        yield "has no docstring"


def known_codes(module: str, tree: ast.Module) -> Iterator[str]:
    known = {*CODES, "KV-000"}  # the base class's own, which nothing raises
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            unknown = set(re.findall(r"KV-\d{3}", node.value)) - known
            yield from (f"line {node.lineno} uses {code}, which errors.CODES does not explain" for code in unknown)


RULES: dict[Rule, list[tuple[str, str]]] = {
    # rule: modules and sources that break it
    import_direction: [
        ("kvtally.core.keys", "import kvtally.wire"),
        ("kvtally.wire.frames", "from kvtally.config import units"),
        ("kvtally.client", "from kvtally.store import arena"),
        ("kvtally.device.cuda", "import kvtally.store"),
        ("kvtally.store.server", "import kvtally.router.app"),
        ("kvtally.store.server", "from kvtally.client import StoreClient"),
        ("kvtally.router.app", "from kvtally import vllm"),
        ("kvtally.router.receipts", "from kvtally.client import StoreClient"),
        ("kvtally.vllm.worker", "def f():\n    from kvtally.store.server import run"),
        ("kvtally.verify.run", "from kvtally.up.file import read"),
        ("kvtally.up.plan", "import kvtally.bench.route"),
        ("kvtally.testing.sim", "from kvtally.bench import report"),
        ("kvtally.bench.repeat", "from kvtally.cli import render"),
        ("kvtally.processes", "from kvtally.testing import engine"),
        ("kvtally.router.app", "from ..store import arena"),
        ("kvtally.brand_new", "import os"),
    ],
    pure_parts: [
        ("kvtally.core.keys", "import time"),
        ("kvtally.wire.frames", "from socket import socket"),
        ("kvtally.core.space", "def f():\n    import random"),
        ("kvtally.store.leases", "import logging"),
        ("kvtally.store.store", "from kvtally.store.mover import Mover"),
        ("kvtally.store.tiers.base", "import os"),
        ("kvtally.store.tiers.pool.format", "from kvtally.store.tiers.engines.base import Engine"),
    ],
    no_threads: [("kvtally.client.link", "import threading"), ("kvtally.client", "from concurrent import futures")],
    only_the_connector_knows_vllm: [
        ("kvtally.store.server", "from vllm import LLM"),
        ("kvtally.testing.engines", "import vllm.config"),
    ],
    no_pickle: [("kvtally.bench.store", "def f():\n    from pickle import loads")],
    no_broad_except: [
        ("kvtally.store.mover", "try:\n    pass\nexcept (OSError, Exception):\n    pass"),
        ("kvtally.vllm.worker", "try:\n    pass\nexcept:\n    pass"),
        ("kvtally.config", "try:\n    pass\nexcept* BaseException:\n    pass"),
    ],
    has_docstring: [("kvtally.config", "import os")],
    known_codes: [("kvtally.config", "code = 'KV-999'")],
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module_keeps(rule: Rule) -> None:
    broken = [
        f"{module} {problem}"
        for module, path in modules().items()
        for problem in rule(module, ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("rule", "module", "source"),
    [pytest.param(rule, *broken, id=f"{rule.__name__}-{broken[0]}") for rule in RULES for broken in RULES[rule]],
)
def test_rule_finds_what_it_is_for(rule: Rule, module: str, source: str) -> None:
    assert list(rule(module, ast.parse(source)))


def test_every_row_of_the_table_is_there() -> None:
    assert {package(module) for module in modules()} - {""} == may_import().keys()


def test_every_module_of_the_store_decides_or_carries_out() -> None:
    decide, carry_out = deciders()
    there = {module.split(".")[2] for module in modules() if module.startswith("kvtally.store.")}
    assert sorted(decide + carry_out) == sorted(there)


def test_where_anything_may_be_caught_something_is() -> None:
    """An entry that nobody needs any more would hide the next one."""
    without = {
        (module, name)
        for module, name in MAY_CATCH_ALL
        if not any(
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name == name
            and any(isinstance(part, ast.ExceptHandler) and is_broad(part) for part in ast.walk(node))
            for node in ast.walk(ast.parse(modules()[module].read_text(encoding="utf-8")))
        )
    }
    assert without == set()


def test_every_code_is_explained_to_operators() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert [code for code in CODES if f"`{code}`" not in text] == []
