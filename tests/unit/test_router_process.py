"""`kvtally route` as a process: what it refuses, how it stops, and that its measurement measures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvtally.bench import route as bench
from kvtally.processes import free_ports
from tests.unit.fake_vllm import FakeVLLM
from tests.unit.router_kit import PATH, run
from tests.waiting import HANG_S, HOUR_S, eventually

ROUTE = [sys.executable, "-m", "kvtally", "route"]


def refused(*flags: str) -> str:
    ended = subprocess.run([*ROUTE, *flags], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert ended.returncode == 2
    return ended.stderr


def test_what_cannot_work_is_refused_at_start(tmp_path: Path) -> None:
    assert "--decode" in refused()
    assert "Did you mean mooncake" in refused(
        "--prefill", "http://a:1", "--decode", "http://b:1", "--flavour", "moncake"
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        salt = ("--salt-file", str(tmp_path / "salt"))
        assert "cannot listen" in refused("--decode", "http://127.0.0.1:1", "--listen", address, *salt)


def test_it_starts_before_its_engines_and_stops_when_told(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--decode", "http://127.0.0.1:1", "--listen", f"127.0.0.1:{port}", "--salt-file", str(tmp_path / "salt")]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    process = subprocess.Popen([*ROUTE, *flags], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        eventually(lambda: process.poll() is not None or health(port) == 503, "it found that nobody is there")
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=HANG_S)
        assert process.returncode == 0, err
        assert b"the router is ready" in err
        assert out == b""
    finally:
        process.kill()
        process.wait()


# The command, with another idea of which signals are the same one: the first of its arguments.
TOLD = """
import sys
from kvtally.cli.main import main
from kvtally.router import app
app.SAME_SIGNAL_S = float(sys.argv.pop(1))
main()
"""


@contextlib.asynccontextmanager
async def streaming(tmp_path: Path, engine: FakeVLLM, same_signal_s: float) -> AsyncIterator[tuple[Any, Any]]:
    """A router in a process of its own that was told to stop, and a stream through it that has not ended."""
    engine.pauses_after = 1
    engine.pause.clear()
    (port,) = free_ports(1)
    flags = ["--decode", engine.url, "--listen", f"127.0.0.1:{port}", "--salt-file", str(tmp_path / "salt")]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", TOLD, str(same_signal_s), "route", *flags, "--socket", str(tmp_path / "none")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        while b"is ready" not in await process.stderr.readline():
            assert process.returncode is None
        body = {"prompt": "x", "stream": True}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"http://127.0.0.1:{port}{PATH}", json=body) as response,
        ):
            assert await response.content.readany()
            process.terminate()
            assert b"stopping" in await process.stderr.readline()
            yield process, response
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_a_second_signal_cuts_streams_and_ends_well(tmp_path: Path) -> None:
    async def story() -> None:
        async with FakeVLLM() as engine, streaming(tmp_path, engine, 0.0) as (process, response):
            process.terminate()
            out, err = await asyncio.wait_for(process.communicate(), HANG_S)
            with pytest.raises(aiohttp.ClientError):
                await response.read()
            assert (process.returncode, err) == (0, b"")
            assert [json.loads(line)["status"] for line in out.splitlines()] == [499]

    run(story)


def test_the_same_signal_from_two_senders_is_one(tmp_path: Path) -> None:
    async def story() -> None:
        async with FakeVLLM() as engine, streaming(tmp_path, engine, HOUR_S) as (process, response):
            process.terminate()  # by somebody else who tells all to end
            told = b""
            for _ in range(2):  # after that the process has noticed
                engine.pauses_after += 1
                engine.pause.set()
                engine.pause.clear()
                told += await response.content.readany()
            engine.pause.set()
            told += await response.content.read()
            assert told.endswith(b"data: [DONE]\n\n")
            out, err = await asyncio.wait_for(process.communicate(), HANG_S)
            assert (process.returncode, err) == (0, b"")
            assert [json.loads(line)["status"] for line in out.splitlines()] == [200]

    run(story)


def health(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1.0) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.mark.slow
def test_the_bench_measures(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--quick", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["errors"] == 0
    assert told["streams_held"] == bench.QUICK.streams
    assert told["rps"] > 0
    assert told["rps_passthrough"] > 0
    assert told["added_ttft_ms_p50"] is not None
    # On a busy machine a half may come too late for the headers.
    assert {"proved", "local"} <= set(told["verdicts"]) <= {"proved", "local", "missing"}
