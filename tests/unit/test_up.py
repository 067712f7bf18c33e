"""A deployment file: how it is read, the plan made from it, what is refused before anything starts, and `--print`."""

from __future__ import annotations

import asyncio
import importlib.machinery
import importlib.util
import json
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import yaml

from kvtally.cli import main as cli
from kvtally.errors import ConfigError
from kvtally.processes import free_ports
from kvtally.up.document import Role
from kvtally.up.file import Deployment, parse, read
from kvtally.up.host import answers, check, this_host
from kvtally.up.plan import (
    GOOD_LIFE_S,
    LONGEST_PAUSE_S,
    MOST_RESTARTS,
    Host,
    Process,
    pause_s,
    plan,
    shell_command,
)
from tests.unit import router_kit
from tests.waiting import HANG_S

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
CPU = Host(python="/bin/python", cores=8, memory_bytes=32 * GIB)
GPUS = Host(python="/bin/python", gpus=("0", "1", "2", "3"), cores=8, memory_bytes=32 * GIB)
PD = {"model": "owner/name", "prefill": 1, "decode": 1}
FILE = Path("/here/up.yaml")


def deployment(**more: object) -> Deployment:
    return parse({**PD, **more}, FILE, {"XDG_RUNTIME_DIR": "/run/user/7"})


def planned(host: Host = CPU, **more: object) -> dict[str, Process]:
    return {process.name: process for process in plan(deployment(**more), host)}


def flags(process: Process) -> dict[str, str]:
    return {
        flag: value for flag, value in zip(process.argv, [*process.argv[1:], ""], strict=True) if flag.startswith("--")
    }


# ---- the file


def test_three_lines_are_enough() -> None:
    processes = plan(deployment(), CPU)
    assert [(process.name, process.stage, process.port) for process in processes] == [
        ("store", 0, 0),
        ("prefill-0", 1, 8100),
        ("decode-0", 1, 8200),
        ("router", 2, 8080),
    ]
    assert [process.health for process in processes] == [
        "/run/user/7/kvtally/store.sock",
        "http://127.0.0.1:8100/health",
        "http://127.0.0.1:8200/health",
        "http://127.0.0.1:8080/instances",
    ]


@pytest.mark.parametrize("name", ["pd", "shared", "multiturn"])
def test_examples_can_be_planned(name: str) -> None:
    assert {process.name for process in plan(read(ROOT / "examples" / f"{name}.yaml", {}), CPU)} >= {"store", "router"}


def test_what_the_example_leaves_out_may_be_said() -> None:
    """Every setting in a comment exists: without the #, all of them work together."""
    text = re.sub(r"^( *)# ( *\w+:.*)$", r"\1\2", (ROOT / "examples" / "pd.yaml").read_text(), flags=re.MULTILINE)
    found = parse(yaml.safe_load(text), FILE, {})
    assert (found.pools[Role.DECODE].count, found.env, found.connector, found.logs, found.router, found.store) == (
        2,
        {"HF_HUB_OFFLINE": 1},
        {"wait_ms": 500},
        "/here/logs",
        {"strict": True},
        {"memory": "2GiB", "disk": "/var/lib/kvtally"},
    )


@pytest.mark.parametrize(
    ("wrong", "message", "remedy"),
    [
        ({"prefil": 1}, "unknown 'prefil'", "Did you mean prefill?"),
        ({"decode": {"cuont": 1}}, "unknown 'cuont' in section decode", "Did you mean count?"),
        ({"store": {"memmory": "1GiB"}}, "unknown 'memmory' in section store", "Did you mean memory?"),
        ({"router": {"strikt": True}}, "unknown 'strikt' in section router", "Did you mean strict?"),
        ({"connector": {"wait": 5}}, "unknown setting 'wait'", "Did you mean wait_ms?"),
        ({"store": {"memory": "a lot"}}, r"store.memory = a lot \(from /here/up.yaml\) is not a size", "8GiB"),
        ({"connector": {"wait_ms": "soon"}}, r"wait_ms = soon \(from /here/up.yaml\)", "2000"),
        ({"store": {"memory": [1]}}, "store.memory in /here/up.yaml is not a plain value", "examples/pd.yaml"),
        ({"store": {"token": "0123456789abcdef"}}, "store.token is not for this file", "token_file"),
        ({"store": {"disk_size": "1GiB"}}, "disk_size .* without store.disk", "--disk"),
        ({"connector": {"store": "/x"}}, "connector.store is not for this file", "store: {socket"),
        ({"router": {"decode": "http://x:1"}}, "router.decode is not for this file", "engines of this file"),
        ({"router": {"listen": "nowhere"}}, "router.listen = nowhere .* is not an address", "host:port"),
        ({"router": {"port": 1, "listen": "127.0.0.1:1"}}, "router.port and router.listen", "listen"),
        ({"router": {"port": 0}}, "router.listen = 127.0.0.1:0 leaves the port open", "router: {port: 8080}"),
        ({"router": {"listen": "0.0.0.0:0"}}, "router.listen = 0.0.0.0:0 leaves the port open", "port: 8080"),
        ({"router": {"timeout": 0}}, "router.timeout = 0 .* is not a whole number from 1", "300"),
        ({"prefill": -1}, "prefill in /here/up.yaml is wrong", "examples/pd.yaml"),
        ({"prefill": 65}, "prefill in /here/up.yaml is wrong", "examples/pd.yaml"),
        ({"prefill": True}, "prefill in /here/up.yaml is wrong", "examples/pd.yaml"),
        ({"decode": {"port": 70_000}}, "decode.port in /here/up.yaml is wrong", "examples/pd.yaml"),
        ({"decode": {"port": 0}}, "decode.port in /here/up.yaml is wrong", "examples/pd.yaml"),
        ({"prefill": {"port": 0}}, "prefill.port in /here/up.yaml is wrong", "examples/pd.yaml"),
        ({"args": [1]}, "args in /here/up.yaml is wrong: expected `object`", "examples/pd.yaml"),
        ({"model": None}, "names no model", "model: DIRECTORY"),
        ({"model": ""}, "names no model", "model: DIRECTORY"),
        ({"prefill": 0}, "decode engines and for no prefill engine", "plain: 1"),
        ({"decode": 0}, "prefill engines and for no decode engine", "plain: 1"),
        ({"prefill": 0, "decode": 0}, "asks for no engine", "plain: 1"),
        ({"plain": 1}, "plain engines beside prefill and decode", "Leave `plain` out"),
        ({"args": {"port": 1}}, "args sets port", "decode: {port: 8200}"),
        ({"decode": {"args": {"--kv-transfer-config": "{}"}}}, "decode.args sets --kv-transfer-config", "connector"),
        ({"decode": {"count": 2, "gpus": [0]}}, "decode.gpus has 1 entries for 2 engines", "gpus: [0, 1]"),
    ],
)
def test_what_is_wrong_is_said(wrong: dict[str, object], message: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        deployment(**wrong)
    assert remedy in raised.value.remedy


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [", "is not YAML"),
        (b"\xff", "it is not UTF-8"),
        (b"- 1", "no `name: value` lines"),
        (b"", "no `name"),
        (b"model: 2024-13-45", "is not YAML: month must be in 1..12"),
        (b"model: m\nplain: 1\nargs: {a: 1}\nplain: 2", "a second 'plain' .* line 4"),
        (b"model: m\nplain: 1\nargs: &a {more: *a}", "is not YAML: .*recursive.* line 3"),
        (b"model: m\nplain: 1\nargs: " + b"{a: " * 1000 + b"}" * 1000, "is nested too deeply"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "up.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "up.yaml", {})


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read(tmp_path / "up.yaml", {})


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    paths = {"model": "models/mine", "logs": "logs", "store": {"socket": "s.sock", "disk": "cache"}}
    found = parse({**PD, **paths}, tmp_path / "up.yaml", {})
    assert (found.model, found.logs, found.socket, found.store) == (
        str(tmp_path / "models" / "mine"),
        str(tmp_path / "logs"),
        str(tmp_path / "s.sock"),
        {"disk": str(tmp_path / "cache")},
    )


# ---- the plan


def test_engines_get_their_arguments_and_the_store() -> None:
    processes = planned(
        args={"max_model_len": 4096, "enforce_eager": True, "max-num-seqs": 8},
        decode={
            "count": 2,
            "port": 9000,
            "args": {
                "max_num_seqs": 4,
                "enable_prefix_caching": False,
                "enforce_eager": None,
                "lora_modules": ["a=/a", "b=/b"],
                "additional_config": {"x": [1]},
            },
            "env": {"A": 2, "B": False},
        },
        env={"A": 1},
        store={"socket": "/s.sock"},
        connector={"wait_ms": 500},
    )
    engine = processes["decode-1"]
    assert engine.argv[:5] == ["/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "owner/name"]
    at = engine.argv.index("--kv-transfer-config")
    assert json.loads(engine.argv[at + 1]) == {
        "kv_connector": "KVTally",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": "/s.sock", "autostart": False, "wait_ms": 500},
    }
    assert engine.argv[5:at] == ["--host", "127.0.0.1", "--port", "9001"]
    assert engine.argv[at + 2 :] == [
        *("--max-model-len", "4096", "--max-num-seqs", "4", "--no-enable-prefix-caching"),
        *("--lora-modules", "a=/a", "b=/b", "--additional-config", '{"x":[1]}'),
    ]
    assert {name: engine.env[name] for name in "AB"} == {"A": "2", "B": "false"}
    assert processes["prefill-0"].env["A"] == "1"
    assert "--enforce-eager" in processes["prefill-0"].argv


def test_the_router_knows_every_engine_and_its_store() -> None:
    router = planned(decode=2, store={"socket": "/s.sock"}, router={"listen": "0.0.0.0:80", "strict": True})["router"]
    assert router.argv[1:] == [
        *("-m", "kvtally", "route", "--listen", "0.0.0.0:80"),
        *("--prefill", "http://127.0.0.1:8100,store=/s.sock"),
        *("--decode", "http://127.0.0.1:8200,store=/s.sock", "--decode", "http://127.0.0.1:8201,store=/s.sock"),
        "--strict",
    ]
    assert router.health == "http://127.0.0.1:80/instances"


def test_a_router_is_ready_whatever_its_engines_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router must not be given up while its only decode engine takes minutes to restart."""
    monkeypatch.setattr("kvtally.router.fleet.CHECK_S", 0.01)

    async def test() -> None:
        async with router_kit.kit(tmp_path, prefill=0) as it:
            it.decode[0].health = 503

            async def is_down() -> bool:
                return (await it.send("GET", "/health")).status == 503

            await router_kit.until(is_down)
            probed = planned(router={"port": it.router.port})["router"].health
            assert await asyncio.to_thread(answers, probed)

    router_kit.run(test)


def test_plain_engines_are_decode_engines_to_the_router() -> None:
    processes = plan(parse({"model": "m", "plain": 2}, FILE, {}), CPU)
    assert [process.name for process in processes] == ["store", "plain-0", "plain-1", "router"]
    assert [
        word.split(",")[0] for word in processes[-1].argv if word.startswith(("--decode", "--prefill", "http"))
    ] == [*("--decode", "http://127.0.0.1:8300", "--decode", "http://127.0.0.1:8301")]


def test_the_store_gets_its_settings() -> None:
    store = planned(store={"socket": "/s", "memory": "64MiB", "verify_reads": False, "disk": None})["store"]
    assert store.argv[1:] == ["-m", "kvtally", "store", "--socket", "/s", "--memory", "64MiB", "--no-verify-reads"]


def test_a_store_that_runs_is_not_started() -> None:
    processes = planned(store="/run/other.sock")
    assert list(processes) == ["prefill-0", "decode-0", "router"]
    assert "store=/run/other.sock" in processes["router"].argv[-1]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, {"prefill-0": "0", "decode-0": "1"}),
        ({"args": {"tensor-parallel-size": 2}}, {"prefill-0": "0,1", "decode-0": "2,3"}),
        ({"decode": {"count": 2, "gpus": [3, "0"]}}, {"prefill-0": "1", "decode-0": "3", "decode-1": "0"}),
        ({"decode": {"gpus": [[0, 1]]}}, {"prefill-0": "2", "decode-0": "0,1"}),
        ({"prefill": {"gpus": [0]}, "decode": {"gpus": [0]}}, {"prefill-0": "0", "decode-0": "0"}),
    ],
)
def test_gpus_are_shared_out(more: dict[str, object], expected: dict[str, str]) -> None:
    processes = planned(GPUS, **more)
    assert {name: processes[name].env for name in expected} == {
        name: {"CUDA_VISIBLE_DEVICES": gpus} for name, gpus in expected.items()
    }


def test_too_few_gpus_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"decode-1 needs 2 GPU\(s\); 1 of 4 here are left") as raised:
        planned(GPUS, decode={"count": 2, "args": {"tensor_parallel_size": 2}}, prefill={"gpus": [0]})
    assert "gpu_memory_utilization" in raised.value.remedy


def test_without_gpus_cores_and_memory_are_shared_out() -> None:
    both = {"OMP_NUM_THREADS": "4", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "4"}
    assert planned()["decode-0"].env == both
    assert planned(env={"OMP_NUM_THREADS": 2})["decode-0"].env == {**both, "OMP_NUM_THREADS": "2"}
    told = msgspec.structs.replace(CPU, environ={"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "9"})
    assert planned(told)["decode-0"].env == {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    sized = planned(args={"gpu_memory_utilization": 0.2})["decode-0"].env
    assert "VLLM_CPU_KVCACHE_SPACE" not in sized
    alone = plan(parse({"model": "m", "plain": 1}, FILE, {}), CPU)[1].env
    assert alone == {"VLLM_CPU_KVCACHE_SPACE": "8"}
    assert planned(msgspec.structs.replace(CPU, has_accelerator=True))["decode-0"].env == {}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"router": {"port": 8201}, "decode": 2}, "decode-1 and router would both have port 8201"),
        ({"decode": {"count": 2, "port": 65_535}}, "decode-1 would have port 65536"),
    ],
)
def test_ports_that_cannot_be(more: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(**more)


def test_restarts_get_slower_and_end() -> None:
    pauses = [pause_s([8.0] * deaths) for deaths in range(1, MOST_RESTARTS + 2)]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, None]
    assert max(pause or 0.0 for pause in pauses) <= LONGEST_PAUSE_S


def test_who_has_lived_long_is_forgiven() -> None:
    before = [0.0] * MOST_RESTARTS
    assert pause_s([*before, GOOD_LIFE_S]) == 1.0
    assert pause_s([*before, GOOD_LIFE_S, 0.0]) == 2.0
    assert pause_s([GOOD_LIFE_S, *before]) is None  # but not for ever
    assert pause_s([GOOD_LIFE_S] * 100) == 1.0
    assert pause_s([*before, GOOD_LIFE_S - 1]) is None


def test_a_printed_command_is_one_a_shell_understands() -> None:
    process = Process(
        name="x",
        part=next(iter(planned().values())).part,
        stage=0,
        argv=[sys.executable, "-c", "import os, sys; print(os.environ['A'], sys.argv[1])", "it's $HOME {}"],
        env={"A": "a b;c"},
        health="",
        start_timeout_s=1,
    )
    done = subprocess.run(
        ["sh", "-c", shell_command(process)], capture_output=True, text=True, check=True, timeout=HANG_S
    )
    assert done.stdout == "a b;c it's $HOME {}\n"


# ---- the machine


@pytest.fixture
def ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    """A deployment that could start here: vLLM seems to be installed."""
    spec = importlib.machinery.ModuleSpec("vllm", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "vllm" else None)
    (tmp_path / "config.json").write_text("{}")
    ports = zip(("prefill", "decode", "router"), free_ports(3), strict=True)
    tree = {"model": str(tmp_path), "store": {"socket": "s.sock"}, **{name: {"port": port} for name, port in ports}}
    return parse(tree, tmp_path / "up.yaml", {})


def test_what_can_run_is_not_refused(ready: Deployment) -> None:
    check(ready, plan(ready, CPU), {})


def test_without_vllm_nothing_starts(ready: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="vLLM is not installed") as raised:
        check(ready, plan(ready, CPU), {})
    assert raised.value.code == "KV-106"


@pytest.mark.parametrize("role", [*Role][:2])
def test_a_port_in_use_is_named(ready: Deployment, role: Role) -> None:
    port = ready.pools[role].port
    with (
        socket.create_server(("127.0.0.1", port or 0)),
        pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1, for {role}-0, is in use") as raised,
    ):
        check(ready, plan(ready, CPU), {})
    assert f"`{role}: {{port: ...}}`" in raised.value.remedy


@pytest.mark.parametrize(
    ("model", "environ", "message"),
    [
        ("/no/such", {}, "there is no model in /no/such"),
        ("./gone", {}, "there is no model in .*/gone"),
        ("/" + "x" * 300, {}, "there is no model in /xxx"),  # nor may it be looked at
        ("x" * 300 + "/a/b", {}, "neither a directory here nor"),
        ("some/where/else", {}, "neither a directory here nor"),
        ("owner/name", {"HF_HUB_OFFLINE": "1", "HF_HOME": "/nowhere"}, "owner/name is not in /nowhere/hub"),
    ],
)
def test_a_model_that_is_not_there(
    ready: Deployment, tmp_path: Path, model: str, environ: dict[str, str], message: str
) -> None:
    found = parse({**PD, "model": model}, tmp_path / "up.yaml", {})
    wanted = msgspec.structs.replace(ready, model=found.model)
    with pytest.raises(ConfigError, match=message) as raised:
        check(wanted, plan(wanted, CPU), environ)
    assert raised.value.code == "KV-106"


def test_a_model_of_the_hub_is_fine_where_it_may_be_fetched_or_is_cached(ready: Deployment, tmp_path: Path) -> None:
    wanted = msgspec.structs.replace(ready, model="owner/name")
    check(wanted, plan(wanted, CPU), {})
    (tmp_path / "models--owner--name").mkdir()
    check(wanted, plan(wanted, CPU), {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)})


def test_a_store_that_should_run_must(ready: Deployment) -> None:
    wanted = msgspec.structs.replace(ready, starts_store=False)
    with pytest.raises(ConfigError, match="no store answers at"):
        check(wanted, plan(wanted, CPU), {})


def test_a_store_that_runs_already_is_not_started_again(ready: Deployment) -> None:
    store = subprocess.Popen([sys.executable, *plan(ready, CPU)[0].argv[1:], "--memory", "16MiB"], cwd=ROOT)
    try:
        assert answers(ready.socket, 20.0)
        with pytest.raises(ConfigError, match="a store already serves") as raised:
            check(ready, plan(ready, CPU), {})
        assert raised.value.code == "KV-104"
        shared = msgspec.structs.replace(ready, starts_store=False)
        check(shared, plan(shared, CPU), {})
    finally:
        store.kill()
        store.wait()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({}, ("0", "1")), ({"CUDA_VISIBLE_DEVICES": "3,GPU-1"}, ("3", "GPU-1")), ({"CUDA_VISIBLE_DEVICES": ""}, ())],
)
def test_gpus_are_found(tmp_path: Path, environ: dict[str, str], expected: tuple[str, ...]) -> None:
    assert this_host(environ, tmp_path).gpus == ()
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "proc" / "driver" / "nvidia" / "gpus" / name).mkdir(parents=True)
    assert this_host(environ, tmp_path).gpus == expected
    (tmp_path / "dev" / "nvidiactl").mkdir(parents=True)
    (tmp_path / "dev" / "nvidia7").mkdir()  # of a container that has one of them
    assert this_host({}, tmp_path).gpus == ("0",)
    assert not this_host({}, tmp_path).has_accelerator


# ---- the command


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "up.yaml").write_text("model: owner/name\nplain: 1\nstore: {socket: a b.sock}\n")
    return tmp_path


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kvtally", *arguments])
    with pytest.raises(SystemExit) as exited:
        cli.main()
    assert isinstance(exited.value.code, int)
    return exited.value.code


def test_print_shows_the_commands(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "up", "up.yaml", "--print") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert [line.split(":")[0] for line in lines[::2]] == ["# store", "# plain-0", "# router"]
    assert shlex.split(lines[1])[:6] == [sys.executable, "-m", "kvtally", "store", "--socket", str(run / "a b.sock")]
    assert "vllm.entrypoints.openai.api_server" in lines[3]


def test_what_is_printed_for_another_machine_need_not_be_here(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither memory nor disk nor files of this machine matter."""
    store = {"memory": "900TiB", "disk": "/var/lib/kvtally", "disk_size": "9000TiB", "tcp": "10.0.0.5:7400"}
    files = {"token_file": "/etc/no/such", "tls_cert": "/etc/no/cert", "tls_key": "/etc/no/key"}
    tree = {**PD, "store": {**store, **files}, "router": {"store_ca": "/etc/no/ca"}}
    (run / "up.yaml").write_text(json.dumps(tree))
    for flag in ("--print", "--json"):
        assert call(monkeypatch, "up", "up.yaml", flag) == 0
        out = capsys.readouterr().out
        assert "900TiB" in out
        assert "/etc/no/such" in out
    assert call(monkeypatch, "up", "up.yaml") == 2
    assert "900TiB" in capsys.readouterr().err
    (run / "up.yaml").write_text(json.dumps({**tree, "store": {"memory": "a lot"}}))
    assert call(monkeypatch, "up", "up.yaml", "--print") == 2


def test_json_is_the_plan(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "up", "up.yaml", "--json") == 0
    processes = json.loads(capsys.readouterr().out)["processes"]
    assert [process["name"] for process in processes] == ["store", "plain-0", "router"]
    assert processes[1]["port"] == 8300


def test_a_refusal_starts_nothing_and_exits_with_2(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "up.yaml").write_text("model: ./gone\nplain: 1\nlogs: logs\n")
    assert call(monkeypatch, "up", "up.yaml") == 2
    assert "remedy: " in capsys.readouterr().err
    assert not (run / "logs").exists()
