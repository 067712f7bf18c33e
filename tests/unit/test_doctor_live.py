"""`kvtally doctor URL`: the verdict on deployments of fakes, healthy ones and broken ones, one cause each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import NamedTuple

import msgspec
import pytest
from typer.testing import CliRunner

from kvtally.cli.main import app
from kvtally.doctor.live import Clock, Limits, count, examine, is_handed_out
from kvtally.doctor.verdict import Counters, Diagnosis, Outcome, Seen, conclude
from kvtally.doctor.verdict import Engine as Described
from kvtally.errors import TransportError
from kvtally.verify.http import Response, Server
from kvtally.verify.reading import read_answer
from tests.unit.doctor_kit import Cache, Engine, Router

REQUEST_S = 60.0
ALIKE = [Described(url="p", role="prefill"), Described(url="d", role="decode")]


class Set(NamedTuple):
    prefill: Engine
    decode: Engine
    router: Router

    def examine(self, *, limits: Limits | None = None, key: str = "", named: bool = True) -> Diagnosis:
        now = [0.0]

        def sleep(seconds: float) -> None:
            now[0] += seconds

        def connect(url: str) -> Server:
            return Server(url, key=key, timeout_s=REQUEST_S)

        return examine(
            connect(self.router.url),
            [connect(self.prefill.url)] if named else [],
            [connect(self.decode.url)] if named else [],
            seed=7,
            limits=limits or Limits(),
            connect=connect,
            clock=Clock(now=lambda: now[0], sleep=sleep),
        )


@pytest.fixture
def pd() -> Iterator[Set]:
    """Prefill and decode with NIXL between them, behind a router that hands over what it must."""
    with ExitStack() as stack:
        prefill, decode = Engine(), Engine()
        router = Router(prefill, decode)
        for web in (prefill, decode, router):
            stack.enter_context(web)
        prefill.uses_nixl = decode.uses_nixl = router.relays = True
        yield Set(prefill, decode, router)


@pytest.fixture
def shared(pd: Set) -> Set:
    """The same with a cache that both reach, and a router that hands over nothing."""
    pd.prefill.uses_nixl = pd.decode.uses_nixl = pd.router.relays = False
    pd.prefill.cache = pd.decode.cache = Cache()
    return pd


# ---- healthy


def test_reuse_by_parameters_is_real(pd: Set) -> None:
    found = pd.examine()
    assert found.outcome is Outcome.REAL
    assert found.causes == []
    assert found.notes == []
    assert all(seen.reused_tokens == seen.prompt_tokens - 1 for seen in found.seen)
    assert all(seen.is_compared and not seen.comparison.problem for seen in found.seen)
    assert found.summary.startswith("Reuse is real: decode took over")


def test_reuse_through_a_cache_is_real_and_short_prompts_are_noted(shared: Set) -> None:
    found = shared.examine()
    assert found.outcome is Outcome.REAL
    assert [seen.reused_tokens for seen in found.seen if seen.is_long] == [512, 1024]
    assert found.notes == [
        "prompts of up to 256 tokens are computed again: too short for the cache, or not worth moving"
    ]


def test_a_router_that_takes_text_only(pd: Set) -> None:
    pd.router.takes_tokens = False
    found = pd.examine()
    assert found.outcome is Outcome.REAL
    assert all(seen.is_compared and not seen.comparison.problem for seen in found.seen)


def test_an_older_vllm_is_believed_with_a_note(pd: Set) -> None:
    pd.prefill.has_sources = pd.decode.has_sources = False
    found = pd.examine()
    assert found.outcome is Outcome.REAL
    assert any("older vLLM" in note for note in found.notes)


def test_a_cache_that_ignores_salts_leaves_the_answers_uncompared(shared: Set) -> None:
    """The reference would be computed from what is in doubt."""
    assert shared.decode.cache is not None
    shared.decode.cache.honours_salt = False
    found = shared.examine()
    assert found.outcome is Outcome.REAL
    assert not any(seen.is_compared for seen in found.seen if seen.is_long)


def test_answers_without_logprobs_leave_the_amounts(pd: Set) -> None:
    pd.router.hides_logprobs = True
    found = pd.examine()
    assert found.outcome is Outcome.REAL
    assert any("amounts are proved, bytes are not" in note for note in found.notes)


# ---- broken, one cause each


def drops_parameters(pd: Set) -> None:
    pd.router.relays = False


def never_asks_prefill(pd: Set) -> None:
    pd.router.asks_prefill = False


def cannot_fetch(pd: Set) -> None:
    pd.decode.fails_to_fetch = True


def no_connector_in_decode(pd: Set) -> None:
    pd.prefill.uses_nixl = pd.decode.uses_nixl = False


def two_caches(pd: Set) -> None:
    no_connector_in_decode(pd)
    pd.prefill.cache, pd.decode.cache = Cache(), Cache()


def too_early(pd: Set) -> None:
    """A cache that both share, and a router that does not wait until it is filled."""
    no_connector_in_decode(pd)
    cache = Cache()
    pd.prefill.cache = pd.decode.cache = cache
    pd.router.before_decode = cache.held.clear


def requests_fail(pd: Set) -> None:
    pd.router.status = 500


def fails_in_the_stream(pd: Set) -> None:
    pd.decode.error = "the load failed"


def wrong_bytes(pd: Set) -> None:
    pd.decode.corrupts = True


BROKEN: list[tuple[Callable[[Set], None], Outcome, str]] = [
    (drops_parameters, Outcome.NONE, "the router drops kv_transfer_params"),
    (never_asks_prefill, Outcome.NONE, "the router never asked prefill"),
    (cannot_fetch, Outcome.NONE, "decode cannot fetch what prefill offers"),
    (no_connector_in_decode, Outcome.NONE, "decode has no connector"),
    (two_caches, Outcome.NONE, "decode looked and found nothing"),
    (too_early, Outcome.NONE, "the engines share a cache, and the router keeps them from using it"),
    (requests_fail, Outcome.NONE, "requests fail"),
    (fails_in_the_stream, Outcome.NONE, "requests fail"),
    (wrong_bytes, Outcome.WRONG, "the KV that decode loads is not that of this prompt"),
]


@pytest.mark.parametrize(("breaks", "outcome", "cause"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_the_first_cause_is_the_right_one(pd: Set, breaks: Callable[[Set], None], outcome: Outcome, cause: str) -> None:
    breaks(pd)
    found = pd.examine()
    assert found.outcome is outcome
    assert found.outcome.exit_code == 1
    assert found.causes[0].what.startswith(cause), found.causes
    assert found.causes[0].evidence
    assert found.causes[0].next_step.endswith(".")


def test_engines_that_are_not_alike_are_a_further_cause(pd: Set) -> None:
    cannot_fetch(pd)
    pd.decode.version, pd.decode.settings = "0.31.0", {"block_size": "32", "cache_dtype": "auto"}
    found = pd.examine()
    assert found.causes[-1].evidence == "version 0.32.0 and 0.31.0, block_size 16 and 32"


def test_hits_that_never_arrived_are_no_reuse() -> None:
    """vLLM counts an external hit when it is promised, also where the transfer fails then."""
    promised = Counters(external_tokens=599, computed_tokens=1, failed_transfers=1)
    seen = Seen(case="long", prompt_tokens=600, is_long=True, decode=promised, prefill=Counters(computed_tokens=600))
    found = conclude([seen], ALIKE, [])
    assert found.outcome is Outcome.NONE
    assert found.causes[0].what == "decode cannot fetch what prefill offers"


def test_some_prompts_only(pd: Set) -> None:
    good = Seen(case="a", prompt_tokens=600, is_long=True, decode=Counters(external_tokens=599, computed_tokens=1))
    bad = Seen(case="b", prompt_tokens=600, is_long=True, decode=Counters(computed_tokens=600, asked_tokens=600))
    bad.prefill = Counters(computed_tokens=600, expired=1)
    found = conclude([good, bad], ALIKE, [])
    assert found.outcome is Outcome.PARTIAL
    assert found.causes[0].what == "prefill dropped the KV before decode fetched it"


# ---- what cannot be said is not guessed


def test_busy_engines_are_not_blamed(pd: Set) -> None:
    pd.decode.others = 5
    found = pd.examine()
    assert found.outcome is Outcome.BUSY
    assert found.outcome.exit_code == 2
    assert found.summary.startswith("Busy, cannot attribute")


def test_requests_that_run_already_are_busy_too(pd: Set) -> None:
    pd.prefill.running = 2
    found = pd.examine()
    assert found.outcome is Outcome.BUSY
    assert "has 2 requests of others" in found.causes[0].evidence


def test_decode_engines_that_were_not_named(pd: Set) -> None:
    with Engine() as other:
        other.uses_nixl = True
        pd.router.decode = other
        found = pd.examine()
    assert found.outcome is Outcome.CANNOT_TEST
    assert found.causes[0].what == "the router decodes with engines that were not named"


def test_engines_that_nobody_named(pd: Set) -> None:
    found = pd.examine(named=False)
    assert (found.outcome, found.causes[0].what) == (Outcome.CANNOT_TEST, "the engines are not known")


def test_an_engine_that_is_no_vllm(pd: Set) -> None:
    pd.decode.is_vllm = False
    found = pd.examine()
    assert found.outcome is Outcome.CANNOT_TEST
    assert "is not a vLLM engine" in found.summary


def test_a_prefill_engine_that_does_not_answer_is_said_and_the_rest_examined(pd: Set) -> None:
    with Engine() as gone:
        unreachable = pd._replace(prefill=gone)
    found = unreachable.examine()
    assert found.outcome is Outcome.REAL  # decode is the witness
    assert any("did not answer" in note for note in found.notes)
    drops_parameters(pd)
    found = unreachable.examine()
    assert found.outcome is Outcome.NONE
    assert found.causes[0].what.startswith("prefill cannot be watched")


def test_a_router_that_wants_a_key(pd: Set) -> None:
    pd.router.key = "secret"
    found = pd.examine()
    assert found.outcome is Outcome.CANNOT_TEST
    assert "wants a key" in found.summary
    assert pd.examine(key="secret").outcome is Outcome.REAL


def test_a_small_context_has_no_long_prompt(pd: Set) -> None:
    pd.decode.limit = 300
    found = pd.examine()
    assert found.outcome is Outcome.CANNOT_TEST
    assert "no prompt that is long enough" in found.summary


# ---- the budget


def test_no_more_is_asked_than_was_allowed(pd: Set) -> None:
    for limits in (Limits(requests=10), Limits(tokens=7_000), Limits(requests=1, tokens=1)):
        asked = [len(pd.prefill.prompts), len(pd.decode.prompts)]
        found = pd.examine(limits=limits)
        assert found.requests <= limits.requests
        assert found.tokens <= limits.tokens
        assert len(pd.decode.prompts) - asked[1] <= limits.requests
    assert found.outcome is Outcome.CANNOT_TEST


def test_by_itself_it_stays_far_below_the_limits(pd: Set) -> None:
    drops_parameters(pd)
    found = pd.examine()
    assert 0 < found.requests <= 60
    assert 0 < found.tokens <= 100_000


# ---- parts


def test_only_whole_parameters_are_handed_on() -> None:
    whole: dict[str, object] = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "e"}
    whole |= {"remote_host": "h", "remote_port": 1}
    assert is_handed_out(whole)
    for name in whole:
        assert not is_handed_out({**whole, name: None})


def test_counters_of_any_version() -> None:
    by_source = [
        ("vllm:prompt_tokens_by_source_total", {"source": source, "engine": engine}, 10.0)
        for source in ("local_compute", "external_kv_transfer")
        for engine in "01"
    ]
    assert count(by_source) == Counters(computed_tokens=20, external_tokens=20)
    assert count([("vllm:prompt_tokens_total", {}, float("nan"))]) == Counters()
    older = [("vllm:prompt_tokens_total", {}, 30.0), ("vllm:external_prefix_cache_hits_total", {}, 10.0)]
    assert count(older) == Counters(computed_tokens=20, external_tokens=10)


def test_a_description_without_figures_says_no_difference() -> None:
    assert conclude([], ALIKE, []).causes[0].what.startswith("no prompt that is long enough")


def test_a_stream_without_end_ends(pd: Set, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that sends a little now and then would never meet a deadline between two bytes."""
    hours = itertools.count(step=3600)
    monkeypatch.setattr("kvtally.verify.http.time", SimpleNamespace(monotonic=lambda: next(hours)))
    body = {"model": "tiny", "prompt": [1, 2, 3], "stream": True}
    with pytest.raises(TransportError, match="not over after 60 s"):
        Server(pd.decode.url, timeout_s=REQUEST_S).stream("/v1/completions", body)


def test_tokens_by_their_text_are_no_answer_to_compare() -> None:
    logprobs = {"tokens": [" a"], "token_logprobs": [-1.0], "top_logprobs": [{" a": -1.0}]}
    response = Response(200, {}, msgspec.json.encode({"choices": [{"text": " a", "logprobs": logprobs}]}))
    with pytest.raises(TransportError, match="by their text"):
        read_answer(Server("http://127.0.0.1:9", timeout_s=1), response)


# ---- the command


def test_people_get_rows_and_a_sentence(pd: Set) -> None:
    arguments = ["doctor", pd.router.url + "/v1/", "--prefill", pd.prefill.url, "--decode", pd.decode.url]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].startswith("Asks for at most ")
    assert any(line.startswith("long ") for line in lines)
    assert any(line.startswith("Reuse is real") for line in lines)
    assert max(map(len, lines)) <= 80


def test_programs_get_json(pd: Set) -> None:
    drops_parameters(pd)
    arguments = ["doctor", "--json", pd.router.url, "--prefill", pd.prefill.url, "--decode", pd.decode.url]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    found = msgspec.json.decode(done.output.encode())
    assert (found["outcome"], found["causes"][0]["what"]) == ("none", "the router drops kv_transfer_params")


@pytest.mark.parametrize(
    "arguments", [["http://127.0.0.1:1", "file.yaml"], ["file.yaml", "--decode", "http://127.0.0.1:1"]]
)
def test_files_and_addresses_do_not_mix(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtally.cli import main as cli

    monkeypatch.setattr("sys.argv", ["kvtally", "doctor", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2


def test_an_address_that_does_not_answer_ends_with_2() -> None:
    nobody = "http://127.0.0.1:9"
    done = CliRunner().invoke(app, ["doctor", nobody, "--prefill", nobody, "--decode", nobody])
    assert done.exit_code == 2
    assert "Traceback" not in done.output
