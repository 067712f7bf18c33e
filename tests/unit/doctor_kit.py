"""For doctor's live tests: engines that compute nothing and count everything, and routers that get it right or wrong.

A token is a word of the prompt. Answers are a hash of all tokens before, so that they are the same wherever they are
computed. Threads serve; `with` starts and stops them.
"""

from __future__ import annotations

import hashlib
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NOTHING = {"computed": 0, "local": 0, "external": 0, "asked": 0, "bytes": 0, "failed": 0, "expired": 0}
SOURCES = {"computed": "local_compute", "local": "local_cache_hit", "external": "external_kv_transfer"}


class Web(AbstractContextManager["Web"]):
    """A server whose `answer` gets a path and a body and gives a status, a content type and bytes."""

    def __init__(self) -> None:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(None)

            def do_POST(self) -> None:
                self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _reply(self, body: dict[str, Any] | None) -> None:
                outer.keys.append(self.headers.get("Authorization", ""))
                status, kind, content = outer.answer(self.path, body)
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self.keys: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, str, bytes]:
        raise NotImplementedError

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def reply(value: object, status: int = 200) -> tuple[int, str, bytes]:
    return status, "application/json", json.dumps(value).encode()


@dataclass
class Cache:
    """What engines share, if they do. Chunks of so many tokens, by all tokens up to their end."""

    chunk: int = 256
    honours_salt: bool = True
    held: set[tuple[object, ...]] = field(default_factory=set)

    def find(self, tokens: list[int], salt: str) -> int:
        key = salt if self.honours_salt else ""
        ends = range(self.chunk, len(tokens), self.chunk)
        return max((end for end in ends if (key, *tokens[:end]) in self.held), default=0)

    def keep(self, tokens: list[int], salt: str) -> None:
        key = salt if self.honours_salt else ""
        self.held |= {(key, *tokens[:end]) for end in range(self.chunk, len(tokens) + 1, self.chunk)}


class Engine(Web):
    """vLLM, as far as doctor sees it. What it does is changed by setting its attributes."""

    def __init__(self) -> None:
        self.counters = dict(NOTHING)
        self.settings = {"block_size": "16", "cache_dtype": "auto"}
        self.version = "0.32.0"
        self.model = "tiny"
        self.has_sources = True
        self.is_vllm = True
        self.uses_nixl = False
        self.fails_to_fetch = False
        self.cache: Cache | None = None
        self.corrupts = False  # what was reused changes the answer
        self.others = 0  # tokens of other people's prompts, counted with each of ours
        self.running = 0
        self.limit = 4096
        self.error = ""  # in the middle of its streams
        self.prompts: list[list[int]] = []
        super().__init__()

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, str, bytes]:
        if path == "/metrics":
            return 200, "text/plain", (self._metrics() if self.is_vllm else "up 1\n").encode()
        if path == "/v1/models":
            return reply({"data": [{"id": self.model, "max_model_len": self.limit}]})
        if path == "/version":
            return reply({"version": self.version})
        if body is None or body.get("model") != self.model:
            return reply({"error": "no such model"}, 404)
        if path == "/tokenize":
            return reply({"tokens": [number_of(word) for word in body["prompt"].split()]})
        if path == "/detokenize":
            return reply({"prompt": " ".join(f"#{token}" for token in body["tokens"])})
        return self._complete(body)

    def _metrics(self) -> str:
        count = self.counters
        lines = [f"vllm:num_requests_running {self.running}.0"]
        labels = ",".join(f'{name}="{value}"' for name, value in self.settings.items())
        lines.append(f"vllm:cache_config_info{{{labels}}} 1.0")
        if self.has_sources:
            lines += [
                f'vllm:prompt_tokens_by_source_total{{source="{source}"}} {count[name]}'
                for name, source in SOURCES.items()
            ]
        else:
            total = count["computed"] + count["local"] + count["external"]
            lines += [
                f"vllm:prompt_tokens_total {total}",
                f"vllm:prefix_cache_hits_total {count['local']}",
                f"vllm:external_prefix_cache_hits_total {count['external']}",
            ]
        lines += [
            f"vllm:external_prefix_cache_queries_total {count['asked']}",
            f"vllm:nixl_bytes_transferred_sum {count['bytes']}",
            f"vllm:nixl_num_failed_transfers_total {count['failed']}",
            f"vllm:nixl_num_kv_expired_reqs_total {count['expired']}",
        ]
        return "\n".join(lines) + "\n"

    def _complete(self, body: dict[str, Any]) -> tuple[int, str, bytes]:
        tokens = tokens_of(body["prompt"])
        self.prompts.append(tokens)
        params = body.get("kv_transfer_params") or {}
        reused = self._reuse(tokens, params, body.get("cache_salt", ""))
        self.counters["external"] += reused
        self.counters["computed"] += len(tokens) - reused + self.others
        if self.cache is not None:
            self.cache.keep(tokens, body.get("cache_salt", ""))
        said = continuation(tokens, body.get("max_tokens", 1), is_wrong=self.corrupts and reused > 0)
        handed = None
        if params.get("do_remote_decode") and self.uses_nixl:
            handed = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "e"}
            handed |= {"remote_host": "h", "remote_port": 1, "tokens": len(tokens)}
        choice = {"text": "", "logprobs": said}
        if not body.get("stream"):
            return reply({"choices": [choice], "kv_transfer_params": handed})
        if self.error:
            return 200, "text/event-stream", f"data: {json.dumps({'error': self.error})}\n\ndata: [DONE]\n\n".encode()
        content = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
        return 200, "text/event-stream", content.encode()

    def _reuse(self, tokens: list[int], params: dict[str, Any], salt: str) -> int:
        if self.uses_nixl and params.get("do_remote_prefill"):
            self.counters["asked"] += len(tokens)
            if self.fails_to_fetch:
                self.counters["failed"] += 1
                return 0
            self.counters["bytes"] += 1000 * len(tokens)
            return len(tokens) - 1
        if self.cache is None:
            return 0
        self.counters["asked"] += len(tokens)
        return self.cache.find(tokens, salt)


class Router(Web):
    """In front of a prefill and a decode engine."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.prefill, self.decode = prefill, decode
        self.relays = False  # kv_transfer_params
        self.asks_prefill = True
        self.status = 200  # of completions
        self.takes_tokens = True
        self.hides_logprobs = False
        self.key = ""
        self.model = "alias"  # its own name for the model
        self.before_decode: Callable[[], None] = lambda: None
        super().__init__()

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, str, bytes]:
        if self.key and self.keys[-1] != f"Bearer {self.key}":
            return reply({"error": "who are you?"}, 401)
        if path == "/v1/models":
            return reply({"data": [{"id": self.model}]})
        if body is None or path != "/v1/completions":
            return reply({"error": "no such path"}, 404)
        if self.status != 200:
            return reply({"error": "decode said no"}, self.status)
        if not self.takes_tokens and not isinstance(body["prompt"], str):
            return reply({"error": "prompt must be text"}, 400)
        body = {**body, "model": self.decode.model}
        more = {}
        if self.asks_prefill:
            wanted = {"kv_transfer_params": {"do_remote_decode": True}} if self.relays else {}
            first = post(self.prefill.url, {**body, "max_tokens": 1, "stream": False, **wanted})
            handed = json.loads(first[2])["kv_transfer_params"]
            more = {"kv_transfer_params": handed} if self.relays and handed else {}
        self.before_decode()
        status, kind, content = post(self.decode.url, {**body, **more})
        return status, kind, content.replace(b'"logprobs"', b'"hidden"') if self.hides_logprobs else content


def post(url: str, body: dict[str, Any]) -> tuple[int, str, bytes]:
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.headers["Content-Type"], response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, "application/json", error.read()


def number_of(word: str) -> int:
    if word.startswith("#"):
        return int(word[1:])
    return int.from_bytes(hashlib.blake2s(word.encode(), digest_size=3).digest())


def tokens_of(prompt: str | list[int]) -> list[int]:
    return [number_of(word) for word in prompt.split()] if isinstance(prompt, str) else prompt


def continuation(tokens: list[int], count: int, *, is_wrong: bool) -> dict[str, Any]:
    """What every engine says to these tokens, as vLLM writes logprobs."""
    known = list(tokens)
    names, logprobs = [], []
    for _ in range(count):
        digest = hashlib.blake2s(repr((known, is_wrong)).encode(), digest_size=4).digest()
        known.append(int.from_bytes(digest[:3]))
        names.append(f"token_id:{known[-1]}")
        logprobs.append(-digest[3] / 256)
    tops = [{name: value, "token_id:0": value - 5} for name, value in zip(names, logprobs, strict=True)]
    return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops}
