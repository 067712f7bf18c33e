"""The command as people and programs see it: its output and exit codes. Most tests talk to one real store."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import termios
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from rich.console import Console
from rich.screen import Screen

from kvtally import __version__
from kvtally.cli import demo
from kvtally.cli import main as cli
from kvtally.cli.render import StatsPage, read_stats
from kvtally.client import Call, Miss, StoreClient
from kvtally.client.link import miss_of
from kvtally.core.keys import ROOT_CHAIN, chain_values, token_bytes
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace
from kvtally.core.receipts import Half, Role
from kvtally.errors import IncompatibleError
from kvtally.testing.copying import CopyingClient
from kvtally.wire.messages import PutObject, PutStatus, ResetDone
from tests.waiting import HANG_S

NAMESPACE = Namespace(
    model="tiny",
    groups=(GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=((1024,),)),),
    chunk_tokens=16,
    alignment_tokens=16,
)


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return Run(monkeypatch, capsys)


class Run:
    """Call the command as the console script does, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Result:
        self._monkeypatch.setattr(sys, "argv", ["kvtally", *arguments])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        out, err = self._capsys.readouterr()
        assert isinstance(exited.value.code, int)
        return Result(exited.value.code, out, err)


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVTALLY_")}
    return {**kept, "PYTHONPATH": str(Path(__file__).parents[2])}


def spawn(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvtally", *arguments], stderr=subprocess.PIPE, text=True, env=environment()
    )


def start_store(*arguments: str) -> subprocess.Popen[str]:
    """A store in a process of its own, ready to serve."""
    process = spawn("store", "--memory", "16MiB", "--log-format", "json", *arguments)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:  # ends when the process does; a store that hangs ends with the test run's own deadline
        lines.append(line)
        if '"the store is ready"' in line:
            return process
    raise AssertionError(f"the store ended with {process.wait()}: {''.join(lines)}")


def stop_store(process: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> int:
    process.send_signal(number)
    try:
        process.communicate(timeout=HANG_S)
    finally:
        process.kill()
    return process.returncode


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The socket of a store that holds one object and one receipt."""
    socket = str(tmp_path_factory.mktemp("store") / "s.sock")
    process = start_store("--socket", socket)
    try:
        with CopyingClient(socket, namespace=NAMESPACE, name="engine\x1b[31m") as client:
            save(client)
            for half in (
                Half(role=Role.PREFILL, prompt_tokens=33, saved_tokens=32, chain=b"\xab" * 32),
                Half(role=Role.DECODE, tokens_host=16, computed_tokens=17, reason="absent", verified=True),
            ):
                assert not isinstance(client.file_receipt("req-1", half).wait(), Miss)
            yield socket
    finally:
        stop_store(process)


def save(client: CopyingClient) -> None:
    chain = chain_values(token_bytes(range(16)), [16])[0]
    item = PutObject(chain, ROOT_CHAIN, 0, 16, 0, 0, 1024)
    assert client.put([(item, bytearray(1024))]) in ([PutStatus.WRITE], [PutStatus.PRESENT])


class TestHelp:
    def test_version(self, run: Run) -> None:
        assert run("--version") == (0, f"kvtally {__version__}\n", "")

    @pytest.mark.parametrize("command", [("store",), ("stat",), ("receipts",), ("reset",), ("config", "show")])
    def test_every_command_teaches_by_an_example(self, run: Run, command: tuple[str, ...]) -> None:
        result = run(*command, "--help")
        assert result.code == 0
        assert f"kvtally {' '.join(command)}" in result.out.split("Example: ")[1].replace("\n ", "")

    @pytest.mark.parametrize("group", [(), ("bench",), ("config",)])
    def test_lists_of_commands_have_whole_sentences(self, run: Run, group: tuple[str, ...]) -> None:
        listed = run(*group, "--help").out.split("Commands:\n")[1].split("\n\n")[0].splitlines()
        assert [line for line in listed if not line.endswith(".") or line.endswith("...")] == []

    def test_asking_for_help_imports_nothing_heavy(self) -> None:
        heavy = ("numpy", "rich", "asyncio", "uvicorn", "starlette", "aiohttp", "uvloop", "blake3", "ssl")
        code = f"import sys, kvtally.cli.main; print([name for name in {heavy!r} if name in sys.modules])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=True)
        assert done.stdout == "[]\n"

    def test_a_wrong_command_is_a_usage_error(self, run: Run) -> None:
        assert run("stroe").code == 2
        assert run("stat", "--jsonn").code == 2


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "code"),
        [
            (("store", "--memory", "lots"), "KV-102"),
            (("store", "--memory", "1MiB"), "KV-102"),
            (("store", "--disk-size", "1GiB"), "KV-100"),
            (("store", "--config", "missing.yaml"), "KV-105"),
            (("store", "--tcp", "127.0.0.1:0"), "KV-100"),
            (("store", "--admin", "0.0.0.0:1"), "KV-102"),
        ],
    )
    def test_a_refusal_is_one_line_and_its_remedy_and_code_2(
        self, run: Run, tmp_path: Path, arguments: tuple[str, ...], code: str
    ) -> None:
        result = run(*arguments)
        assert result.code == 2
        assert result.out == ""
        message, remedy = result.err.splitlines()
        assert message.startswith("error: ")
        assert message.endswith(f" [{code}]")
        assert remedy.startswith("remedy: ")
        assert list(tmp_path.iterdir()) == []

    def test_an_unknown_key_names_the_one_that_was_meant(self, run: Run, tmp_path: Path) -> None:
        (tmp_path / "kvtally.yaml").write_text("store: {memori: 1GiB}", encoding="utf-8")
        result = run("config", "show")
        assert result.code == 2
        assert "remedy: Did you mean memory?" in result.err

    @pytest.mark.parametrize("command", ["stat", "receipts", "reset"])
    def test_no_store_runs(self, run: Run, tmp_path: Path, command: str) -> None:
        result = run(command, "--socket", str(tmp_path / "none.sock"))
        assert result.code == 1
        assert "none.sock [KV-500]" in result.err
        assert "kvtally store" in result.err

    def test_a_second_store_on_the_same_socket(self, run: Run, store: str) -> None:
        second = spawn("store", "--socket", store, "--memory", "16MiB")
        _, err = second.communicate(timeout=HANG_S)
        assert second.returncode == 2
        assert "[KV-104]" in err.splitlines()[-2]
        assert run("stat", "--socket", store).code == 0

    @pytest.mark.parametrize(
        "arguments", [("--version",), ("config", "show"), ("config", "show", "--json"), ("--help",)]
    )
    @pytest.mark.parametrize("unbuffered", ["", "1"])
    def test_a_full_disk_behind_the_output_is_a_clear_error(self, arguments: tuple[str, ...], unbuffered: str) -> None:
        with open("/dev/full", "w", encoding="utf-8") as full:
            done = subprocess.run(
                [sys.executable, "-m", "kvtally", *arguments],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                env={**environment(), "PYTHONUNBUFFERED": unbuffered},
                timeout=HANG_S,
                check=False,
            )
        message, remedy = done.stderr.splitlines()
        assert (done.returncode, message) == (
            1,
            "error: standard output cannot be written: No space left on device [KV-001]",
        )
        assert remedy.startswith("remedy: ")

    def test_an_error_of_ours_is_no_trouble_of_the_output(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(arguments: list[str]) -> int:
            raise FileNotFoundError(2, "No such file or directory")

        fake_module(monkeypatch, "kvtally.cli.demo_store", fail)
        monkeypatch.setattr(sys, "argv", ["kvtally", "demo-store"])
        with pytest.raises(FileNotFoundError):
            cli.main()

    def test_a_long_message_breaks_between_words_in_a_terminal_and_not_at_all_elsewhere(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = "/var/lib/" + "deeper/" * 10 + "missing.yaml"
        whole = run("store", "--config", path).err
        assert len(whole.splitlines()) == 2
        ours, theirs = os.openpty()
        with open(ours, encoding="utf-8") as terminal, open(theirs, "w", encoding="utf-8") as end:
            termios.tcsetwinsize(theirs, (24, 80))
            monkeypatch.setattr(sys, "stderr", end)
            assert run("store", "--config", path).code == 2
            lines: list[str] = []
            while not lines or not lines[-1].endswith("mode."):
                lines.append(terminal.readline().rstrip())
        assert " ".join(lines).split() == whole.split()
        assert [line for line in lines if len(line) > 80 and path not in line] == []

    def test_an_interrupt_is_quiet(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(arguments: list[str]) -> int:
            raise KeyboardInterrupt

        fake_module(monkeypatch, "kvtally.cli.demo_store", interrupted)
        assert run("demo-store") == (130, "", "")

    def test_an_interrupt_before_a_command_has_begun_is_quiet_too(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted() -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(cli, "app", interrupted)
        assert run("stat") == (130, "", "")


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, main: object) -> None:
    module = types.ModuleType(name)
    module.__dict__["main"] = main
    monkeypatch.setitem(sys.modules, name, module)


class TestHandedOver:
    @pytest.mark.parametrize(
        ("command", "module"), [(("bench", "store"), "kvtally.bench.store"), (("demo",), "kvtally.cli.demo")]
    )
    def test_arguments_go_to_the_module_and_its_code_comes_back(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], module: str
    ) -> None:
        seen: list[str] = []

        def main(arguments: list[str]) -> int:
            seen.extend(arguments)
            return 3

        fake_module(monkeypatch, module, main)
        assert run(*command, "--json", "--size", "1GiB", "--help").code == 3
        assert seen == ["--json", "--size", "1GiB", "--help"]


class TestConfigShow:
    def test_json_has_value_and_origin(self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "kvtally.yaml").write_text("store: {memory: 32MiB}", encoding="utf-8")
        monkeypatch.setenv("KVTALLY_STORE__ADMIN", "localhost:7401")
        result = run("config", "show", "--json")
        assert result.code == 0
        tree = json.loads(result.out)
        file = str(tmp_path / "kvtally.yaml")
        assert tree["file"] == file
        assert tree["settings"]["store.memory"] == {"value": 32 << 20, "origin": "file", "where": file}
        assert tree["settings"]["store.admin"]["origin"] == "environment"
        assert tree["settings"]["store.verify_reads"] == {"value": True, "origin": "default", "where": ""}

    def test_for_people_without_the_token(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVTALLY_STORE__TOKEN", "a-long-enough-secret")
        result = run("config", "show")
        assert "a-long-enough-secret" not in result.out
        assert "KVTALLY_STORE__TOKEN" in result.out

    def test_no_value_is_cut_off(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        path = "/var/lib/" + "deeper/" * 10 + "store.sock"
        monkeypatch.setenv("KVTALLY_STORE__SOCKET", path)
        monkeypatch.setenv("COLUMNS", "80")
        assert "…" not in run("config", "show").out
        monkeypatch.delenv("COLUMNS")
        assert f" {path} " in run("config", "show").out


class TestStat:
    def test_json_is_the_stores_own_tree(self, run: Run, store: str) -> None:
        result = run("stat", "--socket", store, "--json")
        assert result.code == 0
        tree = json.loads(result.out)
        assert tree["arena"]["objects"] == 1
        assert {item["client"] for item in tree["clients"]} == {"engine\x1b[31m", "kvtally command"}

    def test_tables(self, run: Run, store: str) -> None:
        result = run("stat", "--socket", store)
        assert result.code == 0
        for word in ("arena", "16MiB", "lookups", "saves begun", "leases open", "since the start", "tiny"):
            assert word in result.out
        assert NAMESPACE.digest.hex()[:12] in result.out
        assert "engine?[31m" in result.out
        assert "\x1b[31m" not in result.out

    def test_a_terminal_without_our_characters(self, run: Run, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
        screen = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(screen, encoding="ascii", write_through=True))
        assert run("stat", "--socket", store).code == 0
        assert b"reads verified" in screen.getvalue()

    def test_the_socket_may_come_from_the_environment(
        self, run: Run, store: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KVTALLY_STORE__SOCKET", store)
        monkeypatch.setenv("KVTALLY_STORE__MEMORY", "900PB")  # wrong for a store, of no concern here
        assert run("stat").code == 0

    def test_watch_goes_on_until_it_is_interrupted(self, run: Run, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
        naps = []

        def nap(seconds: float) -> None:
            naps.append(seconds)
            if len(naps) == 3:
                raise KeyboardInterrupt

        monkeypatch.setattr("kvtally.cli.inspect.time.sleep", nap)
        result = run("stat", "--socket", store, "--watch", "--json")
        assert result.code == 130
        assert len([json.loads(line) for line in result.out.splitlines()]) == 3
        naps.clear()
        result = run("stat", "--socket", store, "--watch")
        assert result.code == 130
        # Without a terminal there is no screen to paint over: every look is printed when it is taken.
        assert result.out.count("a second, ") == 3
        assert result.out.count("just now") == 2


class TestReceipts:
    def test_table(self, run: Run, store: str) -> None:
        result = run("receipts", "--socket", store, "--last", "1")
        assert result.code == 0
        for word in ("req-1", "short", "32", "16", "17", "host 16", "absent"):
            assert word in result.out

    def test_json_of_one(self, run: Run, store: str) -> None:
        (tree,) = json.loads(run("receipts", "req-1", "--socket", store, "--json").out)
        assert (tree["ticket"], tree["verdict"]) == ("req-1", "short")
        assert tree["prefill"]["chain"] == "ab" * 32
        assert tree["decode"]["tokens_host"] == 16

    def test_unknown_ticket(self, run: Run, store: str) -> None:
        assert run("receipts", "other", "--socket", store, "--json") == (1, "[]\n", "")
        result = run("receipts", "other", "--socket", store)
        assert (result.code, result.err) == (1, "No receipt of other: none was filed in the last minutes.\n")

    def test_a_ticket_is_whole_however_narrow_the_terminal_is(
        self, run: Run, store: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """People copy it to ask for the receipt."""
        ticket = "cmpl-8b7e56189b2c71f6a8b7e56189b2c71f6-0-0a1b2c3d"
        with CopyingClient(store, namespace=NAMESPACE) as client:
            half = Half(role=Role.DECODE, tokens_host=16, computed_tokens=17, verified=True)
            assert not isinstance(client.file_receipt(ticket, half).wait(), Miss)
        for columns in ("20", "60", "80"):
            monkeypatch.setenv("COLUMNS", columns)
            assert ticket in run("receipts", ticket, "--socket", store).out.splitlines()
        monkeypatch.delenv("COLUMNS")  # a pipe has no edge
        assert run("receipts", "--socket", store).out.splitlines()[2].split()[0] == ticket


class TestReset:
    def test_one_namespace_by_its_first_digits(self, run: Run, store: str) -> None:
        with CopyingClient(store, namespace=NAMESPACE) as client:
            save(client)
        digits = NAMESPACE.digest.hex()[:8]
        result = run("reset", "--socket", store, "--namespace", digits, "--yes")
        assert result.code == 0
        assert "Forgot 1 objects." in result.out
        with CopyingClient(store, namespace=NAMESPACE) as client:
            save(client)

    @pytest.mark.parametrize("prefix", ["ffffffffffff", "", "zz"])
    def test_a_namespace_it_does_not_have(self, run: Run, store: str, prefix: str) -> None:
        result = run("reset", "--socket", store, "--namespace", prefix, "--yes")
        assert result.code == 2
        assert NAMESPACE.digest.hex()[:12] in result.err

    @pytest.mark.parametrize("late", [0, 2])
    def test_a_store_that_is_busy_forgetting_is_waited_for(
        self, run: Run, store: str, monkeypatch: pytest.MonkeyPatch, late: int
    ) -> None:
        """A disk takes seconds to remove 100,000 objects. Each further reset waits for the rest."""
        error = IncompatibleError("a tier has not removed them yet", remedy="Reset once more.", code="KV-600")
        given: list[float | None] = []
        reset = StoreClient.reset

        def noted(client: StoreClient, digest: bytes = b"", *, timeout_s: float | None = None) -> Call[ResetDone]:
            given.append(timeout_s)
            if len(given) <= late:
                return client._link.answered(miss_of(error))
            return reset(client, digest, timeout_s=timeout_s)

        monkeypatch.setattr(StoreClient, "reset", noted)
        result = run("reset", "--socket", store, "--yes")
        assert (result.code, "Forgot 1 objects." in result.out, len(given)) == (0, True, late + 1)
        assert {seconds is not None and seconds >= 30 for seconds in given} == {True}
        with CopyingClient(store, namespace=NAMESPACE) as client:
            save(client)

    def test_a_refusal_is_told_with_its_own_code_and_remedy(
        self, run: Run, store: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        error = IncompatibleError("they are still there", remedy="See the tier.", code="KV-602")

        def refused(client: StoreClient, digest: bytes = b"", *, timeout_s: float | None = None) -> Call[ResetDone]:
            return client._link.answered(miss_of(error))

        monkeypatch.setattr(StoreClient, "reset", refused)
        result = run("reset", "--socket", store, "--yes")
        assert result.code == 1
        assert result.err == "error: the store said no: they are still there [KV-602]\nremedy: See the tier.\n"

    def test_no_escape_sequence_of_a_model_reaches_the_terminal(self, run: Run, store: str) -> None:
        rude = msgspec.structs.replace(NAMESPACE, model="tiny\x1b[31m")
        with CopyingClient(store, namespace=rude) as client:
            save(client)
        result = run("reset", "--socket", store, "--namespace", rude.digest.hex()[:12], "--yes")
        assert (result.code, "tiny?[31m" in result.out, "\x1b" in result.out) == (0, True, False)

    def test_nobody_to_ask_is_a_no(self, run: Run, store: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "empty").touch()
        with (tmp_path / "empty").open(encoding="utf-8") as nothing:
            monkeypatch.setattr(sys, "stdin", nothing)
            result = run("reset", "--socket", store)
        assert result.code == 1
        assert "Forgot" not in result.out


class TestDaemon:
    def test_ctrl_c_ends_it_in_order(self, tmp_path: Path) -> None:
        socket = tmp_path / "s.sock"
        process = start_store("--socket", str(socket), "--disk", str(tmp_path / "disk"), "--disk-size", "16MiB")
        assert socket.is_socket()
        assert stop_store(process, signal.SIGINT) == 0
        assert not socket.exists()


class TestPage:
    def test_rates_are_those_between_two_looks(self) -> None:
        tier = {"name": "disk", "state": "failing", "read_bytes": 1 << 20, "errors": {"KV-602": 2}}
        before = {"store": "a", "uptime_s": 10.0, "lookups": {"total": 100}, "puts": {"bytes": 0}, "tiers": [tier]}
        now = {
            **before,
            "uptime_s": 12.0,
            "lookups": {"total": 300, "misses": {"absent": 3}},
            "puts": {"bytes": 4 << 20},
            "tiers": [tier | {"read_bytes": 9 << 20}],
        }
        text = page(now, before, width=50)  # narrow: every table for itself
        assert row(text, "lookups")[-1] == "100.0"
        assert row(text, "saved")[-1] == "2MiB"
        assert row(text, "disk read")[-1] == "4MiB"
        assert "disk failed: KV-602" in text
        assert "cut short: absent" in text

    def test_what_failure_drills_tell_to_look_for_is_there_by_that_name(self) -> None:
        drills = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
        drills = drills.split("## Failure drills")[1].split("\n## ")[0]
        tier = {"name": "disk", "state": "not-writing", "postponed": 7, "dropped": 3, "errors": {"KV-601": 2}}
        arena = {"limbo_bytes": 4096}
        text = page({"store": "a", "arena": arena, "tiers": [tier], "quarantined": {"count": {"disk": 1}}})
        in_tiers, elsewhere = ("not-writing", "KV-601", "dropped", "postponed"), ("limbo", "expired", "aborted")
        for word in (*in_tiers, *elsewhere, "quarantined: disk"):
            assert f"`{word}`" in drills
            assert word in text

    def test_what_it_does_not_know_is_left_out_and_what_is_missing_is_zero(self) -> None:
        assert "arena" in page({"store": "a", "later": {"x": 1}})

    def test_another_form_is_refused(self) -> None:
        with pytest.raises(IncompatibleError) as caught:
            read_stats({"tiers": "none"})
        assert caught.value.code == "KV-201"


BUSY = {
    "store": "68b4f3bc53a168b4",
    "version": "0.1.0",
    "uptime_s": 277_812.0,
    "arena": {
        "capacity_bytes": 16 << 30,
        "used_bytes": 17_072_495_001,
        "objects": 1_234_567,
        "evicted": 98_765_432,
        "limbo_bytes": 4_096,
    },
    "tiers": [
        {
            "name": "disk",
            "state": "not-writing",
            "capacity_bytes": 200 << 30,
            "used_bytes": 213_909_504_001,
            "objects": 12_345_678,
            "evicted": 98_765_432,
            "read_bytes": 1 << 45,
            "write_bytes": 9 << 40,
            "postponed": 12_345,
            "dropped": 1_234,
            "errors": {"KV-601": 12, "KV-602": 3},
        }
    ],
    "lookups": {
        "total": 1_234_567,
        "hits": 1_034_567,
        "hit_tokens": 9_876_543_210,
        "asked_tokens": 12_345_678_901,
        "misses": {"absent": 120_000, "state_absent": 40_000, "staging_failed": 1_200, "slow_tier": 4},
    },
    "puts": {"begun": 1_234_567, "committed": 1_230_000, "aborted": 4_000, "expired": 500, "bytes": 9 << 40},
    "leases": {"open": 128, "expired": 12},
    "clients": [
        {"session": number, "client": f"vllm decode rank {number} pid {471100 + number}", "namespace": "42f7fbce72fa"}
        for number in range(7)
    ],
    "namespaces": [
        {"digest": digest * 8, "model": model, "objects": 1_234_567, "chunk_tokens": 256}
        for digest, model in (("42f7fbce", "meta-llama/Llama-3.3-70B@6f6073b"), ("5f5df11d", "Qwen/Qwen3-Next@9c7f2fb"))
    ],
}


class TestEightyColumns:
    """Nothing is cut or broken: a narrow page has the same words as a wide one."""

    def test_stat(self) -> None:
        narrow = page(BUSY, width=80)
        assert {len(line) > 80 for line in narrow.splitlines()} == {False}
        assert sorted(narrow.split()) == sorted(page(BUSY, width=10_000).split())

    def test_stat_is_side_by_side_where_there_is_room(self) -> None:
        assert len(page(BUSY, width=80).splitlines()) == len(page(BUSY, width=10_000).splitlines())
        assert len(page(BUSY, width=79).splitlines()) > len(page(BUSY, width=80).splitlines())

    def test_watch_shows_trouble_first(self) -> None:
        """On 24 rows, even with five kinds of trouble and four reasons for misses."""
        lines = screen(BUSY, width=80, height=24).splitlines()
        for word in ("KV-601", "KV-602", "postponed", "dropped", "limbo", "tokens reused", "disk written"):
            assert [line for line in lines if word in line]

    @pytest.mark.parametrize("clients", [7, 40, 256])
    def test_watch_shows_clients_and_namespaces_on_24_rows(self, clients: int) -> None:
        """The screen cannot be scrolled, so it counts what does not fit."""
        many = [{"session": number, "client": f"engine-{number}"} for number in range(clients)]
        calm = {**BUSY, "lookups": {"total": 9, "misses": {"absent": 1}}, "arena": {}, "clients": many}
        calm["tiers"] = [{"name": "disk"}]
        lines = screen(calm, width=80, height=24).splitlines()
        shown = sum("engine-" in line for line in lines)
        (more,) = [int(line.split()[1]) for line in lines if "more: see kvtally stat" in line] or [0]
        assert shown >= 5
        assert shown + more == clients
        assert sum("@" in line for line in lines) == 2  # both models

    def test_watch_has_blank_lines_where_there_is_room(self) -> None:
        assert "" in [line.strip() for line in screen(BUSY, width=80, height=60).rstrip().splitlines()]

    def test_receipts(self, run: Run, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
        ticket = "cmpl-3ad6ee38ecdbce131d94e336e66fb133-0-4457c6fd"
        half = Half(
            role=Role.DECODE,
            tokens_gpu=1_024,
            tokens_host=12_288,
            tokens_disk=3_072,
            computed_tokens=16_616,
            load_ms=1_034.1,
            reason="staging_failed",
        )
        with CopyingClient(store, namespace=NAMESPACE) as client:
            for one in (Half(role=Role.PREFILL, saved_tokens=32_768), half):
                assert not isinstance(client.file_receipt(ticket, one).wait(), Miss)
        monkeypatch.setenv("COLUMNS", "80")
        _, head, *rest = run("receipts", ticket, "--socket", store).out.splitlines()
        assert head == ticket
        assert [line for line in rest if len(line) > 80 or not line.startswith("  ")] == []
        assert " ".join(" ".join(rest).split()) == (
            "short (staging_failed): promised 32,768, reused 16,384 (gpu 1,024, host 12,288, disk 3,072), computed "
            "16,616, loaded in 1,034.1 ms"
        )

    def test_config_show(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVTALLY_CONNECTOR__MODEL_IDENTITY", "my-model-with-a-long-name-v3")
        monkeypatch.setenv("COLUMNS", "80")
        narrow = run("config", "show").out.splitlines()
        assert "connector.model_identity = my-model-with-a-long-name-v3" in narrow
        assert "  environment: KVTALLY_CONNECTOR__MODEL_IDENTITY" in narrow

    @pytest.mark.parametrize("verdict", ["proved", "recomputed:foreign_namespace", "recomputed:prefill_status_503"])
    def test_demo(self, verdict: str) -> None:
        made = demo.Row(
            step="another prompt, 1,000 tokens shared",
            proves="decode kept its attention of the shared part and took only the rest and the state",
            verdict=verdict,
            reused_tokens=131_071,
            computed_tokens=131_071,
            source="gpu:131072,host:131072,disk:131072",
            answer_equal=False,
            seconds=1.0,
            proved=True,
        )
        console = Console(width=80)
        with console.capture() as capture:
            console.print(demo._table([made]))
        words = capture.get().split()
        for word in (
            *verdict.replace(":", ": ").split(),
            "131,071",
            "gpu:131072",
            "disk:131072",
            "attention",
            "DIFFERS",
        ):
            assert word in words


def test_stat_lists_other_stores_and_what_failed_with_them() -> None:
    peers = [
        {"name": "tcp://10.0.0.7:7400", "state": "ok", "asks": 20_000_000, "hits": 7, "bytes": 3 << 20},
        {"name": "tcp://10.0.0.8:7400", "state": "lost", "asks": 2, "errors": {"KV-500": 3, "KV-604": 1}},
    ]
    text = page({"peers": peers}, width=80)
    assert row(text, "ok") == ["ok", "20M", "7", "3MiB", "-", "tcp://10.0.0.7:7400"]
    assert row(text, "lost")[-5:] == ["KV-500", "3,", "KV-604", "1", "tcp://10.0.0.8:7400"]
    assert max(map(len, text.splitlines())) <= 80
    assert "had it" not in page({})


class TestDemo:
    """Its words, without its engines."""

    @pytest.mark.parametrize(
        ("arguments", "last"), [([], "kvtally demo --nodes 2"), (["--nodes", "2"], "kvtally up nodes.yaml --node NAME")]
    )
    def test_its_last_line_says_what_is_next(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], last: str
    ) -> None:
        row = demo.Row(
            step="s",
            proves="p",
            verdict="proved",
            reused_tokens=1,
            computed_tokens=1,
            source="peer:1",
            answer_equal=True,
            seconds=1.0,
            proved=True,
        )
        shown: list[int] = []

        def show(directory: Path, console: Console, nodes: int) -> list[demo.Row]:
            shown.append(nodes)
            return [row]

        monkeypatch.setattr(demo, "find_spec", lambda name: True)
        monkeypatch.setattr(demo, "_show", show)
        monkeypatch.setenv("COLUMNS", "120")
        assert demo.main(arguments) == 0
        assert last in capsys.readouterr().out.splitlines()[-1]
        assert shown == [2 if arguments else 1]

    @pytest.mark.parametrize("nodes", ["0", "3", "x"])
    def test_other_numbers_of_nodes_are_refused(self, capsys: pytest.CaptureFixture[str], nodes: str) -> None:
        with pytest.raises(SystemExit) as exited:
            demo.main(["--nodes", nodes])
        assert exited.value.code == 2
        assert "--nodes" in capsys.readouterr().err


def page(now: object, before: object | None = None, width: int = 100) -> str:
    console = Console(width=width, markup=False, highlight=False, soft_wrap=True)
    with console.capture() as capture:
        console.print(StatsPage(read_stats(now), None if before is None else read_stats(before)))
    return capture.get()


def screen(now: object, *, width: int, height: int) -> str:
    """What `--watch` paints."""
    console = Console(width=width, height=height, markup=False, highlight=False, force_terminal=True, color_system=None)
    console.set_alt_screen(True)
    with console.capture() as capture:
        console.print(Screen(StatsPage(read_stats(now))))
    return capture.get()


def row(text: str, name: str) -> list[str]:
    """The cells of the last row that begins with this name."""
    return [line for line in text.splitlines() if line.startswith(name)][-1].split()
