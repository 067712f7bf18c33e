"""The contract of a pool's engine: what `pool` needs of a server that many stores share.

    get_small, put_small     many small things at once: manifests, tails, epochs
    get_into, put_from       one value, straight into or out of arena memory
    touch, remove            make names live longer; end them

An engine knows names and bytes, and nothing of what they mean. It may lose anything at any time, and may return wrong
bytes: `pool` and the mover find that out. It must not wait for ever: every call has a deadline of its own. And when
`get_into` returns, by whatever way, nothing may write into its target any more.

Threading: every call may be made from several threads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from kvtally.errors import IntegrityError, TierError

SMALL_S = 0.5  # the longest a small question may take; the store gives up on it before that
PROGRESS_S = 1.0  # the longest a value may make no progress
CONNECT_S = 0.5

Landed = Callable[[memoryview], None]


class DeniedError(TierError):
    """The server refuses this user, password or action. Waiting does not help; an operator can."""

    default_code = "KV-607"


class Credentials(NamedTuple):
    """Who a store is to a server. The password stays in its file, and is read anew for each connection: it may have
    been changed there."""

    user: str = ""
    password_file: str = ""

    def password(self) -> str:
        """Raises DeniedError if the file cannot be read."""
        if not self.password_file:
            return ""
        try:
            return Path(self.password_file).read_text(encoding="utf-8").strip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DeniedError(
                f"the password file {self.password_file} cannot be read: {error}",
                remedy="Check the path, its owner and its mode.",
            ) from error


class Stored(NamedTuple):
    """One name, and how many bytes of a value lie under it: engines that cut values into parts need to know. 0 for
    something small."""

    name: str
    length_bytes: int = 0


class Listed(NamedTuple):
    """One name that an engine holds, as it lists them."""

    name: str
    length_bytes: int
    age_s: float | None  # since it was written or refreshed, where the engine knows


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself, for `kvtally pool check`."""

    server: str  # kind and version
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    eviction: str = ""  # what it does when it is full, in its own words
    nodes: int = 1
    warnings: tuple[tuple[str, str], ...] = ()  # what is wrong, and the remedy


class Engine(Protocol):
    """See the module docstring. Every failure is a `TierError` or an `IntegrityError`."""

    name: str  # for messages and statistics: "valkey", "s3", "mooncake"
    readers: int  # how many threads it is worth reading values with
    writers: int  # and writing
    is_charged: bool  # every small thing that is asked for is a request of its own, which costs time or money

    def get_small(self, names: Sequence[str]) -> list[bytes | None]:
        """The content of each name, None where there is none."""

    def put_small(self, items: Mapping[str, bytes], ttl_s: int) -> None:
        """Write these, replacing what is there. They may go after `ttl_s` seconds; 0: not of themselves."""

    def get_into(self, name: str, target: Sequence[memoryview], landed: Landed) -> None:
        """Fill `target` with a value of exactly that length; as `Tier.read`. Raises KV-603 if it is not there, KV-402
        if it has another length."""

    def put_from(self, name: str, source: Sequence[memoryview], ttl_s: int) -> None:
        """Write a value. Once this has returned, `get_into` gives all of it or fails. Raises KV-601 if it is full."""

    def touch(self, names: Sequence[Stored], ttl_s: int) -> None:
        """Let these live `ttl_s` seconds from now, and count as used. Names that are gone are ignored."""

    def remove(self, names: Sequence[Stored]) -> None:
        """Take these out. Names that are gone are ignored."""

    def register(self, memory: memoryview) -> None:
        """Values will be read into and written from this memory, the arena: an engine that can, prepares for it."""

    def names(self, prefix: str) -> Iterator[Listed]:
        """Every name that begins so; a value that is cut into parts counts once for each. For operators: may take
        minutes. Raises TierError KV-600 if the engine cannot list."""

    def condition(self) -> Condition:
        """Ask the server how it is."""

    def close(self) -> None:
        """Let go of every connection. Idempotent."""


# ---- what all engines say


def absent(name: str) -> TierError:
    return TierError(
        f"{name} is not in the pool", remedy="It was evicted, or never saved: it is computed.", code="KV-603"
    )


def wrong_length(name: str, held_bytes: int | None, wanted_bytes: int) -> IntegrityError:
    held = "other than" if held_bytes is None else f"{held_bytes} bytes where there should be"
    return IntegrityError(
        f"{name} has {held} {wanted_bytes} bytes in the pool", remedy="It is dropped and computed anew.", code="KV-402"
    )


def scatter(data: memoryview, target: Sequence[memoryview], landed: Landed) -> None:
    """Copy `data` over the views of `target`, which have its length in all."""
    position = 0
    for view in target:
        view[:] = data[position : position + len(view)]
        position += len(view)
        landed(view)


def cut(views: Sequence[memoryview], part_bytes: int) -> Iterator[list[memoryview]]:
    """The concatenation of `views` in parts of `part_bytes`, the last one shorter, without copying."""
    part: list[memoryview] = []
    left = part_bytes
    for view in views:
        while len(view):
            taken, view = view[:left], view[left:]
            part.append(taken)
            left -= len(taken)
            if not left:
                yield part
                part, left = [], part_bytes
    if part:
        yield part


def length_of(views: Sequence[memoryview]) -> int:
    return sum(len(view) for view in views)
