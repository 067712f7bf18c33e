"""Triton kernels: pages to a contiguous buffer and back, and the digests of checksum leaves.

Everything works on *units*: equal parts of an object (a power of two of bytes, `unit_bytes`), each of which lies in one
piece of memory. A table of addresses, one for each unit in the object's order, says where. So page sizes, strides and
layers do not matter here, nor whether an address is the engine's memory, a buffer, or pinned memory of the host.

`leaf_digests` is xxh3-64 (unseeded, its published constants, inputs of more than 240 bytes) as `core.checksum` uses it
for leaves: the same numbers, bit by bit. One program hashes one leaf: the eight accumulators of xxh3 as four pairs,
sixteen stripes at a time. Owns no memory and no stream. Neighbours: `cuda` (left). Imports Triton; nobody without a GPU
imports this.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-not-found, untyped-decorator, import-untyped"

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl

PART_BYTES = 8192  # what one program copies
SHORTEST_LEAF_BYTES = 256  # below, xxh3 is another algorithm
STRIPE_BYTES = 64

# The secret of xxh3 (specification, "default secret").
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64_1, PRIME64_2, PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
PRIME64_4, PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
START = (PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1)


def _words(offset: int, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}Q", SECRET, offset)


# What `leaf_digests` reads: the secret's words, those for the last stripe, those of the merge, the accumulators' start.
CONSTANTS = (*_words(0, 24), *_words(121, 8), *_words(11, 8), *START)
LAST, MERGE, BEGIN = tl.constexpr(24), tl.constexpr(32), tl.constexpr(40)


def constants(device: torch.device) -> torch.Tensor:
    signed = [word - (1 << 64) if word >> 63 else word for word in CONSTANTS]
    return torch.tensor(signed, dtype=torch.int64, device=device)


@triton.jit
def copy_units(table, buffer, unit_bytes, PART: tl.constexpr, INTO_BUFFER: tl.constexpr):
    """Unit i, where `table[i]` says, and `buffer[i * unit_bytes]`: one becomes the other. Address 0: neither."""
    unit = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * PART
    start = tl.load(table + unit)
    if start == 0:
        return
    address = tl.multiple_of(start + part, 16)
    words = tl.arange(0, PART // 8)
    page = address.to(tl.pointer_type(tl.int64)) + words
    place = (buffer + tl.multiple_of(unit * unit_bytes + part, 16)).to(tl.pointer_type(tl.int64)) + words
    if INTO_BUFFER:
        tl.store(place, tl.load(page))
    else:
        tl.store(page, tl.load(place))


@triton.jit
def _pairs(table, offset, shift, stripes, mask, STRIPES: tl.constexpr):
    """The even and the odd words of some stripes of the object."""
    at = offset + stripes * 64
    base = tl.load(table + (at >> shift), mask=mask, other=0) + (at & ((1 << shift) - 1))
    address = tl.multiple_of(base, 16)[:, None] + tl.arange(0, 8)[None, :] * 8
    words = tl.load(address.to(tl.pointer_type(tl.uint64)), mask=mask[:, None], other=0)
    return tl.split(tl.reshape(words, (STRIPES, 4, 2)))


@triton.jit
def _product(key):
    return (key & 0xFFFFFFFF) * (key >> 32)


@triton.jit
def _mixed(sum0, sum1, even, odd, key0, key1):
    """Add stripes to the accumulators: each gets its own word times the secret, and its partner's word."""
    sum0 += tl.sum(_product(even ^ key0) + odd, axis=0)
    sum1 += tl.sum(_product(odd ^ key1) + even, axis=0)
    return sum0, sum1


@triton.jit
def _scrambled(total, secret, prime):
    return ((total ^ (total >> 47)) ^ secret) * prime


@triton.jit(do_not_specialize=["addresses_at", "leaves_at"])
def leaf_digests(table, addresses_at, leaves_at, constant, digests):
    """Leaf i: row i of `table`, from `leaves_at` on, holds the index of its object's first address, counted from
    `addresses_at`, its offset in the object, its length, the logarithm of `unit_bytes`, where its digest goes, and its
    length times PRIME64_1."""
    row = table + leaves_at + tl.program_id(0) * 6
    table += addresses_at + tl.load(row)
    offset = tl.load(row + 1)
    length = tl.load(row + 2)
    shift = tl.load(row + 3)
    constant = constant.to(tl.pointer_type(tl.uint64))
    stripes = tl.arange(0, 16)
    pair = tl.arange(0, 4) * 2
    every = stripes >= 0
    secret = constant + stripes[:, None] + pair[None, :]
    key0, key1 = tl.load(secret), tl.load(secret + 1)
    scramble0, scramble1 = tl.load(constant + 16 + pair), tl.load(constant + 17 + pair)
    sum0, sum1 = tl.load(constant + BEGIN + pair), tl.load(constant + BEGIN + 1 + pair)
    prime = tl.full((4,), 0x9E3779B1, tl.uint64)
    blocks = (length - 1) // 1024
    # Four blocks are asked for at once: memory answers all of them in the time of one.
    for group in range(blocks // 4):
        at = offset + group * 4096
        even0, odd0 = _pairs(table, at, shift, stripes, every, 16)
        even1, odd1 = _pairs(table, at + 1024, shift, stripes, every, 16)
        even2, odd2 = _pairs(table, at + 2048, shift, stripes, every, 16)
        even3, odd3 = _pairs(table, at + 3072, shift, stripes, every, 16)
        sum0, sum1 = _mixed(sum0, sum1, even0, odd0, key0, key1)
        sum0, sum1 = _scrambled(sum0, scramble0, prime), _scrambled(sum1, scramble1, prime)
        sum0, sum1 = _mixed(sum0, sum1, even1, odd1, key0, key1)
        sum0, sum1 = _scrambled(sum0, scramble0, prime), _scrambled(sum1, scramble1, prime)
        sum0, sum1 = _mixed(sum0, sum1, even2, odd2, key0, key1)
        sum0, sum1 = _scrambled(sum0, scramble0, prime), _scrambled(sum1, scramble1, prime)
        sum0, sum1 = _mixed(sum0, sum1, even3, odd3, key0, key1)
        sum0, sum1 = _scrambled(sum0, scramble0, prime), _scrambled(sum1, scramble1, prime)
    for block in range(blocks // 4 * 4, blocks):
        even, odd = _pairs(table, offset + block * 1024, shift, stripes, every, 16)
        sum0, sum1 = _mixed(sum0, sum1, even, odd, key0, key1)
        sum0, sum1 = _scrambled(sum0, scramble0, prime), _scrambled(sum1, scramble1, prime)
    # What is left, except the last stripe; masked words are 0, and so must be what they are mixed with.
    rest = stripes < (length - 1 - blocks * 1024) // 64
    even, odd = _pairs(table, offset + blocks * 1024, shift, stripes, rest, 16)
    zero = tl.zeros((16, 4), tl.uint64)
    sum0, sum1 = _mixed(sum0, sum1, even, odd, tl.where(rest[:, None], key0, zero), tl.where(rest[:, None], key1, zero))
    last = stripes < 1
    even, odd = _pairs(table, offset + length - 64, shift, stripes, last, 16)
    end = constant + LAST + pair[None, :] + stripes[:, None] * 0
    sum0, sum1 = _mixed(
        sum0, sum1, even, odd,
        tl.where(last[:, None], tl.load(end), zero), tl.where(last[:, None], tl.load(end + 1), zero),
    )  # fmt: skip
    left, right = sum0 ^ tl.load(constant + MERGE + pair), sum1 ^ tl.load(constant + MERGE + 1 + pair)
    folded = tl.sum((left * right) ^ tl.umulhi(left, right), axis=0)
    digest = tl.load((row + 5).to(tl.pointer_type(tl.uint64))) + folded
    digest ^= digest >> 37
    digest *= 0x165667919E3779F9
    digest ^= digest >> 32
    tl.store(digests.to(tl.pointer_type(tl.uint64)) + tl.load(row + 4), digest)
