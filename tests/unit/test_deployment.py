"""The deployment that the demo and the engine tests drive: what it is started with, and how it is asked. No engine."""

from __future__ import annotations

import json
import os
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kvtally.errors import TransportError
from kvtally.testing.deployment import Deployment, TwoNodes, post
from kvtally.testing.models import DENSE, Model
from tests.waiting import HANG_S

NONSENSE = "nonsense"


def test_settings_of_whoever_runs_it_are_not_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo beside an operator's own store, and in the directory of its settings."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "kvtally.yaml").write_text(f"store: {{memory: {NONSENSE}}}")
    (tmp_path / "up").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("KVTALLY_STORE__ADMIN", NONSENSE)
    up = Deployment(Model(DENSE, tmp_path / "no-model", 0), tmp_path / "up")
    try:
        with pytest.raises(TransportError, match="kvtally up ended") as ended:
            up.wait(lambda: False, "it waits")
    finally:
        up.close()
    assert NONSENSE not in ended.value.message
    assert "[KV-106]" in ended.value.message  # no model, or no vLLM


def test_two_nodes_run_one_file_and_share_only_the_loopback_interface(tmp_path: Path) -> None:
    up = TwoNodes(Model(DENSE, tmp_path / "no-model", 0), tmp_path)
    try:
        for node in (up, up.b):
            with pytest.raises(TransportError, match=r"kvtally up --node \w ended"):
                node.wait_for(lambda: False, "it waits", HANG_S)
            assert "[KV-106]" in node.log()  # no model, or no vLLM: all that is asked before that is right
        with pytest.raises(TransportError, match="kvtally up --node b ended"):
            up.is_ready()
    finally:
        up.close()
    written = json.loads((tmp_path / "up.yaml").read_text())
    a, b = written["nodes"].values()
    assert [node["address"] for node in (a, b)] == ["127.0.0.2", "127.0.0.3"]
    assert not {*map(str, a["store"].values())} & {*map(str, b["store"].values())}
    assert (tmp_path / "token").stat().st_mode & 0o077 == 0


class Engine(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        logprobs = {"tokens": ["token_id:7"], "token_logprobs": [0.0], "top_logprobs": [{"a": 0.0, "b": -1.0}]}
        content = json.dumps({"choices": [{"logprobs": logprobs}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


def test_a_proxy_is_not_asked_for_what_is_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower() == "no_proxy"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setattr(urllib.request, "_opener", None)  # which remembers proxies
    with HTTPServer(("127.0.0.1", 0), Engine) as engine:
        thread = threading.Thread(target=engine.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            assert post(f"http://127.0.0.1:{engine.server_port}/v1/completions", {}).tokens == [7]
        finally:
            engine.shutdown()
            thread.join()
