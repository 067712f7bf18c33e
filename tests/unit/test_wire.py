"""The protocol: every message survives the wire, no bytes do harm, and no message changes unnoticed."""

from __future__ import annotations

import json
import random
import struct
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtally.core.receipts import Half, Receipt, Role
from kvtally.core.space import MAX_PIECES, Piece
from kvtally.errors import TransportError
from kvtally.wire import messages as m
from kvtally.wire.auth import NONCE_BYTES, proof, store_proof
from kvtally.wire.bulk import HEADER_BYTES, MOST_PIECES_BYTES, Header, PullStatus, pack_pieces, unpack_pieces
from kvtally.wire.frames import FrameReader, encode, reply_reader, request_reader
from kvtally.wire.limits import Limits

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "messages.json"
BEFORE_PEERS = GOLDEN.with_name("messages_before_peers.json")  # of the version before stores talked to one another
LIMIT = 1 << 20

REQUESTS: tuple[type[m.Message], ...] = get_args(m.Request)
REPLIES: tuple[type[m.Message], ...] = get_args(m.Reply)
PARTS: tuple[type[m.Message], ...] = (m.Slot, m.PutObject, m.PutSlot)  # travel inside other messages only

# One example of every message, no field at its default: a reordered, retyped or dropped field shows in its bytes.
PREFILL = Half(
    role=Role.PREFILL,
    request="r1",
    prompt_tokens=1,
    saved_tokens=2,
    chain=b"\x03",
    tokens_gpu=4,
    tokens_host=5,
    tokens_disk=6,
    tokens_remote=7,
    tokens_peer=11,
    tokens_pool=12,
    computed_tokens=8,
    moved_bytes=9,
    wait_ms=1.5,
    load_ms=2.5,
    verified=True,
    reason="absent",
    exposed_ms=3.5,
    left_tokens=10,
    load_estimate_ms=4.5,
    compute_estimate_ms=5.5,
    holds_beginnings=False,
)
LIMITS = Limits(**{field: value for value, field in enumerate(Limits.__struct_fields__, start=1)})
EXAMPLES: tuple[m.Request | m.Reply, ...] = (
    m.Hello(1, 2, "engine", b"{}", b"\x01\x02", b"\x03", True, b"\x04"),
    m.Lookup(
        *(1, bytes(range(64)), [256, 300], 299, 16, [1, 2], 3, True, 4, -5, 6, True, 7, True),
        *("tcp://a:1", "ticket", 8, "tcp://b:2"),
    ),
    m.Wanted(1, 2, 3),
    m.SlotsGet(1, 2, 3),
    m.Release(1, [2, 3], [(4, 5, 6, 7)]),
    m.Offer(1, "tcp://a:1", bytes(range(64)), [256, 300], "t"),
    m.Pull(1, 2, 3, 4, 5, True),
    m.Pulled(1),
    m.PutBegin(1, [m.PutObject(b"\x01", b"\x02", 3, 4, 5, 6, 7)]),
    m.PutEnd(1, [(2, 2**64 - 1)], [3]),
    m.ReceiptFile(1, "ticket", PREFILL),
    m.ReceiptGet(1, "ticket", 2, 3),
    m.Ping(1),
    m.StatsGet(1),
    m.Reset(1, b"\x01", "s.1"),
    m.Greeting(1, "0.1", "store", 2, True, LIMITS, b"\x03", "tcp://a:1"),
    m.Welcome(1, 2, b"\x03", b"\x04", 5, b"\x06"),
    m.Refused(1, "KV-204", "what", "remedy"),
    m.Found(1, 2, 3, 4, 5, [b"\x06"], [7], "absent", 8, [m.Slot(2, 3, 4, 5, [6, 7], 8)], "refused", 9, 10),
    m.Staged(1, 2, 3, "checksum", 4, 5, 6, 7, 1.5, 2.5, 8, 9),
    m.Slots(1, [m.Slot(2, 3, 4, 2**64 - 1, [5, 6], 7)], "lease_expired"),
    m.Done(1),
    m.PutSlots(1, [m.PutSlot(m.PutStatus.PENDING, 2, [3, 4])]),
    m.PutEnded(1, 2, [3]),
    m.Receipts(1, [Receipt(ticket="t", prefill=PREFILL, decode=Half(role=Role.DECODE))]),
    m.Stats(1, {"tiers": [{"name": "disk", "bytes": 1}], "share": 0.5, "ok": True, "none": None}),
    m.ResetDone(1, 2),
)


def reader_of(kind: type[m.Message]) -> FrameReader[Any]:
    return request_reader(LIMIT) if kind in REQUESTS else reply_reader(LIMIT)


# ---- there and back


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type that occurs in a message."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return st.one_of([values(argument) for argument in arguments])
    if origin is list:
        return st.lists(values(arguments[0]), max_size=3)
    if origin is tuple:
        return st.tuples(*(values(argument) for argument in arguments))
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind)
        return st.builds(kind, **{field: values(hints[field]) for field in kind.__struct_fields__})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    leaves: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**63), 2**64 - 1),
        bool: st.booleans(),
        float: st.floats(allow_nan=False),
        str: st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        bytes: st.binary(max_size=40),
        NoneType: st.none(),
        object: st.recursive(
            st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text("ab"),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("xy"), inner, max_size=2),
            max_leaves=4,
        ),
    }
    return leaves[kind]


@pytest.mark.parametrize("kind", [*REQUESTS, *REPLIES], ids=lambda kind: kind.__name__)
@settings(max_examples=15)
@given(data=st.data())
def test_every_message_comes_back_as_it_was(kind: type[m.Message], data: st.DataObject) -> None:
    sent = data.draw(st.lists(values(kind), min_size=1, max_size=3))
    received = reader_of(kind).feed(b"".join(encode(message) for message in sent))
    assert received == sent
    assert all(type(message) is kind for message in received)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_frames_may_be_cut_anywhere(example: m.Request | m.Reply) -> None:
    stream = encode(example) * 2
    for cut in range(len(stream) + 1):
        reader = reader_of(type(example))
        assert reader.feed(stream[:cut]) + reader.feed(stream[cut:]) == [example, example]
    reader = reader_of(type(example))
    drip = [message for byte in stream for message in reader.feed(bytes([byte]))]
    assert drip == [example, example]


def test_memory_of_any_kind_may_be_fed() -> None:
    frame = encode(m.Ping(7))
    for data in (frame, bytearray(frame), memoryview(frame)):
        assert request_reader(LIMIT).feed(data) == [m.Ping(7)]


# ---- whatever bytes come


def feed_whatever(data: bytes, *, limit: int = LIMIT) -> list[Any]:
    """Both readers take any bytes: messages, or need more, or KV-503. Returns the messages of both."""
    found: list[Any] = []
    for reader in (request_reader(limit), reply_reader(limit)):
        code = "KV-503"
        try:
            found += reader.feed(data)
        except TransportError as error:
            code = error.code
        assert code == "KV-503"
    return found


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_are_harmless(data: bytes) -> None:
    feed_whatever(data)


@settings(max_examples=300)
@given(st.binary(max_size=60), st.sampled_from([type(example).__struct_config__.tag for example in EXAMPLES]))
def test_any_payload_behind_a_known_tag_is_harmless(data: bytes, tag: str) -> None:
    """Random bytes hardly ever get past the first one; these reach the fields."""
    head = bytes([0x90 | 9, 0xA0 | len(tag)]) + tag.encode()
    feed_whatever(struct.pack("<I", len(head) + len(data)) + head + data)


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 5_000), *(pytest.param(seed, 100_000, marks=pytest.mark.slow) for seed in range(1, 11))]
)
def test_damaged_frames_are_harmless(seed: int, count: int) -> None:
    chooser = random.Random(seed)
    frames = [encode(example) for example in EXAMPLES]
    for _ in range(count):
        frame = bytearray(chooser.choice(frames))
        for _ in range(chooser.randint(1, 4)):
            damage(frame, chooser)
        if chooser.random() < 0.7 and len(frame) >= 4:  # an honest length, so that the payload itself is decoded
            frame[:4] = struct.pack("<I", len(frame) - 4)
        feed_whatever(bytes(frame))


def damage(frame: bytearray, chooser: random.Random) -> None:
    position = chooser.randrange(len(frame)) if frame else 0
    choice = chooser.randrange(5)
    if choice == 0 and frame:
        frame[position] ^= 1 << chooser.randrange(8)
    elif choice == 1 and frame:
        frame[position] = chooser.choice([0x00, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xC7, 0xD7, 0xDB, 0xDD, 0xDF, 0xFF])
    elif choice == 2:
        del frame[position:]
    elif choice == 3:
        frame[position:position] = chooser.randbytes(chooser.randint(1, 6))
    else:
        frame[position:position] = frame[chooser.randrange(len(frame) + 1) :][:20]


def stats_frame(value: bytes) -> bytes:
    """A `Stats` reply whose tree holds this msgpack value: the one place where any type may travel."""
    payload = b"\x93\xa5stats\x01\x81\xa1a" + value
    return struct.pack("<I", len(payload)) + payload


@pytest.mark.parametrize(
    "value",
    [
        b"\x91" * 50_000,  # deeper than any stack
        b"\x81\xa1b" * 50_000,
        b"\xdd\xff\xff\xff\xff",  # promises four thousand million items
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xa1\xff",  # not UTF-8
        b"\x81\x80\x01",  # a map as a key
        b"\x81\x91\x80\x01",
        b"\xd7\xff" + b"\xff" * 8,  # a time that is none
        b"\xc7\x0c\xff" + b"\xff" * 12,
        b"\xc7\x0c\xff\x00\x00\x00\x00" + b"\x7f" * 8,
        b"\xc1",
        b"",
    ],
    ids=lambda value: value[:6].hex(),
)
def test_hostile_values_are_malformed_frames(value: bytes) -> None:
    with pytest.raises(TransportError) as caught:
        reply_reader(LIMIT).feed(stats_frame(value))
    assert caught.value.code == "KV-503"
    assert feed_whatever(stats_frame(value)) == []


def test_a_request_is_not_a_reply() -> None:
    with pytest.raises(TransportError, match="not a message"):
        reply_reader(LIMIT).feed(encode(m.Ping(1)))
    with pytest.raises(TransportError, match="not a message"):
        request_reader(LIMIT).feed(encode(m.Done(1)))


def test_a_frame_over_the_limit_is_refused_before_it_arrives() -> None:
    frame = encode(m.Hello(1, 1, "x" * 100))
    length = len(frame) - 4
    assert request_reader(length).feed(frame) == [m.Hello(1, 1, "x" * 100)]
    with pytest.raises(TransportError, match=f"{length} bytes is over the limit of {length - 1}") as caught:
        request_reader(length - 1).feed(frame[:4])
    assert caught.value.code == "KV-503"


# ---- what may change and what may not


def test_there_is_one_example_of_each_message_with_no_field_at_its_default() -> None:
    assert [type(example) for example in EXAMPLES] == [*REQUESTS, *REPLIES]
    parts = [part for example in EXAMPLES for field in example.__struct_fields__ for part in parts_of(example, field)]
    assert {type(part) for part in parts} == {*PARTS, Half, Receipt, Limits}
    for record in (*EXAMPLES, PREFILL, LIMITS, *(part for part in parts if isinstance(part, m.Message))):
        for field in msgspec.structs.fields(record):
            default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory
            plain = default() if callable(default) else default
            assert getattr(record, field.name) != plain, f"{type(record).__name__}.{field.name}"


def parts_of(message: msgspec.Struct, field: str) -> list[msgspec.Struct]:
    value = getattr(message, field)
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, msgspec.Struct)]


def test_tags_are_unique() -> None:
    tags = [kind.__struct_config__.tag for kind in (*REQUESTS, *REPLIES, *PARTS)]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_fields_may_be_appended(example: m.Request | m.Reply) -> None:
    """A newer peer's extra fields are ignored; an older peer's missing ones have their defaults."""
    items = msgspec.msgpack.decode(encode(example)[4:])
    longer = msgspec.msgpack.encode([*items, "from the future", {"x": 1}])
    assert reader_of(type(example)).feed(struct.pack("<I", len(longer)) + longer) == [example]

    required = [field for field in msgspec.structs.fields(example) if field.required]
    shorter = msgspec.msgpack.encode(items[: 1 + len(required)])
    (received,) = reader_of(type(example)).feed(struct.pack("<I", len(shorter)) + shorter)
    assert received == type(example)(*(getattr(example, field.name) for field in required))


def golden_values() -> dict[str, str]:
    return {type(example).__name__: encode(example).hex() for example in EXAMPLES}


def test_no_message_has_changed() -> None:
    """If this fails, old peers cannot read new ones, unless fields were only appended: raise `PROTOCOL_VERSION`, then
    run this file to renew it."""
    assert golden_values() == json.loads(GOLDEN.read_text())


def test_golden_bytes_are_read_as_what_they_were_written() -> None:
    golden = json.loads(GOLDEN.read_text())
    for example in EXAMPLES:
        assert reader_of(type(example)).feed(bytes.fromhex(golden[type(example).__name__])) == [example]


# ---- a cluster is upgraded machine by machine


def older(message: Any, raw: Any) -> Any:
    """`message` as a version sent it that knew only as many of its fields as `raw` has: the others at their default."""
    if isinstance(message, msgspec.Struct) and isinstance(raw, dict):
        return type(message)(**{name: older(getattr(message, name), value) for name, value in raw.items()})
    if isinstance(message, msgspec.Struct):
        names = message.__struct_fields__[: len(raw) - 1]  # the first item is the tag
        return type(message)(*(older(getattr(message, name), raw[1 + at]) for at, name in enumerate(names)))
    if isinstance(message, list) and message and isinstance(message[0], msgspec.Struct):
        return [older(one, each) for one, each in zip(message, raw, strict=True)]
    return message


def test_messages_of_the_version_before_peers_are_read_with_defaults_for_what_is_new() -> None:
    before = json.loads(BEFORE_PEERS.read_text())
    examples = {type(example).__name__: example for example in EXAMPLES}
    assert set(examples) - set(before) == {"Offer", "Pull", "Pulled"}
    for name, frame in before.items():
        data = bytes.fromhex(frame)
        expected = older(examples[name], msgspec.msgpack.decode(data[4:]))
        assert reader_of(type(expected)).feed(data) == [expected]


def test_what_is_new_is_not_read_from_older_messages_by_accident() -> None:
    """The negative control: the older bytes are others, and what they do not say is missing in what is read."""
    before = json.loads(BEFORE_PEERS.read_text())
    changed = {name for name, frame in golden_values().items() if before.get(name) != frame}
    grown = {"Hello", "Lookup", "Greeting", "Welcome", "Found", "Staged", "Slots", "Reset", "ReceiptFile", "Receipts"}
    assert changed == {*grown, "Offer", "Pull", "Pulled"}
    (hello,) = request_reader(LIMIT).feed(bytes.fromhex(before["Hello"]))
    assert (hello.peer, hello.nonce) == (False, b"")  # type: ignore[union-attr]
    (found,) = reply_reader(LIMIT).feed(bytes.fromhex(before["Found"]))
    assert [slot.rank for slot in found.slots] == [0]  # type: ignore[union-attr]


# ---- bulk connections, and the proof of the token


def test_a_header_comes_back_as_it_was() -> None:
    header = Header(2**40, 7, PullStatus.BUSY)
    assert len(header.pack()) == HEADER_BYTES
    assert Header.unpack(header.pack()) == header
    assert Header.unpack(Header(1, 2**32 + 5, PullStatus.SENT).pack()).pull == 5


def test_pieces_come_back_as_they_were() -> None:
    pieces = [Piece(number << 40, 1 << number) for number in range(MAX_PIECES)]
    assert unpack_pieces(pack_pieces(pieces)) == pieces
    assert len(pack_pieces(pieces)) == MOST_PIECES_BYTES


@pytest.mark.parametrize("size", [0, 1, 15, 17])
def test_what_is_no_pieces_is_noticed(size: int) -> None:
    with pytest.raises(ValueError, match="no pieces"):
        unpack_pieces(bytes(size))


def test_a_client_s_proof_is_none_of_a_store_s() -> None:
    """Otherwise an impostor could have a client answer that client's own nonce."""
    nonce = bytes(NONCE_BYTES)
    proofs = {make(token, nonce) for make in (proof, store_proof) for token in ("a", "b")}
    assert len(proofs) == 4
    assert proof("a", nonce).hex()[:16] == "6ab04e57ab9d3f1d"  # of all versions since the first
    assert store_proof("a", nonce) != store_proof("a", bytes([1] * NONCE_BYTES))


if __name__ == "__main__":
    print(json.dumps(golden_values(), indent=1))
