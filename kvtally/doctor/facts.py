"""What is known about connectors, routers, models and versions; `docs/doctor.md` says where each fact comes from."""

from __future__ import annotations

import re
from enum import StrEnum

from kvtally.doctor.model import Connector, Instance, Router

Version = tuple[int, ...]


class Family(StrEnum):
    """How a connector's bytes get from prefill to decode."""

    NIXL = "NIXL, pulled by decode"
    NIXL_PUSH = "NIXL, pushed by prefill"
    MOONCAKE = "Mooncake transfer engine"
    ASCEND = "Mooncake of vllm-ascend"
    MORIIO = "MoRI-IO"
    LMCACHE = "LMCache in the engine's process"
    LMCACHE_PD = "LMCache's own P/D mode"
    LMCACHE_MP = "LMCache server"
    OFFLOADING = "vLLM's offloading tiers"
    POOL = "a shared pool"
    FILES = "a shared directory"
    KVTALLY = "a kvtally store"
    LOCAL = "the engine's own host memory"
    GONE = "removed from vLLM"
    UNKNOWN = "unknown"


FAMILIES = {
    "NixlConnector": Family.NIXL,
    "NixlPullConnector": Family.NIXL,
    "NixlPushConnector": Family.NIXL_PUSH,
    "MooncakeConnector": Family.MOONCAKE,
    "MooncakeConnectorV1": Family.ASCEND,
    "MoRIIOConnector": Family.MORIIO,
    "LMCacheConnectorV1": Family.LMCACHE,
    "LMCacheConnectorV1Dynamic": Family.LMCACHE,
    "LMCacheConnector": Family.GONE,
    "LMCacheMPConnector": Family.LMCACHE_MP,
    "OffloadingConnector": Family.OFFLOADING,
    "MooncakeStoreConnector": Family.POOL,
    "FlexKVConnectorV1": Family.POOL,
    "HF3FSKVConnector": Family.POOL,
    "ExampleConnector": Family.FILES,
    "SharedStorageConnector": Family.FILES,
    "KVTally": Family.KVTALLY,
    "SimpleCPUOffloadConnector": Family.LOCAL,
    "HiSparseConnector": Family.LOCAL,
    "DecodeBenchConnector": Family.LOCAL,
    "ExampleHiddenStatesConnector": Family.LOCAL,
    "P2pNcclConnector": Family.GONE,
    "PyNcclConnector": Family.GONE,
}

# Families whose hand-over needs something in the requests themselves: a router that drops it breaks them.
NEED_PARAMETERS = frozenset(
    {
        *(Family.NIXL, Family.NIXL_PUSH, Family.MOONCAKE, Family.ASCEND, Family.MORIIO),
        Family.LMCACHE_PD,
    }
)
# Families that use vLLM's own block hashes as keys of something shared.
KEYED_BY_VLLM = frozenset({Family.OFFLOADING, Family.POOL, Family.FILES})
# Connectors without SupportsHMA in vLLM 0.32: hybrid models do not start with them, or lose prefix caching.
WITHOUT_HMA = frozenset({"LMCacheConnectorV1", "LMCacheConnectorV1Dynamic", "FlexKVConnectorV1", "HF3FSKVConnector"})

# What each router's setting carries from prefill's answer to decode's request. Families that need nothing pass through
# all of them. A setting that is not listed is unknown, and no rule judges it.
CARRIES: dict[str, dict[str, frozenset[Family]]] = {
    "kthena": {
        "http": frozenset(),
        "lmcache": frozenset(),
        "nixl": frozenset({Family.NIXL}),
        "mooncake": frozenset({Family.ASCEND}),
    },
    "llm-d": {
        "nixlv2": frozenset({Family.NIXL}),
        "nixl": frozenset({Family.NIXL}),
        "shared-storage": frozenset(),
        "lmcache": frozenset(),
        "mooncake": frozenset({Family.MOONCAKE}),
    },
    "production-stack": {
        "disaggregated_prefill": frozenset(),
        "disaggregated_prefill_orchestrated": frozenset({Family.NIXL}),
    },
    "kvtally": {
        "kvtally": frozenset(),
        "lmcache": frozenset(),
        "plain": frozenset(),
        "nixl": frozenset({Family.NIXL}),
        "nixl-push": frozenset({Family.NIXL_PUSH}),
        "mooncake": frozenset({Family.MOONCAKE}),
    },
    "proxy": {"toy_proxy_server.py": frozenset({Family.NIXL})},
}
PLAIN_BALANCERS = frozenset({"roundrobin", "session", "prefixaware", "kvaware", "ttft"})  # of production-stack

KTHENA_CONNECTORS = {
    "LMCacheConnectorV1": "lmcache",
    "NixlConnector": "nixl",
    "MooncakeConnector": "mooncake",
    "MooncakeConnectorV1": "mooncake",
}
KTHENA_PLAIN_HTTP = frozenset({"http", "lmcache"})

TRANSFER_FIELDS = frozenset(
    {
        *("kv_connector", "engine_id", "kv_buffer_device", "kv_role", "kv_port", "kv_connector_extra_config"),
        *("kv_connector_module_path", "enable_permute_local_kv", "kv_load_failure_policy"),
        *("kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip"),  # of older versions
    }
)
ROLES = {"kv_producer", "kv_consumer", "kv_both"}

LONGEST_NAME = 300  # of what is looked at in a model's or an image's name
LMCACHE_CHUNK = 256
NIXL_LEASE_S = 30
WILDCARD = frozenset({"0.0.0.0", "::", "*"})
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"}) | WILDCARD
FAST_TRANSPORTS = ("rc", "dc", "ib", "ud", "cuda_ipc", "rocm", "ze_", "srd", "gga", "all")

_HYBRID = re.compile(
    r"qwen3[-_.]?next|qwen3\.[5-9]|qwen3[5-9]|jamba|bamba|zamba|nemotron-?(h|3|nano-.*v2)|granite-?4.*-h|falcon-?h1|"
    r"kimi-?(linear|k3)|minimax-(text-01|m1)|lfm2|plamo-?2|mamba",
    re.IGNORECASE,
)
_IN_TAG = re.compile(r"(vllm|lmcache|nixl|mooncake)[-_a-z]*?[-_=:]+v?(\d+\.\d+(?:\.\d+)?)", re.IGNORECASE)


def family(connector: Connector, instance: Instance) -> Family:
    module = connector.fields.get("kv_connector_module_path")
    if module and "ascend" in module.text:
        return Family.ASCEND
    found = FAMILIES.get(connector.name, Family.UNKNOWN)
    if module and found is not Family.LMCACHE and not module.text.startswith(("kvtally", "lmcache")):
        return Family.UNKNOWN  # somebody's own class, whatever it is called
    if found is Family.LMCACHE and (mode := instance.lmcache.get("enable_pd")) and mode.is_true:
        return Family.LMCACHE_PD
    return found


def carries(router: Router) -> frozenset[Family] | None:
    """What a router hands over; None if nothing is known about its setting."""
    known = CARRIES.get(router.kind, {})
    if router.kind == "kthena" and router.speaks.text not in known:
        return known["http"]  # what its factory falls back to
    return known.get(router.speaks.text)


def is_hybrid(model: str) -> bool:
    """Whether a model of this name has recurrent state. A name can mislead, so rules say `likely`."""
    return _HYBRID.search(model.rpartition("/")[2][:LONGEST_NAME]) is not None


def versions(image: str) -> dict[str, Version]:
    """The versions in an image's name: vllm, lmcache, nixl, mooncake."""
    image = image[:LONGEST_NAME]
    name, _, tag = image.rpartition("/")[2].partition(":")
    found = {match[1].lower(): _version(match[2]) for match in _IN_TAG.finditer(tag)}
    if match := re.match(r"v?(\d+\.\d+(?:\.\d+)?)", tag):
        if image.startswith("lmcache/") or "lmcache" in name:
            found.setdefault("lmcache", _version(match[1]))
        elif "vllm" in name:
            found.setdefault("vllm", _version(match[1]))
    return found


def _version(text: str) -> Version:
    return tuple(int(part) for part in text.split("."))
