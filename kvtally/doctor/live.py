"""Asks a running deployment, and hands what was seen to `verdict`. Needs no receipts, so it works with any router.

    for each probe:   counters ─▶ router ─▶ counters          who computed what, and what came from outside
                      decode alone, under a salt               the reference. Asked after the router, because a cache
                                                               that ignores salts would be filled by it
    if nothing came:  prefill, then decode, without the router  who is to blame

Owns the order of the requests and the budget. Blocking; every request has a deadline, and waits for counters end.
Neighbours: `verdict`, `verify.http`, `verify.reading`, `verify.probes`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import NamedTuple

import msgspec

from kvtally.core.answers import compare
from kvtally.doctor.verdict import (
    Counters,
    Diagnosis,
    Engine,
    Handover,
    Seen,
    cannot_test,
    conclude,
    needs_experiment,
    tolerance,
)
from kvtally.errors import KVTallyError, TransportError
from kvtally.verify.http import Server
from kvtally.verify.judge import Answer
from kvtally.verify.probes import MAX_TOKENS, Shape, shapes, words
from kvtally.verify.reading import Instances, Model, Models, Tokenized, decode, failure, read_answer, samples

COUNTERS_S = 5.0  # vLLM counts a prompt a moment after it has answered
SETTLED_S = 1.0  # how long prefill's count may lag behind decode's
QUIET_S = 1.0  # how long our own last request may still be counted as running
CACHE_S = 5.0  # what prefill has computed is stored a moment later
AGAIN_S = 0.05
TRIES = 3  # of one length, if the engines serve others meanwhile
DEFAULT_LIMIT_TOKENS = 4096
DEFAULT_BLOCK_TOKENS = 16
LONG_TOKENS = 512  # two of the largest chunks in use
ASKED_PER_PROBE = 3  # router, reference, and once more for the engine's own deviation
BY_SOURCE = {
    "local_compute": "computed_tokens",
    "local_cache_hit": "local_tokens",
    "external_kv_transfer": "external_tokens",
}
BY_NAME = {
    "vllm:external_prefix_cache_queries_total": "asked_tokens",
    "vllm:nixl_bytes_transferred_sum": "moved_bytes",
    "vllm:nixl_num_failed_transfers_total": "failed_transfers",
    "vllm:nixl_num_kv_expired_reqs_total": "expired",
}
# For a vLLM that does not count by source: all prompt tokens, hits of its own cache, hits of a connector.
OLDER = ("vllm:prompt_tokens_total", "vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")
RUNNING = ("vllm:num_requests_running", "vllm:num_requests_waiting")

NO_PARAMETERS = "prefill hands out no kv_transfer_params"
WANTED_FROM_PREFILL: dict[str, object] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Clock(NamedTuple):
    """Of this process, unless a test has its own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The most that will be asked."""

    requests: int
    tokens: int


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    requests: int = 60
    tokens: int = 100_000


class _Version(msgspec.Struct):
    version: str = ""


class _Detokenized(msgspec.Struct):
    prompt: str


class _Handed(msgspec.Struct):
    kv_transfer_params: dict[str, object] | None = None


class _Spent(Exception):
    """The budget is used up."""


def examine(
    router: Server,
    prefills: Sequence[Server],
    decodes: Sequence[Server],
    *,
    seed: int,
    limits: Limits,
    connect: Callable[[str], Server],
    model: str = "",
    clock: Clock | None = None,
    planned: Callable[[Plan], None] = lambda plan: None,
    told: Callable[[Seen], None] = lambda seen: None,
) -> Diagnosis:
    """Examine a deployment. Engines that are not given are those that a kvtally router names; the model is its first.

    `planned` is told before anything is asked, `told` each prompt's outcome as it comes.
    """
    try:
        if not (prefills and decodes):
            named = decode(router, router.call("/instances"), Instances)
            prefills = prefills or [connect(url) for url in named.having("prefill")]
            decodes = decodes or [connect(url) for url in named.having("decode")]
    except TransportError:
        pass  # not a kvtally router
    if not (prefills and decodes):
        return cannot_test(
            "the engines are not known", "Name them: --prefill URL --decode URL, as often as there are engines."
        )
    examination = _Examination(router, prefills, decodes, random.Random(seed), limits, model, clock or Clock())
    try:
        return examination.run(planned, told)
    except KVTallyError as error:
        return cannot_test(error.message, error.remedy, examination.engines)


class _Examination:
    def __init__(
        self,
        router: Server,
        prefills: Sequence[Server],
        decodes: Sequence[Server],
        dice: random.Random,
        limits: Limits,
        model: str,
        clock: Clock,
    ) -> None:
        self._router = router
        self._servers = {"prefill": list(prefills), "decode": list(decodes)}
        self._dice = dice
        self._limits = limits
        self._requests = 0
        self._tokens_sent = 0
        self._sends_text = False
        self._clock = clock
        self._models = {router.url: model}  # each server's name for it: a router may have its own
        self._own_deviation = 0.0
        self._answers: list[tuple[Seen, Answer, Answer]] = []  # what decode said alone, and the router
        self.engines: list[Engine] = []

    def run(self, planned: Callable[[Plan], None], told: Callable[[Seen], None]) -> Diagnosis:
        self._meet_engines()
        if not self._servers["decode"]:
            why = next((engine.problem for engine in self.engines if engine.role == "decode"), "none was named")
            raise TransportError(
                f"no decode engine can be asked: {why}", remedy="Give addresses that can be reached from here."
            )
        limit_tokens = self._read_model()
        probes = self._probes(limit_tokens)
        planned(_plan(probes))
        seen: list[Seen] = []
        handovers: list[Handover] = []
        try:
            for shape in probes:
                seen.append(self._observe(shape))
                told(seen[-1])
            if self._servers["prefill"] and probes and needs_experiment(seen):
                handovers = self._experiments(probes[-1].tokens)
        except _Spent:
            pass  # what was seen until then stands
        for each, reference, answer in self._answers:
            each.comparison = compare(reference, answer, tolerance(self._own_deviation))
        diagnosis = conclude(seen, self.engines, handovers)
        diagnosis.requests, diagnosis.tokens = self._requests, self._tokens_sent
        return diagnosis

    # ---- who is there

    def _meet_engines(self) -> None:
        """Ask each engine what it is. Those that cannot be witnesses are left out, and the report says so."""
        for role, servers in self._servers.items():
            for server in list(servers):
                engine = Engine(url=server.url, role=role)
                self.engines.append(engine)
                try:
                    self._meet(server, engine)
                except TransportError as error:
                    engine.problem = error.message
                    servers.remove(server)

    def _meet(self, server: Server, engine: Engine) -> None:
        found = list(samples(server))
        if not any(name.startswith("vllm:") for name, _, _ in found):
            raise TransportError(f"{server.url} is not a vLLM engine: its /metrics has no vllm: counters", remedy="")
        engine.has_sources = any(name == "vllm:prompt_tokens_by_source_total" for name, _, _ in found)
        for name, labels, _ in found:
            if name == "vllm:cache_config_info":
                engine.settings = dict(labels)
        engine.model = self._models[server.url] = _first_model(server).id
        response = server.call("/version")
        engine.version = decode(server, response, _Version).version if response.status == 200 else ""

    def _read_model(self) -> int:
        """Find the router's name for the model, if none was given. The longest prompt that decode takes."""
        server = self._servers["decode"][0]
        alone = _first_model(server)
        if not self._models[self._router.url]:
            response = self._router.call("/v1/models")
            if response.status in (401, 403):
                raise TransportError(f"{self._router.url} wants a key", remedy="Give it: --key-file FILE.")
            listed = decode(self._router, response, Models).data if response.status == 200 else [alone]
            self._models[self._router.url] = (listed or [alone])[0].id
        return alone.max_model_len or DEFAULT_LIMIT_TOKENS

    def _probes(self, limit_tokens: int) -> list[Shape]:
        """The lengths to ask. If the budget does not allow all of them, the shortest are left out."""
        sizes = [engine.settings.get("block_size", "") for engine in self.engines if engine.role == "decode"]
        block = next((int(size) for size in sizes if size.isdecimal()), DEFAULT_BLOCK_TOKENS)
        probes = shapes(block, limit_tokens)
        while probes and not _fits(_plan(probes), self._limits):
            probes.pop(0)
        return probes

    # ---- one prompt

    def _observe(self, shape: Shape) -> Seen:
        for _ in range(TRIES):
            seen = self._try(shape)
            if not seen.busy:
                break
        return seen

    def _try(self, shape: Shape) -> Seen:
        tokens = self._tokens(shape.tokens)
        seen = Seen(case=shape.name, prompt_tokens=len(tokens), is_long=len(tokens) >= LONG_TOKENS)
        if waiting := self._running():
            seen.busy = waiting
        before = {role: self._count(role) for role in self._servers}
        try:
            answer, seen.first_token_s = self._ask_router(tokens)
        except TransportError as error:
            seen.failure = error.message
            return seen
        self._attribute(seen, before)
        if seen.busy or answer is None:
            return seen
        try:
            self._compare(seen, tokens, answer)
        except TransportError:
            seen.is_compared = False  # the amounts stand without it
        return seen

    def _ask_router(self, tokens: Sequence[int]) -> tuple[Answer | None, float]:
        """Send token ids, or text if the router does not take ids."""
        prompt: object = tokens if not self._sends_text else self._text(tokens)
        try:
            return self._ask(self._router, prompt, len(tokens))
        except TransportError:
            if self._sends_text:
                raise
            self._sends_text = True
            return self._ask(self._router, self._text(tokens), len(tokens))

    def _attribute(self, seen: Seen, before: dict[str, Counters]) -> None:
        """Note what this prompt alone made the engines count, or why that cannot be told."""
        wanted = seen.prompt_tokens
        seen.decode = self._counted("decode", before["decode"], wanted, COUNTERS_S)
        seen.prefill = self._counted("prefill", before["prefill"], wanted - 1, SETTLED_S)  # hybrids leave the last one
        if not seen.decode.total_tokens:
            seen.is_elsewhere = True
        elif seen.decode.total_tokens < wanted:
            seen.busy = seen.busy or f"decode counted {seen.decode.total_tokens} of {wanted} prompt tokens"
        for role, counted in (("decode", seen.decode), ("prefill", seen.prefill)):
            if counted.total_tokens > wanted:
                seen.busy = f"{role} counted {counted.total_tokens} tokens, this prompt has {wanted}"

    def _compare(self, seen: Seen, tokens: list[int], answer: Answer) -> None:
        """Compare with what decode's engine answers alone, if it computed all of it."""
        engine = self._servers["decode"][0]
        before = self._count("decode")
        longer, seen.alone_first_token_s = self._ask(engine, tokens, len(tokens), self._salt(), 2 * MAX_TOKENS)
        if longer is None:
            return
        reference, further = longer.part(0, MAX_TOKENS), longer.part(MAX_TOKENS, MAX_TOKENS)
        at_once, _ = self._ask(engine, [*tokens, *reference.tokens], len(tokens), self._salt(), MAX_TOKENS)
        if at_once is not None:
            self._own_deviation = max(self._own_deviation, compare(further, at_once, float("inf")).deviation)
        asked = 2 * len(tokens) + len(reference.tokens)
        counted = self._counted("decode", before, asked, COUNTERS_S)
        seen.is_compared = counted.computed_tokens == counted.total_tokens == asked
        self._answers.append((seen, reference, answer))

    # ---- without the router

    def _experiments(self, count: int) -> list[Handover]:
        made = [self._hand_over(count, by_parameters=True)]
        if made[0].failure == NO_PARAMETERS:
            made = []
        if not made or not made[0].reused_tokens:
            made.append(self._hand_over(count, by_parameters=False))
        return made

    def _hand_over(self, count: int, *, by_parameters: bool) -> Handover:
        """Prefill, then decode with what prefill answered, word for word; or with nothing, and after a moment."""
        tokens = self._tokens(count)
        made = Handover(by_parameters=by_parameters, prompt_tokens=len(tokens))
        first, second = self._servers["prefill"][0], self._servers["decode"][0]
        before = self._count("decode")
        try:
            parameters = self._prefill(first, tokens, by_parameters)
            if by_parameters and not is_handed_out(parameters):
                made.failure = NO_PARAMETERS
                return made
            if not by_parameters:
                self._clock.sleep(CACHE_S)
            more = {"kv_transfer_params": parameters} if by_parameters else {}
            self._ask(second, tokens, len(tokens), more, 1)
        except TransportError as error:
            made.failure = error.message
        counted = self._counted("decode", before, len(tokens), COUNTERS_S)
        made.reused_tokens = counted.external_tokens
        made.failed_transfers = counted.failed_transfers
        return made

    def _prefill(self, server: Server, tokens: list[int], by_parameters: bool) -> dict[str, object]:
        body: dict[str, object] = {"model": self._models[server.url], "prompt": tokens, "max_tokens": 1}
        if by_parameters:
            body["kv_transfer_params"] = WANTED_FROM_PREFILL
        self._spend(len(tokens))
        return decode(server, server.call("/v1/completions", body), _Handed).kv_transfer_params or {}

    # ---- asking

    def _ask(
        self,
        server: Server,
        prompt: object,
        count: int,
        more: Mapping[str, object] | None = None,
        max_tokens: int = MAX_TOKENS,
    ) -> tuple[Answer | None, float]:
        """One completion, streamed, and after how many seconds its first token came.

        None where it was answered, but not in a form that can be compared: some routers leave logprobs out.
        """
        self._spend(count)
        body = {
            "model": self._models[server.url],
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 2,
            "return_tokens_as_token_ids": True,
            "stream": True,
            **(more or {}),
        }
        response, first_token_s = server.stream("/v1/completions", body)
        if response.status != 200:
            raise TransportError(f"{server.url}: {failure(response)}", remedy="Look at its log.")
        try:
            return read_answer(server, response), first_token_s
        except TransportError:
            if b'"error"' in response.body:
                raise TransportError(f"{server.url}: {failure(response)}", remedy="Look at its log.") from None
            return None, first_token_s

    def _spend(self, tokens: int) -> None:
        if self._requests + 1 > self._limits.requests or self._tokens_sent + tokens > self._limits.tokens:
            raise _Spent
        self._requests += 1
        self._tokens_sent += tokens

    def _salt(self) -> dict[str, object]:
        return {"cache_salt": f"kvtally-doctor-{self._dice.getrandbits(128):032x}"}

    def _tokens(self, count: int) -> list[int]:
        server = self._servers["decode"][0]
        body = {"model": self._models[server.url], "prompt": words(self._dice, count), "add_special_tokens": True}
        return decode(server, server.call("/tokenize", body), Tokenized).tokens[:count]

    def _text(self, tokens: Sequence[int]) -> str:
        server = self._servers["decode"][0]
        response = server.call("/detokenize", {"model": self._models[server.url], "tokens": list(tokens)})
        return decode(server, response, _Detokenized).prompt

    # ---- counters

    def _count(self, role: str) -> Counters:
        total = Counters()
        for server in self._servers[role]:
            total = total.plus(count(samples(server)))
        return total

    def _counted(self, role: str, before: Counters, wanted: int, patience_s: float) -> Counters:
        """What has been counted since then. Returns once that is as much as wanted, or when patience ends."""
        if not self._servers[role]:
            return Counters()
        deadline_s = self._clock.now() + patience_s
        while (counted := self._count(role).since(before)).total_tokens < wanted and self._clock.now() < deadline_s:
            self._clock.sleep(AGAIN_S)
        return counted

    def _running(self) -> str:
        """The engine that keeps serving others."""
        deadline_s = self._clock.now() + QUIET_S
        while busy := self._at_work():
            if self._clock.now() >= deadline_s:
                break
            self._clock.sleep(AGAIN_S)
        return busy

    def _at_work(self) -> str:
        for role, servers in self._servers.items():
            for server in servers:
                if number := sum(value for name, _, value in samples(server) if name in RUNNING):
                    return f"{role} {server.url} has {int(number)} requests of others"
        return ""


def _first_model(server: Server) -> Model:
    models = decode(server, server.call("/v1/models"), Models).data
    if not models:
        raise TransportError(f"{server.url} serves no model", remedy="Look at its log.")
    return models[0]


def is_handed_out(parameters: dict[str, object]) -> bool:
    """Whether they can be given to decode: an engine that gets only half of them may hang or die."""
    needed = ("remote_block_ids", "remote_engine_id", "remote_host", "remote_port")
    return bool(parameters.get("do_remote_prefill")) and all(parameters.get(name) for name in needed)


def count(found: Iterable[tuple[str, dict[str, str], float]]) -> Counters:
    """What an engine has counted since it started, whatever its version of vLLM."""
    sums: dict[str, int] = dict.fromkeys(Counters.__struct_fields__, 0)
    plain: dict[str, int] = {}
    has_sources = False
    for name, labels, value in found:
        if not isfinite(value):
            continue
        if name == "vllm:prompt_tokens_by_source_total" and labels.get("source") in BY_SOURCE:
            has_sources = True
            sums[BY_SOURCE[labels["source"]]] += int(value)
        elif name in BY_NAME:
            sums[BY_NAME[name]] += int(value)
        elif name in OLDER:
            plain[name] = plain.get(name, 0) + int(value)
    if not has_sources:
        total, local, external = (plain.get(name, 0) for name in OLDER)
        sums |= {"computed_tokens": total - local - external, "local_tokens": local, "external_tokens": external}
    return Counters(**sums)


def _plan(probes: Sequence[Shape]) -> Plan:
    """Includes the experiments, each of which asks twice."""
    longest = probes[-1].tokens if probes else 0
    tokens = sum(ASKED_PER_PROBE * (shape.tokens + MAX_TOKENS) for shape in probes) + 4 * longest
    return Plan(requests=ASKED_PER_PROBE * len(probes) + 4, tokens=tokens)


def _fits(plan: Plan, limits: Limits) -> bool:
    return plan.requests <= limits.requests and plan.tokens <= limits.tokens
