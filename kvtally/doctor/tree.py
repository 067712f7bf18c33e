"""Text of unknown origin as a tree that knows its line numbers: YAML of several documents, and JSON, which is YAML.

Bounded: size, number of nodes, depth. Anything beyond the bounds, or not text at all, is a `ConfigError`. An alias is
expanded, and counts each time, so a document that would unfold without end is refused early. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from kvtally.doctor.model import Place, Value
from kvtally.errors import ConfigError

MOST_BYTES = 1 << 20
MOST_NODES = 50_000
MOST_DEPTH = 64
LONGEST_PATH = 200  # of a value's name in messages
_TEMPLATE = re.compile(r"^\s*\{\{-?\s*(if|with|range|end|include|define|template|toYaml)\b|\{\{-", re.MULTILINE)


class Node:
    """A value in a file. `content` is a dict, a list or the scalar's text; `text` is empty for the former two."""

    __slots__ = ("content", "first_line", "line", "path", "place_file")

    def __init__(
        self, content: dict[str, Node] | list[Node] | str, *, file: str, path: str, line: int, first_line: int = 0
    ) -> None:
        self.content = content
        self.place_file = file
        self.path = path
        self.line = line
        self.first_line = first_line or line  # of a scalar's text: a block begins below its `|`

    @property
    def place(self) -> Place:
        return Place(self.place_file, self.line, self.path)

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else ""

    @property
    def value(self) -> Value:
        return Value(self.text, self.place)

    @property
    def start(self) -> Place:
        """Where a scalar's text begins. A block's text begins below its `|`."""
        return Place(self.place_file, self.first_line, self.path)

    @property
    def keeps_lines(self) -> bool:
        """Whether the lines of a scalar's text are lines of the file. They are not if YAML has folded them."""
        return "\n" not in self.text or self.first_line > self.line

    @property
    def mapping(self) -> dict[str, Node]:
        return self.content if isinstance(self.content, dict) else {}

    @property
    def items(self) -> list[Node]:
        return self.content if isinstance(self.content, list) else []

    def get(self, *names: str) -> Node:
        """The node under these names. If there is none: an empty node, at the nearest place."""
        node = self
        for name in names:
            found = node.mapping.get(name)
            if found is None:
                return Node("", file=self.place_file, path=node.path, line=node.line)
            node = found
        return node

    def has(self, name: str) -> bool:
        return name in self.mapping

    def __bool__(self) -> bool:
        return bool(self.content)

    def leaves(self, prefix: str = "") -> Iterator[tuple[str, Value]]:
        """Every scalar below, by its dotted name."""
        if isinstance(self.content, dict):
            for name, node in self.content.items():
                yield from node.leaves(f"{prefix}.{name}" if prefix else name)
        elif isinstance(self.content, list):
            for index, node in enumerate(self.content):
                yield from node.leaves(f"{prefix}[{index}]")
        else:
            yield prefix, self.value


def decode(content: bytes, file: str) -> str:
    """The text of a file. Raises ConfigError if it is not text, or too long."""
    if len(content) > MOST_BYTES:
        raise _unreadable(file, f"it is larger than {MOST_BYTES >> 20} MiB", "Give the manifests alone, not a bundle.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unreadable(file, "it is not UTF-8 text") from error
    if "\0" in text:
        raise _unreadable(file, "it is binary")
    return text


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml is untyped
    """Gives up early: PyYAML takes seconds for each hundred thousand values."""

    nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.nodes += 1
        if self.nodes > MOST_NODES:
            raise yaml.composer.ComposerError(
                None, None, f"more than {MOST_NODES:,} values", self.peek_event().start_mark
            )
        return super().compose_node(parent, index)


def documents(text: str, file: str) -> list[Node]:
    """The YAML documents of a text; empty ones are left out. Raises ConfigError."""
    try:
        composed = list(yaml.compose_all(text, Loader=_Loader))
    except RecursionError as error:
        raise _unreadable(file, "it is nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:
        if _TEMPLATE.search(text):
            raise _unreadable(
                file, "it is a template, not YAML yet", "Render it first: `helm template … > rendered.yaml`."
            ) from error
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        what = getattr(error, "problem", None) or "it is not text that YAML allows"
        raise _unreadable(file, f"it is not YAML{line}: {what}") from error
    budget = [MOST_NODES]  # once more: an alias costs nothing to compose
    return [_node(root, file, "", 0, budget) for root in composed if root is not None]


def embedded(text: str, place: Place, *, keeps_lines: bool = True) -> Node:
    """The JSON or YAML inside a text that begins at this place. Raises ConfigError.

    Without `keeps_lines` everything in it is said to stand there.
    """
    roots = documents(text, place.file)
    if not roots:
        raise _unreadable(place.file, "it is empty")
    for node in _walk(roots[0]):
        node.line = place.line + node.line - 1 if keeps_lines else place.line
        node.path = f"{place.path}.{node.path}".strip(".")
    return roots[0]


def _walk(root: Node) -> Iterator[Node]:
    yield root
    for node in [*root.mapping.values(), *root.items]:
        yield from _walk(node)


def _node(node: Any, file: str, path: str, depth: int, budget: list[int]) -> Node:
    budget[0] -= 1
    if budget[0] < 0:
        raise _unreadable(file, f"it unfolds to more than {MOST_NODES:,} values")
    if depth > MOST_DEPTH:
        raise _unreadable(file, "it is nested too deeply")
    line = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        if any(not isinstance(key, yaml.ScalarNode) for key, _ in node.value):  # {{ .Values.name }}, unquoted
            return Node("{{…}}", file=file, path=path, line=line)
        content: dict[str, Node] = {}
        for key, value in node.value:
            child = _node(value, file, _below(path, str(key.value)), depth + 1, budget)
            if key.tag == "tag:yaml.org,2002:merge":  # <<: what is written here wins over what is merged
                for merged in [child, *child.items]:
                    content = {**merged.mapping, **content}
                continue
            if not isinstance(value, yaml.ScalarNode):
                child.line = key.start_mark.line + 1  # a mapping or list is found at its name
            content[str(key.value)] = child
        return Node(content, file=file, path=path, line=line)
    if isinstance(node, yaml.SequenceNode):
        children = [_node(child, file, f"{path}[{index}]", depth + 1, budget) for index, child in enumerate(node.value)]
        return Node(children, file=file, path=path, line=line)
    first_line = line + 1 if node.style == "|" else line
    text = "" if node.tag == "tag:yaml.org,2002:null" else str(node.value)
    return Node(text, file=file, path=path, line=line, first_line=first_line)


def _below(path: str, name: str) -> str:
    """A path that stays short, whatever the file holds."""
    longer = f"{path}.{name[:LONGEST_PATH]}" if path else name[:LONGEST_PATH]
    return longer if len(longer) <= LONGEST_PATH else "…" + longer[-LONGEST_PATH:]


def _unreadable(file: str, why: str, remedy: str = "Give YAML, JSON or a shell script.") -> ConfigError:
    return ConfigError(f"{file} cannot be examined: {why}", remedy=remedy, code="KV-105")
