"""Files that people write: text, and a strict YAML. Used by `config` and `up.file`.

Whatever is wrong with a file is a `ConfigError` that names it and, where it can, the line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kvtally.errors import ConfigError


def read_text(path: Path, what: str) -> str:
    """Read a text file. Raises ConfigError, which calls the file `what`."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"{what} {path} cannot be read: {reason}", remedy="Check the path, its owner and its mode.", code="KV-105"
        ) from error


def read_yaml(path: Path, remedy: str) -> object:
    """Read a YAML file into a finite tree. Raises ConfigError."""
    text = read_text(path, "the configuration file")
    try:
        loader = _Loader(text)
        loader.deep_construct = True  # refuses an alias to its own parent, which would be an endless tree
        tree: object = loader.get_single_data()
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply", remedy=remedy, code="KV-105") from error
    # PyYAML lets the others through: for a date that does not exist, or a value that does not fit its tag.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        place = " ".join(str(error).split())
        raise ConfigError(f"{path} is not YAML: {place}", remedy=remedy, code="KV-105") from error
    return tree


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml is untyped
    """Refuses what PyYAML accepts but nobody can have meant."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Refuse a name that occurs twice: PyYAML would silently drop the first, perhaps a whole section."""
        names: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if (name := str(key.value)) in names:
                raise yaml.constructor.ConstructorError(None, None, f"a second {name!r}", key.start_mark)
            names.add(name)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: Any) -> Any:
        """Refuse characters that no path, argument or variable can hold: a zero, half a surrogate pair."""
        value = super().construct_scalar(node)
        if isinstance(value, str) and any(sign == "\0" or "\ud800" <= sign <= "\udfff" for sign in value):
            raise yaml.constructor.ConstructorError(None, None, "text that no system takes", node.start_mark)
        return value
