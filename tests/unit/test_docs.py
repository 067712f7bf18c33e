"""What documents say about code, settings, metrics and each other is true."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import get_args

import msgspec
import pytest
import typer

from kvtally.cli.main import app
from kvtally.config import DEFAULT_FILE
from kvtally.core.receipts import Verdict
from kvtally.core.routing import Skip
from kvtally.errors import CODES
from kvtally.store.metrics import METRICS
from kvtally.verify.reasons import REASONS
from kvtally.wire import messages
from kvtally.wire.limits import Limits
from kvtally.wire.messages import Message, MissReason, Reply, Request
from kvtally.wire.stats import Kind

ROOT = Path(__file__).parents[2]
DOCS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
NESTED = (messages.Slot, messages.PutObject, messages.PutSlot)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def exists(dotted: str) -> bool:
    """Whether `kvtally.a.b.C.d` is a module, or something in one. Reads the source: some of it needs vLLM to run."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        module = ROOT.joinpath(*parts[:count])
        for file in (module.with_suffix(".py"), module / "__init__.py"):
            if file.is_file():
                return _has(ast.parse(file.read_text(encoding="utf-8")), parts[count:])
    return False


def _has(tree: ast.AST, names: list[str]) -> bool:
    """Whether these names, one inside the other, are defined, assigned, annotated or imported there."""
    if not names:
        return True
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == names[0]:
            return _has(node, names[1:])
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        bound = {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ImportFrom):
            given = {alias.asname or alias.name: alias.name for alias in node.names}
            if names[0] in given and (node.module or "").startswith("kvtally."):
                return exists(".".join((node.module or "", given[names[0]], *names[1:])))
            bound = set(given)
        if names[0] in bound:
            return True
    return False


def _bound(node: ast.Assign | ast.AnnAssign | ast.ImportFrom) -> set[str]:
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_code_that_is_named_exists(path: Path) -> None:
    named = set(re.findall(r"`(kvtally(?:\.\w+)+)`", path.read_text(encoding="utf-8"))) - {DEFAULT_FILE}
    assert [dotted for dotted in sorted(named) if not exists(dotted)] == []


def test_the_walk_names_functions() -> None:
    """The walks through the code are useless without the names of functions."""
    walks = text_of("docs/architecture.md").split("## Follow one chunk: ")[1:]
    assert [len(re.findall(r"`kvtally(?:\.\w+)+`", walk.split("\n## ")[0])) >= 10 for walk in walks] == [True] * 3


@pytest.mark.parametrize(
    "wrong", ["kvtally.core.keys.no_such", "kvtally.nothing.here", "kvtally.client.StoreClient.no"]
)
def test_a_wrong_name_is_noticed(wrong: str) -> None:
    assert not exists(wrong)


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_files_and_headings_that_are_linked_exist(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        linked = path.parent / name if name else path
        assert linked.exists(), f"{target} is not there"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, f"{target} has no such heading"


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_commands_and_codes_that_are_named_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    named = set(re.findall(r"(?:`|^|bin/)kvtally ([a-z]+)", text, re.MULTILINE))
    assert named <= commands
    assert set(re.findall(r"KV-\d{3}", text)) <= set(CODES)


def test_a_source_distribution_has_what_its_makefile_runs_and_its_readme_links_to() -> None:
    included = tomllib.loads(text_of("pyproject.toml"))["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    always = ["README.md", "LICENSE", "pyproject.toml"]
    needed = {*re.findall(r"\bscripts/[\w-]+", text_of("Makefile")), "Makefile"}
    needed |= {
        target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text_of("README.md")) if "://" not in target
    }
    roots = tuple([name.removeprefix("/") for name in included] + always)
    assert {name.split("/")[0] for name in needed if name} - set(roots) == set()


def test_what_an_example_writes_beside_itself_is_nobodys_source() -> None:
    """Otherwise a commit or a source distribution would include gigabytes."""
    ignored = text_of(".gitignore").splitlines()
    for path in (ROOT / "examples").glob("*.yaml"):
        for disk in re.findall(r"^  disk: ([\w-]+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            assert f"/examples/{disk}/" in ignored


def test_readme_fits_two_screens() -> None:
    assert len(text_of("README.md").split()) <= 900


def test_every_question_that_was_measured_has_its_command_and_its_figures() -> None:
    text = text_of("docs/benchmarks.md")
    for name in ("store", "verify", "prefetch", "route"):
        assert text.index(f"<!-- bench:{name} -->") < text.index(f"<!-- /bench:{name} -->")
    questions = [part for part in text.split("\n## ")[1:] if part.splitlines()[0].endswith("?")]
    assert len(questions) >= 10
    for question in questions:
        assert "\n|---|" in question, question.splitlines()[0]
        assert re.search(r"`(make|kvtally (bench|up|verify)|tests/)", question), question.splitlines()[0]


def test_readmes_figures_are_those_of_the_benchmarks() -> None:
    """A figure that is measured again must change in both places."""
    figures = text_of("README.md").split("## Five figures")[1].split("\n## ")[0]
    measured = text_of("docs/benchmarks.md")
    assert len(re.findall(r"^\| (?!question)", figures, re.MULTILINE)) == 5
    told = dict(
        line.split(" = ")
        for line in (
            *("53.9 = 53.9", "52.9 = 52.9", "1,114 ms = 1,114.3", "97 ms = 97.0", "88 ms = 88.3", "220 ms = 220.1"),
            *("37 ms = 36.8", "47 ms = 47.4", "1.7 % = 1.017 ×", "2.1 % = 1.021 ×"),
            *("0.36 ms = added: 0.36", "0.14 ms = added: 0.14"),
        )
    )
    assert [here for here, there in told.items() if here not in figures or there not in measured] == []


@pytest.mark.parametrize("path", DECISIONS, ids=name_of)
def test_a_decision_has_its_four_parts(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith(f"# {path.name[:4]}: ")
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings == ["Context", "Decision", "Rejected options", "What would change our mind"]


def test_decisions_are_numbered_without_gaps() -> None:
    assert [int(path.name[:4]) for path in DECISIONS] == list(range(1, len(DECISIONS) + 1))


def test_the_glossary_explains_each_word_once() -> None:
    words = re.findall(r"^\*\*([^*]+)\*\*:", text_of("docs/glossary.md"), re.MULTILINE)
    assert len(words) > 60
    assert sorted(words) == sorted(set(words))
    assert {"wish", "leg", "flavour", "print", "hand-off", "reason", "ticket", "verdict"} <= set(words)


def test_a_word_with_two_meanings_is_explained_with_its_first() -> None:
    text = text_of("docs/glossary.md")
    twice = re.findall(r"^\| (\w+) \|", text.split("## Words with two meanings")[1], re.MULTILINE)
    assert twice[0] == "word"
    assert [word for word in twice[1:] if f"\n**{word}**: " not in text] == []


def members(union: UnionType) -> list[type[Message]]:
    return list(get_args(union))


@pytest.mark.parametrize("message", [*members(Request), *members(Reply), *NESTED], ids=lambda kind: kind.__name__)
def test_protocol_has_every_message_with_its_fields(message: type[Message]) -> None:
    tag = message.__struct_config__.tag
    fields = ", ".join(f"`{name}`" for name in message.__struct_fields__)
    assert f"\n| `{message.__name__}` | `{tag}` | {fields} | " in text_of("docs/protocol.md")


def test_protocol_has_every_limit() -> None:
    text = text_of("docs/protocol.md")
    rows = [f"\n| `{field.name}` | {field.default:,} | " for field in msgspec.structs.fields(Limits)]
    assert [row for row in rows if row not in text] == []


def test_operations_has_every_metric() -> None:
    rows = []
    for entry in METRICS:
        name = entry.name + ("_total" if entry.kind is Kind.COUNTER else "")
        labels = ", ".join(f"`{label}`" for label in entry.labels) or "-"
        rows.append(f"| `{name}` | {entry.kind} | {labels} | {entry.help} |")
    assert "\n".join(rows) in text_of("docs/operations.md")


def test_operations_has_every_miss_reason() -> None:
    named = re.findall(r"^\| `(\w+)` \|", text_of("docs/operations.md").split("## Miss reasons")[1], re.MULTILINE)
    assert named[: len(MissReason)] == [str(reason) for reason in MissReason]


def reasons_in(source: str) -> Iterator[str]:
    """Reasons that this code can put on a receipt, as words, or as `status_` where more follows: whatever becomes a
    `reason`, a `note` or a `why`, names a failure, or is returned instead of a hand-off."""
    tree = ast.parse(source)
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        for value in _values_that_are_reasons(node):
            yield from filter(re.compile(r"[a-z][a-z0-9_]+").fullmatch, _texts(value, constants))


_REASONS = ("reason", "note", "why", "why_missing", "lost")


def _values_that_are_reasons(node: ast.AST) -> Iterator[ast.expr]:
    match node:
        case ast.keyword(arg=name, value=value) if name in _REASONS:
            yield value
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            yield from (value for target, value in zip(targets, values, strict=True) if _name(target) in _REASONS)
        case ast.Assign(targets=[target], value=value) if _name(target) in _REASONS:
            yield value
        case ast.Call(func=func, args=[first, *_]) if _name(func) == "Failure":
            yield first
        case ast.Call(func=func, args=[_, second]) if _name(func) == "Answer":
            yield second
        case ast.FunctionDef(name="close" | "word"):
            yield from (each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _texts(node: ast.AST, constants: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Name) and node.id in constants:
        yield constants[node.id]
    elif not isinstance(node, ast.FormattedValue | ast.Compare):
        for child in ast.iter_child_nodes(node):
            yield from _texts(child, constants)


def emitted_reasons() -> set[str]:
    files = [path for part in ("router", "vllm") for path in (ROOT / "kvtally" / part).rglob("*.py")]
    return {reason for path in files for reason in reasons_in(path.read_text(encoding="utf-8"))}


def test_every_reason_and_verdict_that_the_code_can_give_is_explained() -> None:
    headings = {"docs/operations.md": "## Miss reasons", "docs/router.md": "## Verdicts"}
    pages = "".join(text_of(name).split(heading)[1] for name, heading in headings.items())
    given = emitted_reasons()
    assert {"not_filed", "no_handoff", "connect", "status_", "prefill_", "transfer_mode_", "unknown"} <= given
    words = {*given, *MissReason, *Verdict, *Skip, *REASONS}
    unexplained = [word for word in words if f"`{word}" + ("" if word.endswith("_") else "`") not in pages]
    assert sorted(set(unexplained) - {Verdict.RECOMPUTED}) == []  # which stands there with its reason
    assert "`recomputed:<reason>`" in pages


def test_a_reason_is_found_however_it_is_given() -> None:
    source = """
UNSENT = "connect"
def close(): return "no_handoff" if x == "not_this" else f"mode_{'nor_this'}"
class A:
    def go(self):
        half, why = None, "batch" if b else "no_receipts"
        self.reason = self.reason or "late"
        return Failure(UNSENT, "in many words"), Half(reason="spent"), Answer(None, "full")
"""
    found = {"no_handoff", "mode_", "batch", "no_receipts", "late", "connect", "spent", "full"}
    assert set(reasons_in(source)) == found
