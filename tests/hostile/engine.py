"""An engine that answers at once and looks at nothing: what a hostile request costs is then the router's cost alone.

python -m tests.hostile.engine      prints its port, answers until its standard input ends
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import cast

import uvloop

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_BODY = b'{"id":"x","choices":[{"index":0,"text":" word","finish_reason":"length"}],"usage":{"prompt_tokens":1}}'
_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
_END = b"\r\n\r\n"


class Connection(asyncio.Protocol):
    """Requests one after the other, each with a length or without a body."""

    def __init__(self) -> None:
        self._head = b""
        self._left_bytes = 0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if not self._left_bytes:
            self._head += data
            head, end, data = self._head.partition(_END)
            if not end:
                return
            self._head = b""
            length = _LENGTH.search(head)
            self._left_bytes = int(length[1]) if length else 0
        self._left_bytes -= len(data)
        if not self._left_bytes:
            self._transport.write(_ANSWER)


async def serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Connection, "127.0.0.1", 0, backlog=1_024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
