"""The figures of `kvtally bench prefetch`: what they are made of, and when a target is met. No engine is started."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from kvtally.bench.prefetch import main
from kvtally.bench.prefetch_report import Figures, Speed, judge, page, times
from kvtally.errors import ConfigError

GOOD = Figures(
    gain=0.3,
    on_over_arena=1.02,
    single={"no_store": times([1.0])},
    nothing={"on": times([1.0]), "off": times([1.0], cpu_s=[1.0, 1.01])},
    nothing_on_over_off=1.0,
    slow_tier_over_no_store=1.03,
    fast_tier_disk_tokens=1792,
    outputs_equal=True,
    speeds=[
        Speed(
            name="slow",
            disk_bytes_s=5,
            arms={
                "on": times([10.0, 12.0], [10.5]),
                "off": times([25.0, 27.0], [20.0]),  # behind a queue that a neighbour made longer
                "arena": times([10.2, 10.8], [10.0]),
                "no_store": times([14.0, 16.0], [10.0]),
            },
        )
    ],
)


def test_arms_are_compared_behind_the_same_queue() -> None:
    (speed,) = GOOD.speeds
    assert speed.ratio("on", "off") == pytest.approx((10.25 + 0.5) / (10.25 + 6))
    assert speed.ratio("on", "arena") == pytest.approx(10.75 / 10.75)


def test_times_have_mean_median_and_tail() -> None:
    found = times([float(n) for n in range(1, 101)])
    assert (found.mean_s, found.p50_s, found.p99_s) == (50.5, 50.5, 100.0)


def test_what_meets_its_target_is_ok() -> None:
    assert all(target.ok for target in judge(GOOD))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gain", 0.27),
        ("on_over_arena", 1.11),
        ("nothing_on_over_off", 1.02),
        ("nothing_added_cpu", 0.02),
        ("slow_tier_over_no_store", 1.06),
        ("fast_tier_disk_tokens", 0),
    ],
)
def test_what_misses_its_target_is_a_miss(key: str, value: float) -> None:
    worse = msgspec.structs.replace(GOOD, **{key: value})
    assert [target.key for target in judge(worse) if not target.ok] == [key]


def test_where_the_machine_is_too_noisy_nothing_is_claimed() -> None:
    noisy = {"on": times([1.0]), "off": times([1.0], cpu_s=[1.0, 1.2])}
    targets = judge(msgspec.structs.replace(GOOD, nothing=noisy))
    assert [target.key for target in targets if target.ok is None] == ["nothing_on_over_off"]


def test_the_json_has_what_others_read() -> None:
    tree = msgspec.json.decode(msgspec.json.encode(GOOD))
    wanted = {"mean_ttft_on_s", "mean_ttft_off_s", "mean_ttft_arena_s", "mean_ttft_no_store_s", "outputs_equal"}
    assert wanted <= tree.keys()


def test_the_page_shows_every_arm_and_says_when_outputs_differ() -> None:
    text = io.StringIO()
    Console(file=text, width=120).print(page(msgspec.structs.replace(GOOD, outputs_equal=False, targets=judge(GOOD))))
    assert all(arm in text.getvalue() for arm in ("on", "off", "arena", "no_store", "DIFFER"))


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--engine", "{"], ["--prompt-tokens", "1"]])
def test_impossible_options_are_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigError):
        main(arguments)
