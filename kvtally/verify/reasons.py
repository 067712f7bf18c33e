"""What each reason on a receipt means, in words for people, and what to do about it. Pure.

Reasons come from the store (`wire.messages.MissReason`), the connector and the router. An unknown one is shown as it
is.
"""

from __future__ import annotations

from typing import NamedTuple

from kvtally.core.receipts import Verdict
from kvtally.wire.messages import MissReason


class Explained(NamedTuple):
    what: str
    remedy: str


_LOG = "Look at the engine's log, and at `kvtally stat` for the store's side."
_STORES = (
    "On one machine, give both engines the same `store` in kv_connector_extra_config. Across machines, give each store "
    "`tcp` and `token_file`, name the other machines in its `peers`, and give the router `store=tcp://…` for each "
    "instance. `kvtally up` does all of this."
)
_CONNECTOR = (
    'Start it with --kv-transfer-config \'{"kv_connector": "KVTally", "kv_role": "kv_both"}\', and look for the '
    "line `kvtally: groups …` in its log."
)

REASONS: dict[str, Explained] = {
    MissReason.ABSENT: Explained(
        "the store does not hold the prompt: nobody saved it, or it was evicted",
        "See `kvtally stat`. If `evicted` grows, give the store more memory or a disk. If nothing is committed, the "
        "log of the engine that should have saved it says why.",
    ),
    MissReason.STATE_ABSENT: Explained(
        "attention is there, but not the recurrent state or window at the prompt's boundary",
        "See docs/vllm.md, `Recurrent models: where states are kept`; on a CPU, pass --block-size.",
    ),
    MissReason.PENDING: Explained(
        "the prompt was still being saved when decode's wait ended", "Raise connector.wait_ms, or find what is slow."
    ),
    MissReason.STAGING_FAILED: Explained(
        "a lower tier could not deliver the bytes in time", "See the tiers' states in `kvtally stat`, and the disk."
    ),
    MissReason.CHECKSUM: Explained(
        "bytes in the store did not match their identity: noticed, quarantined and computed instead",
        "Something damages memory or disk. See `quarantined` in `kvtally stat`, and test the hardware.",
    ),
    MissReason.ARENA_FULL: Explained(
        "the store's memory is full of objects in use", "Give it more: `store: {memory: ...}`."
    ),
    MissReason.LEASE_EXPIRED: Explained(
        "the engine took longer to load than its lease allowed", "The engine is overloaded. Send it fewer requests."
    ),
    MissReason.LIMIT: Explained(
        "a bound of the store, the engine or the router was reached", "Spread the load over more instances or stores."
    ),
    MissReason.STORE_UNREACHABLE: Explained(
        "the store could not be reached", "Start it, and check that the engine, or the router, names its address."
    ),
    MissReason.DEADLINE: Explained(
        "the store did not answer in time", "It is overloaded or stopped. Look at its log and its CPU time."
    ),
    MissReason.REFUSED: Explained(
        "the store refused the engine: another user, token or version",
        "Run both as the same user and version; the engine's log has the store's message.",
    ),
    MissReason.FOREIGN_STORE: Explained(
        "prefill and decode use different stores, and decode's does not pull from prefill's", _STORES
    ),
    MissReason.UNASKED: Explained(
        "nobody knows whether it was there: a pool or another store that may have it could not be asked",
        "See the states of tiers and peers in `kvtally stat`; the store's log says why it could not ask.",
    ),
    MissReason.PEER_LOST: Explained(
        "the other machine's store could not be reached, or went away while its bytes were read",
        "Check that it runs, and that decode's store reaches it; `kvtally stat` of decode's store lists its peers.",
    ),
    MissReason.FOREIGN_NAMESPACE: Explained(
        "prefill and decode differ in model, revision, dtype or KV layout, so their bytes are not interchangeable",
        "Start both with the same model and arguments: `kvtally stat` lists each store's namespaces and their models. "
        "A model from the hub and the same files in a folder are two names: give both engines one `model_identity`.",
    ),
    MissReason.UNKNOWN_ADAPTER: Explained(
        "nobody knows which bytes the request's LoRA adapter has: its files are being read, cannot be read, or have "
        "changed since the engine first saw them",
        "The engine's log says which. Give adapters as local folders, and a new version of one another name.",
    ),
    MissReason.OTHER_TOKENS: Explained(
        "prefill and decode tokenized the same text differently",
        "Give both the same tokenizer, chat template and truncation.",
    ),
    MissReason.NO_GAIN: Explained(
        "the prompt was too short for reuse: one token is always computed, and a few are computed before a load begins",
        "Nothing is wrong. Longer prompts are reused.",
    ),
    MissReason.SLOW_TIER: Explained(
        "loading it would have taken longer than computing it",
        "Nothing is wrong if the prompt is short. Otherwise a faster disk or network helps: `kvtally stat --json` has "
        "the tiers' speeds. `connector.always_load` loads anyway.",
    ),
    # an engine that gives no reason
    "unknown": Explained("the engine gave no reason", _LOG),
    # the router's own
    "no_handoff": Explained("prefill answered without a hand-off: its engine runs without the connector", _CONNECTOR),
    "bad_handoff": Explained(
        "prefill's hand-off could not be understood", "Use the same version of kvtally in the router and the engines."
    ),
    "bad_answer": Explained("prefill's answer was not one of a vLLM engine", "Check the addresses of --prefill."),
    "no_receipts": Explained(
        "this router's flavour of hand-off gives no receipts", "Only engines with the kvtally connector prove reuse."
    ),
    "not_filed": Explained(
        "decode filed no receipt: its engine runs without the connector, or with another store than the router reads",
        f"{_CONNECTOR} Give the router the store of each instance: --decode URL,store=ADDRESS.",
    ),
    "not_held": Explained(
        "decode no longer held the prompt, although it had been proved to hold it",
        "Give decode more memory for its KV cache, and the store more memory or a disk.",
    ),
    "store_refused": Explained(
        "the store refused the router: another user, token or version",
        "Run the router as the store's user, or give it the token of a store it reaches over TCP.",
    ),
}


def explain(verdict: Verdict, reason: str, *, refused: bool = False) -> Explained:
    """A sentence about a request that did not prove its reuse, and the remedy."""
    if reason.startswith("prefill_"):
        how = reason.removeprefix("prefill_").replace("_", " ")
        cause = Explained(f"prefill could not do its part ({how})", "See `/instances`, and the prefill engine's log.")
    else:
        cause = REASONS.get(reason, Explained(f"the reason given is `{reason or 'none'}`", _LOG))
    if refused:
        begin = "the strict router refused to answer"
    elif verdict is Verdict.SHORT:
        begin = "less was reused than promised"
    elif verdict is Verdict.MISSING:
        begin = "nobody knows what was reused"
    elif verdict is Verdict.LOCAL:
        begin = "nothing was handed over, decode had only what it held itself"
    else:
        begin = "nothing was reused"
    return Explained(f"{begin}: {cause.what}", cause.remedy)
