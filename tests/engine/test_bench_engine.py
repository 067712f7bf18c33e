"""The vLLM process of the benches, asked as each bench asks it, on whatever processor this is. Times are not judged."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvtally.bench.daemon import Daemon, Ledger
from kvtally.bench.engine import (
    CPU_ENVIRONMENT,
    Answer,
    Ask,
    Burst,
    EngineProcess,
    Settle,
    Source,
    Start,
    Watch,
    Watched,
    connector,
)
from kvtally.processes import own_environment, workplace

pytestmark = pytest.mark.engine

TOKENS = 600  # two chunks of 256 and a tail
CALL_S = 240.0


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with workplace() as directory, Daemon(directory, "store", memory_bytes=256 << 20) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def engine(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    if find_spec("vllm") is None:
        pytest.skip("needs vLLM")
    directory: Path = tmp_path_factory.mktemp("engine")
    arguments = {
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "max_num_seqs": 8,
        **connector(daemon.socket),
    }
    start = Start(arguments=arguments, tiny=str(directory / "models"), briefs=1)
    with EngineProcess(start, directory / "log", {**CPU_ENVIRONMENT, **own_environment()}) as engine:
        yield engine


def test_a_repeat_is_loaded_once_the_engine_has_forgotten_it(engine: EngineProcess, daemon: Daemon) -> None:
    cold = engine.generate(Ask(seed=1, tokens=TOKENS, answer_tokens=3))
    engine.ask(Settle(), Answer, CALL_S)
    with Ledger(daemon) as ledger:
        assert ledger.wait_saved() > 0
        again = engine.generate(Ask(seed=1, tokens=TOKENS, answer_tokens=3, forget=True))
        half = ledger.next_half(TOKENS)
    assert cold.cached_tokens == 0
    assert again.cached_tokens >= 512
    assert half.tokens_host >= 512
    assert half.moved_bytes > 0
    assert again.tokens == cold.tokens
    assert len(again.logprobs) == len(again.margins) == 3


def test_a_burst_waits_behind_its_fillers(engine: EngineProcess) -> None:
    found = engine.burst(Burst(seeds=[11, 12, 13], tokens=TOKENS, fillers=[21, 22], filler_tokens=8))
    assert [len(answer.tokens) for answer in found.answers] == [1, 1, 1]
    assert all(answer.seconds > 0 for answer in found.answers)
    assert 0 < found.queue_s < found.filler_s
    assert 0 <= found.connector_cpu_s < found.cpu_s


@pytest.mark.parametrize("source", [Source.ALONE, Source.OWN, Source.REPEATS])
def test_decodes_are_watched_while_requests_arrive(engine: EngineProcess, source: Source) -> None:
    seeds = [31, 32]
    for seed in seeds:
        engine.generate(Ask(seed=seed, tokens=TOKENS))
    engine.ask(Settle(), Answer, CALL_S)
    watch = Watch(
        source=source,
        seeds=seeds,
        tokens=TOKENS,
        decode_seeds=[41, 42],
        lead_tokens=4,
        window_tokens=6,
        more_tokens=4,
    )
    watched = engine.ask(watch, Watched, CALL_S)
    assert len(watched.gaps_s) == 2 * 6
    arrived = 0 if source is Source.ALONE else len(seeds)
    assert len(watched.firsts_s) == len(watched.cached_tokens) == arrived
    assert all(count >= 512 for count in watched.cached_tokens)
