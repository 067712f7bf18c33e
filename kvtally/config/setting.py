"""One setting: its name, its kind of value, and how that kind is read and checked.

The spelling of a setting in the file (`store: {memory: 8GiB}`), in the environment (`KVTALLY_STORE__MEMORY`) and on the
command line (`--memory`) is derived from its name; its default and bounds are those of its kind. Everything wrong is a
`ConfigError` that names the setting, where it was given and what would be right. Which settings there are is the table
in `table`; what depends on other settings or on the machine is checked in `load`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvtally.config.instances import parse_instance
from kvtally.config.peers import parse_peer
from kvtally.config.remote import parse_remote
from kvtally.config.units import human_size, is_loopback, parse_size, split_address
from kvtally.errors import ConfigError
from kvtally.wire.limits import MIB

SMALLEST_BYTES = 16 * MIB  # of an arena or a disk tier: below that not one object of a large model fits
HIDDEN = "(hidden)"
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_SWITCH = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


class Origin(StrEnum):
    """Where a value comes from; later ones win."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    ENGINE = "engine"
    FLAG = "flag"


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table."""

    section: str = "store"
    name: str
    field: str = ""  # of the section's config, where it is not the name
    description: str
    kind: Kind
    default: str = ""  # in words, where it is not the kind's: it depends on the machine or on other settings
    example: str
    has_flag: bool = True
    is_secret: bool = False

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return f"KVTALLY_{self.section}__{self.name}".upper()

    @property
    def default_words(self) -> str:
        return self.default or self.kind.words()

    @property
    def help(self) -> str:
        return f"{self.description} Default: {self.default_words}."


class Given(NamedTuple):
    """A value as somebody wrote it, unread."""

    setting: Setting
    raw: object
    origin: Origin
    where: str  # for messages: the file, the variable or the flag
    base: Path  # what a relative path is relative to: the file's directory, else the current one

    def __str__(self) -> str:
        value = HIDDEN if self.setting.is_secret else self.raw
        return f"{self.setting.key} = {value} (from {self.where})"

    def text(self) -> str:
        if isinstance(self.raw, str):
            return self.raw
        raise wrong(
            f"{self} is {type_name(self.raw)} where text is needed",
            f"Put it in quotes, for example {self.setting.name}: {self.setting.example}.",
        )


# ---- kinds of values


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """What a setting's value is. `metavar` stands for it in `--help`."""

    metavar: str = "TEXT"
    default: Any = ""

    def words(self) -> str:
        """The default, in words."""
        return str(self.default) or "none"

    def read(self, given: Given, *, is_for_here: bool) -> Any:
        """Read the value. Raises ConfigError. Files are looked for on this machine only if it `is_for_here`."""
        raise NotImplementedError


class Text(Kind, frozen=True, kw_only=True):
    def read(self, given: Given, *, is_for_here: bool) -> Any:
        return given.text() or self.default


class Header(Text, frozen=True, kw_only=True):
    """A header's name. Any other text would match no header, and all tenants would share one cache."""

    metavar: str = "NAME"

    def read(self, given: Given, *, is_for_here: bool) -> Any:
        name = given.text()
        if name and not _HEADER.fullmatch(name):
            raise wrong(f"{given} is not the name of a header", "Write it like X-Tenant.")
        return name


class Choice(Text, frozen=True, kw_only=True):
    """One of a few words."""

    among: tuple[str, ...]

    def read(self, given: Given, *, is_for_here: bool) -> Any:
        word = given.text() or self.default
        if word not in self.among:
            raise wrong(f"{given} is not known", f"Write {' or '.join(self.among)}.")
        return word


class Switch(Kind, frozen=True, kw_only=True):
    default: bool

    def words(self) -> str:
        return str(self.default).lower()

    def read(self, given: Given, *, is_for_here: bool) -> Any:
        word = str(given.raw).lower()
        if word not in _SWITCH:
            raise wrong(f"{given} is neither true nor false", "Write true or false.")
        return _SWITCH[word]


class Number(Kind, frozen=True, kw_only=True):
    """A whole number from `least` to `most`."""

    metavar: str = "NUMBER"
    default: int
    least: int = 0
    most: int

    def read(self, given: Given, *, is_for_here: bool) -> Any:
        text = str(given.raw)
        is_short = text.isdecimal() and len(text) <= len(str(self.most))  # Python does not read thousands of digits
        if isinstance(given.raw, bool) or not is_short or not self.least <= int(text) <= self.most:
            what = f"a whole number from {self.least} to {self.most}"
            raise unusable(f"{given} is not {what}", f"For example {self.default}.")
        return int(text)


class Size(Kind, frozen=True, kw_only=True):
    """Bytes. A default of 0 means none, or one that depends on the machine."""

    metavar: str = "SIZE"
    default: int = 0
    least_bytes: int = SMALLEST_BYTES

    def words(self) -> str:
        return human_size(self.default)

    def read(self, given: Given, *, is_for_here: bool) -> Any:
        example = f"Write a size such as {given.setting.example}, 500 MB or a number of bytes."
        if isinstance(given.raw, bool) or not isinstance(given.raw, int | str):
            raise unusable(f"{given} is {type_name(given.raw)}, not a size", example)
        try:
            size_bytes = parse_size(str(given.raw))
        except ValueError as error:
            raise unusable(f"{given} is not a size", example) from error
        if size_bytes < self.least_bytes:
            raise unusable(f"{given} is below the smallest that works, {human_size(self.least_bytes)}", example)
        return size_bytes


class Address(Kind, frozen=True, kw_only=True):
    """host:port, as it was written."""

    metavar: str = "HOST:PORT"
    must_be_loopback: bool = False

    def read(self, given: Given, *, is_for_here: bool) -> Any:
        text = given.text()
        if not text:
            return self.default
        try:
            host, _ = split_address(text)
        except ValueError as error:
            raise unusable(
                f"{given} is not an address: {error}", f"Write host:port, for example {given.setting.example}."
            ) from error
        if self.must_be_loopback and not is_loopback(host):
            raise unusable(
                f"{given} is not a loopback address",
                "The admin server speaks plain HTTP: use 127.0.0.1:PORT, and SSH or a proxy from elsewhere.",
            )
        return text


class PathOf(Kind, frozen=True, kw_only=True):
    """An absolute path. `must_be_readable`: of a file that is there."""

    metavar: str = "FILE"
    must_be_readable: bool = False

    def read(self, given: Given, *, is_for_here: bool) -> Any:
        text = given.text().removeprefix(self._scheme())
        path = os.path.abspath(given.base / os.path.expanduser(text)) if text else ""
        is_readable = os.path.isfile(path) and os.access(path, os.R_OK)
        if path and self.must_be_readable and is_for_here and not is_readable:
            raise wrong(f"{given} is not a file that can be read", "Check the path, its owner and its mode.")
        return path

    def _scheme(self) -> str:
        return ""


class SocketPath(PathOf, frozen=True, kw_only=True):
    """Engines use shared memory: their store's socket is a path, with or without `unix:`."""

    metavar: str = "PATH"

    def read(self, given: Given, *, is_for_here: bool) -> Any:
        text = given.text()
        if "://" in text or text.startswith("tcp:"):
            raise wrong(
                f"{given} is not a path",
                "Engines share memory with a store on their own machine: give its socket, unix:/path or /path.",
            )
        return super().read(given, is_for_here=is_for_here)

    def _scheme(self) -> str:
        return "unix:"


class Several(Kind, frozen=True, kw_only=True):
    """Several values: a list in the file, repeated flags, separated by spaces in the environment."""

    default: tuple[Any, ...] = ()

    def _words(self, given: Given) -> list[str]:
        return [str(word) for word in given.raw] if isinstance(given.raw, list) else given.text().split()


class Peers(Several, frozen=True, kw_only=True):
    """Addresses, names and networks of other stores, as they were written."""

    metavar: str = "NETWORK"

    def read(self, given: Given, *, is_for_here: bool) -> Any:
        words = self._words(given)
        try:
            for word in words:
                parse_peer(word)
        except ValueError as error:
            raise unusable(
                f"{given} does not name peers: {error}",
                "Name hosts or networks, without ports, for example 10.0.0.0/24 or node-b.",
            ) from error
        return tuple(words)


class RemoteUrl(Kind, frozen=True, kw_only=True):
    """The address of a pool, as it was written. It never holds a secret: see `remote`."""

    metavar: str = "URL"

    def read(self, given: Given, *, is_for_here: bool) -> Any:
        text = given.text()
        if text:
            parse_remote(text, f"{given.setting.key} (from {given.where})")
        return text


class Instances(Several, frozen=True, kw_only=True):
    """Engines behind a router. The store of one that names none is left empty: `load` knows which it is."""

    metavar: str = "URL[,store=ADDRESS]"

    def read(self, given: Given, *, is_for_here: bool) -> Any:
        try:
            found = [parse_instance(word, default_store="") for word in self._words(given)]
        except ValueError as error:
            raise unusable(
                f"{given} does not name instances: {error}", f"For example {given.setting.example}."
            ) from error
        if len({instance.url for instance in found}) < len(found):
            raise wrong(f"{given} names an instance twice", "Name each once.")
        return tuple(found)


def type_name(value: object) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "a mapping", str: "text"}
    return names.get(type(value), "something else")


# ---- errors


def wrong(message: str, remedy: str) -> ConfigError:
    return ConfigError(message, remedy=remedy, code="KV-100")


def unusable(message: str, remedy: str) -> ConfigError:
    return ConfigError(message, remedy=remedy, code="KV-102")


def unknown(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """An error for a name that is not known. It suggests the nearest one that is."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(names)}."
    return ConfigError(f"unknown {what}", remedy=hint, code="KV-101")
