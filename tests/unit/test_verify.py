"""Proving reuse: the judge on made-up observations, one for each possible fault, then whole runs on fakes."""

from __future__ import annotations

import hashlib
import json
import random
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtally.cli import main as cli
from kvtally.cli.verify import _print_observation as print_observation
from kvtally.cli.verify import _print_words as print_words
from kvtally.core.answers import Comparison, compare
from kvtally.core.namespace import chunk_tokens
from kvtally.core.receipts import Verdict
from kvtally.core.routing import Skip
from kvtally.processes import free_ports
from kvtally.verify.judge import (
    Answer,
    Counted,
    Observation,
    Outcome,
    Report,
    Setting,
    Told,
    Turn,
    judge,
    tolerance,
)
from kvtally.verify.probes import MAX_TOKENS, TURN_TOKENS, Shape, shapes, words
from kvtally.verify.reasons import REASONS, explain
from kvtally.wire.messages import MissReason
from tests.waiting import HANG_S

PD = Setting(has_prefill=True, chunk_tokens=256)
PLAIN = Setting(has_prefill=False, chunk_tokens=256)
TOKENS = 1000


# ---- the judge


def seen(verdict: str = "proved", *, reused: int = TOKENS - 1, turn: Turn = Turn.FIRST, **more: Any) -> Observation:
    """A request that went well, unless the arguments say otherwise."""
    told = Told(
        request="t",
        verdict=verdict,
        prefill="p:1",
        decode="d:1",
        reused_tokens=reused,
        computed_tokens=TOKENS - reused,
        promised_tokens=TOKENS - 1,
        sources={"host": reused} if reused else {},
    )
    told = msgspec.structs.replace(told, **more.pop("told", {}))
    counted = Counted(computed_tokens=TOKENS - reused, local_tokens=0, external_tokens=reused)
    return Observation(case="long", turn=turn, prompt_tokens=TOKENS, told=told, **{"counted": counted, **more})


def alone(verdict: str, reused: int, **more: Any) -> Observation:
    """Without prefill."""
    told = {
        "prefill": "",
        "promised_tokens": None,
        "sources": {"gpu": reused} if reused else {},
        **more.pop("told", {}),
    }
    return seen(verdict, reused=reused, told=told, **more)


def only_problem(report: Report) -> str:
    (problem,) = [finding for finding in report.findings if finding.is_problem]
    assert problem.remedy.endswith(".")
    assert report.outcome is Outcome.NOT_PROVED
    return problem.what


def test_proved() -> None:
    report = judge([seen(), seen("local", turn=Turn.AGAIN, told={"prefill": "", "skipped": "held"})], PD)
    assert (report.outcome, report.findings, report.reused_tokens, report.prompt_tokens) == (
        Outcome.PROVED,
        [],
        2 * (TOKENS - 1),
        2 * TOKENS,
    )
    assert report.sources == {"host": 2 * (TOKENS - 1)}
    assert "1,998 of 2,000 prompt tokens (99.9%) were not computed again (1,998 from the store's memory)" in (
        report.summary
    )
    assert "counters confirm 2 of 2 receipts" in report.summary


def test_proved_without_prefill() -> None:
    first, again = alone("recomputed", 0, told={"reason": "absent"}), alone("local", 992, turn=Turn.AGAIN)
    report = judge([first, again], PLAIN)
    assert (report.outcome, report.findings, report.reused_tokens) == (Outcome.PROVED, [], 992)


def test_a_short_prompt_need_not_be_reused_without_prefill() -> None:
    short = msgspec.structs.replace(
        alone("recomputed", 0, turn=Turn.AGAIN, told={"reason": "state_absent"}), prompt_tokens=511
    )
    assert judge([alone("local", 992, turn=Turn.AGAIN), short], PLAIN).outcome is Outcome.PROVED
    long = msgspec.structs.replace(short, prompt_tokens=512)
    assert "recurrent state" in only_problem(judge([alone("local", 992, turn=Turn.AGAIN), long], PLAIN))


@pytest.mark.parametrize("reason", [reason for reason in REASONS if reason != MissReason.SLOW_TIER])
def test_recomputed_says_why(reason: str) -> None:
    report = judge([seen(), seen("recomputed", reused=0, told={"reason": reason})], PD)
    assert only_problem(report) == f"nothing was reused: {REASONS[reason].what}"
    assert "1 of 2 requests object" in report.summary


def test_every_reason_of_the_store_has_its_words() -> None:
    assert set(MissReason) <= set(REASONS)
    assert len({explained.what for explained in REASONS.values()}) == len(REASONS)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("prefill_status_500", "prefill could not do its part (status 500)"),
        ("never_heard_of", "the reason given is `never_heard_of`"),
        ("", "the reason given is `none`"),
    ],
)
def test_other_reasons(reason: str, words: str) -> None:
    report = judge([seen(), seen("recomputed", reused=0, told={"reason": reason, "prefill": ""})], PD)
    assert words in only_problem(report)


def test_short() -> None:
    report = judge([seen(), seen("short", reused=500, told={"reason": "checksum"})], PD)
    assert only_problem(report).startswith("less was reused than promised: bytes in the store did not match")


def test_missing() -> None:
    report = judge([seen(), seen("missing", reused=0, told={"reason": "not_filed"}, counted=None)], PD)
    assert only_problem(report).startswith("nobody knows what was reused: decode filed no receipt")


def test_missing_is_wrong_even_where_nothing_could_be_reused() -> None:
    report = judge([alone("missing", 0, told={"reason": "store_unreachable"})], PLAIN)
    assert only_problem(report).endswith("the store could not be reached")


@pytest.mark.parametrize(("verdict", "reused"), [("recomputed", 0), ("short", 500)])
def test_what_was_faster_to_compute_is_a_note(verdict: str, reused: int) -> None:
    """A short prompt on another machine is computed sooner than it is pulled: that is a choice."""
    chosen = seen(verdict, reused=reused, told={"reason": "slow_tier"})
    report = judge([seen(), chosen], PD)
    assert (report.outcome, [finding.is_problem for finding in report.findings]) == (Outcome.PROVED, [False])
    assert "would have taken longer than computing it" in report.findings[0].what
    wrong = msgspec.structs.replace(chosen, comparison=Comparison(problem="token 3 is 7, not 8"))
    assert "token 3 is 7" in only_problem(judge([seen(), wrong], PD))


def test_where_everything_was_faster_to_compute_nothing_is_proved() -> None:
    report = judge([seen("recomputed", reused=0, told={"reason": "slow_tier"})], PD)
    assert only_problem(report) == "no prompt was handed from prefill to decode"


def test_a_late_receipt_is_a_note() -> None:
    report = judge([seen(told={"is_late": True})], PD)
    assert report.outcome is Outcome.PROVED
    assert "too late" in report.findings[0].what
    assert "router.receipt_wait" in report.findings[0].remedy


def test_a_wrong_answer_is_worse_than_any_receipt() -> None:
    report = judge([seen(), seen(comparison=Comparison(problem="token 3 is 7, not 8"))], PD)
    assert only_problem(report).endswith("reuses nothing: token 3 is 7, not 8")
    assert "kvtally reset" in report.findings[0].remedy


@pytest.mark.parametrize(
    "counted",
    [
        Counted(computed_tokens=TOKENS, local_tokens=0, external_tokens=0),
        Counted(computed_tokens=2, local_tokens=0, external_tokens=TOKENS - 2),
    ],
)
def test_the_engines_counters_are_believed_more_than_the_receipt(counted: Counted) -> None:
    report = judge([seen(), seen(counted=counted)], PD)
    assert only_problem(report).startswith("the receipt says 999 tokens reused and 1 computed, the engine counted")


def test_without_counters_it_is_a_note() -> None:
    report = judge([seen(), seen(counted=None, uncounted="the engine served others meanwhile")], PD)
    assert report.outcome is Outcome.PROVED
    assert report.findings[0].what.endswith("the engine served others meanwhile")
    assert "confirm 1 of 2" in report.summary


def test_a_failed_request() -> None:
    failed = Observation(case="long", turn=Turn.FIRST, prompt_tokens=TOKENS, failure="status 503, no instance")
    assert only_problem(judge([seen(), failed], PD)) == "the request failed: status 503, no instance"


def test_a_strict_routers_refusal_is_explained() -> None:
    refused = Observation(
        case="long", turn=Turn.FIRST, prompt_tokens=TOKENS, failure="status 502", failure_reason="foreign_store"
    )
    report = judge([refused], PD)
    assert only_problem(report).startswith(
        "the strict router refused to answer: prefill and decode use different stores"
    )


def test_one_response_without_receipt() -> None:
    bare = Observation(case="long", turn=Turn.FIRST, prompt_tokens=TOKENS)
    assert only_problem(judge([seen(), bare], PD)) == "the response carries no receipt"


def test_no_receipt_at_all_is_no_test() -> None:
    report = judge([Observation(case="long", turn=Turn.FIRST, prompt_tokens=TOKENS)] * 2, PD)
    assert report.outcome is Outcome.CANNOT_TEST
    assert "no kvtally router" in report.summary


def test_no_probe_is_no_test() -> None:
    assert judge([], PD).outcome is Outcome.CANNOT_TEST


@pytest.mark.parametrize("skip", set(Skip) - {Skip.HELD})
def test_what_the_router_leaves_out_is_a_note_and_no_proof(skip: Skip) -> None:
    left_out = alone("recomputed", 0, told={"skipped": skip, "reason": "absent"})
    report = judge([seen(), left_out], PD)
    assert (report.outcome, [finding.is_problem for finding in report.findings]) == (Outcome.PROVED, [False])
    assert report.prompt_tokens == TOKENS  # of it nothing was expected
    assert only_problem(judge([left_out], PD)) == "no prompt was handed from prefill to decode"


def test_what_decode_should_hold_it_must() -> None:
    lost = alone("recomputed", 0, told={"skipped": Skip.HELD, "reason": "absent"}, turn=Turn.AGAIN)
    assert only_problem(judge([seen(), lost], PD)).startswith("nothing was reused")


def test_local_hits_alone_prove_no_hand_off() -> None:
    report = judge([alone("local", 992, told={"skipped": Skip.HELD}, turn=Turn.AGAIN)], PD)
    assert only_problem(report) == "no prompt was handed from prefill to decode"


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"skipped": Skip.HELD, "reason": "not_held"}, REASONS["not_held"].what),
        ({"reason": "prefill_down"}, "prefill could not do its part (down)"),
        ({"prefill": "p:1", "promised_tokens": 0, "reason": "arena_full"}, REASONS[MissReason.ARENA_FULL].what),
    ],
)
def test_what_decode_had_by_itself_is_no_hand_off(told: dict[str, Any], why: str) -> None:
    report = judge([seen(), alone("local", 16, told=told)], PD)
    assert only_problem(report) == f"nothing was handed over, decode had only what it held itself: {why}"


def test_without_prefill_something_must_be_reused() -> None:
    assert only_problem(judge([alone("recomputed", 0)], PLAIN)) == "no prompt was reused when it came again"


def test_a_prefill_that_promises_less_is_a_note() -> None:
    report = judge([seen(reused=768, told={"promised_tokens": 768})], PD)
    assert report.outcome is Outcome.PROVED
    assert report.findings[0].what == "prefill promised only 768 of 1000 tokens"


def test_the_same_finding_is_told_once() -> None:
    report = judge([seen("recomputed", reused=0, told={"reason": "absent"}, turn=turn) for turn in Turn], PD)
    assert [finding.requests for finding in report.findings] == [["long, first", "long, again"]]


def test_reasons_differ_by_verdict() -> None:
    assert explain(Verdict.SHORT, "absent").what != explain(Verdict.RECOMPUTED, "absent").what


# ---- comparing answers


def answer(tokens: list[int], logprobs: list[float], margins: list[float] | None = None) -> Answer:
    return Answer(tokens=tokens, logprobs=logprobs, margins=margins or [1.0] * len(tokens))


def test_answers_are_compared() -> None:
    reference = answer([1, 2, 3], [-0.1, -0.2, -0.3], [1.0, 1.0, 0.01])
    near = answer([1, 2, 3], [-0.1, -0.25, -0.3])
    assert compare(reference, reference, 1e-3) == Comparison(compared_tokens=3)
    assert "token 1 is off by 0.05" in compare(reference, near, 1e-3).problem
    assert compare(reference, near, 0.1).problem == ""
    assert compare(reference, near, 0.1).deviation == pytest.approx(0.05)
    assert compare(reference, answer([1, 9, 3], [-0.1, -0.2, -0.3]), 0.1).problem == "token 1 is 9, not 2"
    tied = compare(reference, answer([1, 2, 9], [-0.1, -0.2, -0.3]), 0.1)
    assert (tied.is_tie, tied.problem) == (True, "")
    assert compare(reference, answer([1, 2, 9], [-0.1, -0.2, -0.3]), 1e-3).problem == "token 2 is 9, not 3"
    assert compare(reference, answer([1, 2], [-0.1, -0.2]), 1e-3).problem == "it has 2 tokens, not 3"


def test_the_tolerance_grows_with_the_engines_own_deviation_unless_the_arithmetic_is_the_same() -> None:
    assert [tolerance(own, is_same_arithmetic=False) for own in (0.0, 0.1)] == [1e-3, 0.2]
    assert tolerance(0.1, is_same_arithmetic=True) == 1e-3


def test_an_engine_that_does_not_agree_with_itself_is_a_weak_witness() -> None:
    """Nearly any answer would pass, and a reader of PROVED must know that."""
    steady, unsteady = (msgspec.structs.replace(PD, own_deviation=own) for own in (0.5, 3.0))
    assert judge([seen()], steady).findings == []
    assert judge([seen(is_same_arithmetic=True)], unsteady).findings == []  # held to the tightest tolerance
    report = judge([seen()], unsteady)
    assert (report.outcome, [finding.is_problem for finding in report.findings]) == (Outcome.PROVED, [False])
    assert "differ by 3 " in report.findings[0].what


# ---- the probes


@pytest.mark.parametrize(("block", "chunk"), [(16, 256), (32, 256), (272, 272), (100, 300), (528, 528)])
def test_probes_lie_around_blocks_and_chunks(block: int, chunk: int) -> None:
    assert chunk_tokens(block) == chunk
    made = shapes(block, 8192)
    lengths = [shape.tokens for shape in made]
    assert {block - 1, block, block + 1, chunk - 1, chunk, chunk + 1, 30} <= set(lengths)
    assert lengths == sorted(set(lengths))
    assert lengths[-1] > 4 * chunk
    assert [shape.name for shape in made if shape.is_streamed] == ["streamed"]


def test_probes_fit_into_the_context() -> None:
    assert shapes(16, 512)[-1] == Shape("a chunk and one", 257)
    assert shapes(16, MAX_TOKENS + TURN_TOKENS + 1) == []
    assert all(shape.tokens + MAX_TOKENS + TURN_TOKENS <= 700 for shape in shapes(16, 700))


def test_words_are_new_for_each_seed() -> None:
    first, second = words(random.Random(1), 50), words(random.Random(2), 50)
    assert first != second
    assert first == words(random.Random(1), 50)
    assert len(first.split()) == 50


# ---- whole runs, on a fake router and a fake engine


class Deployment:
    """A router, its decode engine and one for prefill. What is answered depends on every token of the prompt, and where
    they round, logprobs depend a little on the pieces it was computed in. `has` are the faults."""

    def __init__(self) -> None:
        self.has: set[str] = set()
        self.prefill = True
        self.cached: set[str] = set()
        self.counters = {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}
        self.receipts: dict[str, object] = {}
        self.stores = {"decode": "", "prefill": ""}
        self.salts: list[str] = []
        self.turns: list[list[int]] = []
        self.engine, self.prefiller = Fake(self.at_engine), Fake(self.at_prefill)
        self.router = Fake(self.at_router)

    def close(self) -> None:
        for server in (self.engine, self.prefiller, self.router):
            server.close()

    # -- the engine

    def at_engine(self, path: str, body: dict[str, Any] | None) -> Reply:
        if path == "/metrics":
            lines = ['vllm:cache_config_info{block_size="16",engine="0"} 1.0'] if "no blocks" not in self.has else []
            lines += [f'vllm:prompt_tokens_by_source_total{{source="{k}"}} {v}.0' for k, v in self.counters.items()]
            return 200, {}, "\n".join([*lines, ""]).encode()
        if path == "/tokenize" and body:
            return as_json({"tokens": [sum(word.encode()) for word in body["prompt"].split()]})
        assert path == "/v1/completions"
        assert body
        self.salts.append(body["cache_salt"])
        if "engine refuses" in self.has:
            return as_json({"error": "nope"}, 400)
        self.count(computed=len(body["prompt"]))
        return as_json({"choices": [self.choice(body["prompt"], body, [len(body["prompt"])])]})

    def at_prefill(self, path: str, body: dict[str, Any] | None) -> Reply:
        assert (path, body is not None) == ("/v1/completions", True)
        assert body
        self.salts.append(body["cache_salt"])
        return as_json({"choices": [self.choice(body["prompt"], body, self.by_prefill(len(body["prompt"])))]})

    def count(self, *, computed: int = 0, local: int = 0, external: int = 0) -> None:
        for source, tokens in zip(self.counters, (computed, local, external), strict=True):
            self.counters[source] += tokens

    def choice(
        self, tokens: list[int], body: dict[str, Any], pieces: list[object], *, wrong: bool = False, off: float = 0.0
    ) -> dict[str, Any]:
        assert body["temperature"] == 0
        said: list[int] = []
        for _ in range(body["max_tokens"]):
            said.append(hashlib.sha256(str([*tokens, *said, wrong]).encode()).digest()[0])
        made = [f"token_id:{byte}" for byte in said]
        noise = [self.rounding(pieces, len(tokens) + index) for index in range(len(said))]
        logprobs = [off + more - byte / 256 for byte, more in zip(said, noise, strict=True)]
        tops = [{token: value, "token_id:999": value - 1} for token, value in zip(made, logprobs, strict=True)]
        return {"text": "x", "logprobs": {"tokens": made, "token_logprobs": logprobs, "top_logprobs": tops}}

    def rounding(self, pieces: list[object], place: int) -> float:
        """Up to 0.01 either way."""
        return random.Random(f"{pieces} {place}").uniform(-0.01, 0.01) if "rounding" in self.has else 0.0

    # -- the router

    def at_router(self, path: str, body: dict[str, Any] | None) -> Reply:
        name = self.engine.address if "unreachable engine" not in self.has else f"127.0.0.1:{free_ports(1)[0]}"
        if path == "/instances":
            rows = [{"instance": name, "roles": ["decode"], "state": "up", "store": self.stores["decode"]}]
            if self.prefill:
                prefill = (
                    self.prefiller.address if "hidden prefill" not in self.has else f"127.0.0.1:{free_ports(1)[0]}"
                )
                rows.append({"instance": prefill, "roles": ["prefill"], "state": "up", "store": self.stores["prefill"]})
            return as_json({"instances": rows})
        if path == "/v1/models":
            return as_json({"data": [{"id": "m", "max_model_len": 2048}]})
        if path.startswith("/receipts/"):
            return as_json(self.receipts[path.removeprefix("/receipts/")])
        assert path == "/v1/completions"
        assert body
        assert "cache_salt" not in body
        return self.complete(body, name)

    def complete(self, body: dict[str, Any], name: str) -> Reply:
        tokens = body["prompt"]
        key, ticket = str(tokens), f"t{len(self.receipts)}"
        is_known = key in self.cached
        self.cached.add(key)
        verdict, prefill = "proved", self.prefiller.address
        if not self.prefill:
            verdict, prefill = ("local" if is_known else "recomputed:absent"), "none"
        elif len(tokens) < 64:
            verdict, prefill = "recomputed:absent", "skipped:short"
        elif is_known:
            verdict, prefill = "local", "skipped:held"
        elif "prefill fails" in self.has and any(tokens[: len(turn)] == turn for turn in self.turns):
            verdict, prefill = "local", "failed:disconnected"
        if "recomputes" in self.has and verdict == "proved":
            verdict = "recomputed:foreign_store"
        if "loses" in self.has and verdict == "proved":
            verdict = "recomputed:peer_lost"
        reused = len(tokens) - 1 if verdict in ("proved", "local") else 0
        computed = len(tokens) - reused
        if "lies" in self.has:
            self.count(computed=len(tokens))
        else:
            self.count(computed=computed, external=reused)
        if "others" in self.has:
            self.count(computed=5)
        late = "late" in self.has
        half = {"tokens_host": reused, "computed_tokens": computed}
        promise = {"saved_tokens": len(tokens) - 1} if prefill == self.prefiller.address else None
        self.receipts[ticket] = {"verdict": verdict, "reason": "late", "prefill": promise, "decode": half}
        headers = {
            "request": ticket,
            "prefill": prefill,
            "decode": name,
            "verdict": "missing" if late else verdict,
            **({"reason": verdict.partition(":")[2]} if ":" in verdict else {}),
            "reused-tokens": "unknown" if late else str(reused),
            "computed-tokens": "unknown" if late else str(computed),
            "source": "unknown" if late else f"host:{reused}" if reused else "none",
        }
        told = {} if "no receipts" in self.has else {f"X-KVTally-{name}": value for name, value in headers.items()}
        if "strict" in self.has and verdict.startswith("recomputed:foreign"):
            return 502, told, b'{"error": "reuse was not proved"}'
        off = 0.004 if "slightly off" in self.has and reused else 0.0
        pieces, wrong = self.pieces(tokens, reused), "wrong" in self.has and reused > 0
        choice = self.choice(tokens, body, pieces, wrong=wrong, off=off)
        if not body.get("stream"):
            return 200, told, json.dumps({"choices": [choice]}).encode()
        return 200, {**told, "Content-Type": "text/event-stream"}, self.stream(choice)

    def pieces(self, tokens: list[int], reused: int) -> list[object]:
        """Prefill computed the reused part at once, or had its beginning from an earlier turn."""
        if not reused:
            return [len(tokens)]
        turns = [turn for turn in self.turns if len(turn) < len(tokens) and tokens[: len(turn)] == turn]
        self.turns.append(tokens)
        return [*map(len, turns), *self.by_prefill(len(tokens) - 1)]

    def by_prefill(self, tokens: int) -> list[object]:
        return [tokens, *(["another"] if "another prefill" in self.has else [])]

    def stream(self, choice: dict[str, Any]) -> bytes:
        found = choice["logprobs"]
        parts = [{"choices": [{"text": "", "logprobs": {k: [v[i]] for k, v in found.items()}}]} for i in range(12)]
        events = [*map(json.dumps, parts), *([] if "broken stream" in self.has else ["[DONE]"])]
        return b"".join(b"data: %s\n\n" % event.encode() for event in events)


Reply = tuple[int, dict[str, str], bytes]


def as_json(tree: object, status: int = 200) -> Reply:
    return status, {}, json.dumps(tree).encode()


class Fake:
    """An HTTP server in a thread."""

    def __init__(self, reply: Callable[[str, dict[str, Any] | None], Reply]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(*reply(self.path, None))

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                self._send(*reply(self.path, json.loads(content)))

            def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    made = Deployment()
    yield made
    made.close()


@pytest.fixture
def run(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """The command: exit code and output."""
    monkeypatch.setattr("kvtally.verify.run.COUNTERS_S", 0.05)

    def call(*more: str, url: str = "") -> tuple[int, str]:
        url = url or f"http://{deployment.router.address}/"
        monkeypatch.setattr(sys, "argv", ["kvtally", "verify", url, "--timeout", str(int(HANG_S)), *more])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        assert isinstance(exited.value.code, int)
        return exited.value.code, capsys.readouterr().out

    return call


Command = Callable[..., tuple[int, str]]


def test_a_good_deployment_is_proved(deployment: Deployment, run: Command) -> None:
    code, out = run()
    assert code == 0, out
    assert "PROVED. Reuse is real" in out
    lines = out.splitlines()
    cases = [line.split("  ")[0] for line in lines[3 : lines.index("", 3)]]
    assert {"short", "a block exactly", "a chunk and one", "streamed", "long", "next turn"} <= set(cases)
    assert "prefill took no part (short)" in out
    assert len(set(deployment.salts)) == len(deployment.salts)  # nobody reuses what another reference has left


def test_plain_engines_are_proved_by_repeats(deployment: Deployment, run: Command) -> None:
    deployment.prefill = False
    code, out = run("--json", "--seed", "5")
    report = json.loads(out)
    assert (code, report["outcome"], report["seed"]) == (0, "proved", 5)
    assert report["sources"] == {"host": report["reused_tokens"]}
    assert {seen["turn"] for seen in report["observations"]} == {"first", "again"}
    assert all(seen["counted"] for seen in report["observations"])


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("recomputes", "nothing was reused: prefill and decode use different stores"),
        ("prefill fails", "nothing was handed over, decode had only what it held itself: prefill could not do"),
        ("wrong", "the answer is not the one of an engine that reuses nothing: "),
        ("lies", "the engine counted 0 and "),
        ("broken stream", "the request failed: the stream broke off"),
    ],
)
def test_a_bad_deployment_is_not(deployment: Deployment, run: Command, fault: str, words: str) -> None:
    deployment.has.add(fault)
    code, out = run()
    assert code == 1, out
    assert "NOT PROVED. " in out
    assert f"problem: {words}" in out or words in out
    assert "remedy: " in out


def test_rounding_is_not_blamed_on_the_cache(deployment: Deployment, run: Command) -> None:
    """A next turn is computed in other pieces than its reference, and a prefill of another make rounds differently."""
    deployment.has.add("rounding")
    code, out = run("--json")
    report = json.loads(out)
    assert code == 0, out
    same = {seen["case"] for seen in report["observations"] if seen["is_same_arithmetic"]}
    assert {"long", "streamed"} <= same
    assert "next turn" not in same
    assert 0.005 < report["own_deviation"] <= 0.02
    for makes in ("another prefill", "hidden prefill"):
        deployment.has = {"rounding", makes}
        code, out = run("--json")
        assert code == 0, out
        assert not any(seen["is_same_arithmetic"] for seen in json.loads(out)["observations"])


@pytest.mark.parametrize("more", [set(), {"late"}])
def test_where_nothing_is_rounded_a_little_is_too_much(deployment: Deployment, run: Command, more: set[str]) -> None:
    deployment.has |= {"rounding", "slightly off", *more}
    code, out = run()
    assert code == 1
    assert "is off by 0.004, allowed are 0.001" in out


def test_who_serves_others_may_round_as_it_does(deployment: Deployment, run: Command) -> None:
    """In a batch with other requests the same tokens are rounded differently."""
    deployment.has |= {"rounding", "slightly off", "others"}
    code, out = run("--json")
    assert code == 0, out
    assert not any(seen["is_same_arithmetic"] for seen in json.loads(out)["observations"])
    deployment.has |= {"wrong"}
    assert run()[0] == 1


def test_a_strict_router_refuses(deployment: Deployment, run: Command) -> None:
    deployment.has |= {"recomputes", "strict"}
    code, out = run()
    assert code == 1
    assert "the strict router refused to answer: prefill and decode use different stores" in out


def test_late_receipts_and_other_traffic_are_notes(deployment: Deployment, run: Command) -> None:
    deployment.has |= {"late", "others"}
    code, out = run()
    assert code == 0, out
    assert "note: decode's half of the receipt came too late" in out
    assert "confirm 0 of" in out


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no receipts", "this is no kvtally router"),
        ("unreachable engine", "/metrics did not answer"),
        ("no blocks", "does not tell the engine's block size"),
        ("engine refuses", "said no: status 400"),
    ],
)
def test_what_cannot_be_tested_is_neither(deployment: Deployment, run: Command, fault: str, words: str) -> None:
    deployment.has.add(fault)
    code, out = run()
    assert code == 2, out
    assert "CANNOT TEST. Nothing could be tested" in out
    assert words in out


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}", "nonsense"])
def test_no_router_is_no_test(run: Command, url: str) -> None:
    code, out = run(url=url.format(port=free_ports(1)[0]))
    assert code == 2
    assert "did not answer" in out
    assert "http://HOST:PORT" in out


def test_the_address_that_clients_are_given_will_do(deployment: Deployment, run: Command) -> None:
    code, out = run(url=f"http://{deployment.router.address}/v1/")
    assert code == 0, out


@pytest.mark.parametrize("seconds", ["inf", "1e300", "nan", "0"])
def test_a_wait_without_end_is_refused(run: Command, seconds: str) -> None:
    assert run("--timeout", seconds) == (2, "")


def test_an_engine_can_be_named(deployment: Deployment, run: Command) -> None:
    deployment.has.add("unreachable engine")
    code, out = run("--direct", f"http://{deployment.engine.address}")
    assert code == 0, out
    assert "the engine that decoded cannot be reached from here" in out


def test_a_key_file_that_cannot_be_read(run: Command, tmp_path: Path) -> None:
    assert run("--key-file", str(tmp_path / "none"))[0] == 2


@pytest.mark.parametrize("content", ["ключ", "two\nlines"])
def test_a_key_that_no_header_can_carry(run: Command, tmp_path: Path, content: str) -> None:
    (tmp_path / "key").write_text(content, encoding="utf-8")
    assert run("--key-file", str(tmp_path / "key")) == (2, "")


# ---- what people see


@pytest.mark.parametrize("reason", ["", "absent", "foreign_namespace", "prefill_status_503"])
@pytest.mark.parametrize("sources", [{}, {"host": 16_384}, {"gpu": 16_384, "host": 131_072, "disk": 65_536}])
def test_eighty_columns_break_no_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reason: str, sources: dict[str, int]
) -> None:
    verdict = "recomputed" if reason else "proved"
    observation = seen(verdict, reused=sum(sources.values()), told={"reason": reason, "sources": sources})
    observation = msgspec.structs.replace(observation, case="a chunk less one", comparison=Comparison(is_tie=True))
    report = judge([observation, seen()], PD)

    def printed() -> str:
        print_observation(observation)
        print_words(report)
        return capsys.readouterr().out

    monkeypatch.delenv("COLUMNS", raising=False)
    whole = printed()
    monkeypatch.setenv("COLUMNS", "80")
    narrow = printed()
    assert narrow.split() == whole.split()
    assert [line for line in narrow.splitlines() if len(line) > 80] == []
