"""Prompts of one chunk and one object each, by number, for tests of one fault at a time."""

from __future__ import annotations

from kvtally.client import Miss, question
from kvtally.core.keys import ROOT_CHAIN, ObjectKey
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace
from kvtally.testing.copying import CopyingClient
from kvtally.testing.sim_client import content
from kvtally.wire.messages import Lookup, PutObject, PutStatus

CHUNK = 64
OBJECT_BYTES = 10_000  # three granules, the last one in part
NAMESPACE = Namespace(
    model="single",
    groups=(GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=((OBJECT_BYTES // 4,),)),),
    chunk_tokens=CHUNK,
    alignment_tokens=16,
)


def asked(number: int, *, wait_ms: int = 0) -> Lookup:
    return question(NAMESPACE, [number] * (CHUNK + 1), wait_ms=wait_ms)


def key(number: int) -> ObjectKey:
    return ObjectKey(NAMESPACE.digest, asked(number).chains, 0, 0)


def item(number: int) -> PutObject:
    return PutObject(asked(number).chains, ROOT_CHAIN, 0, CHUNK, 0, 0, OBJECT_BYTES)


def right_bytes(number: int) -> bytes:
    return content(key(number), OBJECT_BYTES)


def save(client: CopyingClient, *numbers: int) -> None:
    """Save these and make sure that they were."""
    for number in numbers:
        statuses = client.put([(item(number), right_bytes(number))])
        assert statuses == [PutStatus.WRITE], statuses


def load(client: CopyingClient, number: int) -> Miss | None:
    """Load one and compare; the reason if there was none."""
    found = client.get(asked(number))
    if isinstance(found, Miss):
        return found
    assert found == {(0, 0): right_bytes(number)}, f"wrong bytes were served for {number}"
    return None
