"""The GPU kernels in Triton's interpreter, where there is no GPU: the same digests as the host's, the same bytes.

On a GPU `tests/gpu/copies.py` does this and more. The interpreter must be chosen before Triton is imported, hence the
process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine

SCRIPT = """
import numpy as np, torch, xxhash
from kvtally.device import kernels
from kvtally.device.units import leaf_rows

pick = np.random.default_rng(5)
for unit, units, lengths in ((256, 300, (256, 512, 1_280, 76_800)), (4096, 144, (4096, 65_536, 589_824))):
    pages = pick.integers(0, 256, (2 * units, unit), np.uint8)
    order = pick.permutation(2 * units)[:units]
    table = torch.from_numpy(pages.ctypes.data + order.astype(np.int64) * unit)
    content = pages[order].tobytes()

    rows = [leaf_rows(length, 0, unit, 0) for length in lengths]
    counts = [len(part) for part in rows]
    for first, part in zip(np.cumsum([0, *counts]), rows):
        part[:, 4] += first
    leaves = np.concatenate(rows)
    digests = torch.zeros(len(leaves), dtype=torch.int64)
    kernels.leaf_digests[(len(leaves),)](
        table, torch.from_numpy(leaves.ravel()), kernels.constants(torch.device("cpu")), digests
    )
    expected = [xxhash.xxh3_64_intdigest(content[offset : offset + size]) for offset, size in leaves[:, 1:3].tolist()]
    assert [value % 2**64 for value in digests.tolist()] == expected, unit

    part = min(unit, 1024)
    buffer = torch.zeros(units * unit, dtype=torch.uint8)
    kernels.copy_units[(units, unit // part)](table, buffer, unit, PART=part, INTO_BUFFER=True)
    assert buffer.numpy().tobytes() == content
    before = pages.copy()
    table[3] = 0  # a gap: left alone
    buffer ^= 0xFF
    kernels.copy_units[(units, unit // part)](table, buffer, unit, PART=part, INTO_BUFFER=False)
    before[np.delete(order, 3)] ^= 0xFF
    assert np.array_equal(pages, before)
print("same")
"""


def test_kernels_do_what_the_host_does() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert ran.stdout.endswith(b"same\n"), ran.stderr.decode()
