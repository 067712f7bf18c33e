"""Which stores the router names to each other, and which addresses it passes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtally.config.instances import Instance
from kvtally.core.handoff import KEY
from kvtally.core.routing import Held
from kvtally.endpoint import endpoint
from kvtally.router.flavours import FLAVOURS
from kvtally.router.fleet import Fleet
from kvtally.router.receipts import ReceiptReader
from kvtally.router.stores import Stores
from kvtally.wire.limits import Limits
from kvtally.wire.messages import PROTOCOL_VERSION, Greeting
from tests.unit.fake_vllm import FakeVLLM
from tests.unit.router_kit import LONG, kit, run

A, B = "tcp://127.0.0.2:7400", "tcp://127.0.0.3:7400"


def instance(name: str, store: str) -> Instance:
    return Instance(url=f"http://{name}", store=store, bootstrap=f"http://{name}")


def fleet_of(prefill: str, decode: str, *others: str) -> Fleet:
    fleet = Fleet(
        [instance("p:1", prefill)],
        [instance("d:1", decode), *(instance(f"d:{n}", store) for n, store in enumerate(others, 2))],
        timeout_s=1,
    )
    for member in fleet.members.values():
        member.came_up()
    return fleet


async def reader_of(address: str, told: str) -> ReceiptReader:
    reader = ReceiptReader(endpoint(address, must_resolve=False))
    reader.greeting = Greeting(PROTOCOL_VERSION, "0", "s", 1, True, Limits(), address=told)
    return reader


def test_the_store_that_has_seen_most_is_the_source() -> None:
    fleet = fleet_of(A, B, "tcp://127.0.0.4:7400")
    stores = Stores(fleet, {})
    prefill, decode = fleet.members["p:1"], fleet.members["d:1"]
    held = {"d:1": Held(500, 0), "d:2": Held(900, 0)}
    assert stores.source(prefill, held, {"p:1": Held(100, 0)}) == "tcp://127.0.0.4:7400"
    assert stores.source(prefill, held, {"p:1": Held(900, 0)}) == ""  # its own has as much
    assert stores.source(decode, {}, {"p:1": Held(100, 0)}) == A
    assert stores.source(decode, {}, {}) == ""
    assert stores.source(prefill, {"gone:1": Held(900, 0)}) == ""


def test_engines_that_share_a_store_name_none() -> None:
    fleet = fleet_of(A, A)
    stores = Stores(fleet, {})
    prefill, decode = fleet.members["p:1"], fleet.members["d:1"]
    assert stores.beside(prefill, decode) == ""
    assert stores.source(prefill, {"d:1": Held(900, 0)}) == ""


def test_an_instance_that_is_down_is_no_source() -> None:
    fleet = fleet_of(A, B)
    fleet.members["d:1"].went_down("gone")
    assert Stores(fleet, {}).source(fleet.members["p:1"], {"d:1": Held(900, 0)}) == ""


def test_a_store_is_known_by_what_it_tells_itself() -> None:
    """The router may reach it by a unix socket, or by a name that other machines do not know."""

    async def test() -> None:
        fleet = fleet_of("/run/a.sock", "tcp://db:7400")
        stores = Stores(
            fleet, {"/run/a.sock": await reader_of("/run/a.sock", A), "tcp://db:7400": await reader_of("/x", B)}
        )
        prefill, decode = fleet.members["p:1"], fleet.members["d:1"]
        assert (stores.address(prefill), stores.address(decode)) == (A, B)
        assert stores.beside(prefill, decode) == B
        assert stores.is_known(A)
        assert stores.is_known("tcp://db:7400")
        assert not stores.is_known("tcp://10.9.9.9:7400")

    run(test)


def test_a_store_without_an_address_is_never_named() -> None:
    fleet = fleet_of("/run/a.sock", B)
    stores = Stores(fleet, {})
    assert stores.source(fleet.members["d:1"], {"p:1": Held(900, 0)}) == ""
    assert not stores.is_known("")


@pytest.mark.parametrize("name", [name for name, flavour in FLAVOURS.items() if not flavour.has_receipts])
def test_other_flavours_are_told_of_no_store(name: str) -> None:
    flavour, params = FLAVOURS[name], {"x": 1}
    assert flavour.aimed(params, source=A, deliver=B) is params
    assert flavour.trusted(params, lambda address: False) is params


def test_an_address_that_is_not_configured_does_not_reach_decode() -> None:
    flavour = FLAVOURS["kvtally"]
    params = {KEY: {"ticket": "t", "role": "decode", "store": "s", "address": A}, "ids": [1]}
    assert flavour.trusted(params, lambda address: address == A) == params
    told = flavour.trusted(params, lambda address: False)
    assert told == {KEY: {"ticket": "t", "role": "decode", "store": "s"}, "ids": [1]}


def test_both_legs_name_the_other_store(tmp_path: Path) -> None:
    """Prefill hears whom to deliver to, and decode whom to pull from."""

    def say_address(address: str, engine: FakeVLLM) -> None:
        engine.handoff = lambda _, answer: {**answer, KEY: {**answer[KEY], "address": address}}

    async def test() -> None:
        async with kit(tmp_path, prefill=1, decode=1) as made:
            (prefill,), (decode,) = made.prefill, made.decode
            stores = {prefill.url: A, decode.url: B}
            for member in made.router.known.fleet.members.values():
                object.__setattr__(member, "instance", instance(member.name, stores[f"http://{member.name}"]))
            say_address(A, prefill)
            await made.ask(LONG)
            assert prefill.seen[-1].params[KEY]["deliver"] == B
            assert decode.seen[-1].params[KEY]["address"] == A
            say_address("tcp://10.9.9.9:1", prefill)
            await made.ask(LONG + " and more " * 200)
            assert "address" not in decode.seen[-1].params[KEY]

    run(test)
