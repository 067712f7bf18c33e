"""How many elements a JSON text has, counted before anything is built from it.

A text of 32 MiB can hold ten million list elements or object members, and a parser that builds one Python object for
each takes seconds and gigabytes. `check` counts first: it drops the strings, a block at a time and at the speed of
`bytes` methods, and counts the commas, brackets and colons that remain. For any text, the counts are exact up to the
first place where it is not JSON; the parser stops there. Pure.
"""

from __future__ import annotations

from kvtally.errors import RouteError

FEW = 1_024  # a text with no more commas than this cannot hold enough elements to matter
MOST_MEMBERS = 1_024  # of the outermost object
MOST_ELEMENTS = 1 << 21  # of all lists and objects together: prompts of two million token ids
MOST_MARKS = 1 << 18  # brackets, braces and colons: a hundred thousand messages
BLOCK_BYTES = 64 * 1024

_NO_MARKS = bytes(set(range(256)) - set(b"{}[]:"))
_OPENING, _CLOSING = frozenset(b"{["), frozenset(b"}]")


def check(data: bytes) -> None:
    """Raises RouteError KV-705 for a text with more elements than any request needs."""
    if data.count(b",") <= FEW:
        return
    is_quoted, start = False, 0
    elements = marks = members = depth = 0
    while start < len(data):
        block = _block(data, start)
        start += len(block)
        if b"\\" in block:  # leave no quote that does not begin or end a string
            block = block.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = block.split(b'"')
        outside = b"".join(pieces[is_quoted::2])
        is_quoted ^= len(pieces) % 2 == 0
        elements += outside.count(b",")
        found = outside.translate(None, _NO_MARKS)
        marks += len(found)
        if elements > MOST_ELEMENTS or marks > MOST_MARKS:
            raise _too_many(f"{MOST_ELEMENTS:,} elements, or {MOST_MARKS:,} brackets and colons")
        for mark in found:
            if mark in _OPENING:
                depth += 1
            elif mark in _CLOSING:
                depth -= 1
            else:
                members += depth == 1
    if members > MOST_MEMBERS:
        raise _too_many(f"{MOST_MEMBERS:,} members in its outermost object")


def _block(data: bytes, start: int) -> bytes:
    """The next block. It never ends between a backslash and the character that this escapes."""
    block = data[start : start + BLOCK_BYTES]
    backslashes = len(block) - len(block.rstrip(b"\\"))
    return data[start : start + len(block) + 1] if backslashes % 2 else block


def _too_many(what: str) -> RouteError:
    return RouteError(f"the body has more than {what}", remedy="Send less at once.", status=413, code="KV-705")
