"""Triton kernels: pages to a contiguous buffer and back, and the digests of checksum leaves.

Everything works on *units*: parts of an object of equal size (a power of two of bytes), each contiguous in memory. A
table holds the address of each unit, in the object's order. So page sizes, strides and layers do not matter here. Our
kernels slow down the engine's, so each byte is read once, 16 bytes at a time.

The digests are xxh3-64 (unseeded, its published constants, inputs of more than 240 bytes), as `core.checksum` uses it
for leaves: the same numbers, bit for bit. xxh3 works through an input in blocks of 1 KiB, sixteen stripes of eight
words. What a block adds to the eight accumulators does not depend on their values, so it is computed for all blocks in
parallel while they are copied (`copy_summed`). The rest is a chain: add, scramble, next block (`leaf_digests`).

Owns no memory and no stream. Neighbours: `cuda` (calls these). Imports Triton: only `cuda` imports this, where there is
a GPU.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-not-found, untyped-decorator, import-untyped"

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl

from kvtally.device import units

FETCHED = 512  # numbers that one program of `fetch` copies
PART_BYTES = 8192  # bytes that one program of `copy_units` copies
HASHED_BYTES = 4096  # bytes that one program of `copy_summed` copies
DIGESTS = 8  # digests that one program of `leaf_digests` computes

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


# Read by `leaf_digests`: the secret's words, those for the last stripe, those for the merge, the accumulators' start.
CONSTANTS = (*_words(0, 24), *_words(121, 8), *_words(11, 8), *START)
LAST, MERGE, BEGIN = tl.constexpr(24), tl.constexpr(32), tl.constexpr(40)
BLOCKS = tl.constexpr(HASHED_BYTES // units.BLOCK_BYTES)
LEAVES = tl.constexpr(DIGESTS)
MOST_BLOCKS = tl.constexpr(units.MOST_BLOCKS)
LEAF_COLUMNS = tl.constexpr(units.LEAF_COLUMNS)
AHEAD = tl.constexpr(4)  # groups of four sums that are being read at once


def constants(device: torch.device) -> torch.Tensor:
    signed = [word - (1 << 64) if word >> 63 else word for word in CONSTANTS]
    return torch.tensor(signed, dtype=torch.int64, device=device)


@triton.jit(do_not_specialize=["count"])
def fetch(here, there, count, WORDS: tl.constexpr):
    """Fetch a table from pinned memory. The copy engines could not: they may have loads queued for milliseconds."""
    at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    tl.store(there + at, tl.load(here + at, mask=at < count), mask=at < count)


@triton.jit
def copy_units(table, buffer, UNIT: tl.constexpr, PART: tl.constexpr, INTO_BUFFER: tl.constexpr):
    """Copy unit i between address `table[i]` and `buffer[i * UNIT]`. Address 0: skip the unit."""
    unit = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * PART
    start = tl.load(table + unit)
    if start == 0:
        return
    words = tl.arange(0, PART // 8)
    # The alignment hints are on pointers, because Triton forgets hints on the integers that they were made of.
    page = tl.multiple_of((start + part).to(tl.pointer_type(tl.int64)), 16) + words
    place = tl.multiple_of((buffer + unit * UNIT + part).to(tl.pointer_type(tl.int64)), 16) + words
    if INTO_BUFFER:
        tl.store(place, tl.load(page))
    else:
        tl.store(page, tl.load(place))


@triton.jit
def _product(key):
    return (key & 0xFFFFFFFF) * (key >> 32)


@triton.jit(do_not_specialize=["leaves_at"])
def copy_summed(table, leaves_at, constant, sums, buffer, UNIT: tl.constexpr, INTO_BUFFER: tl.constexpr):
    """Copy like `copy_units`, some blocks of a leaf per program, and note what each block adds to xxh3's accumulators.

    Row i of `table`, from `leaves_at` on, holds for leaf i: the index of its object's first unit, its offset in the
    object, its length, the index of its digest, and its length times PRIME64_1.
    """
    leaf = tl.program_id(0).to(tl.int64)
    row = table + leaves_at + leaf * LEAF_COLUMNS
    first = tl.load(row)
    block = tl.program_id(1) * BLOCKS
    offset = tl.load(row + 1) + block * 1024
    left = tl.load(row + 2) - block * 1024  # bytes of the leaf from here on
    if left <= 0:
        return
    stripe = tl.arange(0, BLOCKS * 16)
    word = tl.arange(0, 8)[None, :]
    mask = stripe * 64 < left
    at = offset + stripe * 64
    table += first
    if UNIT >= BLOCKS * 1024:  # the blocks of this program are contiguous
        start = tl.load(table + offset // UNIT)
        page = tl.multiple_of((start + offset % UNIT).to(tl.pointer_type(tl.uint64)), 16) + stripe[:, None] * 8
        is_wanted = tl.where(start != 0, mask, False)
    else:
        start = tl.load(table + at // UNIT, mask=mask, other=0)
        page = tl.multiple_of((start + at % UNIT).to(tl.pointer_type(tl.uint64)), 16)[:, None]
        is_wanted = mask & (start != 0)
    place = tl.multiple_of((buffer + first * UNIT + offset).to(tl.pointer_type(tl.uint64)), 16) + stripe[:, None] * 8
    if INTO_BUFFER:
        words = tl.load(page + word, mask=mask[:, None], other=0)
        tl.store(place + word, words, mask=mask[:, None])
    else:
        words = tl.load(place + word, mask=mask[:, None], other=0)
        tl.store(page + word, words, mask=is_wanted[:, None])
    # Each accumulator gets its own word times the secret, and its partner's word.
    even, odd = tl.split(tl.reshape(words, (BLOCKS, 16, 4, 2)))
    secret = constant.to(tl.pointer_type(tl.uint64)) + tl.arange(0, 16)[:, None] + tl.arange(0, 4)[None, :] * 2
    sum0 = tl.sum(_product(even ^ tl.load(secret)[None, :, :]) + odd, axis=1)
    sum1 = tl.sum(_product(odd ^ tl.load(secret + 1)[None, :, :]) + even, axis=1)
    numbers = block + tl.arange(0, BLOCKS)
    there = sums.to(tl.pointer_type(tl.uint64)) + (leaf * MOST_BLOCKS + numbers)[:, None] * 8
    there += tl.arange(0, 4)[None, :] * 2
    is_whole = (tl.arange(0, BLOCKS) * 1024 < left - 1024)[:, None]  # xxh3 treats the last block differently
    tl.store(there, sum0, mask=is_whole)
    tl.store(there + 1, sum1, mask=is_whole)


@triton.jit
def _scrambled(total, secret):
    return ((total ^ (total >> 47)) ^ secret) * tl.full((1, 4), 0x9E3779B1, tl.uint64)


@triton.jit
def _added(stripes, count, key0, key1):
    """What the first `count` of sixteen stripes add to the accumulators, for each of these places."""
    mask = (tl.arange(0, 16)[None, :] < count[:, None])[:, :, None]
    word = tl.arange(0, 16)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    words = tl.load(stripes[:, None, None] + word, mask=mask, other=0)
    even, odd = tl.split(tl.reshape(words, (LEAVES, 16, 4, 2)))
    zero = tl.zeros((LEAVES, 16, 4), tl.uint64)  # masked words are 0, so their keys must be 0, too
    sum0 = tl.sum(_product(even ^ tl.where(mask, key0[None, :, :], zero)) + odd, axis=1)
    return sum0, tl.sum(_product(odd ^ tl.where(mask, key1[None, :, :], zero)) + even, axis=1)


@triton.jit(do_not_specialize=["leaves_at", "leaves"])
def leaf_digests(table, leaves_at, constant, sums, buffer, digests, leaves, UNIT: tl.constexpr):
    """The digests of the leaves that `copy_summed` has copied: its sums, block after block, and then the last block.

    Few programs, each with several leaves: the chain takes its time, and should not take room from other kernels.
    """
    leaf = tl.program_id(0).to(tl.int64) * LEAVES + tl.arange(0, LEAVES)
    known = leaf < leaves
    row = table + leaves_at + leaf * LEAF_COLUMNS
    length = tl.load(row + 2, mask=known, other=64)
    blocks = (length - 1) // 1024
    constant = constant.to(tl.pointer_type(tl.uint64))
    pair = tl.arange(0, 4)[None, :] * 2
    scramble0, scramble1 = tl.load(constant + 16 + pair), tl.load(constant + 17 + pair)
    none = tl.zeros((LEAVES, 1), tl.int32)
    sum0, sum1 = tl.load(constant + BEGIN + pair + none), tl.load(constant + BEGIN + 1 + pair + none)
    added = sums.to(tl.pointer_type(tl.uint64)) + (leaf * MOST_BLOCKS * 8)[:, None] + pair
    for first in tl.range(0, tl.max(blocks), 4, num_stages=AHEAD):
        for more in tl.static_range(4):
            block = first + more
            is_left = (block < blocks)[:, None]
            next0 = tl.load(added + block * 8, mask=is_left, other=0)
            next1 = tl.load(added + block * 8 + 1, mask=is_left, other=0)
            sum0 = tl.where(is_left, _scrambled(sum0 + next0, scramble0), sum0)
            sum1 = tl.where(is_left, _scrambled(sum1 + next1, scramble1), sum1)
    # The rest of the last block except its last stripe; then that stripe, with a secret of its own.
    start = tl.load(row, mask=known, other=0) * UNIT + tl.load(row + 1, mask=known, other=0)
    end = (buffer + start + length).to(tl.pointer_type(tl.uint64))
    stripe = tl.arange(0, 16)[:, None]
    secret = constant + stripe + pair
    rest = length - blocks * 1024
    count = tl.where(known, (rest - 1) // 64, 0)
    more0, more1 = _added(end - rest // 8, count, tl.load(secret), tl.load(secret + 1))
    own = constant + LAST + stripe * 0 + pair
    last0, last1 = _added(end - 8, tl.where(known, 1, 0), tl.load(own), tl.load(own + 1))
    left = (sum0 + more0 + last0) ^ tl.load(constant + MERGE + pair)
    right = (sum1 + more1 + last1) ^ tl.load(constant + MERGE + 1 + pair)
    folded = tl.sum((left * right) ^ tl.umulhi(left, right), axis=1)
    digest = tl.load((row + 4).to(tl.pointer_type(tl.uint64)), mask=known, other=0) + folded
    digest ^= digest >> 37
    digest *= 0x165667919E3779F9
    digest ^= digest >> 32
    tl.store(digests.to(tl.pointer_type(tl.uint64)) + tl.load(row + 3, mask=known, other=0), digest, mask=known)
