"""The one error tree. Every error says what failed, where, and what to do about it.

KVTallyError             KV-0xx          the command itself failed, exit code 1
├── ConfigError          KV-1xx  REFUSE  a setting is wrong: stop at start, exit code 2
├── IncompatibleError    KV-2xx  REFUSE  two parts cannot work together (protocol, namespace, format)
├── CapacityError        KV-3xx  MISS    no room: arena, queue, lease or client limit
├── IntegrityError       KV-4xx  MISS    bytes are not what their identity says; the object is quarantined
├── TransportError       KV-5xx  MISS    the store cannot be reached in time, or a peer broke the protocol
├── TierError            KV-6xx  MISS    a lower tier (disk, ...) failed; the tier degrades, the store lives on
└── RouteError           KV-7xx  ANSWER  the router could not serve a request; its client is told, with an HTTP status

Expected outcomes (a miss, a pending object) are values, never exceptions. `docs/operations.md` lists every code;
a test keeps that list equal to `CODES`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class Disposition(StrEnum):
    """What the code that catches an error does with it."""

    REFUSE = "refuse"  # stop at start-up and print the remedy
    MISS = "miss"  # count it with its reason and recompute
    ANSWER = "answer"  # tell the client


class KVTallyError(Exception):
    """Base of the tree. `code` is stable and documented; `remedy` is one sentence an operator can act on."""

    disposition: ClassVar[Disposition] = Disposition.MISS
    default_code: ClassVar[str] = "KV-000"

    def __init__(self, message: str, *, remedy: str, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.code = code or self.default_code

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]. {self.remedy}"


class ConfigError(KVTallyError):
    disposition = Disposition.REFUSE
    default_code = "KV-100"


class IncompatibleError(KVTallyError):
    disposition = Disposition.REFUSE
    default_code = "KV-200"


class CapacityError(KVTallyError):
    default_code = "KV-300"


class IntegrityError(KVTallyError):
    default_code = "KV-400"


class TransportError(KVTallyError):
    default_code = "KV-500"


class TierError(KVTallyError):
    default_code = "KV-600"


class RouteError(KVTallyError):
    disposition = Disposition.ANSWER
    default_code = "KV-700"

    def __init__(self, message: str, *, remedy: str, status: int, code: str | None = None) -> None:
        super().__init__(message, remedy=remedy, code=code)
        self.status = status


CODES: dict[str, str] = {
    "KV-001": "standard output cannot be written",
    "KV-100": "a setting is wrong",
    "KV-101": "an unknown setting",
    "KV-102": "a size, duration or address that cannot be read or cannot work",
    "KV-103": "a directory that cannot be used",
    "KV-104": "another store already owns this socket or disk directory",
    "KV-105": "the configuration file cannot be read",
    "KV-106": "what a deployment needs is not on this machine (vLLM, the model, a store, NIXL, RDMA)",
    "KV-200": "two parts do not fit together",
    "KV-201": "client and store speak different protocol versions",
    "KV-202": "the namespace cannot be registered (too many groups or ranks, objects too large, digest mismatch)",
    "KV-203": "the disk directory or the pool has another format version",
    "KV-204": "the operation needs shared memory: connect over the unix socket",
    "KV-205": "the peer is another user, or the token is wrong",
    "KV-206": "the operation needs a namespace: say hello with one",
    "KV-207": "this version of vLLM was not tested",
    "KV-208": "the weights of the model or of an adapter cannot be identified",
    "KV-209": "the engine's model or settings cannot be served correctly",
    "KV-210": "the other store does not take this one for a peer",
    "KV-300": "a limit was reached",
    "KV-301": "too many clients",
    "KV-302": "this client holds too many leases, open puts, waiting lookups or resets",
    "KV-400": "the bytes do not match their identity",
    "KV-401": "checksum mismatch",
    "KV-402": "the object is shorter than its record says",
    "KV-403": "what lies in the pool does not open with the pool's key",
    "KV-500": "the store cannot be reached",
    "KV-501": "no answer within the deadline",
    "KV-502": "the connection was closed",
    "KV-503": "malformed or oversized frame",
    "KV-504": "a process of `kvtally up` did not start, or died too often",
    "KV-600": "a lower tier failed",
    "KV-601": "the tier is full",
    "KV-602": "the tier cannot be written (read-only, vanished or failing device)",
    "KV-603": "the tier does not hold this object",
    "KV-604": "the store that holds this object is lost",
    "KV-605": "the store that holds this object has no room for one more send",
    "KV-606": "the pool does not hold the boundary before this object, which is therefore not written",
    "KV-607": "the pool refuses this user, password or action, or its bucket is not there",
    "KV-700": "the router could not serve the request",
    "KV-701": "no instance is up",
    "KV-702": "an instance failed, before or in the middle of its answer",
    "KV-703": "strict: reuse was promised and not proved",
    "KV-704": "strict: the client set what only the router may set",
    "KV-705": "the request's body is too large, too slow, or not a JSON object",
    "KV-706": "no such path here, or the call needs the token",
    "KV-707": "the router has too many requests at once",
}
