"""Free ports, and processes that end when ours does."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvtally.processes import FIRST_PORT, free_ports, own_environment
from tests.waiting import HANG_S

TIED = """
import subprocess, sys, time
from kvtally.processes import ending_with_us
said = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
subprocess.Popen(ending_with_us([sys.executable, "-c", said]))
time.sleep(600)
"""


def test_what_is_tied_to_a_process_ends_with_it_however_that_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", TIED], env=own_environment(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        end = os.pidfd_open(int(process.stdout.readline()))
        try:
            process.send_signal(signal.SIGKILL)
            assert select.select([end], [], [], HANG_S)[0]
        finally:
            os.close(end)


def proc(directory: Path, outgoing: str) -> Path:
    place = directory / "sys" / "net" / "ipv4"
    place.mkdir(parents=True)
    (place / "ip_local_port_range").write_text(outgoing)
    return directory


def test_ports_are_none_of_those_that_outgoing_connections_get(tmp_path: Path) -> None:
    ports = free_ports(20, proc(tmp_path, "32768\t60999\n"))
    assert len(set(ports)) == 20
    assert all(FIRST_PORT <= port < 32768 for port in ports)


def test_what_is_taken_is_not_given(tmp_path: Path) -> None:
    """One of two ports is taken."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvtally.processes.FIRST_PORT", port - 1)
            [given] = free_ports(1, proc(tmp_path, f"{port + 1} 60999"))
    assert given != port


@pytest.mark.parametrize("outgoing", ["1024 65535", ""])
def test_where_all_ports_are_for_outgoing_connections_one_of_them_is_given(tmp_path: Path, outgoing: str) -> None:
    assert len(set(free_ports(3, proc(tmp_path, outgoing)))) == 3


def test_too_few_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError("no")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(OSError, match="2 ports are wanted, 0 are free"):
        free_ports(2)
