"""A client process that stops half-way through a write, until it is told to go on.

`python -m tests.chaos.writer SOCKET` begins to save prompt 1 and holds what is known of prompt 2, writes half, says
`begun`, and waits for a line. Then it writes the rest, commits, and says what the store made of it.
"""

from __future__ import annotations

import sys

from kvtally.client import Miss
from kvtally.testing.copying import CopyingClient
from tests.chaos.single import NAMESPACE, asked, item, right_bytes


def main(socket: str) -> None:
    client = CopyingClient(socket, namespace=NAMESPACE, name="writer")
    lease = client.hold(asked(2)).wait()
    puts = client.put_begin([item(1)]).wait()
    assert not isinstance(puts, Miss)
    assert not isinstance(lease, Miss)
    put, data = puts[0], right_bytes(1)
    half = len(put.pieces[0]) // 2
    put.pieces[0][:half] = data[:half]
    print("begun", flush=True)
    sys.stdin.readline()
    checksum = client.write(put, data)
    assert not isinstance(checksum, Miss)
    ended = client.put_end([(put, checksum)]).wait()
    print(f"missed {ended.reason}" if isinstance(ended, Miss) else f"rejected {len(ended.rejected)}", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1])
