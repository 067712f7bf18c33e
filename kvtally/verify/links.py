"""Which store cannot be reached from where, and why: for prompts that were lost on the way between two machines.

    observations: peer_lost, unasked, foreign_store ─▶ the two stores, by the router's /instances
                  ─▶ what decode's store says about prefill's; else how the two look from here

Pure, but for `look`. Neighbours: `run` (gives the observations), `cli.verify` (looks at stores), `judge` (everything
else that is found).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from kvtally.core.receipts import Verdict
from kvtally.errors import IncompatibleError, KVTallyError, TransportError
from kvtally.verify.judge import Finding, Observation
from kvtally.verify.reasons import Explained
from kvtally.wire.messages import MissReason
from kvtally.wire.stats import StoreStats

BETWEEN_STORES = frozenset({MissReason.PEER_LOST, MissReason.UNASKED, MissReason.FOREIGN_STORE})
TO_THE_ROUTER = frozenset({MissReason.STORE_UNREACHABLE, "store_refused"})
OVER_TCP = "tcp://"
# By the code with which one store lost another.
CAUSES = {
    "KV-200": Explained(
        "TLS between the two does not work",
        "Give every store tls_cert, tls_key and peers_ca, or none of them. The certificate of each must be for the "
        "address by which the others reach it.",
    ),
    "KV-201": Explained(
        "they are of different versions", "Install the same version of kvtally on both machines, and restart both."
    ),
    "KV-205": Explained(
        "it is refused, because the two have different tokens",
        "Give both stores the same token_file, and restart them.",
    ),
    "KV-210": Explained(
        "it is refused, because it is not on the other's list of peers",
        "Name each machine in the `peers` of the other's store, by the address from which its connections come.",
    ),
    "KV-500": Explained(
        "nothing accepts connections there",
        "Check that the store runs, that its `tcp` is this address and port, and that no firewall refuses it.",
    ),
    "KV-501": Explained(
        "there is no answer",
        "Check the firewall and the routes between the two machines, and that the store is not stopped.",
    ),
    "KV-502": Explained("it closes the connection", "Look at its log; it may be restarting again and again."),
    "KV-503": Explained("what answers there is no store", "Check the address, and the port of its `tcp`."),
    "KV-604": Explained(
        "questions are answered, but bytes do not come",
        "They travel on a port of their own, `bulk`, by default the one after `tcp`: it must be open, too.",
    ),
}

Errors = Mapping[tuple[str, str], Counter[str]]  # which store, at which other one -> how often, by code
Look = Callable[[str], StoreStats | KVTallyError]  # what a store says of itself, or why it cannot be asked from here


def not_looked_at(address: str) -> KVTallyError:
    """A `Look` for whoever cannot reach any store."""
    return TransportError(f"nobody looked at {address}", remedy="Look there.")


def errors_now(stores: Mapping[str, str], look: Look) -> Errors:
    """What each store that can be asked has met at others so far. `stores`: the address of each instance's."""
    addresses = set(stores.values())
    if len(addresses) < 2:
        return {}
    seen = {address: look(address) for address in addresses}
    return {
        (address, peer.name): Counter(peer.errors)
        for address, stats in seen.items()
        if isinstance(stats, StoreStats)
        for peer in stats.peers
    }


def broken_links(
    observations: Sequence[Observation],
    stores: Mapping[str, str],
    look: Look,
    before: Errors,
    reached_by: Mapping[str, str],
) -> list[Finding]:
    """One finding for each link on which prompts or receipts were lost. `before`: the errors of earlier. `reached_by`:
    the address by which others reach a store, as it says itself."""
    lost: dict[tuple[str, str], list[str]] = {}  # who cannot reach what -> requests
    for seen in observations:
        told = seen.told
        if told is None:
            continue
        source, reader = stores.get(told.prefill, ""), stores.get(told.decode, "")
        if told.reason in BETWEEN_STORES and source and reader and source != reader:
            lost.setdefault((reader, source), []).append(f"{seen.case}, {seen.turn}")
        elif told.reason in TO_THE_ROUTER and told.verdict == Verdict.MISSING and reader:
            lost.setdefault(("", reader), []).append(f"{seen.case}, {seen.turn}")
    findings = []
    for (reader, source), requests in lost.items():
        if reader:
            cause, remedy = _between(reader, source, look, before, reached_by.get(source, source))
            what = f"decode's store, {reader}, cannot pull from prefill's, {source}: {cause}"
        else:
            cause, remedy = _from_here(source, look)
            what = f"the router cannot ask decode's store, {source}, for receipts: {cause}"
        findings.append(Finding(what=what, remedy=remedy, requests=requests))
    return findings


def _between(reader: str, source: str, look: Look, before: Errors, address: str) -> Explained:
    """Why one store cannot pull from another, which is reached by this address: what it met there most, since the
    errors before or else ever."""
    for store in (source, reader):
        if not store.startswith(OVER_TCP):
            return Explained(
                f"{store} is a socket, which only its own machine can reach",
                "Give every store `tcp`, `token_file` and `peers`, and the router `store=tcp://HOST:PORT` for each "
                "instance.",
            )
    if not address:
        return Explained(
            "it tells nobody by which address to pull from it, because it has no peers",
            f"Name the machines that pull from it in `peers` of the store at {source}.",
        )
    said = look(reader)
    if not isinstance(said, StoreStats):
        return _from_here(source, look)
    errors = next((Counter(peer.errors) for peer in said.peers if peer.name == address), None)
    if errors is None:
        host = address.removeprefix(OVER_TCP).rpartition(":")[0].strip("[]")
        return Explained(
            f"it has never tried, because {address} is not on its list of peers",
            f"Name {host} in `peers` of the store at {reader}.",
        )
    since = errors - before.get((reader, address), Counter())
    for code, _ in [*since.most_common(), *errors.most_common()]:
        if code in CAUSES:
            return CAUSES[code]
    return _from_here(source, look)


def _from_here(store: str, look: Look) -> Explained:
    """How a store looks from here, where nobody who should reach it can be asked."""
    said = look(store)
    if isinstance(said, StoreStats):
        return Explained(
            "from here it answers",
            "Check the way to it from the other machine: a firewall for the ports of `tcp` and `bulk`, the token, TLS.",
        )
    if isinstance(said, IncompatibleError):  # it answers
        return Explained(
            f"from here it answers, but {said.message}",
            f"{said.remedy} Then `kvtally verify` (--token-file, --store-ca) can ask the stores about each other.",
        )
    return Explained(f"from here, too, it cannot be asked: {said.message}", CAUSES["KV-500"].remedy)
