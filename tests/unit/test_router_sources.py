"""Which stores the router names to each other, which addresses it passes on, and what it learns from pulls.

Engines are imitations; stores are real, each with an address of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from kvtally.core.handoff import KEY
from kvtally.core.receipts import Half, Role
from kvtally.core.routing import Candidate, Work
from kvtally.router.flavours import FLAVOURS
from kvtally.router.stores import NOT_PULLED, Pulls, computed_instead, pull_bytes_s
from tests.unit.fake_vllm import FakeVLLM, Seen
from tests.unit.router_kit import LONG, Home, Kit, Reply, kit, run
from tests.unit.shell import TOKEN, Bench
from tests.waiting import HANG_S, comes_about

PROMPT_TOKENS = len(LONG)
LONGER = LONG * 20
A, B, C = "127.0.0.2", "127.0.0.3", "127.0.0.4"
ELSEWHERE = "tcp://10.9.9.9:7400"


class Homes:
    """Stores on machines of their own, and what their engines know of them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = contextlib.ExitStack()
        self.stops: dict[Home, Any] = {}

    def start(self, host: str, *, peers: tuple[str, ...] = (A, B, C)) -> Home:
        directory = self._directory / host
        directory.mkdir()
        bench = Bench(directory)
        self._stack.callback(bench.close)
        running = bench.start(tcp=f"{host}:0", token=TOKEN, peers=peers)
        name = running.call(running.server.hub.store.greeting).store
        home = Home(bench.path, name, running.server.address, f"tcp://{host}:{running.server.tcp_port}")
        self.stops[home] = running.stop
        return home

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def homes(tmp_path: Path) -> Iterator[Homes]:
    made = Homes(tmp_path)
    try:
        yield made
    finally:
        made.close()


def own(seen: Seen) -> dict[str, Any]:
    return dict(seen.params[KEY])


def addresses(seen: Seen) -> dict[str, str]:
    """The stores that a leg was told of."""
    return {name: value for name, value in own(seen).items() if name in ("source", "deliver", "address")}


async def told(it: Kit, home: Home) -> dict[str, Any]:
    """What /instances tells about a store."""
    tree = (await it.send("GET", "/instances")).json()
    return dict(tree["stores"][home.address or home.path])


async def samples(it: Kit, name: str) -> dict[str, float]:
    lines = (await it.send("GET", "/metrics")).body.decode().splitlines()
    rows = [line.removeprefix(name).rsplit(" ", 1) for line in lines if line.startswith(name)]
    return {labels: float(value) for labels, value in rows}


def saying(**fields: object) -> Any:
    """A prefill whose hand-off says this."""
    return lambda _, answer: {KEY: {**answer[KEY], **fields}}


class TestHandOff:
    def test_between_two_stores_is_proved_as_on_one(self, tmp_path: Path, homes: Homes) -> None:
        async def test() -> None:
            a, b = homes.start(A), homes.start(B)
            async with kit(tmp_path, prefill=[a], decode=[b], token=TOKEN, strict=True) as it:
                reply = await it.ask()
                assert (reply.status, reply.verdict) == (200, "proved")
                assert reply.headers["x-kvtally-source"] == f"peer:{PROMPT_TOKENS - 1}"
                assert reply.headers["x-kvtally-computed-tokens"] == "1"
                assert addresses(it.prefill[0].seen[0]) == {"deliver": b.told}
                assert addresses(it.decode[0].seen[0]) == {"address": a.told, "source": a.told}
                tokens = await samples(it, "kvtally_router_prompt_tokens_total")
                assert tokens['{source="peer"}'] == PROMPT_TOKENS - 1
                assert tokens['{source="pool"}'] == 0
                assert (await told(it, a))["pulls"]["tokens"] == PROMPT_TOKENS - 1
                assert (await told(it, b))["pulls"]["count"] == 0

        run(test)

    def test_without_addresses_it_is_recomputed(self, tmp_path: Path, homes: Homes) -> None:
        """The same stores, with no peers."""

        async def test() -> None:
            a, b = homes.start(A, peers=()), homes.start(B, peers=())
            assert a.told == ""
            async with kit(tmp_path, prefill=[a], decode=[b], token=TOKEN) as it:
                await comes_about(lambda: not any(each.problem for each in it.router.known.stores.readers.values()))
                assert (await it.ask()).verdict == "recomputed:foreign_store"
                assert addresses(it.prefill[0].seen[0]) == addresses(it.decode[0].seen[0]) == {}
                assert (await told(it, a))["address"] == ""

        run(test)

    @pytest.mark.parametrize("by", ["socket", "tcp"])
    def test_a_store_is_named_as_it_told_itself(self, tmp_path: Path, homes: Homes, by: str) -> None:
        """However the router reaches it."""

        async def test() -> None:
            a, b = (home._replace(address="" if by == "socket" else home.address) for home in map(homes.start, (A, B)))
            async with kit(tmp_path, prefill=[a], decode=[b], token=TOKEN) as it:
                assert (await it.ask()).verdict == "proved"
                assert addresses(it.prefill[0].seen[0]) == {"deliver": b.told}
                assert (await told(it, b))["address"] == b.told

        run(test)

    @pytest.mark.parametrize("is_one_address", [True, False])
    def test_engines_that_share_a_store_are_told_of_none(
        self, tmp_path: Path, homes: Homes, is_one_address: bool
    ) -> None:
        """Even if the router reaches it by a socket for one of them, and over TCP for the other."""

        async def test() -> None:
            a = homes.start(A)
            other = a if is_one_address else a._replace(address="")
            async with kit(tmp_path, prefill=[a], decode=[other, other], token=TOKEN) as it:
                for number in range(4):
                    assert (await it.ask(f"{number} {LONG}")).verdict == "proved"
                seen = [*it.prefill[0].seen, *(leg for engine in it.decode for leg in engine.seen)]
                assert not any("source" in own(leg) or "deliver" in own(leg) for leg in seen)

        run(test)

    @pytest.mark.parametrize("address", [ELSEWHERE, "a socket", "x" * 256, "tcp://127.0.0.2:1"])
    def test_an_address_that_is_not_configured_does_not_reach_decode(
        self, tmp_path: Path, homes: Homes, caplog: pytest.LogCaptureFixture, address: str
    ) -> None:
        async def test() -> None:
            a, b = homes.start(A), homes.start(B)
            unix = homes.start(C)._replace(address="")
            async with kit(tmp_path, prefill=[a], decode=[b, unix], token=TOKEN) as it:
                it.prefill[0].handoff = saying(address=unix.path if address == "a socket" else address)
                with caplog.at_level(logging.WARNING):
                    for number in range(3):
                        reply = await it.ask(f"{number} {LONG}")
                        assert (reply.status, reply.verdict) == (200, "recomputed:foreign_store")
                assert not any("address" in own(leg) for engine in it.decode for leg in engine.seen)
                assert (await samples(it, "kvtally_router_foreign_addresses_total"))[""] == 3
                assert caplog.text.count("store=ADDRESS") == 1  # once, and not for each request
                it.prefill[0].handoff = saying(address=b.told)  # of any instance's store
                assert (await it.ask(f"known {LONG}")).verdict == "proved"

        run(test)

    def test_an_engine_cannot_fill_the_log_with_addresses(
        self, tmp_path: Path, homes: Homes, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def test() -> None:
            a, b = homes.start(A), homes.start(B)
            async with kit(tmp_path, prefill=[a], decode=[b], token=TOKEN) as it:
                with caplog.at_level(logging.WARNING):
                    for number in range(30):
                        it.prefill[0].handoff = saying(address=f"{ELSEWHERE}{number}")
                        await it.ask(f"{number} {LONG}")
                assert caplog.text.count("store=ADDRESS") == 16

        run(test)

    @pytest.mark.parametrize("name", [name for name, flavour in FLAVOURS.items() if not flavour.has_receipts])
    def test_other_flavours_are_told_of_no_store(self, name: str) -> None:
        flavour, params = FLAVOURS[name], {"x": 1}
        assert flavour.aimed(params, source=A, deliver=B) is params
        assert flavour.trusted(params, lambda address: False) is params

    def test_a_store_that_cannot_be_reached_is_not_named(self, tmp_path: Path, homes: Homes) -> None:
        async def test() -> None:
            a, b = homes.start(A), homes.start(B)
            gone = a._replace(path="", address=str(tmp_path / "no.sock"), told="")
            async with kit(tmp_path, prefill=[gone], decode=[b], token=TOKEN) as it:
                assert (await it.ask()).verdict == "recomputed:foreign_store"
                assert addresses(it.prefill[0].seen[0]) == addresses(it.decode[0].seen[0]) == {}
                assert (await told(it, gone))["receipts"] == "store_unreachable"

        run(test)


class TestSource:
    def test_the_next_turn_of_a_conversation_is_pulled_from_where_its_answer_was_computed(
        self, tmp_path: Path, homes: Homes
    ) -> None:
        """Prefill has seen as much of it as decode. But decode has the answer, too."""

        def body(*words: str) -> dict[str, object]:
            return {"messages": [{"role": "user", "content": word} for word in words]}

        async def test() -> None:
            a, b = homes.start(A), homes.start(B)
            async with kit(tmp_path, prefill=[a], decode=[b], token=TOKEN, prefill_from_tokens=0) as it:
                for words in ((LONG,), (LONG, "an answer", "and then?")):
                    await it.send("POST", "/v1/chat/completions", json=body(*words))
                first, second = it.prefill[0].seen
                assert addresses(first) == {"deliver": b.told}
                assert addresses(second) == {"source": b.told, "deliver": b.told}
                await it.send("POST", "/v1/chat/completions", json=body(LONG, "an answer", "and then?"))
                assert "source" not in own(it.prefill[0].seen[2])  # it has all of that

        run(test)

    def test_decode_alone_is_told_who_has_the_prompt(self, tmp_path: Path, homes: Homes) -> None:
        async def test() -> None:
            a, b = homes.start(A), homes.start(B)
            async with kit(tmp_path, prefill=[], decode=[a, b], token=TOKEN) as it:
                (first,) = [it.find((await it.ask()).headers["x-kvtally-decode"])]
                assert addresses(first.seen[0]) == {}
                member = it.router.known.fleet.find(first.name)
                assert member is not None
                member.is_draining = True
                (second,) = [engine for engine in it.decode if engine is not first]
                source = a.told if first is it.decode[0] else b.told
                second.half = lambda _, half: structs.replace(
                    half, tokens_peer=600, computed_tokens=half.prompt_tokens - 600, wait_ms=150.0, load_ms=50.0
                )
                reply = await it.ask(LONG + "and more")
                assert addresses(second.seen[0]) == {"source": source}
                assert reply.headers["x-kvtally-source"] == "peer:600"
                pulls = (await told(it, a if first is it.decode[0] else b))["pulls"]
                assert (pulls["tokens"], pulls["prompt_bytes_s"]) == (600, 600 / 0.2)
                second.half = lambda _, half: half
                await it.ask(LONG + "and more")
                assert addresses(second.seen[1]) == {}  # now it has as much itself

        run(test)

    def test_the_second_try_is_told_of_others_stores_and_not_of_its_own(self, tmp_path: Path, homes: Homes) -> None:
        async def test() -> None:
            a, b = homes.start(A), homes.start(B)
            async with kit(tmp_path, prefill=[], decode=[a, b], token=TOKEN) as it:
                holder = it.find((await it.ask()).headers["x-kvtally-decode"])
                (other,) = [engine for engine in it.decode if engine is not holder]
                holder.drops = 1
                await it.ask()
                assert addresses(holder.seen[1]) == {}
                assert addresses(other.seen[0]) == {"source": (a if holder is it.decode[0] else b).told}
                # Both have it now. The one that was drained is asked second, and pulls nothing from itself.
                longer = LONG + "and more"
                member = it.router.known.fleet.find(holder.name)
                assert member is not None
                member.is_draining = True
                await it.ask(longer)
                member.is_draining = False
                other.drops = 1
                await it.ask(longer)
                assert addresses(holder.seen[2]) == {"source": (b if holder is it.decode[0] else a).told}

        run(test)

    def test_after_a_hand_off_the_second_try_is_told_of_prefill_again(self, tmp_path: Path, homes: Homes) -> None:
        """The second engine shares prefill's store: it is told of the promise, and of no source."""

        async def test() -> None:
            a, b = homes.start(A), homes.start(B)
            async with kit(tmp_path, prefill=[a], decode=[b, a], token=TOKEN) as it:
                far, near = it.decode
                member = it.router.known.fleet.find(near.name)
                assert member is not None
                member.is_draining = True
                far.drops = 1

                def undrain(seen: Seen, answer: dict[str, Any]) -> dict[str, Any]:
                    member.is_draining = False
                    return answer

                it.prefill[0].handoff = undrain
                reply = await it.ask()
                assert addresses(it.prefill[0].seen[0]) == {"deliver": b.told}
                assert addresses(far.seen[0]) == {"address": a.told, "source": a.told}
                assert addresses(near.seen[0]) == {"address": a.told}
                assert (reply.verdict, reply.headers["x-kvtally-source"]) == ("proved", f"host:{PROMPT_TOKENS - 1}")

        run(test)

    def test_a_store_that_is_gone_is_no_source(self, tmp_path: Path, homes: Homes) -> None:
        async def test() -> None:
            a, b = homes.start(A), homes.start(B)
            async with kit(tmp_path, prefill=[], decode=[a, b], token=TOKEN) as it:
                holder = it.find((await it.ask()).headers["x-kvtally-decode"])
                home = a if holder is it.decode[0] else b
                (other,) = [engine for engine in it.decode if engine is not holder]
                await asyncio.to_thread(homes.stops[home])
                await comes_about(lambda: bool(it.router.known.stores.readers[home.address].problem))
                holder.drops = 1
                await it.ask()
                assert addresses(other.seen[0]) == {}
                row = await told(it, home)
                assert (row["receipts"], row["address"]) == ("store_unreachable", home.told)  # it may come back

        run(test)


class TestPulls:
    def test_a_pull_that_breaks_is_counted_until_one_succeeds(self, tmp_path: Path, homes: Homes) -> None:
        async def test() -> None:
            a, b = homes.start(A), homes.start(B)
            async with kit(tmp_path, prefill=[a], decode=[b], token=TOKEN) as it:
                it.decode[0].half = lambda _, half: structs.replace(
                    half, tokens_peer=0, computed_tokens=half.prompt_tokens, verified=False, reason="peer_lost"
                )
                assert (await it.ask(f"1 {LONG}")).verdict == "recomputed:peer_lost"
                pulls = (await told(it, a))["pulls"]
                assert (pulls["count"], pulls["failures"], pulls["last_failure"]) == (0, {"peer_lost": 1}, "peer_lost")
                it.decode[0].half = lambda _, half: half
                assert (await it.ask(f"2 {LONG}")).verdict == "proved"
                pulls = (await told(it, a))["pulls"]
                assert (pulls["count"], pulls["failures"], pulls["last_failure"]) == (1, {"peer_lost": 1}, "")
                counted = await samples(it, f'kvtally_router_pulls_total{{result="ok",store="{a.address}"}}')
                assert counted == {"": 1}
                counted = await samples(it, f'kvtally_router_pulls_total{{result="peer_lost",store="{a.address}"}}')
                assert counted == {"": 1}

        run(test)

    def test_one_that_dies_after_the_hand_off_is_blamed(self, tmp_path: Path, homes: Homes) -> None:
        """The router has lost it by then, and names it no more."""

        async def test() -> None:
            a, b = homes.start(A), homes.start(B)
            async with kit(tmp_path, prefill=[a], decode=[b], token=TOKEN) as it:
                reader = it.router.known.stores.readers[a.address]

                def lose(_: Seen, answer: dict[str, Any]) -> dict[str, Any]:
                    reader.problem = "store_unreachable"
                    return answer

                it.prefill[0].handoff = lose
                it.decode[0].half = lambda _, half: structs.replace(
                    half, tokens_peer=0, computed_tokens=half.prompt_tokens, verified=False, reason="peer_lost"
                )
                await it.ask()
                assert addresses(it.decode[0].seen[0]) == {"address": a.told}
                assert (await told(it, a))["pulls"]["failures"] == {"peer_lost": 1}

        run(test)

    def test_a_prefill_s_own_half_says_how_fast_it_pulled(
        self, tmp_path: Path, homes: Homes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It lies in prefill's store, which decode's half never reaches."""
        monkeypatch.setattr("kvtally.router.stores.HALF_WAIT_MS", 1)

        async def test() -> None:
            a, b = homes.start(A), homes.start(B)
            async with kit(tmp_path, prefill=[a], decode=[b], token=TOKEN, prefill_from_tokens=0) as it:
                await it.ask(LONG)
                prefill = it.prefill[0]
                longer = LONG + "and more"
                tokens = len(longer)
                prefill.handoff = saying(tokens_peer=tokens // 2, computed_tokens=tokens // 4)
                prefill.prefill_half = lambda _: Half(
                    role=Role.PREFILL, prompt_tokens=tokens, tokens_peer=tokens // 2, wait_ms=400.0, load_ms=100.0
                )
                await it.ask(longer)
                assert addresses(prefill.seen[1])["source"] == b.told
                pulls = it.router.known.stores.pulls[b.address]
                await comes_about(lambda: pulls.bytes_s > 0)
                assert pulls.bytes_s == pytest.approx(tokens // 2 / 0.5)
                assert (await told(it, b))["pulls"] == {
                    "count": 1,
                    "tokens": tokens // 2,
                    "prompt_bytes_s": round(tokens // 2 / 0.5),
                    "failures": {},
                    "last_failure": "",
                }

        run(test)

    def test_a_wait_for_prefill_is_no_slow_pull(self, tmp_path: Path, homes: Homes) -> None:
        async def test() -> None:
            a, b = homes.start(A), homes.start(B)
            async with kit(tmp_path, prefill=[a], decode=[b], token=TOKEN) as it:
                it.decode[0].half = lambda _, half: structs.replace(half, wait_ms=500.0)
                assert (await it.ask()).verdict == "proved"
                pulls = (await told(it, a))["pulls"]
                assert (pulls["count"], pulls["prompt_bytes_s"]) == (1, 0)

        run(test)

    def test_an_engine_that_computes_what_it_should_have_pulled_makes_the_store_doubtful(self) -> None:
        """Perhaps the store evicted it, or the engine's own store found pulling slower. Nobody says."""
        chosen = Candidate("i", 0, 0.0, 100.0, stored_bytes=200, pulled_bytes=900, pull_bytes_s=400.0)
        half = Half(role=Role.PREFILL, prompt_tokens=100, tokens_host=20, computed_tokens=80)
        assert computed_instead(chosen, half, 1_000)
        for other in (
            structs.replace(half, tokens_host=90, computed_tokens=10),  # its own store had it after all
            structs.replace(half, tokens_host=0, tokens_peer=70, computed_tokens=30),
        ):
            assert not computed_instead(chosen, other, 1_000)
        assert not computed_instead(replace(chosen, pull_bytes_s=50.0), half, 1_000)  # computing was the faster way
        pulls, other = Pulls(), Pulls()
        pulled = Half(role=Role.PREFILL, prompt_tokens=100, tokens_peer=50, wait_ms=500.0)
        pulls.measured(pulled, 1_000)
        assert pull_bytes_s(pulls, [pulls, other]) == pull_bytes_s(other, [pulls, other]) == 1_000.0
        pulls.counted(0, NOT_PULLED)
        assert pull_bytes_s(pulls, [pulls, other]) == 0.0
        pulls.counted(50, "")
        assert pull_bytes_s(pulls, [pulls, other]) == 1_000.0

    @pytest.mark.parametrize("reason", ["absent", "no_gain", "pending", "nonsense", ""])
    def test_what_was_not_there_says_nothing_about_pulling(self, reason: str) -> None:
        pulls = Pulls()
        pulls.counted(0, reason)
        assert (pulls.last_failure, pulls.failures) == ("", {})

    @pytest.mark.parametrize(
        ("tokens", "took_ms"), [(-5, 10.0), (0, 10.0), (5, 0.0), (5, -1.0), (5, nan), (5, inf), (5, 1e300)]
    )
    def test_nonsense_measures_nothing(self, tokens: int, took_ms: float) -> None:
        pulls = Pulls()
        pulls.measured(Half(role=Role.DECODE, prompt_tokens=10, tokens_peer=tokens, wait_ms=took_ms), 1_000)
        pulls.counted(min(tokens, 0), "")
        assert (pulls.bytes_s, pulls.count, pulls.tokens) == (0.0, 0, 0)


class TestCost:
    """Two prefill engines with stores of their own. One has the prompt, and has something else to do."""

    async def second(self, it: Kit) -> tuple[FakeVLLM, Reply, dict[str, Any]]:
        """Who prefilled a prompt first, and where it went the second time, while the first was busy."""
        holder = it.find((await it.ask(LONGER)).prefill)
        others = [engine for engine in it.prefill if engine is not holder]
        for engine in others:
            engine.drops = 1  # so that the next prompt goes to the holder, whatever it costs
        holder.pause.clear()
        holder.arrived.clear()
        members = [it.router.known.fleet.find(engine.name) for engine in others]
        for member in members:
            assert member is not None
            member.is_draining = True
        busy = asyncio.create_task(it.ask("something else " + LONGER))
        async with asyncio.timeout(HANG_S):
            await holder.arrived.wait()
        for engine, member in zip(others, members, strict=True):
            assert member is not None
            member.is_draining, engine.drops = False, 0
        asked = asyncio.create_task(it.ask(LONGER + "and more"))
        await comes_about(lambda: sum(len(engine.seen) for engine in it.prefill) == 3)
        leg = (holder.seen[2:] or others[0].seen)[0]
        holder.pause.set()
        await busy
        return holder, await asked, own(leg)

    @pytest.mark.parametrize("is_measured", [True, False])
    @pytest.mark.parametrize("can_pull", [True, False])
    def test_a_busy_holder_is_left_alone_if_its_prompt_can_be_pulled(
        self,
        tmp_path: Path,
        homes: Homes,
        monkeypatch: pytest.MonkeyPatch,
        is_measured: bool,
        can_pull: bool,
    ) -> None:
        """One request more on the holder is little to the old rule. What it costs can only be known from rates."""
        monkeypatch.setattr(Work, "bytes_s", property(lambda _: 1.0 if is_measured else 0.0))

        async def test() -> None:
            a, b, c = homes.start(A), homes.start(B), homes.start(C)
            async with kit(tmp_path, prefill=[a, b], decode=[c], token=TOKEN, prefill_from_tokens=0) as it:
                if can_pull:
                    half = Half(role=Role.DECODE, prompt_tokens=100, tokens_peer=100, wait_ms=1.0)
                    for home in (a, b, c):
                        it.router.known.stores.pulled(home.told, half, 100, is_timed=True)
                holder, reply, leg = await self.second(it)
                went_elsewhere = is_measured and can_pull
                assert (reply.prefill != holder.name) == went_elsewhere
                assert leg["source"] == c.told  # decode has the answer, too

        run(test)

    def test_what_is_under_way_is_over_however_it_ends(self, tmp_path: Path, homes: Homes) -> None:
        async def test() -> None:
            a, b = homes.start(A), homes.start(B)
            async with kit(tmp_path, prefill=[a, a], decode=[b], token=TOKEN, prefill_from_tokens=0) as it:
                members = it.router.known.fleet.prefill.members
                left = [sum(each.work.queued_bytes(0) for each in members)]
                for engine in it.prefill:
                    engine.statuses = [503]
                await it.ask(f"failed {LONG}")
                left.append(sum(each.work.queued_bytes(0) for each in members))
                for engine in it.prefill:
                    engine.pause.clear()
                task = asyncio.create_task(it.ask(f"cancelled {LONG}"))
                await comes_about(lambda: sum(len(engine.seen) for engine in it.prefill) == 3)
                assert sum(each.work.queued_bytes(0) for each in members) == len(f"cancelled {LONG}")
                task.cancel()
                await comes_about(lambda: not any(each.legs for each in members))
                left.append(sum(each.work.queued_bytes(0) for each in members))
                for engine in it.prefill:
                    engine.pause.set()
                await it.ask(f"answered {LONG}")
                left.append(sum(each.work.queued_bytes(0) for each in members))
                assert left == [0, 0, 0, 0]
                assert sum(each.work.bytes_s > 0 for each in members) == 1  # only what was answered measures

        run(test)
