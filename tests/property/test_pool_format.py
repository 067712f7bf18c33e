"""What lies in a pool: everything that was packed unpacks, and nothing else does."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kvtally.core.keys import CHAIN_BYTES
from kvtally.store.tiers.base import Boundary
from kvtally.store.tiers.pool.format import (
    MOST_TAILS,
    SALT_BYTES,
    Epoch,
    Manifest,
    Names,
    pack_epoch,
    pack_manifest,
    pack_tails,
    parse,
    unpack_epoch,
    unpack_manifest,
    unpack_tails,
)

WIDTH = 40
digests = st.binary(min_size=CHAIN_BYTES, max_size=CHAIN_BYTES)
tokens = st.integers(0, (1 << 32) - 2)
names_ = st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1, max_size=80)
epochs = st.builds(Epoch, st.integers(0, (1 << 64) - 1), st.binary(min_size=SALT_BYTES, max_size=SALT_BYTES))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    start = draw(tokens)
    end = draw(st.integers(start + 1, (1 << 32) - 1))
    rows = draw(st.dictionaries(st.integers(0, WIDTH - 1), st.integers(0, (1 << 64) - 1)))
    return Manifest(Boundary(draw(digests), draw(digests), start, end), rows)


@given(names_, manifests())
def test_a_manifest_comes_back(name: str, manifest: Manifest) -> None:
    packed = pack_manifest(name, manifest)
    assert unpack_manifest(name, packed, manifest.boundary.chain, WIDTH) == manifest


@given(names_, st.lists(st.integers(0, (1 << 32) - 1), max_size=40))
def test_the_last_tails_come_back_each_once(name: str, lengths: list[int]) -> None:
    assert unpack_tails(name, pack_tails(name, lengths)) == tuple(dict.fromkeys(lengths))[:MOST_TAILS]


@given(names_, epochs)
def test_an_epoch_comes_back(name: str, epoch: Epoch) -> None:
    assert unpack_epoch(name, pack_epoch(name, epoch)) == epoch


@given(names_, manifests(), epochs, st.lists(st.integers(0, 99), max_size=5), st.randoms())
def test_what_was_changed_does_not_unpack(
    name: str, manifest: Manifest, epoch: Epoch, lengths: list[int], random: Random
) -> None:
    chain = manifest.boundary.chain
    for packed, unpack in (
        (pack_manifest(name, manifest), lambda data, under: unpack_manifest(under, data, chain, WIDTH)),
        (pack_tails(name, lengths), lambda data, under: unpack_tails(under, data)),
        (pack_epoch(name, epoch), lambda data, under: unpack_epoch(under, data)),
    ):
        flipped = bytearray(packed)
        flipped[random.randrange(len(packed))] ^= 1 << random.randrange(8)
        assert unpack(bytes(flipped), name) is None
        assert unpack(packed[: random.randrange(len(packed))], name) is None
        assert unpack(packed + random.randbytes(random.randrange(1, 9)), name) is None
        assert unpack(packed, name + "x") is None
        assert unpack(packed, name) is not None  # and unchanged, it does


@given(names_, st.binary(max_size=200))
def test_garbage_does_not_unpack(name: str, data: bytes) -> None:
    assert unpack_manifest(name, data, bytes(CHAIN_BYTES), WIDTH) is None
    assert unpack_tails(name, data) is None
    assert unpack_epoch(name, data) is None


def test_a_manifest_of_another_shape_does_not_unpack() -> None:
    """Well made, and still not for this namespace: an object that it cannot have, a span without tokens."""
    chain = bytes(CHAIN_BYTES)
    good = Manifest(Boundary(chain, chain, 0, 256), {WIDTH - 1: 7})
    assert unpack_manifest("m", pack_manifest("m", good), chain, WIDTH) == good
    assert unpack_manifest("m", pack_manifest("m", good), chain, WIDTH - 1) is None
    for start, end in ((256, 256), (257, 256)):
        bad = Manifest(Boundary(chain, chain, start, end), {0: 7})
        assert unpack_manifest("m", pack_manifest("m", bad), chain, WIDTH) is None


@given(st.sampled_from(["kvt1", "team-a/kvt1", "p"]), digests, digests, epochs)
def test_names_are_taken_apart_again(prefix: str, namespace: bytes, chain: bytes, epoch: Epoch) -> None:
    names = Names(prefix)
    under = names.under(namespace, epoch)
    for name, kind, of_epoch in (
        (names.namespace(namespace), "n", ""),
        (names.epoch(namespace), "e", ""),
        (under.manifest(chain), "m", str(epoch)),
        (under.tails(chain), "t", str(epoch)),
        (under.value(chain, 3, 7, 99), "v", str(epoch)),
        (under.value(chain, 3, 7, 99) + "/12", "v", str(epoch)),
    ):
        assert parse(prefix, name) == (kind, namespace, of_epoch)
        assert parse(prefix + "x", name) is None
        assert name.isascii()
        assert name.isprintable()


@given(st.text(max_size=100))
def test_other_names_are_not_of_a_pool(name: str) -> None:
    assert parse("kvt1", name) is None
    assert parse("kvt1", "kvt1/" + name) is None


@given(st.lists(epochs, min_size=2, max_size=20, unique=True))
def test_every_epoch_has_its_own_names(found: list[Epoch]) -> None:
    namespace, chain = bytes(CHAIN_BYTES), bytes(CHAIN_BYTES)
    assert len({Names("p").under(namespace, epoch).manifest(chain) for epoch in found}) == len(found)
