"""What an operator wants to know of a pool, and how one namespace is taken out of it. For `kvtally pool`.

`check` tries everything that a store will do, with names and values of its own, which it removes. `stat` lists every
name: that may take minutes. `forget` begins a new epoch, which is enough for stores, then deletes what lies there.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Iterator

import msgspec

from kvtally.core.namespace import decode
from kvtally.errors import IntegrityError, TierError
from kvtally.store.tiers.engines.base import Condition, Stored
from kvtally.store.tiers.pool.format import Named, parse, unpack_epoch
from kvtally.store.tiers.pool.tier import PoolTier

QUESTIONS = 20
NAMES = 128  # manifests and tails of a prompt of 16k tokens
VALUES = 8
VALUE_BYTES = 4 * 1024 * 1024
TRIAL_TTL_S = 60  # what a check leaves behind if it is cut off
REMOVE_AT_ONCE = 1_000


class Finding(msgspec.Struct, frozen=True):
    """Something that is not as it should be, and what to do about it."""

    what: str
    remedy: str


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What `check` found. Times in milliseconds."""

    condition: Condition
    lookup_ms: float  # the median for the names of a 16k-token prompt, none of which is there
    slowest_ms: float
    put_bytes_s: float  # one thread, values of 4 MiB
    get_bytes_s: float
    findings: tuple[Finding, ...]


class Use(msgspec.Struct, kw_only=True):
    """What a pool holds of one namespace."""

    namespace: str  # its digest, in hexadecimal digits
    model: str = ""  # empty: its description is gone, or cannot be read
    boundaries: int = 0
    objects: int = 0
    bytes: int = 0  # of values
    old_bytes: int = 0  # of earlier epochs: the server drops them in its own time
    newest_s: float | None = None  # ages of values, where the server knows them
    oldest_s: float | None = None


def check(tier: PoolTier, clock: Callable[[], float] = time.perf_counter) -> Checked:
    """Try what a store does. Raises TierError or IntegrityError if that fails."""
    engine, names = tier.engine, tier.names
    word = secrets.token_hex(8)
    small = [names.trial(f"{word}-{number}") for number in range(NAMES)]
    times = [_timed(clock, lambda: engine.get_small(small)) for _ in range(QUESTIONS)]
    engine.put_small({small[0]: b"here"}, TRIAL_TTL_S)
    if engine.get_small(small[:1]) != [b"here"]:
        raise IntegrityError(
            f"{names.prefix} does not give back what was written a moment ago",
            remedy="It evicts at once (too little memory), or several servers answer that do not know one another.",
            code="KV-401",
        )
    data = [secrets.token_bytes(64 * 1024) * (VALUE_BYTES // (64 * 1024)) for _ in range(VALUES)]
    values = [Stored(names.trial(f"{word}-value-{number}"), VALUE_BYTES) for number in range(VALUES)]
    findings = []
    try:
        put_s = [
            _timed(clock, lambda v=value, d=each: engine.put_from(v.name, [memoryview(d)], TRIAL_TTL_S))  # type: ignore[misc]
            for value, each in zip(values, data, strict=True)
        ]
        get_s = []
        for value, each in zip(values, data, strict=True):
            target = bytearray(VALUE_BYTES)
            get_s.append(_timed(clock, lambda v=value, t=target: engine.get_into(v.name, [memoryview(t)], _ignore)))  # type: ignore[misc]
            if target != each:
                raise IntegrityError(
                    "the pool gave back other bytes than were written", remedy="Do not use it.", code="KV-401"
                )
    finally:
        engine.remove([Stored(small[0]), *values])
    if engine.get_small(small[:1]) != [None]:
        findings.append(Finding("what is removed stays there", "Allow this user to delete under the prefix."))
    try:
        condition = engine.condition()
        findings += [Finding(what, remedy) for what, remedy in condition.warnings]
    except TierError as error:
        condition = Condition(server="?")
        findings.append(Finding(f"it does not say how it is: {error.message}", error.remedy))
    return Checked(
        condition=condition,
        lookup_ms=statistics.median(times) * 1000,
        slowest_ms=max(times) * 1000,
        put_bytes_s=VALUE_BYTES / statistics.median(put_s),
        get_bytes_s=VALUE_BYTES / statistics.median(get_s),
        findings=tuple(findings),
    )


def stat(tier: PoolTier) -> list[Use]:
    """What the pool holds, the largest namespace first."""
    engine, names = tier.engine, tier.names
    uses: dict[bytes, Use] = {}
    epochs: dict[bytes, str] = {}
    for name, length_bytes, age_s in engine.names(f"{names.prefix}/"):
        named = parse(names.prefix, name)
        if named is None:
            continue
        digest = named.namespace
        if digest not in uses:
            uses[digest] = Use(namespace=digest.hex(), model=_model(tier, digest))
            epochs[digest] = _epoch(tier, digest)
        _count(uses[digest], named, name, length_bytes, age_s, is_current=named.epoch == epochs[digest])
    return sorted(uses.values(), key=lambda use: -use.bytes)


def namespaces(tier: PoolTier) -> dict[bytes, str]:
    """The namespaces that anything is known of, with their models."""
    found: dict[bytes, str] = {}
    for prefix in (tier.names.namespaces, tier.names.epochs):
        for name, _, _ in tier.engine.names(prefix):
            named = parse(tier.names.prefix, name)
            if named is not None and named.namespace not in found:
                found[named.namespace] = _model(tier, named.namespace)
    return found


def forget(tier: PoolTier, digest: bytes) -> int:
    """Make every store forget a namespace, and delete what the pool holds of it. Returns how many names that were."""
    tier.forget(digest)
    engine, names = tier.engine, tier.names
    current = f"{names.contents(digest)}{_epoch(tier, digest)}/"
    removed = 0
    for some in _batches(name for name, _, _ in engine.names(names.contents(digest)) if not name.startswith(current)):
        engine.remove([Stored(name) for name in some])
        removed += len(some)
    engine.remove([Stored(names.namespace(digest))])
    return removed


def _count(use: Use, named: Named, name: str, length_bytes: int, age_s: float | None, *, is_current: bool) -> None:
    if named.kind == "v" and not is_current:
        use.old_bytes += length_bytes
    elif named.kind == "v":
        part = name.rpartition("/")[2]
        use.objects += not part.isdecimal() or part == "0"
        use.bytes += length_bytes
        if age_s is not None:
            use.newest_s = age_s if use.newest_s is None else min(use.newest_s, age_s)
            use.oldest_s = age_s if use.oldest_s is None else max(use.oldest_s, age_s)
    elif named.kind == "m" and is_current:
        use.boundaries += 1


def _model(tier: PoolTier, digest: bytes) -> str:
    (data,) = tier.engine.get_small([tier.names.namespace(digest)])
    try:
        namespace = decode(data) if data is not None else None
    except msgspec.DecodeError:
        return ""
    return namespace.model if namespace is not None and namespace.digest == digest else ""


def _epoch(tier: PoolTier, digest: bytes) -> str:
    name = tier.names.epoch(digest)
    (data,) = tier.engine.get_small([name])
    epoch = unpack_epoch(name, data) if data is not None else None
    return str(epoch) if epoch is not None else ""


def _batches(names: Iterator[str]) -> Iterator[list[str]]:
    some: list[str] = []
    for name in names:
        some.append(name)
        if len(some) == REMOVE_AT_ONCE:
            yield some
            some = []
    if some:
        yield some


def _timed(clock: Callable[[], float], call: Callable[[], object]) -> float:
    begun = clock()
    call()
    return max(clock() - begun, 1e-9)


def _ignore(part: memoryview) -> None:
    """Nobody hashes it."""
