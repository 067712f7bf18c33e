"""What the clients of a storm save and load: prompts that share stems, objects whose bytes follow from their keys."""

from __future__ import annotations

from functools import cache
from random import Random

from kvtally.client import question
from kvtally.core.keys import CHAIN_BYTES, ROOT_CHAIN, ObjectKey
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace
from kvtally.testing.sim_client import content
from kvtally.wire.messages import Lookup, PutObject

CHUNK = 64
DEPTH = 6
PROMPTS = 96
NAMESPACE = Namespace(
    model="chaos",
    groups=(
        GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=((16_384,),)),
        GroupSpec(kind=GroupKind.RECURRENT, block_tokens=CHUNK, page_bytes=((50_001,),)),
    ),
    chunk_tokens=CHUNK,
    alignment_tokens=16,
)


@cache
def prompts() -> list[list[int]]:
    """The same in every process. One token more than whole chunks: a hit leaves at least one to compute."""
    random = Random(4711)
    stems = [[random.randrange(1 << 17) for _ in range(DEPTH * CHUNK + 1)] for _ in range(PROMPTS // 4)]
    found = list(stems)
    while len(found) < PROMPTS:
        shared = CHUNK * random.randrange(DEPTH)
        found.append(
            random.choice(stems)[:shared] + [random.randrange(1 << 17) for _ in range(DEPTH * CHUNK + 1 - shared)]
        )
    return found


@cache
def asked(prompt: int) -> Lookup:
    return question(NAMESPACE, prompts()[prompt])


def objects(prompt: int, depth: int = DEPTH) -> list[PutObject]:
    """Everything there is to save of the first `depth` chunks of a prompt."""
    lookup = asked(prompt)
    chains = [lookup.chains[at : at + CHAIN_BYTES] for at in range(0, len(lookup.chains), CHAIN_BYTES)]
    found = []
    for index, chain in enumerate(chains[:depth]):
        parent, start = (chains[index - 1], lookup.ends[index - 1]) if index else (ROOT_CHAIN, 0)
        for group in range(len(NAMESPACE.groups)):
            length = NAMESPACE.object_bytes(group, 0, CHUNK)
            found.append(PutObject(chain, parent, start, lookup.ends[index], group, 0, length))
    return found


@cache
def right_bytes(chain: bytes, group: int) -> bytes:
    """What the object must hold."""
    return content(ObjectKey(NAMESPACE.digest, chain, group, 0), NAMESPACE.object_bytes(group, 0, CHUNK))


def problem(prompt: int, found: dict[tuple[int, int], bytearray]) -> str:
    """What is wrong with what a load brought; empty where each byte is right and nothing is missing."""
    deepest = max(index for index, _ in found)
    expected = {(index, 0) for index in range(deepest + 1)} | {(deepest, 1)}
    if found.keys() != expected:
        return f"a hit at boundary {deepest} came with {sorted(found)}"
    chains = asked(prompt).chains
    for (index, group), data in found.items():
        if data != right_bytes(chains[index * CHAIN_BYTES : (index + 1) * CHAIN_BYTES], group):
            return f"wrong bytes were served for boundary {index}, group {group} of prompt {prompt}"
    return ""
