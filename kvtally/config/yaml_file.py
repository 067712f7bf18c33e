"""Files that people write: text, and YAML with what it leaves open decided. Used by `config` and `up.file`.

Whatever is wrong with a file is a `ConfigError` that names it and, where it can, the line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kvtally.errors import ConfigError


def read_text(path: Path, what: str) -> str:
    """The content of a file, which is called `what` if it cannot be read. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"{what} {path} cannot be read: {reason}", remedy="Check the path, its owner and its mode.", code="KV-105"
        ) from error


def read_yaml(path: Path, remedy: str) -> object:
    """What stands in a YAML file: a tree, and an end to it. Raises ConfigError."""
    text = read_text(path, "the configuration file")
    try:
        loader = _Loader(text)
        loader.deep_construct = True  # refuses an alias to what it stands in: a tree without end
        tree: object = loader.get_single_data()
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply", remedy=remedy, code="KV-105") from error
    # The others are what PyYAML lets through: of a date that does not exist, or of a value that its tag does not fit.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        place = " ".join(str(error).split())
        raise ConfigError(f"{path} is not YAML: {place}", remedy=remedy, code="KV-105") from error
    return tree


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml is untyped
    """Refuses what PyYAML takes, and nobody can have meant."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """A name that stands twice: the first, a whole section perhaps, would be forgotten."""
        names: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if (name := str(key.value)) in names:
                raise yaml.constructor.ConstructorError(None, None, f"a second {name!r}", key.start_mark)
            names.add(name)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: Any) -> Any:
        """Escapes for what no path, argument or variable can hold: a zero, half a character."""
        value = super().construct_scalar(node)
        if isinstance(value, str) and any(sign == "\0" or "\ud800" <= sign <= "\udfff" for sign in value):
            raise yaml.constructor.ConstructorError(None, None, "text that no system takes", node.start_mark)
        return value
