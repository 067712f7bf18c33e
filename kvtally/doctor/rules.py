"""The rules: what would keep reuse from happening, or make it wrong. One small function each, in one table. Pure.

A rule yields a `Hit` for each thing that it finds; the table adds why it matters, the remedy, the source of the fact
and how sure we are. A value that is still a template is not judged: rules ask `Value.is_known`. To add a rule, write it
here, give it a row in `tests/unit/test_doctor_rules.py`, and a line in `docs/doctor.md`.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from enum import StrEnum

import msgspec

from kvtally.doctor.facts import (
    FAMILIES,
    FAST_TRANSPORTS,
    KEYED_BY_VLLM,
    KTHENA_CONNECTORS,
    KTHENA_PLAIN_HTTP,
    LMCACHE_CHUNK,
    LOOPBACK,
    NEED_PARAMETERS,
    NIXL_LEASE_S,
    PLAIN_BALANCERS,
    ROLES,
    TRANSFER_FIELDS,
    WILDCARD,
    WITHOUT_HMA,
    Family,
    carries,
    family,
    is_hybrid,
    versions,
)
from kvtally.doctor.model import Connector, Deployment, Instance, Role, Value


class Level(StrEnum):
    """From grave to harmless. A note is worth knowing, but no reason to act."""

    PROBLEM = "problem"  # reuse does not happen, answers may be wrong, or an engine does not start
    RISK = "risk"  # it works until something happens
    NOTE = "note"


class Sure(StrEnum):
    CERTAIN = "certain"
    LIKELY = "likely"
    POSSIBLE = "possible"


class Hit(msgspec.Struct):
    """What a rule found. Empty fields are the rule's own."""

    what: str
    evidence: list[Value]
    level: Level | None = None
    sure: Sure | None = None
    remedy: str = ""


class Options(msgspec.Struct, frozen=True):
    """What the person who asks knows and no file says."""

    prompt_tokens: int | None = None  # of a typical prompt


Check = Callable[[Deployment, Options], Iterator[Hit]]


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    title: str
    level: Level
    sure: Sure
    why: str
    remedy: str
    source: str
    check: Check


class Finding(msgspec.Struct, kw_only=True):
    """A hit together with its rule: everything there is to say."""

    rule: str
    title: str
    level: Level
    sure: Sure
    deployment: str
    what: str
    evidence: list[Value]
    why: str
    remedy: str
    source: str


RULES: list[Rule] = []


def rule(
    name: str, title: str, level: Level, sure: Sure, *, why: str, remedy: str, source: str
) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        RULES.append(
            Rule(name=name, title=title, level=level, sure=sure, why=why, remedy=remedy, source=source, check=check)
        )
        return check

    return register


def judge(deployment: Deployment, asked: Options) -> list[Finding]:
    """Everything that is found in a deployment: the gravest and surest first, then in the order of the table."""
    findings = [
        Finding(
            rule=each.name,
            title=each.title,
            level=hit.level or each.level,
            sure=hit.sure or each.sure,
            deployment=deployment.name,
            what=hit.what,
            evidence=hit.evidence,
            why=each.why,
            remedy=hit.remedy or each.remedy,
            source=each.source,
        )
        for each in RULES
        for hit in each.check(deployment, asked)
    ]
    levels, sures = list(Level), list(Sure)
    return sorted(findings, key=lambda found: (levels.index(found.level), sures.index(found.sure)))


# ---- what rules ask


def _families(instance: Instance) -> set[Family]:
    return {family(connector, instance) for connector in instance.connectors()}


def _using(deployment: Deployment, *wanted: Family) -> list[Instance]:
    return [instance for instance in deployment.instances if _families(instance) & set(wanted)]


def _differing(
    deployment: Deployment, wanted: Callable[[Instance], bool], read: Callable[[Instance], Value | None]
) -> Iterator[tuple[Instance, Instance, Value, Value]]:
    """The first pair of engines whose known values differ. A value that is not given never differs."""
    for first, second in deployment.pairs():
        if wanted(first) and wanted(second):
            one, two = read(first), read(second)
            if one and two and one.is_known and two.is_known and one.text != two.text:
                yield first, second, one, two
                return


def _flag(name: str) -> Callable[[Instance], Value | None]:
    return lambda instance: instance.flags.get(name)


def _connected(instance: Instance) -> bool:
    return bool(instance.connectors())


def _shared_key(instance: Instance) -> bool:
    """Whether other processes must compute the same keys to find what it caches."""
    return bool(_families(instance) & {Family.LMCACHE, Family.LMCACHE_PD, *KEYED_BY_VLLM})


def _model(instance: Instance) -> Value | None:
    return instance.flags.get("model")


def _version(instance: Instance, package: str) -> tuple[int, ...] | None:
    return versions(instance.image.text).get(package) if instance.image and instance.image.is_known else None


def _runs_on_cpu(instance: Instance) -> Value | None:
    """What says that an engine computes on a CPU."""
    if (device := instance.flags.get("device")) and device.text == "cpu":
        return device
    if instance.image and "cpu" in instance.image.text.rpartition("/")[2]:
        return instance.image
    return next((value for name, value in instance.env.items() if name.startswith("VLLM_CPU_")), None)


def _say(instances: Sequence[Instance]) -> str:
    return " and ".join(instance.name for instance in instances[:3]) + (" …" if len(instances) > 3 else "")


# ---- is there a connector at all, and can it be read


@rule(
    "bad-transfer-config",
    "kv-transfer-config cannot be read",
    Level.PROBLEM,
    Sure.CERTAIN,
    why="The engine, or the operator that starts it, refuses it; nothing is handed over.",
    remedy='Write one JSON object, as a string: \'{"kv_connector": "…", "kv_role": "…"}\'.',
    source="vLLM 0.32 config/kv_transfer.py; Kthena convert/model_server.go",
)
def bad_transfer_config(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    for instance in deployment.instances:
        connector = instance.connector
        if connector is None:
            continue
        if connector.problem:
            yield Hit(f"{instance.name}: {connector.problem}", [Value(connector.text, connector.place)])
        elif not connector.name:
            yield Hit(f"{instance.name}: it names no kv_connector", [connector.evidence])


@rule(
    "unknown-transfer-field",
    "kv-transfer-config has a field that vLLM does not know",
    Level.PROBLEM,
    Sure.LIKELY,
    why="vLLM refuses unknown fields, so the engine does not start; or an older one ignores what was meant.",
    remedy="Compare it with the fields of KVTransferConfig; a connector's own go into kv_connector_extra_config.",
    source="vLLM 0.32 config/kv_transfer.py",
)
def unknown_transfer_field(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    for instance in deployment.instances:
        for connector in instance.connectors():
            for name, value in connector.fields.items():
                if name not in TRANSFER_FIELDS:
                    yield Hit(f"{instance.name}: {name!r} is not one of its fields", [value])


@rule(
    "no-connector",
    "an engine of a P/D deployment has no connector",
    Level.PROBLEM,
    Sure.CERTAIN,
    why="Without one it neither hands over nor takes over any KV: decode computes every prompt again.",
    remedy="Give every prefill and decode engine the same --kv-transfer-config.",
    source="vLLM 0.32 config/kv_transfer.py",
)
def no_connector(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    if not deployment.is_disaggregated:
        return
    for instance in deployment.instances:
        if instance.connector is None:
            sure = Sure.POSSIBLE if instance.unseen else Sure.CERTAIN
            yield Hit(f"{instance.name} has no --kv-transfer-config", [Value(instance.name, instance.place)], sure=sure)


@rule(
    "unknown-connector",
    "vLLM has no connector of this name",
    Level.PROBLEM,
    Sure.LIKELY,
    why="The engine does not start: vLLM loads connectors by these names, or from kv_connector_module_path.",
    remedy="Check the spelling, or add kv_connector_module_path.",
    source="vLLM 0.32 kv_connector/factory.py; P2pNcclConnector was removed in vLLM#44854",
)
def unknown_connector(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    for instance in deployment.instances:
        for connector in instance.connectors():
            found = family(connector, instance)
            is_ours = "kv_connector_module_path" in connector.fields
            if not connector.name or not connector.evidence.is_known or is_ours or connector.name == "MultiConnector":
                continue
            if found is Family.GONE:
                yield Hit(f"{instance.name}: {connector.name} was removed from vLLM", [connector.evidence])
            elif found is Family.UNKNOWN:
                near = get_close_matches(connector.name, FAMILIES, n=1, cutoff=0.8)
                meant = f"; {near[0]} is" if near else ", though a plug-in may add it"
                level, sure = (None, None) if near else (Level.RISK, Sure.POSSIBLE)
                text = f"{instance.name}: {connector.name} is not a connector of vLLM 0.32{meant}"
                yield Hit(text, [connector.evidence], level=level, sure=sure)


# ---- do the two sides fit


@rule(
    "connectors-differ",
    "prefill and decode use different connectors",
    Level.PROBLEM,
    Sure.CERTAIN,
    why="What one connector hands over, another cannot take: decode computes every prompt again.",
    remedy="Use the same connector on both sides; for two at once, the same MultiConnector.",
    source="vLLM 0.32 kv_connector/v1",
)
def connectors_differ(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    if not deployment.is_disaggregated:
        return
    for prefill, decode in deployment.pairs():
        one, two = prefill.connectors(), decode.connectors()
        if any(not each.name or not each.evidence.is_known for each in (*one, *two)):
            continue
        if one and two and not {each.name for each in one} & {each.name for each in two}:
            if _families(prefill) & _families(decode):
                continue  # NixlConnector is another name of NixlPullConnector
            yield Hit(
                f"{prefill.name} uses {one[0].name}, {decode.name} uses {two[0].name}",
                [one[0].evidence, two[0].evidence],
            )
            return


@rule(
    "kv-role",
    "kv_role does not fit what the engine is for",
    Level.PROBLEM,
    Sure.CERTAIN,
    why="Prefill must produce (kv_producer or kv_both) and decode consume (kv_consumer or kv_both); without a kv_role "
    "vLLM does not start.",
    remedy="prefill: kv_producer, decode: kv_consumer; or kv_both on both.",
    source="vLLM 0.32 config/kv_transfer.py; Kthena convert/model_server.go",
)
def kv_role(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    wrong = {Role.PREFILL: "kv_consumer", Role.DECODE: "kv_producer"}
    for instance in deployment.instances:
        for connector in [*instance.connectors(), *([instance.connector] if instance.connector else [])]:
            if connector.problem or not connector.name or not connector.evidence.is_known:
                continue
            role = connector.fields.get("kv_role")
            if role is None:
                yield Hit(f"{instance.name}: {connector.name} has no kv_role", [connector.evidence])
            elif role.is_known and role.text not in ROLES:
                yield Hit(f"{instance.name}: {role.text!r} is not a kv_role", [role])
            elif role.is_known and role.text == wrong.get(instance.role):
                yield Hit(f"{instance.name} is for {instance.role} and has kv_role {role.text}", [role])
            else:
                continue
            break


@rule(
    "one-sided",
    "there is nobody to hand over to, or to take over from",
    Level.PROBLEM,
    Sure.LIKELY,
    why="A producer without a consumer, or a consumer without a producer, reuses nothing.",
    remedy="Give doctor the files of both sides; if there is only one, use kv_both.",
    source="vLLM 0.32 config/kv_transfer.py",
)
def one_sided(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        alone = [instance for instance in deployment.instances if instance.role is role]
        if alone and not deployment.having(other):
            said = alone[0].connector.fields.get("kv_role") if alone[0].connector else None
            evidence = said or Value(alone[0].name, alone[0].place)
            yield Hit(f"{_say(alone)}: for {role}, and there is no {other} engine", [evidence])


@rule(
    "no-shared-backend",
    "prefill and decode share no cache",
    Level.PROBLEM,
    Sure.CERTAIN,
    why="Each engine writes to memory or files of its own. Requests pass through both and are answered, but decode "
    "finds nothing and computes every prompt again.",
    remedy="Configure a backend that both reach: for LMCache LMCACHE_REMOTE_URL (redis://…); for the "
    "OffloadingConnector a secondary tier on a shared directory; for kvtally one store.",
    source="kthena#1069 and its follow-up; LMCache 0.5.6 v1/config.py; vLLM 0.32 v1/kv_offload",
)
def no_shared_backend(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    if not deployment.is_disaggregated:
        return  # engines that do both may well keep their caches to themselves
    for first, second in deployment.pairs():
        shared = [one for one in first.connectors() if _matches(one, first, second)]
        if not shared:
            continue
        # One path that works is enough: MultiConnector may add a cache of each engine's own.
        reasons = [_unshared(connector, first, second) for connector in shared]
        if all(reason is not None for reason in reasons):
            reason = next(reason for reason in reasons if reason is not None)
            if first.unseen or second.unseen:
                reason.sure = Sure.POSSIBLE
                reason.evidence += (first.unseen or second.unseen)[:1]
            yield reason
            return


def _matches(connector: Connector, first: Instance, second: Instance) -> bool:
    return family(connector, first) in _families(second)


def _unshared(connector: Connector, first: Instance, second: Instance) -> Hit | None:
    """Why one engine cannot find what this connector saves in the other; None if it can, or the files do not tell."""
    kind = family(connector, first)
    other = next((each for each in second.connectors() if family(each, second) is kind), connector)
    evidence = [connector.evidence, other.evidence]
    apart = first.where.is_apart_from(second.where)
    if kind is Family.LOCAL:
        return Hit(f"{connector.name} keeps KV in the memory of each engine's own process", evidence)
    if kind is Family.LMCACHE:
        return _unshared_lmcache(first, second, evidence)
    if kind is Family.OFFLOADING:
        return _unshared_tiers(connector, first, other, second, evidence)
    if kind is Family.FILES:
        path = connector.extra.get("shared_storage_path")
        return _unshared_path(path.text if path else "/tmp", first, second, [path] if path else evidence)
    if kind is Family.LMCACHE_MP:
        hosts = [each.extra.get("lmcache.mp.host") for each in (connector, other)]
        names = {(host.text if host else "tcp://localhost").removeprefix("tcp://") for host in hosts}
        if apart and names <= LOOPBACK:
            return Hit(
                f"{first.name} and {second.name} each use an LMCache server on their own loopback interface",
                [host for host in hosts if host] or evidence,
                sure=Sure.POSSIBLE,
                remedy="Give both the address of one server (lmcache.mp.host), or servers with one shared L2 adapter, "
                "or P2P.",
            )
    if kind is Family.KVTALLY:
        return _unshared_store(connector, other, first, second, evidence)
    return None


def _unshared_lmcache(first: Instance, second: Instance, evidence: list[Value]) -> Hit | None:
    places = [_lmcache_backend(instance) for instance in (first, second)]
    missing = [instance for instance, place in zip((first, second), places, strict=True) if place is None]
    if missing:
        text = "LMCache keeps KV in each engine's own memory: LMCACHE_REMOTE_URL is not set"
        return Hit(f"{text} for {_say(missing)}", evidence)
    one, two = places
    if one and two and one.is_known and two.is_known and one.text != two.text:
        return Hit(f"LMCache's backends differ: {one.text} and {two.text}", [one, two])
    if one and one.text.startswith(("file://", "/")):
        return _unshared_path(one.text.removeprefix("file://"), first, second, [one])
    return None


def _lmcache_backend(instance: Instance) -> Value | None:
    """Where LMCache puts what others may read."""
    for name in ("remote_url", "remote_storage_plugins", "enable_p2p", "p2p_host", "nixl_backend", "gds_path"):
        if (value := instance.lmcache.get(name)) and value.text.lower() not in ("", "null", "none", "false"):
            return value
    if disk := instance.lmcache.get("local_disk"):
        return Value(disk.text, disk.place) if disk.text.startswith(("file://", "/")) else None
    return None


def _unshared_tiers(
    connector: Connector, first: Instance, other: Connector, second: Instance, evidence: list[Value]
) -> Hit | None:
    tiers = [{name: value for name, value in each.extra.items() if "tiers" in name} for each in (connector, other)]
    if not all(tiers) and "spec_module_path" not in connector.extra:
        return Hit("OffloadingConnector without a secondary tier keeps KV in each engine's own host memory", evidence)
    roots = [
        next((value for name, value in tier.items() if name.endswith(("root_dir", ".path"))), None) for tier in tiers
    ]
    one, two = roots
    if one and two and one.is_known and two.is_known:
        if one.text != two.text:
            return Hit(f"the secondary tiers are different directories: {one.text} and {two.text}", [one, two])
        return _unshared_path(one.text, first, second, [one, two])
    return None


def _unshared_path(path: str, first: Instance, second: Instance, evidence: list[Value]) -> Hit | None:
    """Whether two engines that name the same directory see the same files."""
    sources = [_mounted(path, instance) for instance in (first, second)]
    if first.where.is_apart_from(second.where) is not True:
        return None
    if None in sources or sources[0] != sources[1] or str(sources[0]).startswith("emptyDir"):
        seen = " and ".join(source or "the container's own files" for source in dict.fromkeys(sources))
        return Hit(f"{path} is not one directory in both: it is {seen}", evidence)
    if str(sources[0]).startswith("hostPath"):
        return Hit(
            f"{path} is a hostPath: one directory only if both run on the same node",
            evidence,
            level=Level.RISK,
            sure=Sure.POSSIBLE,
        )
    return None


def _mounted(path: str, instance: Instance) -> str | None:
    inside = [point for point in instance.mounts if os.path.commonpath([point, path or "/"]) == point]
    return instance.mounts[max(inside, key=len)] if inside else None


def _unshared_store(
    connector: Connector, other: Connector, first: Instance, second: Instance, evidence: list[Value]
) -> Hit | None:
    sockets = [each.extra.get("store") or each.extra.get("kvtally.store") for each in (connector, other)]
    one, two = sockets
    if one and two and one.is_known and two.is_known and one.text != two.text:
        return Hit(f"the engines use two stores: {one.text} and {two.text}", [one, two])
    if first.where.is_apart_from(second.where):
        if one is None:
            return Hit("no store is named, so each pod starts its own", evidence, sure=Sure.LIKELY)
        return _unshared_path(os.path.dirname(one.text), first, second, [one])
    return None


@rule(
    "router-drops-parameters",
    "the router does not hand over what the connector needs",
    Level.PROBLEM,
    Sure.CERTAIN,
    why="This connector needs kv_transfer_params (or more) in decode's request. The router sends the plain request: "
    "every answer is right, and decode computes every prompt again, or fails.",
    remedy="Use the router's setting for this connector, a connector that needs nothing from the router, or "
    "`kvtally route --flavour …`.",
    source="Kthena connectors/factory.go; llm-d-router pkg/sidecar/proxy; production-stack request.py; LMCache 0.5.6",
)
def router_drops_parameters(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    if not deployment.is_disaggregated:
        return
    needed = {
        (need, connector.name): connector.evidence
        for instance in deployment.instances
        for connector in instance.connectors()
        if (need := family(connector, instance)) in NEED_PARAMETERS
    }
    for router in deployment.routers:
        carried = carries(router)
        if carried is None or not router.speaks.is_known:
            continue
        for (need, name), evidence in needed.items():
            if need not in carried:
                setting = f"{router.kind}'s {router.speaks.text!r}"
                shown = [evidence] if router.is_derived else [router.speaks, evidence]
                yield Hit(f"{name} ({need}) behind {setting}, which does not speak it", shown)


@rule(
    "router-not-disaggregating",
    "the router balances load and knows no prefill and decode",
    Level.PROBLEM,
    Sure.LIKELY,
    why="Requests go to any engine, prefill or decode; nobody computes a prompt in one and generates in the other.",
    remedy="routingLogic: disaggregated_prefill, or disaggregated_prefill_orchestrated for connectors with parameters.",
    source="production-stack src/vllm_router/parsers/parser.py",
)
def router_not_disaggregating(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    for router in deployment.routers:
        if router.kind == "production-stack" and router.speaks.text in PLAIN_BALANCERS and deployment.is_disaggregated:
            yield Hit(f"routingLogic is {router.speaks.text}", [router.speaks])


@rule(
    "admission-refuses",
    "Kthena's admission refuses this connector",
    Level.PROBLEM,
    Sure.CERTAIN,
    why="A ModelBooster of type vLLMDisaggregated takes four connectors; with any other it is rejected when it is "
    "applied.",
    remedy=f"Use one of {', '.join(sorted(KTHENA_CONNECTORS))}; for others write a ModelServing and a ModelServer.",
    source="Kthena convert/model_server.go, webhook/model_validator.go (2026-08)",
)
def admission_refuses(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    if deployment.kind != "Kthena ModelBooster" or not deployment.is_disaggregated:
        return
    for role in (Role.PREFILL, Role.DECODE):
        same = [instance for instance in deployment.instances if instance.role is role]
        if len(same) > 1:
            yield Hit(f"there are {len(same)} {role} workers, at most one is allowed", [Value(role, same[1].place)])
    for instance in deployment.instances:
        connector = instance.connector
        if connector and connector.name and connector.evidence.is_known and connector.name not in KTHENA_CONNECTORS:
            yield Hit(f"{instance.name}: {connector.name}", [connector.evidence])


# ---- LMCache


def _chunk(instance: Instance) -> tuple[int, list[Value]]:
    value = instance.lmcache.get("chunk_size")
    return (value.number or LMCACHE_CHUNK, [value]) if value and value.number else (LMCACHE_CHUNK, [])


@rule(
    "chunk-over-prompt",
    "shorter prompts are never stored",
    Level.NOTE,
    Sure.CERTAIN,
    why="LMCache stores whole chunks. A prompt that is shorter than one stores nothing, and of a longer one the rest "
    "after the last whole chunk is computed again.",
    remedy="Test with prompts of several chunks; for short ones lower LMCACHE_CHUNK_SIZE, the same on both sides.",
    source="LMCache 0.5.6 v1/config.py (chunk_size 256); kthena#1069's follow-up",
)
def chunk_over_prompt(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    for instance in _using(deployment, Family.LMCACHE, Family.LMCACHE_MP):
        if (unfull := instance.lmcache.get("save_unfull_chunk")) and unfull.is_true:
            continue
        tokens, said = _chunk(instance)
        partial = [
            each.extra["discard_partial_chunks"]
            for each in instance.connectors()
            if "discard_partial_chunks" in each.extra
        ]
        evidence = [*said, *partial] or [instance.connectors()[0].evidence]
        longest = instance.flags.get("max_model_len")
        if longest and longest.number and longest.number < tokens:
            text = f"max_model_len {longest.number} is less than a chunk of {tokens} tokens: nothing is ever stored"
            yield Hit(text, [longest, *evidence], level=Level.PROBLEM)
        elif asked.prompt_tokens is not None and asked.prompt_tokens < tokens:
            text = f"prompts of {asked.prompt_tokens} tokens are shorter than a chunk of {tokens}: nothing is stored"
            yield Hit(text, evidence, level=Level.PROBLEM)
        else:
            yield Hit(f"prompts under {tokens} tokens store nothing", evidence)
        return


@rule(
    "hash-seed",
    "processes may name the same tokens differently",
    Level.RISK,
    Sure.LIKELY,
    why="The keys are made with Python's hash, or with vLLM's, whose seed is random in each process unless "
    "PYTHONHASHSEED is set. What one engine stores, another then never finds.",
    remedy="Set PYTHONHASHSEED to the same number for every engine.",
    source="LMCache 0.5.6 (pre_caching_hash_algorithm builtin), LMCache#1095, #2136; vLLM#51875",
)
def hash_seed(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    shared = [instance for instance in deployment.instances if _needs_seed(instance)]
    is_several = len(shared) > 1 or any(instance.replicas > 1 for instance in shared)
    for _, _, one, two in _differing(deployment, _needs_seed, lambda each: each.env.get("PYTHONHASHSEED")):
        yield Hit(f"PYTHONHASHSEED is {one.text} and {two.text}", [one, two], level=Level.PROBLEM, sure=Sure.CERTAIN)
        return
    missing = [
        instance
        for instance in shared
        if instance.env.get("PYTHONHASHSEED", Value("random", instance.place)).text == "random"
    ]
    if is_several and missing:
        sure = Sure.POSSIBLE if any(instance.unseen for instance in missing) else None
        evidence = [connector.evidence for instance in missing for connector in instance.connectors()[:1]]
        yield Hit(f"PYTHONHASHSEED is not set for {_say(missing)}", evidence[:2], sure=sure)


def _needs_seed(instance: Instance) -> bool:
    if _families(instance) & {Family.LMCACHE, Family.LMCACHE_PD}:
        algorithm = instance.lmcache.get("pre_caching_hash_algorithm")
        return algorithm is None or algorithm.text == "builtin"
    if not _families(instance) & KEYED_BY_VLLM:
        return False
    algorithm = instance.flags.get("prefix_caching_hash_algo")
    if algorithm and algorithm.text.startswith("xxhash"):
        return True
    version = _version(instance, "vllm")
    return version is not None and version < (0, 28)


@rule(
    "lmcache-settings-differ",
    "LMCache is configured differently on the two sides",
    Level.PROBLEM,
    Sure.CERTAIN,
    why="Chunks of another size have other keys, and bytes in another format cannot be read: nothing is found, or it "
    "is wrong.",
    remedy="Use the same settings on every engine.",
    source="LMCache 0.5.6 v1/config.py",
)
def lmcache_settings_differ(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    def uses(instance: Instance) -> bool:
        return bool(_families(instance) & {Family.LMCACHE, Family.LMCACHE_PD})

    defaults = {"chunk_size": str(LMCACHE_CHUNK), "remote_serde": "naive", "pre_caching_hash_algorithm": "builtin"}
    for name, default in defaults.items():

        def read(instance: Instance, name: str = name, default: str = default) -> Value:
            return instance.lmcache.get(name) or Value(default, instance.place)

        for first, second, one, two in _differing(deployment, uses, read):
            given = [value for value in (one, two) if value.place not in (first.place, second.place)]
            yield Hit(f"{name} is {one.text} in {first.name} and {two.text} in {second.name}", given or [one, two])


@rule(
    "lmcache-lossy",
    "stored KV is compressed with loss",
    Level.RISK,
    Sure.LIKELY,
    why="Answers after a hit are not those that the engine would have computed.",
    remedy="Use the serde naive, unless the loss was measured and accepted.",
    source="LMCache#717",
)
def lmcache_lossy(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    for instance in _using(deployment, Family.LMCACHE):
        if (serde := instance.lmcache.get("remote_serde")) and serde.text.lower() in ("cachegen", "kivi"):
            yield Hit(f"{instance.name}: remote_serde {serde.text}", [serde])
            return


@rule(
    "lmcache-pd-unsafe",
    "decode may read KV that has not arrived",
    Level.PROBLEM,
    Sure.LIKELY,
    why="Without the proxy's notification nothing says when the bytes have landed: the receiver lists a chunk before "
    "it is written. The default back end (async) needs the notification and does not start without a proxy.",
    remedy="Leave pd_skip_proxy_notification out and use a proxy that waits, or share a backend instead of enable_pd.",
    source="LMCache 0.5.6 v1/storage_backend/pd_backend*.py",
)
def lmcache_pd_unsafe(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    for instance in _using(deployment, Family.LMCACHE_PD):
        if (skip := instance.lmcache.get("pd_skip_proxy_notification")) and skip.is_true:
            yield Hit(f"{instance.name}: pd_skip_proxy_notification", [skip])
            return


@rule(
    "lmcache-two-modes",
    "an LMCache server stands beside engines that do not use it",
    Level.PROBLEM,
    Sure.CERTAIN,
    why="`lmcache server` serves LMCacheMPConnector only. LMCacheConnectorV1 runs LMCache inside the engine and never "
    "asks it.",
    remedy="Use LMCacheMPConnector in the engines.",
    source="LMCache#4213",
)
def lmcache_two_modes(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    servers = [service for service in deployment.services if service.kind == "lmcache server"]
    users = _using(deployment, Family.LMCACHE, Family.LMCACHE_PD)
    if servers and users and not _using(deployment, Family.LMCACHE_MP):
        evidence = [Value("lmcache server", servers[0].place), users[0].connectors()[0].evidence]
        yield Hit(f"{_say(users)} run LMCache in their own process", evidence)


@rule(
    "lmcache-on-cpu",
    "in-process LMCache does not work on a CPU",
    Level.PROBLEM,
    Sure.CERTAIN,
    why="It finds no connector for a CPU. The engine keeps serving, every lookup waits 3 s for nothing, and there are "
    "no hits.",
    remedy="Use LMCacheMPConnector with `lmcache server`, or kvtally.",
    source="measured with LMCache 0.5.6 and vLLM 0.32",
)
def lmcache_on_cpu(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    for instance in _using(deployment, Family.LMCACHE, Family.LMCACHE_PD):
        if said := _runs_on_cpu(instance):
            yield Hit(f"{instance.name} runs on a CPU", [said, instance.connectors()[0].evidence])


@rule(
    "hybrid-unsupported",
    "this connector cannot serve a model with recurrent state",
    Level.PROBLEM,
    Sure.LIKELY,
    why="Hybrid models need a connector that supports several KV groups. With this one vLLM turns its hybrid cache "
    "manager off, and models with Mamba or linear attention do not start.",
    remedy="Use NixlConnector, LMCacheMPConnector (with --separate-object-groups), OffloadingConnector or KVTally.",
    source="vLLM 0.32 config/vllm.py (SupportsHMA); vLLM#42620; LMCache#2845",
)
def hybrid_unsupported(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    for instance in deployment.instances:
        model = _model(instance)
        for connector in instance.connectors():
            if model and is_hybrid(model.text) and connector.name in WITHOUT_HMA:
                yield Hit(f"{instance.name}: {model.text} with {connector.name}", [model, connector.evidence])


@rule(
    "lmcache-hybrid-default",
    "LMCache's default stores wrong recurrent state",
    Level.PROBLEM,
    Sure.LIKELY,
    why="Without --separate-object-groups the server stores the state of skipped boundaries as if it were real. A hit "
    "on a shared prefix then loads a wrong state: HTTP 200, clean logs, wrong answers.",
    remedy="Start `lmcache server` with --separate-object-groups.",
    source="measured with LMCache 0.5.6; LMCache#4247, #4437",
)
def lmcache_hybrid_default(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    users = [
        instance
        for instance in _using(deployment, Family.LMCACHE_MP)
        if (model := _model(instance)) and is_hybrid(model.text)
    ]
    if not users:
        return
    model = users[0].flags["model"]
    servers = [service for service in deployment.services if service.kind == "lmcache server"]
    for server in servers:
        if "separate_object_groups" not in server.flags:
            evidence = [Value("lmcache server", server.place), model]
            yield Hit(f"{model.text} is hybrid, and the server has no --separate-object-groups", evidence)
    if not servers:
        yield Hit(
            f"{model.text} is hybrid; the LMCache server's flags are in none of these files",
            [model],
            level=Level.RISK,
            sure=Sure.POSSIBLE,
        )


@rule(
    "plain-http",
    "kvConnector: lmcache means plain HTTP",
    Level.NOTE,
    Sure.CERTAIN,
    why="Kthena's router serves `lmcache` with its HTTP connector: prefill, then decode, nothing handed over. That is "
    "right for LMCache with a shared backend, and does nothing for LMCache's own P/D mode.",
    remedy="Nothing to do where a shared backend is configured.",
    source="Kthena connectors/factory.go; kthena#1069, kthena#1502",
)
def plain_http(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    for router in deployment.routers:
        if router.kind == "kthena" and router.speaks.text in KTHENA_PLAIN_HTTP - {"http"}:
            made = [
                connector.evidence for each in _using(deployment, Family.LMCACHE) for connector in each.connectors()
            ]
            if router.is_derived and made:
                yield Hit("the ModelServer that Kthena makes of this has kvConnector: lmcache", made[:1])
            else:
                yield Hit("the ModelServer has kvConnector: lmcache", [router.speaks])


@rule(
    "lmcache-in-process",
    "in-process LMCache is being retired",
    Level.NOTE,
    Sure.CERTAIN,
    why="Its maintainers no longer develop LMCacheConnectorV1 and recommend the server (LMCacheMPConnector).",
    remedy="Plan to move; the server needs no PYTHONHASHSEED.",
    source="LMCache#3927, #3956, #5147",
)
def lmcache_in_process(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    for instance in _using(deployment, Family.LMCACHE, Family.LMCACHE_PD)[:1]:
        yield Hit(f"{instance.name} uses {instance.connectors()[0].name}", [instance.connectors()[0].evidence])


# ---- what decides the bytes


@rule(
    "model-differs",
    "prefill and decode do not name the same model",
    Level.PROBLEM,
    Sure.CERTAIN,
    why="The model's name is part of every key and of NIXL's handshake: under another name, or another path to the "
    "same files, nothing is found.",
    remedy="Start every engine with the same --model, written the same way.",
    source="vLLM 0.32 nixl/metadata.py, v1/kv_offload/file_mapper.py; LMCache 0.5.6 keys",
)
def model_differs(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    for first, second, one, two in _differing(deployment, _connected, _model):
        is_same_end = one.text.rstrip("/").rpartition("/")[2] == two.text.rstrip("/").rpartition("/")[2]
        detail, remedy = "the same name, other paths" if is_same_end else "two models", ""
        are_folders = [value.text.startswith(("/", ".", "~")) for value in (one, two)]
        if is_same_end and any(are_folders) and _families(first) | _families(second) == {Family.KVTALLY}:
            if all(are_folders) or _have_one_identity(first, second):
                return  # kvtally knows a folder by its bytes, wherever it lies
            detail = "a folder, which kvtally knows by its bytes, and a name on the hub, which it knows by its commit"
            remedy = "Load both from folders or both from the hub, or give both engines the same `model_identity`."
        level = None if deployment.is_disaggregated else Level.NOTE
        yield Hit(f"{one.text} and {two.text}: {detail}", [one, two], level=level, remedy=remedy)


def _have_one_identity(*instances: Instance) -> bool:
    """Whether the user has named the weights of these engines, and by one name."""
    extras = [connector.extra for instance in instances for connector in instance.connectors()]
    named = [extra.get("model_identity") or extra.get("kvtally.model_identity") for extra in extras]
    return None not in named and len({value.text for value in named if value is not None}) == 1


@rule(
    "revision-differs",
    "prefill and decode may run different weights",
    Level.PROBLEM,
    Sure.LIKELY,
    why="Keys carry the model's name, not its weights. KV that other weights computed is loaded without any error, "
    "and the answers are wrong.",
    remedy="Pin the same --revision (a commit) on every engine.",
    source="vLLM 0.32 nixl/metadata.py (model name, not weights)",
)
def revision_differs(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    for name in ("revision", "quantization", "load_format"):
        for first, second in deployment.pairs():
            one, two = first.flags.get(name), second.flags.get(name)
            if not (_connected(first) and _connected(second)) or (one is None and two is None):
                continue
            said = [value for value in (one, two) if value is not None]
            if any(not value.is_known for value in said) or (one and two and one.text == two.text):
                continue
            texts = [value.text if value else "not given" for value in (one, two)]
            level = Level.PROBLEM if one and two else Level.RISK
            yield Hit(f"--{name.replace('_', '-')}: {texts[0]} and {texts[1]}", said, level=level)
            return


@rule(
    "served-name-differs",
    "prefill and decode answer to different model names",
    Level.PROBLEM,
    Sure.CERTAIN,
    why="A router sends the same request to both; one of them answers 404.",
    remedy="Use the same --served-model-name.",
    source="vLLM's OpenAI server",
)
def served_name_differs(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    if deployment.is_disaggregated:
        for _, _, one, two in _differing(deployment, _connected, _flag("served_model_name")):
            if not set(one.text.split()) & set(two.text.split()):
                yield Hit(f"{one.text} and {two.text}", [one, two])


@rule(
    "dtype-differs",
    "prefill and decode compute with different types",
    Level.PROBLEM,
    Sure.CERTAIN,
    why="KV of another type is refused (NIXL's handshake), not found, or read as garbage.",
    remedy="Use the same --dtype and --kv-cache-dtype on both sides.",
    source="vLLM 0.32 nixl/metadata.py",
)
def dtype_differs(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    for name in ("dtype", "kv_cache_dtype"):

        def read(instance: Instance, name: str = name) -> Value | None:
            return instance.flags.get(name) or Value("auto", instance.place)

        for first, second, one, two in _differing(deployment, _connected, read):
            is_auto = "auto" in (one.text, two.text)  # --dtype auto may well come to the same
            level, sure = (Level.RISK, Sure.POSSIBLE) if is_auto and name == "dtype" else (None, None)
            given = [value for value in (one, two) if value.place not in (first.place, second.place)]
            text = f"--{name.replace('_', '-')}: {one.text} and {two.text}"
            yield Hit(text, given or [one, two], level=level, sure=sure)


@rule(
    "tensor-parallel-differs",
    "prefill and decode have different tensor parallel sizes",
    Level.PROBLEM,
    Sure.CERTAIN,
    why="Each rank stores its own share of the heads. With another number of ranks the shares do not fit: nothing is "
    "found. NIXL can translate where one size divides the other.",
    remedy="Use the same --tensor-parallel-size, or NixlConnector with sizes that divide one another.",
    source="LMCache 0.5.6 keys (world size); vLLM 0.32 kv_connector/utils.py, v1/kv_offload/file_mapper.py",
)
def tensor_parallel_differs(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    def read(instance: Instance) -> Value:
        given = instance.flags.get("tensor_parallel_size") or instance.flags.get("tp")
        return given or Value("1", instance.place)

    translated = {
        Family.NIXL,
        Family.NIXL_PUSH,
        Family.MOONCAKE,
        Family.ASCEND,
        Family.POOL,
        Family.UNKNOWN,
        Family.MORIIO,
    }
    for first, second, one, two in _differing(deployment, _connected, read):
        sizes = sorted((one.number or 1, two.number or 1))
        both = _families(first) & _families(second)
        if not sizes[0] or both & {Family.POOL, Family.UNKNOWN, Family.ASCEND, Family.MORIIO}:
            continue
        if both & translated and sizes[1] % sizes[0] == 0:
            continue
        if any("canonical_layout" in each.extra for each in first.connectors()):
            continue
        yield Hit(f"{first.name} has {one.text}, {second.name} has {two.text}", [one, two])


@rule(
    "block-size-differs",
    "prefill and decode have different block sizes",
    Level.PROBLEM,
    Sure.CERTAIN,
    why="Caches that use vLLM's block hashes as keys find nothing; NIXL needs one size to be a multiple of the other.",
    remedy="Use the same --block-size.",
    source="vLLM 0.32 kv_connector/utils.py, v1/core/kv_cache_utils.py",
)
def block_size_differs(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    for first, second, one, two in _differing(deployment, _connected, _flag("block_size")):
        both = _families(first) & _families(second)
        sizes = sorted((one.number or 1, two.number or 1))
        if both & {*KEYED_BY_VLLM, Family.KVTALLY} or (both & {Family.NIXL} and sizes[1] % max(sizes[0], 1)):
            yield Hit(f"{first.name} has {one.text}, {second.name} has {two.text}", [one, two])


@rule(
    "layout-differs",
    "prefill and decode lay KV out differently",
    Level.PROBLEM,
    Sure.LIKELY,
    why="The same bytes mean something else under another attention backend or KV layout. NIXL refuses the handshake; "
    "caches that do not check return garbage.",
    remedy="Use the same attention backend and KV cache layout on both sides.",
    source="vLLM 0.32 nixl/metadata.py; vLLM#55907; LMCache#4463",
)
def layout_differs(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    def backend(instance: Instance) -> Value | None:
        return instance.flags.get("attention_backend") or instance.env.get("VLLM_ATTENTION_BACKEND")

    for what, read in (
        ("attention backend", backend),
        ("VLLM_KV_CACHE_LAYOUT", lambda instance: instance.env.get("VLLM_KV_CACHE_LAYOUT")),
    ):
        for _, _, one, two in _differing(deployment, _connected, read):
            yield Hit(f"{what}: {one.text} and {two.text}", [one, two])


@rule(
    "hash-algorithm-differs",
    "prefill and decode hash blocks differently",
    Level.PROBLEM,
    Sure.CERTAIN,
    why="The hash is the key of the shared cache: what one side stores, the other never finds.",
    remedy="Use the same --prefix-caching-hash-algo; sha256_cbor does not depend on Python.",
    source="vLLM 0.32 v1/core/kv_cache_utils.py",
)
def hash_algorithm_differs(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    for _, _, one, two in _differing(deployment, _shared_key, _flag("prefix_caching_hash_algo")):
        yield Hit(f"{one.text} and {two.text}", [one, two])


# ---- versions


@rule(
    "versions-differ",
    "prefill and decode run different versions",
    Level.PROBLEM,
    Sure.LIKELY,
    why="NIXL's handshake includes vLLM's version and refuses another one; caches may have changed their keys or "
    "layout.",
    remedy="Use one image for both.",
    source="vLLM 0.32 nixl/metadata.py",
)
def versions_differ(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    for first, second in deployment.pairs():
        if not (first.image and second.image and _connected(first) and _connected(second)):
            continue
        one, two = versions(first.image.text), versions(second.image.text)
        changed = [name for name in one if name in two and one[name] != two[name]]
        if changed:
            texts = [".".join(map(str, each[changed[0]])) for each in (one, two)]
            yield Hit(f"{changed[0]} {texts[0]} and {texts[1]}", [first.image, second.image])
            return


@rule(
    "versions-known-bad",
    "these versions are known not to work together",
    Level.PROBLEM,
    Sure.LIKELY,
    why="Reports of reuse that is silently wrong, or that never happens.",
    remedy="Use LMCache 0.5.6 or later with vLLM 0.26 or later.",
    source="LMCache#4463, #4247, #1803; dynamo#14416",
)
def versions_known_bad(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    for instance in _using(deployment, Family.LMCACHE, Family.LMCACHE_PD, Family.LMCACHE_MP):
        vllm, lmcache = _version(instance, "vllm"), _version(instance, "lmcache")
        if instance.image is None or lmcache is None:
            continue
        if vllm and vllm >= (0, 26) and lmcache < (0, 5, 6):
            text = "vLLM 0.26 changed the KV layout; LMCache before 0.5.6 was seen to return wrong KV with it"
            yield Hit(text, [instance.image])
            return
        if lmcache == (0, 3, 7):
            yield Hit("LMCache 0.3.7 reports no hits for identical requests", [instance.image], level=Level.RISK)
            return


# ---- how bytes travel


@rule(
    "side-channel-loopback",
    "decode cannot reach prefill's NIXL side channel",
    Level.PROBLEM,
    Sure.CERTAIN,
    why="Prefill tells decode this address for the handshake. From another pod or machine a loopback or wildcard "
    "address leads to decode itself: the handshake fails, and every request is recomputed or fails.",
    remedy="Set VLLM_NIXL_SIDE_CHANNEL_HOST to the pod's address: valueFrom: {fieldRef: {fieldPath: status.podIP}}.",
    source="vLLM 0.32 envs.py, nixl/pull_scheduler.py; vLLM#27083, #53018",
)
def side_channel_loopback(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    for prefill, decode in deployment.pairs():
        if not _families(prefill) & _families(decode) & {Family.NIXL, Family.NIXL_PUSH}:
            continue
        apart = prefill.where.is_apart_from(decode.where)
        host = prefill.env.get("VLLM_NIXL_SIDE_CHANNEL_HOST")
        if apart is False or (apart is None and host is None):
            continue
        sure = None if apart else Sure.POSSIBLE
        if prefill.unseen and host is None:
            sure = Sure.POSSIBLE
        if host is None:
            text = f"VLLM_NIXL_SIDE_CHANNEL_HOST is not set for {prefill.name}: its default is localhost"
            yield Hit(text, [prefill.connectors()[0].evidence], sure=sure)
            return
        if host.is_known and (host.text in LOOPBACK or host.text.startswith("127.")) and apart:
            is_wildcard = host.text in WILDCARD
            yield Hit(f"VLLM_NIXL_SIDE_CHANNEL_HOST is {host.text}", [host], sure=Sure.LIKELY if is_wildcard else sure)
            return


@rule(
    "side-channel-port",
    "two engines on one machine use the same NIXL port",
    Level.PROBLEM,
    Sure.CERTAIN,
    why="The second engine cannot bind it and does not start; or it answers for the first.",
    remedy="Give each engine its own VLLM_NIXL_SIDE_CHANNEL_PORT; each data parallel rank takes one more.",
    source="vLLM 0.32 envs.py (default 5600)",
)
def side_channel_port(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    for first, second in deployment.pairs():
        both = _families(first) & _families(second)
        if not both & {Family.NIXL, Family.NIXL_PUSH} or first.where.is_apart_from(second.where) is not False:
            continue
        ports = [each.env.get("VLLM_NIXL_SIDE_CHANNEL_PORT") for each in (first, second)]
        texts = [port.text if port else "5600" for port in ports]
        if texts[0] == texts[1] and all(port is None or port.is_known for port in ports):
            evidence = [port for port in ports if port] or [
                first.connectors()[0].evidence,
                second.connectors()[0].evidence,
            ]
            yield Hit(f"{first.name} and {second.name}: port {texts[0]}", evidence)
            return


@rule(
    "same-engine-id",
    "two engines have the same engine_id",
    Level.PROBLEM,
    Sure.LIKELY,
    why="Peers tell engines apart by it; with one id for two, decode takes prefill for itself.",
    remedy="Leave engine_id out: vLLM makes one.",
    source="vLLM 0.32 config/kv_transfer.py, nixl/base_worker.py",
)
def same_engine_id(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    for first, second in deployment.pairs():
        if not (first.connector and second.connector):
            continue
        one, two = (each.connector.fields.get("engine_id") for each in (first, second) if each.connector)
        if one and two and one.is_known and one.text == two.text:
            yield Hit(f"{first.name} and {second.name}: {one.text}", [one, two])
            return


@rule(
    "ucx-tcp",
    "KV travels over TCP",
    Level.RISK,
    Sure.LIKELY,
    why="UCX_TLS names no RDMA and no CUDA IPC. Gigabytes of KV then go through the kernel, often slower than "
    "computing the prompt again; without cuda_copy GPU memory cannot be sent at all.",
    remedy="Leave UCX_TLS out, or name the fast ones: rc,cuda_copy,cuda_ipc,sm,self.",
    source="NIXL's UCX back end; vLLM docs on NixlConnector",
)
def ucx_tcp(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    for instance in _using(deployment, Family.NIXL, Family.NIXL_PUSH, Family.LMCACHE_PD):
        transports = instance.env.get("UCX_TLS")
        if not transports or not transports.is_known or transports.text.startswith("^") or _runs_on_cpu(instance):
            continue
        names = [name.strip() for name in transports.text.lower().split(",")]
        if "tcp" in names and not any(name.startswith(FAST_TRANSPORTS) for name in names):
            yield Hit(f"{instance.name}: UCX_TLS={transports.text}", [transports])
            return


@rule(
    "expandable-segments",
    "GPU memory may move under the connector",
    Level.RISK,
    Sure.POSSIBLE,
    why="With expandable_segments PyTorch may remap memory that a connector has registered; transfers then fail or "
    "read stale pages. vLLM 0.32 refuses the combination at start.",
    remedy="Remove expandable_segments:True from PYTORCH_CUDA_ALLOC_CONF.",
    source="vLLM 0.32 config/vllm.py (_verify_kv_transfer_compat)",
)
def expandable_segments(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    for instance in deployment.instances:
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            value = instance.env.get(name)
            if not (value and "expandable_segments:true" in value.text.lower() and _connected(instance)):
                continue
            if "enable_sleep_mode" in instance.flags:
                continue
            version = _version(instance, "vllm")
            is_refused = version is not None and version >= (0, 32)
            level, sure = (Level.PROBLEM, Sure.CERTAIN) if is_refused else (None, None)
            yield Hit(f"{instance.name}: {name}={value.text}", [value], level=level, sure=sure)
            return


@rule(
    "no-shm",
    "/dev/shm is too small for several ranks",
    Level.RISK,
    Sure.LIKELY,
    why="A container's /dev/shm has 64 MiB unless it is mounted. The ranks of one engine talk through it, and "
    "LMCache's server or a CPU engine passes KV through it: they fail at start or under load.",
    remedy="Mount an emptyDir with medium: Memory at /dev/shm (compose: shm_size; docker: --shm-size or --ipc=host).",
    source="vLLM docs on Docker and Kubernetes; LMCache#4394",
)
def no_shm(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    for instance in deployment.instances:
        size = instance.flags.get("tensor_parallel_size") or instance.flags.get("tp")
        if size and size.is_known and (size.number or 1) > 1 and not instance.has_shm:
            sure = Sure.POSSIBLE if deployment.kind == "Kthena ModelBooster" else None
            yield Hit(f"{instance.name}: tensor parallel size {size.text}, no volume at /dev/shm", [size], sure=sure)
            return


# ---- failures


@rule(
    "load-failure-policy",
    "a failed load fails the request",
    Level.NOTE,
    Sure.CERTAIN,
    why="kv_load_failure_policy is `fail`, vLLM's default: where KV cannot be loaded (prefill restarted, a key was "
    "evicted between lookup and load) the client gets an error instead of a recomputed answer.",
    remedy='Set "kv_load_failure_policy": "recompute", unless errors are wanted to notice failures.',
    source="vLLM 0.32 config/kv_transfer.py; vLLM#34896; vllm-ascend#15060",
)
def load_failure_policy(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    consumers = [instance for instance in deployment.having(Role.DECODE) if instance.connector]
    for instance in consumers:
        if instance.connector is None or instance.connector.problem:
            continue
        policy = instance.connector.fields.get("kv_load_failure_policy")
        evictable = _families(instance) & {*KEYED_BY_VLLM, Family.LMCACHE, Family.LMCACHE_MP}
        if policy and policy.text == "fail":
            yield Hit(f"{instance.name}: set to fail", [policy], level=Level.RISK if evictable else None)
            return
        version = _version(instance, "vllm")
        is_old = version is not None and version < (0, 17)  # its default was recompute
        if policy is None and not is_old and _families(instance) - {Family.KVTALLY, Family.UNKNOWN}:
            yield Hit(f"{instance.name}: not set, and its default is fail", [instance.connector.evidence])
            return


@rule(
    "short-lease",
    "prefill may drop KV before decode fetches it",
    Level.RISK,
    Sure.LIKELY,
    why="Prefill keeps a prompt's blocks for the lease (30 s by default) until decode has queued the request and "
    "renews it. A request that waits longer in front of decode finds them gone.",
    remedy="Raise kv_lease_duration above the longest time that a request may wait in the router's and decode's queue.",
    source="vLLM 0.32 nixl/base_scheduler.py (kv_lease_duration)",
)
def short_lease(deployment: Deployment, asked: Options) -> Iterator[Hit]:
    for instance in _using(deployment, Family.NIXL, Family.NIXL_PUSH):
        given = [each.extra["kv_lease_duration"] for each in instance.connectors() if "kv_lease_duration" in each.extra]
        if "VLLM_NIXL_ABORT_REQUEST_TIMEOUT" in instance.env:
            given.append(instance.env["VLLM_NIXL_ABORT_REQUEST_TIMEOUT"])
        for lease in given:
            if lease.number is None:
                continue
            waits = [router.timeout_s for router in deployment.routers if router.timeout_s]
            longer = [wait for wait in waits if (wait.number or 0) > lease.number]
            if lease.number < NIXL_LEASE_S or longer:
                than = f"the router waits {longer[0].text} s" if longer else f"the default is {NIXL_LEASE_S} s"
                yield Hit(f"{instance.name}: a lease of {lease.text} s, {than}", [lease, *longer])
                return
