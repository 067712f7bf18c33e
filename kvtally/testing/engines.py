"""Real vLLM engines for tests: each in a process of its own, told what to do line by line, ended whatever happens.

    test ──commands, one JSON line each──▶ stdin   ┌ runner, forked by the nursery       ┐
         ◀──replies──────────────────────  stdout  └ vllm.LLM, its connector, its log file┘

`Engine` is `vllm.LLM`, with scheduler and worker in the runner's own process or in processes of theirs. `Server` is
vLLM's OpenAI server behind the same methods. Both return tokens, their logprobs and vLLM's own count of cached tokens.

A runner is a worker as `kvtally.processes` has them, except that the nursery forks it: it ends with the test. Every
wait has a deadline. Threading: none here.
"""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kvtally.core.answers import margin
from kvtally.core.namespace import GroupKind
from kvtally.errors import TransportError
from kvtally.processes import GRACE_S, STOP_S, Lines, Process, free_ports, python_path
from kvtally.testing import nursery as nurseries
from kvtally.up.host import direct

START_S = 300.0
CALL_S = 240.0

OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
# One thread, no core of its own, nothing from the network, one GiB of KV cache.
ENVIRONMENT = {
    **OFFLINE,
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",  # lets a test reset a server's prefix cache
}


class Prompt(msgspec.Struct, frozen=True):
    """A request. Only requests with the same salt may reuse one another's KV. `transfer`: its `kv_transfer_params`."""

    tokens: list[int]
    max_tokens: int = 8
    salt: str = ""
    transfer: dict[str, Any] = {}


class Output(msgspec.Struct, frozen=True):
    """The answer to a request. `margins`: by how much each token's logprob leads the runner-up's. `transfer`: the
    connector's part of the answer."""

    tokens: list[int] = []
    logprobs: list[float] = []
    margins: list[float] = []
    cached_tokens: int = 0
    transfer: dict[str, Any] = {}


class Settings(msgspec.Struct, frozen=True, tag="start"):
    """How to start an engine: arguments of `vllm.LLM`, among them `kv_transfer_config`."""

    arguments: dict[str, Any]


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """Run these requests at once."""

    prompts: list[Prompt]


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """Forget the engine's own prefix cache."""


class GetCounters(msgspec.Struct, frozen=True, tag="counters"):
    """vLLM's counters."""


class Sabotage(msgspec.Struct, frozen=True, tag="sabotage"):
    """From now on zero one block of a group of this kind after each load; None ends it. In-process engines only."""

    kind: GroupKind | None


class Done(msgspec.Struct, frozen=True, tag="done"):
    """What was asked for. `kinds`: of KV-cache groups, if the engine is in-process. `count`: blocks sabotaged."""

    outputs: list[Output] = []
    counters: dict[str, float] = {}
    kinds: list[GroupKind] = []
    count: int = 0


Command = Settings | Generate | Reset | GetCounters | Sabotage


class Runs(Protocol):
    """What `Engine` and `Server` have in common. Every method blocks, at most for its deadline."""

    def wait_ready(self) -> None: ...
    def generate(self, prompts: Sequence[Prompt]) -> list[Output]: ...
    def reset(self) -> None: ...
    def counters(self) -> dict[str, float]: ...
    def close(self) -> None: ...


class Engine:
    """`vllm.LLM` in a runner. Starting takes half a minute and begins here; `wait_ready` waits for it."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        log: Path,
        *,
        in_process: bool = True,
        environment: Mapping[str, str] | None = None,
        nursery: int = 0,
    ) -> None:
        multiprocessing = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1"}
        self._group = ProcessGroup(["engine"], log, {**multiprocessing, **(environment or {})}, nursery=nursery)
        self._lines = self._group.lines
        self.kinds: list[GroupKind] = []  # of KV-cache groups, once an in-process engine is ready
        defaults = {"skip_tokenizer_init": True, "disable_log_stats": False, "enable_prefix_caching": True}
        self.send(Settings({**defaults, **arguments}))

    def __enter__(self) -> Engine:
        self.wait_ready()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._group.pid

    def wait_ready(self) -> None:
        self.kinds = self.receive(START_S).kinds

    def generate(self, prompts: Sequence[Prompt]) -> list[Output]:
        return self._ask(Generate(list(prompts))).outputs

    def reset(self) -> None:
        self._ask(Reset())

    def counters(self) -> dict[str, float]:
        return self._ask(GetCounters()).counters

    def sabotage(self, kind: GroupKind | None) -> int:
        """See `Sabotage`; how many blocks the one that ends now has hit."""
        return self._ask(Sabotage(kind)).count

    def close(self) -> None:
        """Shut down cleanly: what is still to be saved is saved first."""
        self._group.close()

    def kill(self) -> None:
        """kill -9, of all its processes."""
        self._group.kill()

    def _ask(self, command: Command) -> Done:
        self.send(command)
        return self.receive(CALL_S)

    def send(self, command: Command) -> None:
        """For tests that do something while the engine works; `receive` gets the reply."""
        self._lines.send(command)

    def receive(self, timeout_s: float = CALL_S) -> Done:
        return self._lines.receive(Done, timeout_s)

    @property
    def has_answered(self) -> bool:
        """Whether `receive` would return at once."""
        return self._lines.has_answer


class Server:
    """vLLM's OpenAI server on a free port of the loopback interface."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        nursery: int = 0,
    ) -> None:
        [self.port] = free_ports(1)
        flags = {"host": "127.0.0.1", "port": self.port, "served_model_name": "tiny", **arguments}
        command = ["server", *_flags(flags)]
        command += ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--return-tokens-as-token-ids"]
        self._group = ProcessGroup(command, log, environment or {}, name="the server", nursery=nursery)

    def __enter__(self) -> Server:
        self.wait_ready()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def wait_ready(self) -> None:
        self._group.wait_for(self._is_healthy, f"the server was not ready within {START_S:g} s", START_S, every_s=0.2)

    def generate(self, prompts: Sequence[Prompt]) -> list[Output]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(self._complete, prompts))

    def reset(self) -> None:
        """It refuses while blocks are in use, and a connector may hold some until they are saved."""

        def is_reset() -> bool:
            return bool(msgspec.json.decode(self.call("/reset_prefix_cache", {}))["success"])

        self._group.wait_for(is_reset, "the server does not reset its prefix cache", CALL_S, every_s=0.05)

    def counters(self) -> dict[str, float]:
        from prometheus_client.parser import text_string_to_metric_families

        families = text_string_to_metric_families(self.call("/metrics").decode())
        samples = ((sample.name, sample.labels, sample.value) for family in families for sample in family.samples)
        return sums((name.removesuffix("_total"), labels, value) for name, labels, value in samples)

    def close(self) -> None:
        self._group.close()

    def kill(self) -> None:
        self._group.kill()

    def call(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """GET, or POST of a body."""
        content = msgspec.json.encode(body) if body is not None else None
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", content, {"Content-Type": "application/json"}
        )
        try:
            with direct.open(request, timeout=CALL_S) as response:
                answer: bytes = response.read()
                return answer
        except OSError as error:
            raise self._group.broken(f"{path}: {error}") from error

    def _is_healthy(self) -> bool:
        try:
            self.call("/health")
        except TransportError:
            return False
        return True

    def _complete(self, prompt: Prompt) -> Output:
        body = {
            "model": "tiny",
            "prompt": prompt.tokens,
            "max_tokens": prompt.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 2,
            **({"cache_salt": prompt.salt} if prompt.salt else {}),
            **({"kv_transfer_params": prompt.transfer} if prompt.transfer else {}),
        }
        answer = msgspec.json.decode(self.call("/v1/completions", body))
        logprobs = answer["choices"][0]["logprobs"]
        details = answer["usage"].get("prompt_tokens_details") or {}
        return Output(
            tokens=[int(token.removeprefix("token_id:")) for token in logprobs["tokens"]],
            logprobs=logprobs["token_logprobs"],
            margins=[margin(top.values()) for top in logprobs["top_logprobs"]],
            cached_tokens=details.get("cached_tokens") or 0,
            transfer=answer.get("kv_transfer_params") or {},
        )


class ProcessGroup(Process):
    """A runner and all its processes, forked by a nursery. A shutdown may take `grace_s` before all are killed."""

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        *,
        name: str = "the engine",
        grace_s: float = GRACE_S,
        nursery: int = 0,
    ) -> None:
        role, *others = arguments
        surroundings = {**os.environ, **ENVIRONMENT, "PYTHONPATH": python_path(), **environment}
        with log.open("ab") as file:
            forked = nurseries.nursery(nursery).start([role, str(grace_s), *others], surroundings, file)
        super().__init__(forked.pid, forked.end, log, name=name, remedy=f"Its log is {log}.")
        self.lines = Lines(forked.stdin, forked.stdout, self)

    def close(self) -> None:
        self.lines.end()
        self.has_ended(STOP_S)
        self.kill()

    def kill(self) -> None:
        super().kill()
        self.lines.close()


def _flags(arguments: Mapping[str, Any]) -> list[str]:
    flags = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            flags += [flag] if value else []
        else:
            flags += [flag, str(value) if isinstance(value, str | int | float) else msgspec.json.encode(value).decode()]
    return flags


def sums(samples: Any) -> dict[str, float]:
    """vLLM's counters by name, summed over engines; labels such as a source of tokens stand behind the name."""
    sums: dict[str, float] = {}
    for name, labels, value in samples:
        if name.startswith("vllm:") and not name.endswith(("_info", "_created", "_bucket")):
            key = "/".join([name, *(labels[key] for key in sorted(labels) if key not in ("model_name", "engine"))])
            sums[key] = sums.get(key, 0.0) + value
    return sums
