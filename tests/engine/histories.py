"""Random histories of an engine that has too little memory: requests come, are aborted, preempted and resumed, and its
cache is reset under them. Runs inside the engine's process (`offline`), because only there can be seen what vLLM's
scheduler really did with each request."""

from __future__ import annotations

import math
import random
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

LONGEST_PROMPT = 900
MOST_AT_ONCE = 6
ABORTED, RESET = 0.15, 0.15  # how often that happens, for each request
SHARED = 12  # prompts whose beginnings are asked for again and again


@dataclass
class Seen:
    """What vLLM did with one request, until its first token."""

    prompt_tokens: int
    attempts: list[int] = field(default_factory=list)  # of each, how many tokens it had when it was first computed
    stats: list[int] | None = None  # local and external tokens, by vLLM's own account
    preemptions: int = 0  # before the first token
    later_preemptions: int = 0


class Witness:
    """Stands between vLLM's scheduler and its engine, and writes down what goes by."""

    def __init__(self, scheduler: Any) -> None:
        self.seen: dict[str, Seen] = {}
        self._scheduler = scheduler
        self._attempts: dict[str, int] = {}  # preemptions of a request when it was last computed
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        scheduler.schedule, scheduler.update_from_output = self.schedule, self.update

    def schedule(self, *given: Any, **more: Any) -> Any:
        output = self._schedule(*given, **more)
        for name, count in output.num_scheduled_tokens.items():
            request = self._scheduler.requests[name]
            seen = self.seen[_ticket(name)]
            seen.later_preemptions = request.num_preemptions - seen.preemptions
            if seen.stats is None and self._attempts.get(name) != request.num_preemptions:
                self._attempts[name] = request.num_preemptions
                seen.attempts.append(request.num_computed_tokens - count)
                seen.preemptions = request.num_preemptions
        return output

    @property
    def is_in_mid_prompt(self) -> bool:
        return any(0 < one.num_computed_tokens < one.num_prompt_tokens for one in self._scheduler.running)

    def update(self, *given: Any, **more: Any) -> Any:
        answers = self._update(*given, **more)
        for answer in answers.values():
            for output in answer.outputs:
                if output.prefill_stats is not None:
                    stats = output.prefill_stats
                    self.seen[_ticket(output.request_id)].stats = [
                        stats.num_local_cached_tokens,
                        stats.num_external_cached_tokens,
                    ]
        return answers


def _ticket(name: str) -> str:
    """The name we gave; vLLM appends something of its own."""
    return name.split("/")[0]


def run(llm: Any, given: dict[str, Any]) -> dict[str, Any]:
    """A history of so many requests, from a seed: what was seen of each, and how often it was disturbed."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    draw = random.Random(given["seed"])
    engine = llm.llm_engine
    witness = Witness(engine.engine_core.engine_core.scheduler)
    shared = [draw.choices(range(10, 900), k=LONGEST_PROMPT) for _ in range(SHARED)]
    active: set[str] = set()
    doomed: dict[str, int] = {}  # requests that are aborted, and before which step
    count, steps, aborts, resets = 0, 0, 0, 0
    awaits_reset = False  # until a request is in mid-prompt, or there is none

    def add() -> None:
        nonlocal count
        tokens = draw.choice(shared)[: draw.randrange(20, LONGEST_PROMPT)]
        tokens = tokens + draw.choices(range(10, 900), k=draw.choice([0, 0, 1, 40]))
        ticket = f"{given['seed']}-{count}"
        sampling = SamplingParams(
            temperature=0,
            max_tokens=draw.choice([1, 2, 8, 40]),
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": {"kvtally": {"ticket": ticket, "role": "decode"}}},
        )
        witness.seen[ticket] = Seen(len(tokens))
        engine.add_request(f"{ticket}/", TokensPrompt(prompt_token_ids=tokens), sampling)
        active.add(f"{ticket}/")
        if draw.random() < ABORTED:
            doomed[f"{ticket}/"] = steps + draw.randrange(40)
        count += 1

    while count < given["requests"] or active:
        if count < given["requests"] and len(active) < MOST_AT_ONCE and draw.random() < 0.4:
            add()
            awaits_reset = awaits_reset or draw.random() < RESET
        if awaits_reset and (witness.is_in_mid_prompt or not active):
            awaits_reset = False
            _reset(llm, running=draw.random() < 0.7)
            resets += 1
        for name in sorted(name for name in active if doomed.get(name, math.inf) <= steps):
            engine.abort_request([name])
            active.discard(name)
            aborts += 1
        if active:
            steps += 1
            for output in engine.step():
                if output.finished:
                    active.discard(output.request_id)
    seen = {ticket: asdict(one) for ticket, one in witness.seen.items()}
    return {"seen": seen, "aborts": aborts, "resets": resets}


def _reset(llm: Any, *, running: bool) -> None:
    """Have vLLM forget its own cache. With `running` it preempts every request first, and then raises if blocks are
    still in use, by loads or for saves. Without, it forgets nothing while any block is in use."""
    with suppress(RuntimeError):
        llm.reset_prefix_cache(reset_running_requests=running)
