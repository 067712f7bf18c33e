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
AHEAD = tl.constexpr(4)  # of the pages that are hashed, so many groups of blocks are under way at once


def constants(device: torch.device) -> torch.Tensor:
    signed = [word - (1 << 64) if word >> 63 else word for word in CONSTANTS]
    return torch.tensor(signed, dtype=torch.int64, device=device)


@triton.jit
def copy_units(table, buffer, UNIT: tl.constexpr, PART: tl.constexpr, INTO_BUFFER: tl.constexpr):
    """Unit i, where `table[i]` says, and `buffer[i * UNIT]`: one becomes the other. Address 0: neither."""
    unit = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * PART
    start = tl.load(table + unit)
    if start == 0:
        return
    words = tl.arange(0, PART // 8)
    # What is told of alignment is told of pointers: Triton forgets what it knew of the integers they were made of.
    page = tl.multiple_of((start + part).to(tl.pointer_type(tl.int64)), 16) + words
    place = tl.multiple_of((buffer + unit * UNIT + part).to(tl.pointer_type(tl.int64)), 16) + words
    if INTO_BUFFER:
        tl.store(place, tl.load(page))
    else:
        tl.store(page, tl.load(place))


@triton.jit
def _stripes(table, buffer, offset, mask, UNIT: tl.constexpr, INTO_BUFFER: tl.constexpr):
    """Sixteen stripes of the object are copied; answers their even and their odd words."""
    row = tl.arange(0, 16)[:, None] * 8
    word = tl.arange(0, 8)[None, :]
    place = tl.multiple_of((buffer + offset).to(tl.pointer_type(tl.uint64)), 16) + row + word
    if UNIT >= 1024:  # they lie in one piece
        start = tl.load(table + offset // UNIT)
        page = tl.multiple_of((start + offset % UNIT).to(tl.pointer_type(tl.uint64)), 16) + row + word
        is_wanted = tl.where(start != 0, mask, False)
    else:
        at = offset + tl.arange(0, 16) * 64
        start = tl.load(table + at // UNIT, mask=mask, other=0)
        page = tl.multiple_of((start + at % UNIT).to(tl.pointer_type(tl.uint64)), 16)[:, None] + word
        is_wanted = mask & (start != 0)
    if INTO_BUFFER:
        words = tl.load(page, mask=mask[:, None], other=0)
        tl.store(place, words, mask=mask[:, None])
    else:
        words = tl.load(place, mask=mask[:, None], other=0)
        tl.store(page, words, mask=is_wanted[:, None])
    return tl.split(tl.reshape(words, (16, 4, 2)))


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


@triton.jit
def _block(sums, words, keys, scrambles):
    """A block, which is 1 KiB, is added to the accumulators, and these are scrambled."""
    sum0, sum1 = _mixed(sums[0], sums[1], words[0], words[1], keys[0], keys[1])
    prime = tl.full((4,), 0x9E3779B1, tl.uint64)
    return _scrambled(sum0, scrambles[0], prime), _scrambled(sum1, scrambles[1], prime)


@triton.jit(do_not_specialize=["leaves_at"])
def copy_hashed(table, leaves_at, constant, digests, buffer, UNIT: tl.constexpr, INTO_BUFFER: tl.constexpr):
    """As `copy_units`, leaf by leaf, with the digests of what is copied. Row i of `table`, from `leaves_at` on, holds
    for leaf i the index of its object's first unit, its offset in the object, its length, where its digest goes, and
    its length times PRIME64_1."""
    row = table + leaves_at + tl.program_id(0) * 5
    first = tl.load(row)
    table += first
    buffer += first * UNIT
    offset = tl.load(row + 1)
    length = tl.load(row + 2)
    constant = constant.to(tl.pointer_type(tl.uint64))
    stripes = tl.arange(0, 16)
    pair = tl.arange(0, 4) * 2
    every = stripes >= 0
    secret = constant + stripes[:, None] + pair[None, :]
    keys = tl.load(secret), tl.load(secret + 1)
    scrambles = tl.load(constant + 16 + pair), tl.load(constant + 17 + pair)
    sums = tl.load(constant + BEGIN + pair), tl.load(constant + BEGIN + 1 + pair)
    blocks = (length - 1) // 1024
    # Four blocks at once, and the next ones are under way by then: memory answers all of them in the time of one.
    for group in tl.range(blocks // 4, num_stages=AHEAD):
        at = offset + group * 4096
        words0 = _stripes(table, buffer, at, every, UNIT, INTO_BUFFER)
        words1 = _stripes(table, buffer, at + 1024, every, UNIT, INTO_BUFFER)
        words2 = _stripes(table, buffer, at + 2048, every, UNIT, INTO_BUFFER)
        words3 = _stripes(table, buffer, at + 3072, every, UNIT, INTO_BUFFER)
        sums = _block(sums, words0, keys, scrambles)
        sums = _block(sums, words1, keys, scrambles)
        sums = _block(sums, words2, keys, scrambles)
        sums = _block(sums, words3, keys, scrambles)
    for block in range(blocks // 4 * 4, blocks):
        words = _stripes(table, buffer, offset + block * 1024, every, UNIT, INTO_BUFFER)
        sums = _block(sums, words, keys, scrambles)
    # What is left, except the last stripe; masked words are 0, and so must be what they are mixed with.
    zero = tl.zeros((16, 4), tl.uint64)
    rest = stripes < (length - 1 - blocks * 1024) // 64
    even, odd = _stripes(table, buffer, offset + blocks * 1024, rest, UNIT, INTO_BUFFER)
    sum0, sum1 = _mixed(
        sums[0], sums[1], even, odd, tl.where(rest[:, None], keys[0], zero), tl.where(rest[:, None], keys[1], zero)
    )
    last = stripes < 1
    even, odd = _stripes(table, buffer, offset + length - 64, last, UNIT, INTO_BUFFER)
    end = constant + LAST + pair[None, :] + stripes[:, None] * 0
    sum0, sum1 = _mixed(
        sum0, sum1, even, odd,
        tl.where(last[:, None], tl.load(end), zero), tl.where(last[:, None], tl.load(end + 1), zero),
    )  # fmt: skip
    left, right = sum0 ^ tl.load(constant + MERGE + pair), sum1 ^ tl.load(constant + MERGE + 1 + pair)
    folded = tl.sum((left * right) ^ tl.umulhi(left, right), axis=0)
    digest = tl.load((row + 4).to(tl.pointer_type(tl.uint64))) + folded
    digest ^= digest >> 37
    digest *= 0x165667919E3779F9
    digest ^= digest >> 32
    tl.store(digests.to(tl.pointer_type(tl.uint64)) + tl.load(row + 3), digest)
