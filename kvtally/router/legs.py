"""Legs: one request to one instance. A failure is a value that says what the caller may do about it.

Neighbours: `prefill` and `proxy` (left), `fleet` (which instances there are), `upstream` (HTTP).
"""

from __future__ import annotations

from typing import NamedTuple

from multidict import CIMultiDict

from kvtally.router.fleet import OUR_FAULT, Member
from kvtally.router.upstream import Response

LARGEST_ANSWER_BYTES = 64 << 20  # of a prefill, which returns the token ids of its prompt
RETRIED_STATUSES = frozenset({502, 503, 504})
UNSENT = "connect"  # a failure's reason: the engine never saw the request


class Failure(NamedTuple):
    """A leg that failed before its first byte."""

    reason: str  # one word, for headers and receipts
    message: str
    is_final: bool = False  # trying another instance would not help


class Whole(NamedTuple):
    """A complete answer."""

    status: int
    headers: CIMultiDict[str]
    body: bytes


class Started(NamedTuple):
    """An answer whose first bytes have come (none where it has no body). Its owner must close it."""

    response: Response
    first: bytes


class Leg(NamedTuple):
    """A request to one instance."""

    path: str
    headers: CIMultiDict[str]
    body: bytes | None
    method: str = "POST"
    may_repeat: bool = True  # it may be sent again on a new connection, without anybody being told


async def start(member: Member, leg: Leg, *, is_last: bool = True) -> Started | Failure:
    """Send a request and wait for the first bytes of its answer.

    A status of 502 to 504 is a failure, unless this `is_last`: then the client gets it."""
    response: Response | None = None
    first: bytes | None = None
    try:
        response = await member.client.request(leg.method, leg.path, leg.headers, leg.body, may_repeat=leg.may_repeat)
        first = await response.read()
        member.was_heard = True
        if response.status in RETRIED_STATUSES and not is_last:
            response.close()
            return Failure(f"status_{response.status}", f"{member.name} answered {response.status}")
        return Started(response, first)
    except TimeoutError as error:
        return _late(member, error)
    except ConnectionResetError as error:
        return Failure("disconnected", f"{member.name}: {error}")
    except OSError as error:
        if error.errno not in OUR_FAULT:
            member.avoid(f"it cannot be reached: {error}")
        return Failure(UNSENT, f"{member.name} cannot be reached: {error}")
    finally:
        if response is not None and first is None:
            response.close()


async def ask(member: Member, leg: Leg) -> Whole | Failure:
    """Send a request and wait for its whole answer."""
    started = await start(member, leg)
    if isinstance(started, Failure):
        return started
    try:
        started = await read_on(started, LARGEST_ANSWER_BYTES)
        if not started.response.is_complete:
            return Failure("too_long", f"{member.name} answered more than {LARGEST_ANSWER_BYTES} bytes")
    except TimeoutError as error:
        return _late(member, error)
    except OSError as error:
        return Failure("disconnected", f"{member.name} broke off its answer: {error}")
    finally:
        started.response.close()
    return Whole(started.response.status, started.response.headers, started.first)


def _late(member: Member, error: TimeoutError) -> Failure:
    if not member.is_up:
        return Failure("down", f"{member.name} did not answer: {error}")
    return Failure("timeout", f"{member.name} did not answer: {error}", is_final=True)  # once is long enough


async def read_on(started: Started, limit_bytes: int) -> Started:
    """Read the rest of the body, or until it is longer than the limit. Raises OSError if it breaks off."""
    parts, size_bytes = [started.first], len(started.first)
    while size_bytes <= limit_bytes and (part := await started.response.read()):
        parts.append(part)
        size_bytes += len(part)
    return Started(started.response, b"".join(parts))
