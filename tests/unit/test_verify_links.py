"""Which link between two machines is broken: from what the stores say of each other, and from how they look here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvtally.cli.verify import _look as look_at
from kvtally.config import RouterConfig, StoreConfig
from kvtally.errors import CODES, IncompatibleError, KVTallyError, TransportError
from kvtally.processes import free_ports
from kvtally.store.peers import REFUSALS
from kvtally.store.server import StoreServer
from kvtally.verify.judge import Finding, Observation, Told, Turn
from kvtally.verify.links import BETWEEN_STORES, CAUSES, Errors, broken_links, errors_now, not_looked_at
from kvtally.verify.reading import Instances
from kvtally.wire.limits import MIB
from kvtally.wire.messages import MissReason
from kvtally.wire.stats import PeerStats, StoreStats
from tests.unit.shell import TOKEN, Running
from tests.unit.test_verify import Command, Deployment, deployment, run

__all__ = ["deployment", "run"]  # fixtures

A, B = "tcp://10.0.0.7:7400", "tcp://10.0.0.8:7400"
STORES = {"p:1": A, "d:1": B}
Seen = StoreStats | KVTallyError


def lost(reason: str = "peer_lost", verdict: str = "recomputed", **told: str) -> Observation:
    said = Told(request="t", verdict=verdict, reason=reason, prefill="p:1", decode="d:1")
    return Observation(case="long", turn=Turn.FIRST, prompt_tokens=9, told=msgspec.structs.replace(said, **told))


def stats(**errors: int) -> StoreStats:
    """Of decode's store, which met these errors at prefill's."""
    counts = Counter({code.replace("_", "-"): count for code, count in errors.items()})
    return StoreStats(peers=[PeerStats(name="tcp://10.0.0.9:1"), PeerStats(name=A, state="lost", errors=counts)])


def found(
    *observations: Observation,
    stores: dict[str, str] = STORES,
    before: Errors | None = None,
    reached_by: dict[str, str] | None = None,
    **looks: Seen,
) -> list[Finding]:
    """`a` and `b` are how the two stores look from here."""
    asked: list[str] = []

    def look(address: str) -> Seen:
        asked.append(address)
        return looks["a" if address == A else "b"]

    findings = broken_links(observations or [lost()], stores, look, before or {}, reached_by or {})
    assert all(finding.is_problem and finding.remedy.endswith(".") for finding in findings)
    return findings


@pytest.mark.parametrize("code", CAUSES)
def test_the_store_that_could_not_pull_says_why(code: str) -> None:
    [finding] = found(b=stats(**{code.replace("-", "_"): 3, "KV_300": 2}))
    assert finding.what == f"decode's store, {B}, cannot pull from prefill's, {A}: {CAUSES[code].what}"
    assert finding.remedy == CAUSES[code].remedy
    assert finding.requests == ["long, first"]


def test_every_cause_is_a_code_and_every_refusal_by_a_peer_that_can_be_mended_has_one() -> None:
    assert set(CAUSES) <= set(CODES)
    assert set(REFUSALS) - set(CAUSES) == {"KV-202", "KV-204", "KV-206"}  # ours to mend, not the operator's


def test_what_happened_most_is_the_cause() -> None:
    [finding] = found(b=stats(KV_502=1, KV_205=7))
    assert "different tokens" in finding.what


def test_what_happened_before_is_the_cause_only_where_nothing_new_was_met() -> None:
    [finding] = found(b=stats(KV_501=9, KV_205=2), before={(B, A): Counter({"KV-501": 9})})
    assert finding.what.endswith(CAUSES["KV-205"].what)
    [finding] = found(b=stats(KV_501=9), before={(B, A): Counter({"KV-501": 9})})  # it is left alone since
    assert finding.what.endswith(CAUSES["KV-501"].what)


def test_errors_are_read_from_every_store_that_can_be_asked() -> None:
    looks: dict[str, Seen] = {A: TransportError("gone", remedy="R."), B: stats(KV_205=2)}
    assert errors_now(STORES, looks.__getitem__) == {(B, "tcp://10.0.0.9:1"): {}, (B, A): {"KV-205": 2}}
    assert errors_now({"p:1": A, "d:1": A}, looks.__getitem__) == {}  # one store for both: nobody is asked


def test_a_store_that_never_tried_may_not() -> None:
    [finding] = found(lost("foreign_store"), b=StoreStats())
    assert "it has never tried" in finding.what
    assert "10.0.0.7" in finding.remedy


def test_a_store_is_known_to_others_by_the_address_that_it_tells() -> None:
    by_name = {"p:1": "tcp://node-a:7400", "d:1": B}
    [finding] = found(stores=by_name, reached_by={"tcp://node-a:7400": A}, b=stats(KV_205=1))
    assert (
        finding.what == f"decode's store, {B}, cannot pull from prefill's, tcp://node-a:7400: {CAUSES['KV-205'].what}"
    )


def test_a_store_without_peers_tells_none() -> None:
    [finding] = found(lost("foreign_store"), reached_by={A: "", B: B})
    assert "it tells nobody by which address" in finding.what
    assert f"`peers` of the store at {A}" in finding.remedy


def test_where_decodes_store_cannot_be_asked_prefills_is_looked_at() -> None:
    unreachable = TransportError("the store at B cannot be reached: no route", remedy="R.")
    gone = TransportError("the store at A cannot be reached", remedy="R.")
    [finding] = found(b=unreachable, a=gone)
    assert finding.what.endswith("from here, too, it cannot be asked: the store at A cannot be reached")
    [finding] = found(b=unreachable, a=StoreStats())
    assert finding.what.endswith("from here it answers")
    assert "firewall" in finding.remedy
    refused = IncompatibleError("the store at A asks for a token", remedy="Give it.", code="KV-205")
    [finding] = found(b=refused, a=refused)
    assert finding.what.endswith("from here it answers, but the store at A asks for a token")
    assert "--token-file" in finding.remedy


def test_a_code_that_says_nothing_is_no_cause() -> None:
    [finding] = found(b=stats(KV_300=9), a=StoreStats())
    assert finding.what.endswith("from here it answers")


def test_a_socket_reaches_no_other_machine() -> None:
    [finding] = found(stores={"p:1": "/run/a.sock", "d:1": B})
    assert "/run/a.sock is a socket" in finding.what
    assert "store=tcp://HOST:PORT" in finding.remedy


def test_a_router_that_cannot_read_receipts_is_a_link_too() -> None:
    [finding] = found(lost("store_unreachable", "missing"), b=TransportError("no route", remedy="R."))
    assert finding.what == f"the router cannot ask decode's store, {B}, for receipts: from here, too, it cannot be " + (
        "asked: no route"
    )


@pytest.mark.parametrize(
    "fine",
    [
        lost("checksum"),
        lost(MissReason.STORE_UNREACHABLE),  # an engine's own store: not between machines
        lost(prefill=""),
        lost(decode="unknown:1"),
        Observation(case="long", turn=Turn.FIRST, prompt_tokens=9),
    ],
)
def test_other_faults_are_no_links(fine: Observation) -> None:
    assert found(fine, a=StoreStats(), b=StoreStats()) == []


def test_one_store_for_both_has_no_link() -> None:
    assert found(stores={"p:1": A, "d:1": A}) == []


def test_each_link_is_named_once_with_all_its_requests() -> None:
    stores = {**STORES, "d:2": "tcp://10.0.0.9:7400"}
    seen = [lost(reason) for reason in BETWEEN_STORES] + [lost(decode="d:2")]
    findings = found(*seen, stores=stores, b=stats(KV_500=1))
    assert [len(finding.requests) for finding in findings] == [3, 1]


# ---- the command, with real stores


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Starts a store, and gives its address."""
    running: list[Running] = []

    def start(name: str) -> str:
        config = StoreConfig(socket=str(tmp_path / name), memory_bytes=16 * MIB, tcp="127.0.0.1:0", token=TOKEN)
        running.append(Running(StoreServer(config)))
        return f"tcp://127.0.0.1:{running[-1].server.tcp_port}"

    yield start
    for each in running:
        each.stop()


def test_a_store_is_asked_with_the_token_it_wants(store: Callable[[str], str]) -> None:
    address = store("s")
    assert isinstance(look_at(address, RouterConfig(token=TOKEN)), StoreStats)
    for wrong in ("", "another token of that length"):
        said = look_at(address, RouterConfig(token=wrong))
        assert isinstance(said, IncompatibleError)
        assert said.code == "KV-205"
    gone = look_at(f"tcp://127.0.0.1:{free_ports(1)[0]}", RouterConfig(token=TOKEN))
    assert isinstance(gone, TransportError)
    assert "onnection refused" in gone.message
    assert "[KV-" not in gone.message
    assert isinstance(look_at("nonsense://", RouterConfig()), KVTallyError)


def test_the_command_names_the_broken_link(
    deployment: Deployment, run: Command, store: Callable[[str], str], tmp_path: Path
) -> None:
    deployment.has.add("loses")
    gone = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    deployment.stores = {"decode": store("d"), "prefill": gone}
    token = tmp_path / "token"
    token.write_text(TOKEN)
    code, out = run("--token-file", str(token))
    said = " ".join(out.split())
    assert code == 1
    assert f"problem: decode's store, {deployment.stores['decode']}, cannot pull from prefill's, {gone}: it has" in said
    code, out = run()  # without the token, it is seen from here
    assert "from here, too, it cannot be asked" in " ".join(out.split())
    deployment.has.discard("loses")
    code, out = run()
    assert (code, "cannot pull" in out) == (0, False)


def test_what_a_router_tells_of_its_stores() -> None:
    read = msgspec.convert({"instances": [], "stores": {A: {"address": A, "new": 1}, B: {"address": ""}}}, Instances)
    assert read.reached_by == {A: A, B: ""}
    assert msgspec.convert({"instances": [], "stores": {A: "ok"}}, Instances).reached_by == {}  # of the version before


def test_nobody_need_look() -> None:
    [finding] = broken_links([lost()], STORES, not_looked_at, errors_now(STORES, not_looked_at), {})
    assert "cannot be asked" in finding.what
