"""Settings: order and origin of values, every refusal with its code, and the token, which is never shown."""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from kvtally.cli.main import app
from kvtally.config import LONGEST_SOCKET_PATH_BYTES, ConnectorConfig, Origin, Settings, StoreConfig, load, sizes
from kvtally.config.peers import PeerList
from kvtally.config.setting import Given, Setting
from kvtally.config.sizes import available_memory_bytes
from kvtally.config.table import SETTINGS, settings_table
from kvtally.config.units import human_size, parse_size, split_address
from kvtally.errors import ConfigError, Disposition
from kvtally.wire.limits import MIB

ROOT = Path(__file__).parents[2]
TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def settings(
    text: str | None = None, *, environ: dict[str, str] | None = None, flags: dict[str, str | bool | None] | None = None
) -> Settings:
    if text is not None:
        Path("kvtally.yaml").write_text(text, encoding="utf-8")
    return load(flags=flags, environ=environ or {})


def store(text: str | None = None, **environ: str) -> StoreConfig:
    return settings(text, environ={f"KVTALLY_STORE__{name}": value for name, value in environ.items()}).store()


def refusal(text: str | None = None, **environ: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        store(text, **environ)
    assert caught.value.disposition is Disposition.REFUSE
    assert caught.value.remedy
    return caught.value


class TestOrder:
    def test_nothing_given_is_a_working_store(self) -> None:
        config = settings(environ={"XDG_RUNTIME_DIR": "/run/user/7"}).store()
        assert config.socket == "/run/user/7/kvtally/store.sock"
        assert config.memory_bytes == available_memory_bytes() // 4 // MIB * MIB
        assert config.verify_reads
        assert (config.disk, config.disk_bytes, config.tcp, config.token, config.admin) == ("", 0, "", "", "")

    def test_without_a_runtime_directory_the_socket_is_the_users_own(self) -> None:
        path = Path(settings().socket())
        assert (path.parent.name, path.name) == (f"kvtally-{os.getuid()}", "store.sock")

    def test_flag_beats_environment_beats_file_beats_default(self) -> None:
        text = "store: {memory: 32MiB, disk: cache, disk_size: 20MiB}"
        environ = {"KVTALLY_STORE__MEMORY": "48MiB", "KVTALLY_STORE__DISK_SIZE": "24MiB"}
        given = settings(text, environ=environ, flags={"store.memory": "64MiB", "store.tcp": None})
        config = given.store()
        assert (config.memory_bytes, config.disk_bytes) == (64 * MIB, 24 * MIB)
        assert config.disk == str(Path.cwd() / "cache")
        origins = {row.key: (row.origin, row.where) for row in given.shown()}
        assert origins["store.memory"] == (Origin.FLAG, "--memory")
        assert origins["store.disk_size"] == (Origin.ENVIRONMENT, "KVTALLY_STORE__DISK_SIZE")
        assert origins["store.disk"] == (Origin.FILE, str(Path.cwd() / "kvtally.yaml"))
        assert origins["store.tcp"] == (Origin.DEFAULT, "")
        assert origins.keys() == SETTINGS.keys()

    def test_a_switch_can_be_turned_both_ways(self) -> None:
        assert not store("store: {verify_reads: false}").verify_reads
        assert store(None, VERIFY_READS="on").verify_reads
        given = settings(environ={"KVTALLY_STORE__VERIFY_READS": "true"}, flags={"store.verify_reads": False})
        assert not given.store().verify_reads
        row = next(row for row in given.shown() if row.key == "store.verify_reads")
        assert row.where == "--no-verify-reads"

    def test_the_file_is_the_flags_then_the_variables_then_the_directorys(self) -> None:
        for name, size in (("a.yaml", "32MiB"), ("b.yaml", "48MiB"), ("kvtally.yaml", "64MiB")):
            Path(name).write_text(f"store: {{memory: {size}}}", encoding="utf-8")
        environ = {"KVTALLY_CONFIG": "b.yaml"}
        assert load(file="a.yaml", environ=environ).store().memory_bytes == 32 * MIB
        assert load(environ=environ).store().memory_bytes == 48 * MIB
        assert load(environ={}).store().memory_bytes == 64 * MIB

    def test_paths_of_a_file_are_relative_to_it(self, tmp_path: Path) -> None:
        (tmp_path / "etc").mkdir()
        (tmp_path / "etc" / "node.yaml").write_text("store: {socket: ../run/s.sock, disk: ~/cache}", encoding="utf-8")
        config = load(file="etc/node.yaml", environ={}).store()
        assert config.socket == str(tmp_path / "run" / "s.sock")
        assert config.disk == os.path.expanduser("~/cache")

    def test_a_name_without_a_value_says_nothing(self) -> None:
        assert store("store:\n  disk:\n  memory: 32MiB\n").disk == ""
        assert store("").memory_bytes == store("store:\n").memory_bytes

    def test_what_an_orchestrator_sets_for_a_service_of_our_name_is_not_ours(self) -> None:
        given = settings(environ={"KVTALLY_PORT": "tcp://10.0.0.1:80", "KVTALLY_STORE_SERVICE_HOST": "10.0.0.1"})
        assert {row.origin for row in given.shown()} == {Origin.DEFAULT}


class TestRefusals:
    @pytest.mark.parametrize(
        ("text", "remedy"),
        [
            ("store: {memroy: 1GiB}", "Did you mean memory?"),
            ("stor: {memory: 1GiB}", "Did you mean store?"),
            ("store: {zzz: 1}", "Known: admin, advertise"),
        ],
    )
    def test_unknown_in_the_file(self, text: str, remedy: str) -> None:
        error = refusal(text)
        assert error.code == "KV-101"
        assert "kvtally.yaml" in error.message
        assert remedy in error.remedy

    def test_unknown_in_the_environment(self) -> None:
        error = refusal(None, MEMRY="1GiB")
        assert error.code == "KV-101"
        assert error.remedy == "Did you mean KVTALLY_STORE__MEMORY?"

    @pytest.mark.parametrize(
        "size",
        ["lots", "", "-5", "-1GiB", "1.5.2GiB", "8GiBs", "8 G B", "1e9", "true", "[1]", "1.5", "0", "15MiB", "900PB"],
    )
    def test_impossible_memory(self, size: str) -> None:
        error = refusal(f"store:\n  memory: {size or repr('')}\n")
        assert error.code == "KV-102"
        assert "store.memory" in error.message
        assert "kvtally.yaml" in error.message
        assert "GiB" in error.remedy

    def test_memory_may_be_all_of_it_and_not_a_byte_more(self) -> None:
        limit = available_memory_bytes()
        assert store(None, MEMORY=str(limit)).memory_bytes == limit
        assert refusal(None, MEMORY=str(limit + 1)).code == "KV-102"

    def test_impossible_disk_size(self) -> None:
        assert refusal(None, DISK="d", DISK_SIZE="900PB").code == "KV-102"
        assert refusal(None, DISK="d", DISK_SIZE="1MB").code == "KV-102"
        assert refusal(None, DISK_SIZE="1GiB").code == "KV-100"

    def test_a_disk_that_cannot_be_looked_at(self) -> None:
        error = refusal(None, DISK="x" * 300)
        assert (error.code, "--disk" in error.remedy) == ("KV-103", True)

    @pytest.mark.parametrize("address", ["7400", ":7400", "host:", "host:http", "host:70000", "::1:7400", "host:-1"])
    def test_impossible_address(self, address: str) -> None:
        error = refusal(None, TCP=address, TOKEN=TOKEN)
        assert error.code == "KV-102"
        assert "host:port" in error.remedy

    @pytest.mark.parametrize("address", ["0.0.0.0:7401", "10.0.0.5:7401", "127.example.org:7401", "[::]:7401"])
    def test_admin_stays_on_this_machine(self, address: str) -> None:
        assert refusal(None, ADMIN=address).code == "KV-102"

    def test_socket_path_too_long(self) -> None:
        room = LONGEST_SOCKET_PATH_BYTES - 1
        assert store(None, SOCKET="/" + "s" * room).socket
        assert refusal(None, SOCKET="/" + "s" * (room + 1)).code == "KV-102"

    def test_tcp_needs_a_token(self) -> None:
        assert refusal(None, TCP="127.0.0.1:0").code == "KV-100"
        assert refusal(None, TCP="127.0.0.1:0", TOKEN="").code == "KV-100"
        assert store(None, TCP="127.0.0.1:0", TOKEN=TOKEN).token == TOKEN

    def test_tls_needs_both_files_and_they_must_be_there(self) -> None:
        Path("cert.pem").write_text("", encoding="utf-8")
        assert "tls_key" in refusal(None, TLS_CERT="cert.pem").message
        assert "missing.pem" in refusal(None, TLS_CERT="missing.pem", TLS_KEY="cert.pem").message

    @pytest.mark.parametrize(
        "text",
        [
            *("store: [1", "store: [memory]", "just words", "- store", "store: {memory: 1GiB"),
            *("store: {memory: 2024-13-45}", "store: {verify_reads: !!bool maybe}", "store: {disk: !!timestamp soon}"),
            *("store: {memory: &a [*a]}", "[" * 1000 + "]" * 1000),
        ],
    )
    def test_a_file_of_another_form(self, text: str) -> None:
        error = refusal(text)
        assert error.code == "KV-105"
        assert "kvtally.yaml" in error.message
        assert "\n" not in error.message

    def test_a_file_that_cannot_be_read(self) -> None:
        Path("binary.yaml").write_bytes(b"\xff\xfe\x00")
        for name in ("missing.yaml", ".", "binary.yaml"):
            with pytest.raises(ConfigError) as caught:
                load(file=name, environ={})
            assert caught.value.code == "KV-105"

    def test_a_router_that_would_wait_for_nothing(self) -> None:
        assert settings(flags={"router.timeout": "1"}).router().timeout_s == 1
        with pytest.raises(ConfigError) as caught:
            settings(flags={"router.timeout": "0"}).router()
        assert (caught.value.code, "--timeout" in caught.value.message) == ("KV-102", True)

    @pytest.mark.parametrize(
        "text",
        [
            "store: {memory: 32MiB}\nstore: {disk: d}",
            "store: {memory: 32MiB, memory: 64MiB}",
            "router: {timeout: 5}\nstore:\n  disk: d\n  memory: 32MiB\n  disk: e\n",
        ],
    )
    def test_a_name_that_stands_twice(self, text: str) -> None:
        error = refusal(text)
        assert (error.code, "a second '" in error.message, "line" in error.message) == ("KV-105", True, True)

    @pytest.mark.parametrize("escape", ["\\0", "\\ud800"])
    def test_text_that_no_system_takes(self, escape: str) -> None:
        error = refusal(f'store: {{socket: "/a/{escape}.sock"}}')
        assert (error.code, "no system takes" in error.message) == ("KV-105", True)

    def test_what_an_anchor_gives_may_be_said_again(self) -> None:
        assert store("store: {<<: {memory: 32MiB, verify_reads: false}, memory: 48MiB}").memory_bytes == 48 * MIB

    @pytest.mark.parametrize("name", ["X Tenant", "X-Tenant:", "X-Tenant: a", "X-Tenant\n", "X-Mändant"])
    def test_a_tenant_header_that_no_request_can_have(self, name: str) -> None:
        with pytest.raises(ConfigError, match="not the name of a header") as caught:
            settings(flags={"router.tenant_header": name}).router()
        assert caught.value.code == "KV-100"
        assert settings(flags={"router.tenant_header": "X-Tenant_2"}).router().tenant_header == "X-Tenant_2"

    def test_numbers_beyond_all_measure(self) -> None:
        assert refusal(None, MEMORY="9" * 5000).code == "KV-102"
        for key in ("router.timeout", "router.max_body"):
            for digits in (400, 5000):
                with pytest.raises(ConfigError) as caught:
                    settings(flags={key: "9" * digits}).router()
                assert caught.value.code == "KV-102"

    def test_a_store_s_socket_is_a_path_however_it_is_written(self) -> None:
        assert store(None, SOCKET="unix:/a/b.sock").socket == "/a/b.sock"
        for written in ("tcp://10.0.0.1:7400", "tcp:10.0.0.1:7400", "http://10.0.0.1"):
            assert "is not a path" in refusal(None, SOCKET=written).message

    def test_text_where_a_number_was_written(self) -> None:
        assert refusal("store: {token: 12345678901234567890}").code == "KV-100"
        assert refusal("store: {verify_reads: maybe}").code == "KV-100"


class TestPeers:
    NETWORK = {"TCP": "10.0.0.5:7400", "TOKEN": TOKEN, "PEERS": "10.0.0.0/24"}

    def test_the_addresses_follow_from_that_of_tcp(self) -> None:
        config = store(None, **self.NETWORK)
        assert (config.peers, config.advertise, config.bulk) == (("10.0.0.0/24",), "10.0.0.5:7400", "10.0.0.5:7401")
        assert (config.transport, config.bulk_tls, config.peers_ca) == ("tcp", True, "")
        any_port = store(None, **self.NETWORK | {"TCP": "[::1]:0"})
        assert (any_port.advertise, any_port.bulk) == ("[::1]:0", "[::1]:0")
        assert store(None, **self.NETWORK | {"BULK": "10.0.0.5:0"}).bulk == "10.0.0.5:0"

    def test_without_peers_nothing_is_advertised(self) -> None:
        config = store(None, TCP="10.0.0.5:7400", TOKEN=TOKEN)
        assert (config.peers, config.advertise, config.bulk) == ((), "", "")

    def test_several_are_a_list_repeated_flags_or_words(self) -> None:
        expected = ("10.0.0.7", "node-b")
        text = f"store: {{tcp: '10.0.0.5:7400', token: {TOKEN}, peers: [10.0.0.7, node-b]}}"
        assert store(text).peers == expected
        assert store(None, **self.NETWORK | {"PEERS": "10.0.0.7  node-b"}).peers == expected

    @pytest.mark.parametrize(
        "entry",
        [
            *(
                "10.0.0.0/33",
                "10.0.0.7/24",
                "10.0.0.7:7400",
                "[::1]",
                "tcp://10.0.0.7:7400",
                "10.0.0",
                "300.1.1.1",
                "a..b",
            ),
            *(
                "-a",
                "a_-",
                "nöde",
                "::1/200",
                "a/b",
                "10.0.0.0/24,10.0.1.0/24",
                "x" * 64,
                ".".join(["x" * 60] * 5),
                "1",
            ),
        ],
    )
    def test_neither_address_nor_network_nor_name(self, entry: str) -> None:
        error = refusal(None, **self.NETWORK | {"PEERS": f"10.0.0.7 {entry}"})
        assert (error.code, repr(entry) in error.message, "10.0.0.0/24" in error.remedy) == ("KV-102", True, True)

    def test_peers_need_tcp_and_tcp_a_token(self) -> None:
        error = refusal(None, PEERS="10.0.0.0/24", TOKEN=TOKEN)
        assert (error.code, "--tcp" in error.remedy) == ("KV-100", True)
        assert "has no token" in refusal(None, PEERS="10.0.0.0/24", TCP="10.0.0.5:7400").message

    @pytest.mark.parametrize("tcp", ["0.0.0.0:7400", "[::]:7400", "[::ffff:0.0.0.0]:7400"])
    def test_a_wildcard_is_not_an_address_to_be_reached_by(self, tcp: str) -> None:
        assert "--advertise" in refusal(None, **self.NETWORK | {"TCP": tcp}).remedy
        config = store(None, **self.NETWORK | {"TCP": tcp, "ADVERTISE": "node-a:7400"})
        assert (config.advertise, config.bulk) == ("node-a:7400", tcp.replace("7400", "7401"))

    def test_bytes_have_a_port_of_their_own(self) -> None:
        assert "--bulk" in refusal(None, **self.NETWORK | {"BULK": "10.0.0.6:7400"}).remedy
        assert "--bulk" in refusal(None, **self.NETWORK | {"TCP": "10.0.0.5:65535"}).remedy
        assert refusal(None, **self.NETWORK | {"BULK": "7401"}).code == "KV-102"

    @pytest.mark.parametrize("name", ["ADVERTISE", "BULK"])
    def test_what_is_for_peers_needs_some(self, name: str) -> None:
        error = refusal(None, **{"TCP": "10.0.0.5:7400", "TOKEN": TOKEN, name: "10.0.0.5:7402"})
        assert (error.code, "--peers" in error.remedy) == ("KV-100", True)

    def test_tls_covers_both_directions_or_none(self) -> None:
        Path("some.pem").write_text("", encoding="utf-8")
        both = {"TLS_CERT": "some.pem", "TLS_KEY": "some.pem"}
        assert "peers_ca" in refusal(None, **self.NETWORK, **both).message
        assert "tls_cert" in refusal(None, **self.NETWORK, PEERS_CA="some.pem").message
        assert store(None, **self.NETWORK, **both, PEERS_CA="some.pem").peers_ca

    def test_a_transport_that_there_is_not(self) -> None:
        assert "tcp or nixl or nixl-tcp" in refusal(None, **self.NETWORK, TRANSPORT="rdma").remedy
        assert store(None, **self.NETWORK, TRANSPORT="nixl").transport == "nixl"

    def test_nixl_is_for_peers_and_never_encrypted_by_accident(self) -> None:
        Path("some.pem").write_text("", encoding="utf-8")
        tls = {"TLS_CERT": "some.pem", "TLS_KEY": "some.pem", "PEERS_CA": "some.pem"}
        for transport in ("nixl", "nixl-tcp"):
            assert "--peers" in refusal(None, TCP="10.0.0.5:7400", TOKEN=TOKEN, TRANSPORT=transport).remedy
            error = refusal(None, **self.NETWORK, **tls, TRANSPORT=transport)
            assert (error.code, "bulk_tls: false" in error.remedy) == ("KV-100", True)
            assert store(None, **self.NETWORK, **tls, TRANSPORT=transport, BULK_TLS="false").transport == transport
        assert store(None, **self.NETWORK, **tls).bulk_tls


class TestPeerList:
    PEERS = PeerList(["10.0.0.0/24", "192.168.1.9", "fd00::/64", "Node-B", "store.example."], own="tcp://10.0.0.5:7400")

    @pytest.mark.parametrize(
        "address",
        [
            *("tcp://10.0.0.7:7400", "tcp://10.0.0.5:7402", "tcp://192.168.1.9:1", "tcp://[fd00::7]:7400"),
            *("tcp://node-b:7400", "tcp://NODE-B.:7400", "tcp://store.example:7400", "tcp://[::ffff:10.0.0.7]:7400"),
        ],
    )
    def test_may_be_asked(self, address: str) -> None:
        assert self.PEERS.may_ask(address)

    @pytest.mark.parametrize(
        "address",
        [
            *("tcp://10.0.0.5:7400", "tcp://10.0.1.7:7400", "tcp://192.168.1.8:1", "tcp://[fd00:0:0:1::7]:7400"),
            *("tcp://node-c:7400", "tcp://node-b.evil.example:7400", "tcp://10.0.0.7.evil.example:7400"),
            *("10.0.0.7:7400", "unix:/run/s.sock", "/run/s.sock", "http://10.0.0.7:7400", "TCP://10.0.0.7:7400", ""),
            *(
                "tcp://10.0.0.7",
                "tcp://10.0.0.7:0",
                "tcp://10.0.0.7:99999",
                "tcp://10.0.0.7:7400/x",
                "tcp://u@10.0.0.7:1",
            ),
            *(
                "tcp://10.0.0.007:7400",
                "tcp://0xa000007:7400",
                "tcp://167772167:7400",
                "tcp://10.7:7400",
                "tcp://:7400",
            ),
            *("tcp://127.0.0.1:7400", "tcp://localhost:7400", "tcp://10.0.0.7\n:7400", "tcp:// 10.0.0.7:7400"),
        ],
    )
    def test_may_not_be_asked(self, address: str) -> None:
        assert not self.PEERS.may_ask(address)

    def test_everybody_is_no_address(self) -> None:
        everybody = PeerList(["0.0.0.0/0", "::/0"])
        assert everybody.may_ask("tcp://8.8.8.8:1")
        for host in ("0.0.0.0", "[::]", "[::ffff:0.0.0.0]", "224.0.0.1", "[ff02::1]"):
            assert not everybody.may_ask(f"tcp://{host}:7400")

    def test_who_comes_has_a_number(self) -> None:
        assert self.PEERS.has("10.0.0.7")
        assert self.PEERS.has("::ffff:10.0.0.7")
        assert not self.PEERS.has("10.0.1.7")
        assert not self.PEERS.has("node-b")
        assert self.PEERS.names == {"node-b", "store.example"}

    def test_nobody_is_a_peer_of_an_empty_list(self) -> None:
        nobody = PeerList()
        assert not nobody
        assert not nobody.may_ask("tcp://10.0.0.7:7400")
        assert PeerList(["a"])
        assert PeerList(["10.0.0.1"])


class TestPlaces:
    """Paths that cannot be read, and a current directory that is gone."""

    def test_a_file_that_may_not_be_looked_at_is_one_that_cannot_be_read(self) -> None:
        assert refusal(None, TOKEN_FILE="x" * 300).code == "KV-100"

    def test_a_directory_that_may_not_be_looked_into_has_no_settings_file(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As for `sudo -u engines kvtally stat`, typed in root's home."""
        ask = os.stat

        def refuse(path: object, **options: Any) -> os.stat_result:
            if str(path).endswith("kvtally.yaml"):
                raise PermissionError(13, "Permission denied")
            return ask(path, **options)  # type: ignore[call-overload]

        monkeypatch.setattr(os, "stat", refuse)
        assert load(environ={}).file is None

    def test_a_directory_that_is_gone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "gone").mkdir()
        monkeypatch.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        given = load(flags={"store.socket": "/a/s.sock"}, environ={"KVTALLY_STORE__MEMORY": "32MiB"})
        assert (given.socket(), given.store().memory_bytes) == ("/a/s.sock", 32 * MIB)

    def test_nowhere_to_write(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def nowhere() -> str:
            raise FileNotFoundError(2, "No usable temporary directory found")

        monkeypatch.setattr(tempfile, "gettempdir", nowhere)
        error = refusal()
        assert (error.code, "--socket" in error.remedy) == ("KV-102", True)
        assert store(None, SOCKET="/a/s.sock").socket == "/a/s.sock"

    def test_a_user_without_a_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def unknown(uid: int) -> NoReturn:
            raise KeyError(uid)

        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr(pwd, "getpwuid", unknown)
        assert settings().router().salt_file == "/.local/state/kvtally/salt"
        assert settings(environ={"XDG_STATE_HOME": "/s"}).router().salt_file == "/s/kvtally/salt"


class TestToken:
    def test_from_a_file_without_its_line_end(self) -> None:
        Path("secret").write_text(TOKEN + "\n", encoding="utf-8")
        assert store(None, TOKEN_FILE="secret").token == TOKEN

    def test_unreadable_empty_or_short(self) -> None:
        Path("empty").write_text("\n", encoding="utf-8")
        assert refusal(None, TOKEN_FILE="missing").code == "KV-100"
        assert refusal(None, TOKEN_FILE="empty").code == "KV-100"
        assert refusal(None, TOKEN="short").code == "KV-100"

    def test_two_in_one_place_are_refused_and_of_two_places_the_later_wins(self) -> None:
        Path("secret").write_text(TOKEN, encoding="utf-8")
        assert refusal(None, TOKEN=TOKEN[::-1], TOKEN_FILE="secret").code == "KV-100"
        environ = {"KVTALLY_STORE__TOKEN": TOKEN[::-1]}
        assert settings("store: {token_file: secret}", environ=environ).store().token == TOKEN[::-1]
        assert settings(environ=environ, flags={"store.token_file": "secret"}).store().token == TOKEN

    def test_is_never_shown(self) -> None:
        given = settings(f"store: {{token: {TOKEN}}}")
        assert TOKEN not in repr(given.store())
        assert TOKEN not in str([row.value for row in given.shown()])
        assert "12345" not in refusal("store: {token: 12345}").message


class TestDisk:
    def test_default_size_is_ten_times_the_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "statvfs", lambda path: _FileSystem(free_bytes=1 << 40))
        assert store(None, DISK="d", MEMORY="32MiB").disk_bytes == 320 * MIB

    def test_and_at_most_four_fifths_of_the_free_space(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "statvfs", lambda path: _FileSystem(free_bytes=100 * MIB))
        assert store(None, DISK="d", MEMORY="32MiB").disk_bytes == 80 * MIB

    def test_too_little_room(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "statvfs", lambda path: _FileSystem(free_bytes=10 * MIB))
        assert refusal(None, DISK="d", MEMORY="32MiB").code == "KV-102"

    def test_what_the_directory_holds_already_counts_as_room(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "statvfs", lambda path: _FileSystem(free_bytes=100 * MIB))
        held = tmp_path / "d" / "deeper" / "data"
        assert sizes.disk_usable_bytes(tmp_path / "d") == 100 * MIB
        held.parent.mkdir(parents=True)
        held.write_bytes(os.urandom(4 * MIB))
        held_bytes = held.stat().st_blocks * 512
        assert sizes.disk_usable_bytes(tmp_path / "d") == 100 * MIB + held_bytes
        monkeypatch.setattr(os, "walk", lambda path: [(str(held.parent), [], ["data", "replaced-by-a-store"])])
        assert sizes.disk_usable_bytes(tmp_path / "d") == 100 * MIB + held_bytes


class _FileSystem:
    """What `os.statvfs` returns for a file system with this much free space."""

    def __init__(self, *, free_bytes: int) -> None:
        self.f_frsize = 4096
        self.f_blocks = (1 << 44) // self.f_frsize
        self.f_bavail = free_bytes // self.f_frsize


class TestMemory:
    def test_the_tightest_group_counts(self, tmp_path: Path) -> None:
        group = tmp_path / "cgroup" / "pod" / "box"
        group.mkdir(parents=True)
        self._member(tmp_path, "0::/pod/box")
        (group / "memory.max").write_text("max\n", encoding="utf-8")
        (group.parent / "memory.max").write_text(f"{256 * MIB}\n", encoding="utf-8")
        assert available_memory_bytes(tmp_path, tmp_path / "cgroup") == 256 * MIB

    def test_version_1_and_a_path_of_the_host(self, tmp_path: Path) -> None:
        (tmp_path / "cgroup" / "memory").mkdir(parents=True)
        self._member(tmp_path, "9:cpu,cpuacct:/x\n4:memory:/docker/a b")
        (tmp_path / "cgroup" / "memory" / "memory.limit_in_bytes").write_text(f"{128 * MIB}\n", encoding="utf-8")
        assert available_memory_bytes(tmp_path, tmp_path / "cgroup") == 128 * MIB

    def test_without_groups_it_is_the_machines(self, tmp_path: Path) -> None:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert available_memory_bytes(tmp_path, tmp_path) == physical

    @staticmethod
    def _member(proc: Path, lines: str) -> None:
        (proc / "self").mkdir()
        (proc / "self" / "cgroup").write_text(lines + "\n", encoding="utf-8")


class TestUnits:
    @pytest.mark.parametrize(
        ("text", "size_bytes"),
        [
            ("0", 0),
            ("8GiB", 8 << 30),
            ("8g", 8 << 30),
            ("500 MB", 500_000_000),
            (" 1.5 KiB ", 1536),
            ("9007199254740993", 9007199254740993),
            ("512b", 512),
        ],
    )
    def test_sizes(self, text: str, size_bytes: int) -> None:
        assert parse_size(text) == size_bytes

    @given(st.integers(min_value=0, max_value=1 << 55))
    def test_what_is_written_can_be_read(self, size_bytes: int) -> None:
        assert parse_size(human_size(size_bytes)) == pytest.approx(size_bytes, rel=0.06, abs=1)

    @given(st.text())
    def test_any_text_is_a_size_or_a_value_error(self, text: str) -> None:
        with contextlib.suppress(ValueError):
            assert parse_size(text) >= 0

    def test_addresses(self) -> None:
        assert split_address("[::1]:7400") == ("::1", 7400)
        assert split_address("node-3:0") == ("node-3", 0)


class TestDocumentation:
    def test_operations_has_the_table(self) -> None:
        text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
        assert settings_table() in text, "replace the table in docs/operations.md with that of settings_table()"

    @pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.key)
    def test_what_help_says_can_be_written(self, setting: Setting) -> None:
        """The example can be read, and so can the default if it is a value."""
        if setting.is_secret:
            return
        read = functools.partial(setting.kind.read, is_for_here=False)
        assert read(Given(setting, setting.example, Origin.FLAG, setting.flag, Path())) not in ("", (), None)
        if not setting.default:
            default = Given(setting, setting.default_words, Origin.FLAG, setting.flag, Path())
            assert setting.default_words == "none" or read(default) == setting.kind.default

    def test_every_setting_with_a_flag_is_an_option_of_its_command(self) -> None:
        commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
        for section, command in (("store", "store"), ("router", "route")):
            options = {name for option in commands[command].params for name in option.opts}
            mine = [setting for setting in SETTINGS.values() if setting.section == section and setting.has_flag]
            assert {setting.flag for setting in mine} <= options
            assert "--token" not in options

    def test_every_setting_fills_a_field(self) -> None:
        for section, config in (("store", StoreConfig), ("connector", ConnectorConfig)):
            settings = [setting for setting in SETTINGS.values() if setting.section == section]
            assert {setting.field or setting.name for setting in settings} == set(config.__struct_fields__)

    def test_an_engine_s_extra_settings_win_and_unknown_ones_are_refused(self) -> None:
        connector = load(extra={"wait_ms": 5, "on_unsupported": "serve"}, environ={}).connector()
        assert (connector.wait_ms, connector.on_unsupported, connector.autostart) == (5, "serve", True)
        with pytest.raises(ConfigError, match="wait_ms") as caught:
            load(extra={"wait_m": 5}, environ={})
        assert caught.value.code == "KV-101"
        for wrong in ({"wait_ms": "soon"}, {"on_unsupported": "perhaps"}, {"autostart": "maybe"}):
            with pytest.raises(ConfigError):
                load(extra=wrong, environ={}).connector()

    def test_an_engine_s_store_is_a_path_however_it_is_written(self) -> None:
        for written in ("unix:/a/b.sock", "/a/b.sock"):
            assert load(extra={"store": written}, environ={}).connector().store == "/a/b.sock"
        for written in ("tcp://10.0.0.1:7400", "tcp:10.0.0.1:7400"):
            with pytest.raises(ConfigError, match="is not a path"):
                load(extra={"store": written}, environ={}).connector()

    def test_the_example_works_and_names_every_setting_that_has_a_flag(self) -> None:
        path = ROOT / "examples" / "store.yaml"
        assert load(file=str(path), environ={}).store().memory_bytes == 1024 * MIB
        text = path.read_text(encoding="utf-8")
        assert [
            setting.name for setting in SETTINGS.values() if setting.has_flag and f"{setting.name}: " not in text
        ] == []
