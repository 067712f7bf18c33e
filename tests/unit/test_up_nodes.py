"""A file that names several machines: what each of them runs, which one this is, and what is refused."""

from __future__ import annotations

import asyncio
import importlib.machinery
import importlib.util
import io
import json
import re
import shlex
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from kvtally.cli import main as cli
from kvtally.errors import ConfigError
from kvtally.processes import free_ports
from kvtally.up import live
from kvtally.up.document import MOST_NODES, Document, Role, parse_document
from kvtally.up.file import Deployment, parse
from kvtally.up.host import check, is_here, this_node
from kvtally.up.live import _others as others_ready
from kvtally.up.plan import Host, Process, plan

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
CPU = Host(python="/bin/python", cores=8, memory_bytes=32 * GIB)
FILE = Path("/here/up.yaml")
ENVIRON = {"XDG_RUNTIME_DIR": "/run/user/7"}
ELSEWHERE, ALSO_ELSEWHERE = "240.0.0.1", "240.0.0.2"  # reserved: no machine has them

Tree = dict[str, Any]
A: Tree = {"address": "10.0.0.7", "prefill": 1}
B: Tree = {"address": "10.0.0.8", "decode": 2}
TOKEN = {"token_file": "/etc/kvtally/token"}


def tree(**more: Any) -> Tree:
    return {"model": "owner/name", "nodes": {"a": A, "b": B}, "store": TOKEN, **more}


def deployment(node: str, **more: Any) -> Deployment:
    return parse(tree(**more), FILE, ENVIRON, node=node, is_for_here=False)


def planned(node: str, **more: Any) -> dict[str, Process]:
    return {process.name: process for process in plan(deployment(node, **more), CPU)}


def document(**more: Any) -> Document:
    return parse_document(tree(**more), FILE)


# ---- what each machine runs


def test_each_machine_runs_its_own_part() -> None:
    parts = {node: [(each.name, each.host, each.port) for each in planned(node).values()] for node in "ab"}
    assert parts == {
        "a": [("store", "10.0.0.7", 7400), ("prefill-0", "10.0.0.7", 8100), ("router", "127.0.0.1", 8080)],
        "b": [("store", "10.0.0.8", 7400), ("decode-0", "10.0.0.8", 8200), ("decode-1", "10.0.0.8", 8201)],
    }


def test_stores_listen_on_their_own_address_and_pull_from_the_others() -> None:
    store = planned("a")["store"]
    assert store.argv[1:] == [
        *("-m", "kvtally", "store", "--socket", "/run/user/7/kvtally/store.sock"),
        *("--tcp", "10.0.0.7:7400", "--peers", "10.0.0.8"),
        *("--token-file", "/etc/kvtally/token"),
    ]
    assert (store.ports, store.health) == ([7400, 7401], "/run/user/7/kvtally/store.sock")
    three = {"a": A, "b": B, "c": {"address": "node-c.internal", "decode": 1}}
    assert "10.0.0.7 node-c.internal" in planned("b", nodes=three)["store"].argv


def test_engines_listen_where_the_router_reaches_them() -> None:
    engine = planned("b")["decode-1"]
    at = engine.argv.index("--host")
    assert engine.argv[at : at + 4] == ["--host", "10.0.0.8", "--port", "8201"]
    assert engine.health == "http://10.0.0.8:8201/health"
    transfer = json.loads(engine.argv[engine.argv.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"]["store"] == "/run/user/7/kvtally/store.sock"  # its own machine's


def test_the_router_has_the_engines_of_all_machines() -> None:
    router = planned("a", router={"listen": "0.0.0.0:80"})["router"]
    assert router.argv[4:] == [
        *("--listen", "0.0.0.0:80"),
        *("--prefill", "http://10.0.0.7:8100,store=tcp://10.0.0.7:7400"),
        *("--decode", "http://10.0.0.8:8200,store=tcp://10.0.0.8:7400"),
        *("--decode", "http://10.0.0.8:8201,store=tcp://10.0.0.8:7400"),
        *("--token-file", "/etc/kvtally/token"),
    ]
    assert router.awaits == {
        "decode-0 of node b": "http://10.0.0.8:8200/health",
        "decode-1 of node b": "http://10.0.0.8:8201/health",
    }


def test_a_file_without_nodes_awaits_nobody_and_has_no_ports_for_peers() -> None:
    processes = plan(parse({"model": "m", "prefill": 1, "decode": 1}, FILE, ENVIRON), CPU)
    assert [(each.awaits, each.bulk_port) for each in processes] == [({}, 0)] * 4
    assert processes[0].ports == []


@pytest.mark.parametrize("node", ["b", "r"])
def test_the_router_may_be_on_any_node(node: str) -> None:
    nodes = {"a": A, "b": B, "r": {"address": "10.0.0.9"}} if node == "r" else {"a": A, "b": B}
    parts = {name: list(planned(name, nodes=nodes, router={"node": node})) for name in nodes}
    routers = [name for name, names in parts.items() if "router" in names]
    assert routers == [node]
    if node == "r":
        assert parts["r"] == ["router"]  # and no store: it has no engines
        assert "10.0.0.9" not in " ".join(planned("a", nodes=nodes, router={"node": node})["store"].argv)


def test_what_a_node_says_wins() -> None:
    b = {
        **B,
        "decode": {"count": 1, "port": 9000, "args": {"max_num_seqs": 1}},
        "model": "/models/here",
        "args": {"max_model_len": 10, "seed": None},
        "env": {"X": 2},
        "store": {"memory": "8GiB", "disk": "cache", "disk_size": None, "port": 7500},
    }
    common = {"args": {"max_model_len": 5, "seed": 1}, "env": {"X": 1, "Y": 1}}
    store = {**TOKEN, "memory": "1GiB", "disk_size": "1GiB"}
    for_b = planned("b", nodes={"a": {**A, "store": {"disk": "d"}}, "b": b}, store=store, **common)
    assert for_b["store"].argv[6:] == [
        *("--tcp", "10.0.0.8:7500", "--peers", "10.0.0.7"),
        *("--token-file", "/etc/kvtally/token", "--memory", "8GiB", "--disk", "/here/cache"),
    ]
    engine = for_b["decode-0"]
    assert (engine.port, engine.argv[4], engine.env["X"], engine.env["Y"]) == (9000, "/models/here", "2", "1")
    assert engine.argv[-4:] == ["--max-model-len", "10", "--max-num-seqs", "1"]
    for_a = planned("a", nodes={"a": {**A, "store": {"disk": "d"}}, "b": b}, store=store, **common)
    assert for_a["store"].argv[-2:] == ["--disk", "/here/d"]
    assert for_a["prefill-0"].argv[-4:] == ["--max-model-len", "5", "--seed", "1"]
    assert "http://10.0.0.8:9000,store=tcp://10.0.0.8:7500" in for_a["router"].argv


@pytest.mark.parametrize(
    ("peers", "flag"), [("10.0.0.0/24", "10.0.0.0/24"), (["10.0.0.8", "node-c.internal"], "10.0.0.8 node-c.internal")]
)
def test_whom_to_pull_from_may_be_said(peers: object, flag: str) -> None:
    argv = planned("a", store={**TOKEN, "peers": peers})["store"].argv
    assert argv[argv.index("--peers") + 1] == flag


def test_nodes_on_one_machine_know_each_other_by_any_of_its_loopback_addresses() -> None:
    """A connection from 127.0.0.3 to 127.0.0.2 comes from 127.0.0.1."""
    nodes = {"a": {**A, "address": "127.0.0.2"}, "b": {**B, "address": "127.0.0.3"}}
    argv = planned("a", nodes=nodes)["store"].argv
    assert argv[argv.index("--peers") + 1] == "127.0.0.0/8"


def test_a_node_without_others_shares_nothing() -> None:
    store = planned("a", nodes={"a": {"address": "10.0.0.7", "plain": 1}})["store"]
    assert ("--peers" in store.argv, store.ports) == (False, [7400])


def test_ipv6_addresses_stand_in_brackets_where_a_port_follows() -> None:
    nodes = {"a": {**A, "address": "[fd00::0007]"}, "b": {**B, "address": "fd00::8"}}
    for_a = planned("a", nodes=nodes)
    assert for_a["store"].argv[7] == "[fd00::7]:7400"
    assert "http://[fd00::8]:8200,store=tcp://[fd00::8]:7400" in for_a["router"].argv
    argv = for_a["prefill-0"].argv
    assert argv[argv.index("--host") + 1] == "fd00::7"


def test_engines_that_do_both_can_be_spread() -> None:
    nodes = {"a": {"address": "10.0.0.7", "plain": 1}, "b": {"address": "10.0.0.8", "plain": 1}}
    assert planned("a", nodes=nodes)["router"].argv.count("--decode") == 2


def test_the_example_can_be_planned_as_it_is_and_with_all_it_leaves_out() -> None:
    text = (ROOT / "examples" / "nodes.yaml").read_text()
    more = re.sub(r"^( *)# ( *\w+: .*)$", r"\1\2", text, flags=re.MULTILINE)
    for written in (text, more):
        for node in "ab":
            found = parse(yaml.safe_load(written), FILE, {}, node=node, is_for_here=False)
            assert {each.name for each in plan(found, CPU)} >= {"store"}
    b = parse(yaml.safe_load(more), FILE, {}, node="b", is_for_here=False)
    assert (b.model, b.store["memory"], b.store["peers"], b.env) == (
        "/models/qwen3-0.6b",
        "64GiB",
        "10.0.0.0/24",
        {"HF_HUB_OFFLINE": 1},
    )


# ---- what is refused


@pytest.mark.parametrize(
    ("wrong", "message", "remedy"),
    [
        ({"nodes": {"a": A, "b": {**B, "adress": 1}}}, "unknown 'adress' in section nodes.b", "Did you mean address?"),
        ({"nodes": {"a": A, "b": {"decode": 1}}}, "nodes.b in .* is wrong: .*missing required", "examples/nodes.yaml"),
        ({"nodes": {"a": A, "b": {**B, "decode": {"cuont": 1}}}}, "in section nodes.b.decode of", "count"),
        ({"nodes": {"a": A, "b": {**B, "decode": -1}}}, "nodes.b.decode in .* is wrong", "examples/nodes.yaml"),
        ({"nodes": {"a": A, "b": None}}, "nodes.b in .* says nothing", "examples/nodes.yaml"),
        ({"nodes": ["a", "b"]}, "nodes in .* is wrong", "examples/nodes.yaml"),
        ({"nodes": {"a": A, 2: B}}, "2 under `nodes` .* is not a name", "in quotes"),
        ({"nodes": {"a": A, "../b": B}}, "'../b' under `nodes` .* is not a name", "letters"),
        (
            {"nodes": {"a": A, "b": {**B, "address": "10.0.0.8:7400"}}},
            "is not the address of a machine",
            "without a port",
        ),
        ({"nodes": {"a": A, "b": {**B, "address": "10.0.0.800"}}}, "nodes.b.address = 10.0.0.800", "10.0.0.7"),
        ({"nodes": {"a": A, "b": {**B, "address": "http://b"}}}, "is not the address of a machine", "10.0.0.7"),
        ({"nodes": {"a": A, "b": {**B, "address": ""}}}, "is not the address of a machine", "10.0.0.7"),
        ({"nodes": {"a": A, "b": {**B, "address": 10.1}}}, "nodes.b.address in .* is wrong", "examples/nodes.yaml"),
        ({"nodes": {"a": A, "b": {**B, "address": "0.0.0.0"}}}, "not an address by which", "interfaces"),
        ({"nodes": {"a": A, "b": {**B, "address": "::"}}}, "not an address by which", "interfaces"),
        ({"nodes": {"a": A, "b": {**B, "address": "10.0.0.7"}}}, "a and b .* have one address, 10.0.0.7", "one node"),
        ({"nodes": {"a": A, "b": {**B, "address": "127.0.0.1"}}}, "b .* only its own machine can reach", "reach"),
        (
            {"nodes": {"a": A, "b": {**A, "address": "10.0.0.8"}}},
            "prefill engines and for no decode engine",
            "decode: 1",
        ),
        ({"nodes": {"a": A, "b": B, "c": {"address": "10.0.0.9", "plain": 1}}}, "plain engines beside", "plain"),
        ({"nodes": {"a": A, "b": B, "c": {"address": "10.0.0.9"}}}, "node c .* neither engines nor", "node: c"),
        ({"nodes": {str(n): {**A, "address": f"10.0.0.{n}"} for n in range(MOST_NODES + 1)}}, "65 nodes", "routers"),
        ({"prefill": 1}, "prefill engines beside `nodes`", "nodes: {NAME"),
        ({"nodes": {"a": A, "b": {**B, "args": {"host": "x"}}}}, "nodes.b.args sets host", "router"),
        ({"args": {"port": 1}}, "args sets port", "decode: {port: 8200}"),
        ({"nodes": {"a": A, "b": {**B, "decode": {"count": 2, "gpus": [0]}}}}, "nodes.b.decode.gpus has 1", "gpus"),
        ({"store": {}}, "node a in .* has no token", "token_file"),
        ({"store": {"token_file": ""}}, "node a in .* has no token", "token_file"),
        ({"nodes": {"a": A, "b": {**B, "store": {"token_file": None}}}}, "node b in .* has no token", "token_file"),
        ({"store": {**TOKEN, "token": "0123456789abcdef"}}, "store.token is not for this file", "token_file"),
        ({"store": "/run/s.sock"}, "a store that runs already", "token_file"),
        ({"store": {**TOKEN, "tcp": "10.0.0.7:1"}}, "store.tcp is not for a file with nodes", "port: 7400"),
        ({"store": {**TOKEN, "peers": "10.0.0.8:7400"}}, "store.peers = 10.0.0.8:7400", "10.0.0.0/24"),
        ({"store": {**TOKEN, "peers": [["x"]]}}, "store.peers = ", "10.0.0.0/24"),
        (
            {"store": {**TOKEN, "tls_cert": "/c", "tls_key": "/k"}},
            "store.tls_cert is given without store.peers_ca",
            "peers_ca",
        ),
        ({"store": {**TOKEN, "advertise": "h:1"}}, "store.advertise is not for a file with nodes", "address"),
        ({"store": {**TOKEN, "port": 0}}, "store.port = 0 for node a", "7400"),
        ({"store": {**TOKEN, "port": "x"}}, "store.port = x for node a", "7400"),
        ({"store": {**TOKEN, "port": True}}, "store.port = True for node a", "7400"),
        ({"nodes": {"a": A, "b": {**B, "store": {"memmory": 1}}}}, "unknown 'memmory'", "Did you mean memory?"),
        ({"nodes": {"a": A, "b": {**B, "store": {"memory": "much"}}}}, "store.memory = much", "8GiB"),
        ({"router": {"node": "c"}}, "unknown node 'c' in section router", "Known: a, b."),
        ({"router": {"node": 1}}, "unknown node 1 in section router", "Known: a, b."),
        (
            {"store": {**TOKEN, "tls_cert": "/c", "tls_key": "/k", "peers_ca": "/ca"}},
            "the router has no authority",
            "router: {store_ca: FILE}",
        ),
    ],
)
def test_what_is_wrong_is_said_whichever_node_asks(wrong: Tree, message: str, remedy: str) -> None:
    """A fault in one node's part is everybody's: the machines need not be compared to find it."""
    for node in "ab":
        with pytest.raises(ConfigError, match=message) as raised:
            plan(deployment(node, **wrong), CPU)
        assert remedy in raised.value.remedy


def test_a_node_of_a_file_without_any(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown 'node' in section router"):
        parse({"model": "m", "plain": 1, "router": {"node": "a"}}, FILE, ENVIRON)
    with pytest.raises(ConfigError, match="names no nodes") as raised:
        parse({"model": "m", "plain": 1}, FILE, ENVIRON, node="a")
    assert "Leave --node out" in raised.value.remedy


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"store": {**TOKEN, "port": 8099}}, "store and prefill-0 would both have port 8100"),  # its bytes' port
        ({"store": {**TOKEN, "port": 65_535}}, "no port after that of store.tcp = 10.0.0.7:65535"),
        ({"store": {**TOKEN, "bulk": "10.0.0.7:8100"}}, "store and prefill-0 would both have port 8100"),
    ],
)
def test_ports_that_cannot_be(more: Tree, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned("a", **more)


# ---- which machine this is


def test_an_address_of_this_machine_is_known() -> None:
    assert [is_here(address) for address in ("127.0.0.1", "127.0.0.2", "localhost")] == [True] * 3
    assert [is_here(address) for address in (ELSEWHERE, "no-such-name.invalid")] == [False] * 2


def at(**addresses: str) -> Document:
    roles: list[Tree] = [{"prefill": 1}, {"decode": 1}]
    nodes = {name: {"address": address, **role} for (name, address), role in zip(addresses.items(), roles, strict=True)}
    return document(nodes=nodes)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def has(address: str) -> None:
        monkeypatch.setattr("kvtally.up.host.is_here", lambda asked: asked == address)

    return has


def test_the_node_with_this_machines_address_is_this_machine(here: Callable[[str], None]) -> None:
    here("10.0.0.8")
    assert this_node(document(), None, FILE) == "b"
    assert this_node(document(), "b", FILE) == "b"
    with pytest.raises(ConfigError, match=r"node a's address, 10\.0\.0\.7, is not one of this machine's") as raised:
        this_node(document(), "a", FILE)
    assert "this machine has that of node b: --node b" in raised.value.remedy
    assert this_node(parse_document({"model": "m", "plain": 1}, FILE), None, FILE) == ""


def test_where_the_address_does_not_tell_the_name_must() -> None:
    with pytest.raises(ConfigError, match=r"none of the file's nodes: a 240\.0\.0\.1, b 240\.0\.0\.2"):
        this_node(at(a=ELSEWHERE, b=ALSO_ELSEWHERE), None, FILE)
    several = at(a="127.0.0.2", b="127.0.0.3")
    with pytest.raises(ConfigError, match="several nodes are this machine's: a, b") as raised:
        this_node(several, None, FILE)
    assert "--node a" in raised.value.remedy
    assert this_node(several, "b", FILE) == "b"


@pytest.mark.parametrize("node", ["c", ""])
def test_an_unknown_node_is_refused(node: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown node '{node}'") as raised:
        this_node(document(), node, FILE)
    assert raised.value.remedy == "Known: a, b."


@pytest.fixture
def ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    """Node a of a deployment that could start here: vLLM seems to be installed."""
    spec = importlib.machinery.ModuleSpec("vllm", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "vllm" else None)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "token").write_text("0123456789abcdef")
    ports = free_ports(5)
    written = {
        "model": str(tmp_path),
        "nodes": {
            "a": {"address": "127.0.0.2", "prefill": {"port": ports[0]}, "store": {"port": ports[1], "socket": "a"}},
            "b": {"address": "127.0.0.3", "decode": {"port": ports[2]}, "store": {"token_file": "/only/on/b"}},
        },
        "store": {"token_file": "token", "bulk": f"127.0.0.2:{ports[3]}"},
        "router": {"port": ports[4]},
    }
    return parse(written, tmp_path / "up.yaml", {}, node="a")


def test_what_can_run_is_not_refused(ready: Deployment) -> None:
    check(ready, plan(ready, CPU), {})


def test_a_port_of_a_store_in_use_is_named(ready: Deployment) -> None:
    processes = plan(ready, CPU)
    for port in processes[0].ports:
        with (
            socket.create_server(("127.0.0.2", port)),
            pytest.raises(ConfigError, match=f"port {port} on 127.0.0.2, for store, is in use") as raised,
        ):
            check(ready, processes, {})
        assert "`store: {port: ...}`" in raised.value.remedy


def test_a_token_must_be_on_the_machine_that_uses_it(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef")
    found = tree(store={"token_file": "token"}, nodes={"a": A, "b": {**B, "store": {"token_file": "gone"}}})
    assert parse(found, tmp_path / "up.yaml", {}, node="a").node.name == "a"
    with pytest.raises(ConfigError, match=r"gone .* is not a file that can be read"):
        parse(found, tmp_path / "up.yaml", {}, node="b")
    (tmp_path / "token").write_text("short")
    with pytest.raises(ConfigError, match="the token has 5 characters"):
        parse(found, tmp_path / "up.yaml", {}, node="a")


# ---- the command


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "up.yaml").write_text(json.dumps(tree(logs="logs")))

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["kvtally", "up", *arguments])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        assert isinstance(exited.value.code, int)
        return exited.value.code

    return call


def test_print_shows_every_node_or_one(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("up.yaml", "--print") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    heads = [line.partition(": stage")[0] for line in lines if line.startswith("#")]
    assert heads == [
        *("# ---- on node a", "# store", "# prefill-0", "# router"),
        *("# ---- on node b", "# store", "# decode-0", "# decode-1"),
    ]
    assert run("up.yaml", "--print", "--node", "b") == 0
    only = [line for line in capsys.readouterr().out.splitlines() if line and not line.startswith("#")]
    assert only == [line for line in lines if not line.startswith("#")][3:]
    assert "--peers" in shlex.split(only[0])


def test_json_has_every_node_or_one(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("up.yaml", "--json") == 0
    nodes = json.loads(capsys.readouterr().out)["nodes"]
    assert {name: [each["name"] for each in processes] for name, processes in nodes.items()} == {
        "a": ["store", "prefill-0", "router"],
        "b": ["store", "decode-0", "decode-1"],
    }
    assert run("up.yaml", "--json", "--node", "b") == 0
    assert json.loads(capsys.readouterr().out) == {"processes": nodes["b"]}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--node", "c"], "unknown node 'c'"),
        (["--node", "c", "--print"], "unknown node 'c'"),
        (["--node", "a"], "is not one of this machine's"),
        ([], "none of the file's nodes"),
    ],
)
def test_a_refusal_starts_nothing_and_exits_with_2(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    addresses = {"a": {**A, "address": ELSEWHERE}, "b": {**B, "address": ALSO_ELSEWHERE}}
    (tmp_path / "up.yaml").write_text(json.dumps(tree(logs="logs", nodes=addresses)))
    assert run("up.yaml", *arguments) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert words in told
    assert "remedy: " in told
    assert not (tmp_path / "logs").exists()


def test_two_nodes_of_one_name_are_refused(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "up.yaml").write_text(
        "model: m\nnodes:\n  a: {address: 10.0.0.7, prefill: 1}\n  a: {address: 10.0.0.8, decode: 1}\n"
    )
    assert run("up.yaml", "--print") == 2
    assert "a second 'a'" in capsys.readouterr().err


def test_a_node_that_its_address_tells_is_said(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends at the next check, which is not about nodes: there is no model."""
    (tmp_path / "token").write_text("0123456789abcdef")
    nodes = {"a": {**A, "address": "127.0.0.2"}, "b": {**B, "address": "localhost"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvtally.up.host.is_here", lambda address: address == "localhost")
        (tmp_path / "up.yaml").write_text(json.dumps(tree(nodes=nodes, model="./no", store={"token_file": "token"})))
        assert run("up.yaml") == 2
    told = capsys.readouterr()
    assert told.out == "this machine is node b: it has the address localhost\n"
    assert "[KV-106]" in told.err


# ---- what the router's machine says


def test_the_router_says_which_engines_of_other_machines_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    awaits = planned("a")["router"].awaits
    rounds = [set(), set(), {"http://10.0.0.8:8201/health"}, set(awaits.values())]
    asked: list[str] = []

    def answers(health: str) -> bool:
        asked.append(health)
        return health in rounds[(len(asked) - 1) // len(awaits)]

    monkeypatch.setattr(live, "answers", answers)
    monkeypatch.setattr(live, "AWAIT_S", 0.0)
    out = io.StringIO()
    asyncio.run(others_ready(Console(file=out), awaits))
    told = out.getvalue().splitlines()
    assert len(asked) == len(rounds) * len(awaits)
    assert len(told) == 2  # each once
    assert "decode-0 of node b (http://10.0.0.8:8200/health), decode-1" in told[0]
    assert "decode-1" not in told[1]


def test_an_engine_s_role_is_kept_apart_by_machine() -> None:
    found = deployment("a")
    assert [(node.name, list(node.pools)) for node in found.nodes] == [("a", [Role.PREFILL]), ("b", [Role.DECODE])]
