"""Each rule of `kvtally doctor` on a deployment that breaks it, and on the nearest one that does not."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import NamedTuple

import pytest

from kvtally.doctor.model import Deployment
from kvtally.doctor.readers import assemble, read
from kvtally.doctor.rules import RULES, Finding, Level, Options, judge

DOCS = Path(__file__).parents[2] / "docs" / "doctor.md"
PACKAGE = Path(__file__).parents[2] / "kvtally" / "doctor"
NIXL = "NixlConnector"
LMCACHE = "LMCacheConnectorV1"
REDIS = {"LMCACHE_REMOTE_URL": "redis://cache:6379", "PYTHONHASHSEED": "0"}
FS_TIER = {"secondary_tiers": [{"type": "fs", "root_dir": "/kv"}]}
HYBRID = "Qwen/Qwen3-Next-80B-A3B-Instruct"


def service(
    name: str,
    connector: str | None,
    *,
    role: str | None = None,
    flags: str = "",
    env: dict[str, str] | None = None,
    extra: dict[str, object] | None = None,
    fields: dict[str, object] | None = None,
    model: str = "Qwen/Qwen3-8B",
    image: str = "vllm/vllm-openai:v0.32.0",
    **more: object,
) -> dict[str, object]:
    """One service of a compose file: an engine that is told where its NIXL side channel is."""
    config = {
        "kv_connector": connector,
        "kv_role": role or ("kv_producer" if name == "prefill" else "kv_consumer"),
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra or {},
        **(fields or {}),
    }
    transfer = ["--kv-transfer-config", json.dumps({key: value for key, value in config.items() if value is not None})]
    return {
        "image": image,
        "command": ["vllm", "serve", model, *(transfer if connector else []), *flags.split()],
        "environment": {"VLLM_NIXL_SIDE_CHANNEL_HOST": name, **(env or {})},
        **more,
    }


class Made(NamedTuple):
    """A deployment as text."""

    text: str
    file: str = "compose.yaml"


def pair(
    connector: str | None = NIXL,
    *,
    prefill: dict[str, object] | None = None,
    decode: dict[str, object] | None = None,
    flavour: str | None = "nixl",
    services: dict[str, object] | None = None,
    **both: object,
) -> Made:
    """Prefill and decode in two containers behind `kvtally route`. `prefill` and `decode` say what is special there."""
    sides = {
        name: service(name, **{"connector": connector, **both, **(special or {})})  # type: ignore[arg-type]
        for name, special in (("prefill", prefill), ("decode", decode))
    }
    router = (
        {} if flavour is None else {"router": {"image": "kvtally", "command": f"kvtally route --flavour {flavour}"}}
    )
    return Made(json.dumps({"services": {**sides, **router, **(services or {})}}, indent=1))


def lmcache(**more: object) -> Made:
    return pair(LMCACHE, **{"env": REDIS, "flavour": "lmcache", **more})  # type: ignore[arg-type]


def offloading(**more: object) -> Made:
    given = {"extra": FS_TIER, "volumes": ["kv:/kv"], **more}
    return pair("OffloadingConnector", flavour="lmcache", **given)  # type: ignore[arg-type]


def booster(connector: str = LMCACHE, **fields: object) -> Made:
    """A ModelBooster of Kthena."""
    workers = [
        {
            "type": role,
            "config": {"kv-transfer-config": json.dumps({"kv_connector": connector, "kv_role": kv_role, **fields})},
        }
        for role, kv_role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
    ]
    env = [{"name": name, "value": value} for name, value in {**REDIS, "VLLM_NIXL_SIDE_CHANNEL_HOST": "$(IP)"}.items()]
    backend = {"type": "vLLMDisaggregated", "env": env, "workers": workers, "modelURI": "hf://Qwen/Qwen3-8B"}
    tree = {"apiVersion": "v1", "kind": "ModelBooster", "metadata": {"name": "m"}, "spec": {"backend": backend}}
    return Made(json.dumps(tree, indent=1))


def script(text: str) -> Made:
    return Made(text, "run.sh")


TWO_ON_ONE = """
VLLM_NIXL_SIDE_CHANNEL_PORT={} vllm serve m --kv-transfer-config \\
  '{{"kv_connector":"NixlConnector","kv_role":"kv_producer"}}' &
VLLM_NIXL_SIDE_CHANNEL_PORT={} vllm serve m --kv-transfer-config \\
  '{{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}}'
"""
LMCACHE_SERVER = {"image": "lmcache", "command": "lmcache server --chunk-size 256"}
SEPARATE = {"image": "lmcache", "command": "lmcache server --separate-object-groups"}
SHARED_SERVER = {"lmcache.mp.host": "tcp://lmcache"}
STACK = {
    "servingEngineSpec": {
        "modelSpec": [
            {
                "name": name,
                "repository": "vllm/vllm-openai",
                "tag": "v0.32.0",
                "modelURL": "m",
                "vllmConfig": {
                    "extraArgs": [
                        "--kv-transfer-config",
                        '{"kv_connector":"MooncakeStoreConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute"}',
                    ]
                },
            }
            for name in ("prefill", "decode")
        ]
    }
}


def stack(logic: str) -> Made:
    return Made(json.dumps({**STACK, "routerSpec": {"routingLogic": logic}}, indent=1))


NOTHING_ASKED = Options()


class Case(NamedTuple):
    rule: str
    broken: Made
    healthy: Made
    level: Level = Level.PROBLEM
    asked: Options = NOTHING_ASKED
    is_first: bool = True  # whether the broken one has this cause before all others


NOTE, RISK = Level.NOTE, Level.RISK
CASES = [
    Case("bad-transfer-config", script("vllm serve m --kv-transfer-config '{oops'"), script("vllm serve m")),
    Case("bad-transfer-config", pair(decode={"fields": {"kv_connector": None}}), pair(), is_first=True),
    Case("unknown-transfer-field", pair(fields={"kv_conector_extra_config": "x"}), pair(fields={"kv_port": 14579})),
    Case("no-connector", pair(decode={"connector": None}), pair()),
    Case("unknown-connector", pair("NixelConnector", flavour=None), pair("MooncakeConnector", flavour="mooncake")),
    Case(
        "unknown-connector",
        pair("P2pNcclConnector", flavour=None),
        pair("MyConnector", fields={"kv_connector_module_path": "my.module"}, flavour=None),
    ),
    Case("unknown-connector", pair("UCMConnector", flavour=None), pair("KVTally", flavour="kvtally"), RISK),
    Case("connectors-differ", pair(decode={"connector": "MooncakeConnector"}, flavour=None), pair()),
    Case(
        "connectors-differ",
        pair("NixlPullConnector", decode={"connector": "KVTally"}, flavour=None),
        pair("NixlPullConnector", decode={"connector": NIXL}),
    ),
    Case("kv-role", pair(decode={"role": "kv_producer"}), pair(role="kv_both")),
    Case("kv-role", pair(prefill={"fields": {"kv_role": None}}), pair(prefill={"role": "kv_producer"})),
    Case("kv-role", pair(prefill={"role": "producer"}), pair()),
    Case(
        "one-sided",
        script("""vllm serve m --kv-transfer-config '{"kv_connector":"KVTally","kv_role":"kv_producer"}'"""),
        script("""vllm serve m --kv-transfer-config '{"kv_connector":"KVTally","kv_role":"kv_both"}'"""),
    ),
    Case("no-shared-backend", lmcache(env={"PYTHONHASHSEED": "0"}), lmcache()),
    Case(
        "no-shared-backend",
        lmcache(decode={"env": {**REDIS, "LMCACHE_REMOTE_URL": "redis://other:6379"}}),
        lmcache(),
    ),
    Case("no-shared-backend", pair("SimpleCPUOffloadConnector", flavour="lmcache"), offloading()),
    Case("no-shared-backend", offloading(extra={"cpu_bytes_to_use": 1}), offloading()),
    Case("no-shared-backend", offloading(volumes=[]), offloading()),
    Case("no-shared-backend", offloading(decode={"volumes": ["other:/kv"]}), offloading()),
    Case(
        "no-shared-backend",
        pair("LMCacheMPConnector", flavour="lmcache"),
        pair("LMCacheMPConnector", flavour="lmcache", extra=SHARED_SERVER),
    ),
    Case(
        "no-shared-backend",
        pair("KVTally", flavour="kvtally", prefill={"extra": {"store": "/a"}}, decode={"extra": {"store": "/b"}}),
        pair("KVTally", flavour="kvtally", extra={"store": "/run/kv/s"}, volumes=["run:/run/kv"]),
    ),
    Case("router-drops-parameters", pair(flavour="lmcache"), pair(flavour="nixl")),
    Case("router-drops-parameters", booster("MooncakeConnector"), booster(NIXL)),
    Case(
        "router-drops-parameters",
        lmcache(env={"PYTHONHASHSEED": "0", "LMCACHE_ENABLE_PD": "true"}),
        lmcache(env={**REDIS, "LMCACHE_ENABLE_PD": "false"}),
    ),
    Case("router-not-disaggregating", stack("roundrobin"), stack("disaggregated_prefill")),
    Case("admission-refuses", booster("LMCacheMPConnector"), booster(LMCACHE)),
    Case("plain-http", booster(LMCACHE), booster(NIXL), NOTE, is_first=False),
    Case("chunk-over-prompt", lmcache(), pair(), NOTE),
    Case(
        "chunk-over-prompt",
        lmcache(),
        lmcache(env={**REDIS, "LMCACHE_CHUNK_SIZE": "16"}),
        asked=Options(prompt_tokens=30),
    ),
    Case("chunk-over-prompt", lmcache(flags="--max-model-len 128"), lmcache(flags="--max-model-len 4096")),
    Case("hash-seed", lmcache(env={"LMCACHE_REMOTE_URL": "redis://cache"}), lmcache(), RISK),
    Case("hash-seed", lmcache(decode={"env": {**REDIS, "PYTHONHASHSEED": "1"}}), lmcache()),
    Case(
        "hash-seed",
        offloading(flags="--prefix-caching-hash-algo xxhash"),
        offloading(flags="--prefix-caching-hash-algo sha256"),
        RISK,
    ),
    Case(
        "lmcache-settings-differ",
        lmcache(decode={"env": {**REDIS, "LMCACHE_CHUNK_SIZE": "128"}}),
        lmcache(env={**REDIS, "LMCACHE_CHUNK_SIZE": "128"}),
    ),
    Case(
        "lmcache-lossy",
        lmcache(env={**REDIS, "LMCACHE_REMOTE_SERDE": "cachegen"}),
        lmcache(env={**REDIS, "LMCACHE_REMOTE_SERDE": "naive"}),
        RISK,
    ),
    Case(
        "lmcache-pd-unsafe",
        lmcache(env={**REDIS, "LMCACHE_ENABLE_PD": "1", "LMCACHE_PD_SKIP_PROXY_NOTIFICATION": "true"}, flavour=None),
        lmcache(env={**REDIS, "LMCACHE_ENABLE_PD": "1"}, flavour=None),
    ),
    Case(
        "lmcache-two-modes",
        lmcache(services={"lmcache": LMCACHE_SERVER}),
        pair("LMCacheMPConnector", flavour="lmcache", extra=SHARED_SERVER, services={"lmcache": LMCACHE_SERVER}),
    ),
    Case("lmcache-on-cpu", lmcache(image="vllm/vllm-cpu:v0.32.0"), lmcache()),
    Case("hybrid-unsupported", lmcache(model=HYBRID), pair(model=HYBRID)),
    Case(
        "lmcache-hybrid-default",
        pair(
            "LMCacheMPConnector",
            flavour="lmcache",
            extra=SHARED_SERVER,
            model=HYBRID,
            services={"lmcache": LMCACHE_SERVER},
        ),
        pair(
            "LMCacheMPConnector", flavour="lmcache", extra=SHARED_SERVER, model=HYBRID, services={"lmcache": SEPARATE}
        ),
    ),
    Case(
        "lmcache-hybrid-default",
        pair("LMCacheMPConnector", flavour="lmcache", extra=SHARED_SERVER, model=HYBRID),
        pair("LMCacheMPConnector", flavour="lmcache", extra=SHARED_SERVER),
        RISK,
    ),
    Case("lmcache-in-process", lmcache(), pair(), NOTE, is_first=False),
    Case("model-differs", pair(decode={"model": "/models/Qwen3-8B"}), pair()),
    Case(
        "model-differs",
        pair("KVTally", flavour="kvtally", decode={"model": "/models/Qwen3-8B"}),
        pair("KVTally", flavour="kvtally", prefill={"model": "/a/m"}, decode={"model": "/b/m"}),
    ),
    Case(
        "model-differs",
        pair("KVTally", flavour="kvtally", prefill={"model": "/a/m"}, decode={"model": "/b/n"}),
        pair("KVTally", flavour="kvtally", model="/a/m"),
    ),
    Case(
        "model-differs",
        pair("KVTally", flavour="kvtally", prefill={"model": "a/m"}, decode={"model": "b/m"}),
        pair(
            "KVTally",
            flavour="kvtally",
            decode={"model": "/models/Qwen3-8B"},
            extra={"model_identity": "qwen, as of May", "store": "/run/kv/s"},
            volumes=["run:/run/kv"],
        ),
    ),
    Case(
        "revision-differs",
        pair(prefill={"flags": "--revision a1"}, decode={"flags": "--revision b2"}),
        pair(flags="--revision a1"),
    ),
    Case("revision-differs", pair(prefill={"flags": "--revision a1"}), pair(), RISK),
    Case(
        "served-name-differs",
        pair(prefill={"flags": "--served-model-name a"}, decode={"flags": "--served-model-name b"}),
        pair(flags="--served-model-name a"),
    ),
    Case("dtype-differs", pair(decode={"flags": "--dtype bfloat16"}), pair(flags="--dtype bfloat16"), RISK),
    Case("dtype-differs", pair(decode={"flags": "--kv-cache-dtype fp8"}), pair(flags="--kv-cache-dtype fp8")),
    Case(
        "tensor-parallel-differs",
        lmcache(decode={"flags": "--tensor-parallel-size 2"}, shm_size="8gb"),
        pair(decode={"flags": "--tensor-parallel-size 2"}, shm_size="8gb"),
    ),
    Case(
        "tensor-parallel-differs",
        pair(
            prefill={"flags": "--tensor-parallel-size=2"}, decode={"flags": "--tensor-parallel-size=3"}, shm_size="8gb"
        ),
        pair(),
    ),
    Case(
        "block-size-differs",
        offloading(prefill={"flags": "--block-size 16"}, decode={"flags": "--block-size 32"}),
        pair(prefill={"flags": "--block-size 16"}, decode={"flags": "--block-size 32"}),
    ),
    Case(
        "layout-differs",
        pair(prefill={"env": {"VLLM_KV_CACHE_LAYOUT": "HND"}}, decode={"env": {"VLLM_KV_CACHE_LAYOUT": "NHD"}}),
        pair(env={"VLLM_KV_CACHE_LAYOUT": "HND"}),
    ),
    Case(
        "hash-algorithm-differs",
        offloading(
            prefill={"flags": "--prefix-caching-hash-algo sha256"},
            decode={"flags": "--prefix-caching-hash-algo sha256_cbor"},
        ),
        pair(
            prefill={"flags": "--prefix-caching-hash-algo sha256"},
            decode={"flags": "--prefix-caching-hash-algo sha256_cbor"},
        ),
    ),
    Case(
        "versions-differ",
        pair(decode={"image": "vllm/vllm-openai:v0.31.0"}),
        pair(decode={"image": "mirror.example/vllm-openai:v0.32.0"}),
    ),
    Case(
        "versions-known-bad",
        lmcache(image="e/vllm-openai:v0.28.0-lmcache-0.5.4"),
        lmcache(image="e/vllm-openai:v0.32.0-lmcache-0.5.6"),
    ),
    Case("side-channel-loopback", pair(env={"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}), pair()),
    Case(
        "side-channel-loopback", pair(env={"VLLM_NIXL_SIDE_CHANNEL_HOST": "0.0.0.0"}), script(TWO_ON_ONE.format(1, 2))
    ),
    Case("side-channel-port", script(TWO_ON_ONE.format(5600, 5600)), script(TWO_ON_ONE.format(5600, 5700))),
    Case(
        "same-engine-id",
        pair(fields={"engine_id": "0"}),
        pair(prefill={"fields": {"engine_id": "0"}}, decode={"fields": {"engine_id": "1"}}),
    ),
    Case("ucx-tcp", pair(env={"UCX_TLS": "tcp,cuda_copy"}), pair(env={"UCX_TLS": "rc,tcp,cuda_copy"}), RISK),
    Case(
        "expandable-segments",
        pair(env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        pair(env={"PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8"}),
    ),
    Case(
        "expandable-segments",
        pair(env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, image="vllm/vllm-openai:v0.20.0"),
        pair(),
        RISK,
    ),
    Case(
        "no-shm", pair(flags="--tensor-parallel-size 2"), pair(flags="--tensor-parallel-size 2", shm_size="8gb"), RISK
    ),
    Case("load-failure-policy", offloading(fields={"kv_load_failure_policy": "fail"}), offloading(), RISK),
    Case("load-failure-policy", pair(fields={"kv_load_failure_policy": None}), pair(), NOTE),
    Case("short-lease", pair(extra={"kv_lease_duration": 5}), pair(extra={"kv_lease_duration": 60}), RISK),
]


def deployments(made: Made) -> list[Deployment]:
    return assemble([read(made.text, made.file)])


def findings(made: Made, asked: Options = NOTHING_ASKED) -> list[Finding]:
    return [finding for deployment in deployments(made) for finding in judge(deployment, asked)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_broken_deployment_is_told_from_a_healthy_one(case: Case) -> None:
    found = findings(case.broken, case.asked)
    mine = [finding for finding in found if finding.rule == case.rule]
    assert [finding.level for finding in mine[:1]] == [case.level], [finding.rule for finding in found]
    if case.is_first:
        assert found[0].rule == case.rule, [finding.rule for finding in found]
    assert case.rule not in [
        finding.rule for finding in findings(case.healthy, case.asked) if finding.level is case.level
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_evidence_is_where_it_is_said_to_be(case: Case) -> None:
    """Each finding of a file names lines that are in it; a value that was written there stands there."""
    lines = case.broken.text.splitlines()
    for finding in findings(case.broken, case.asked):
        assert finding.evidence, finding.rule
        for value in finding.evidence:
            assert value.place.file == case.broken.file
            assert 1 <= value.place.line <= len(lines), finding.rule
    mine = next(finding for finding in findings(case.broken, case.asked) if finding.rule == case.rule)
    written = [line.replace('\\"', '"') for line in lines]  # JSON inside JSON
    assert any(value.text in written[value.place.line - 1] for value in mine.evidence), mine.evidence


def test_a_deployment_without_fault_is_clean() -> None:
    for made in (
        pair(),
        offloading(),
        stack("disaggregated_prefill"),
        pair("KVTally", flavour="kvtally", extra={"store": "/run/kv/s"}, volumes=["run:/run/kv"]),
    ):
        assert findings(made) == []


def test_every_rule_has_a_case_and_is_explained() -> None:
    names = [rule.name for rule in RULES]
    assert len(names) == len(set(names))
    assert set(names) == {case.rule for case in CASES}
    text = DOCS.read_text(encoding="utf-8")
    assert [name for name in names if f"`{name}`" not in text] == []


def test_a_rule_says_why_what_to_do_and_how_it_is_known() -> None:
    for rule in RULES:
        assert rule.why.endswith("."), rule.name
        assert rule.remedy, rule.name
        assert rule.source, rule.name


@pytest.mark.parametrize("name", ["engines", "facts", "model", "readers", "rules", "shell", "tree", "verdict"])
def test_what_reads_and_judges_touches_nothing(name: str) -> None:
    """Only `examine` opens files, and only `live` asks servers and knows the time."""
    imported = {
        module
        for node in ast.walk(ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8")))
        for module in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported.isdisjoint({"os", "io", "pathlib", "socket", "subprocess", "sys", "time", "random", "shutil"})
    assert not any(module.startswith(("urllib", "http", "asyncio", "threading")) for module in imported)


def test_a_value_that_is_filled_in_later_is_not_judged() -> None:
    """Neither as a difference nor as an unknown name."""
    made = pair(
        "{{ .Values.connector }}", decode={"model": "${MODEL}", "flags": "--kv-cache-dtype $TYPE"}, flavour=None
    )
    assert findings(made) == []


def test_a_multi_connector_is_as_good_as_its_best_child() -> None:
    def multi(*names: str) -> dict[str, object]:
        children = [{"kv_connector": name, "kv_role": "kv_both"} for name in names]
        return {"connector": "MultiConnector", "role": "kv_both", "extra": {"connectors": children}}

    assert findings(pair(prefill=multi(NIXL, "SimpleCPUOffloadConnector"), decode=multi(NIXL))) == []
    found = findings(pair(prefill=multi("SimpleCPUOffloadConnector"), decode=multi("SimpleCPUOffloadConnector")))
    assert [finding.rule for finding in found] == ["no-shared-backend"]


def test_what_nobody_can_see_makes_findings_less_sure() -> None:
    """Variables may come from a file that was not given."""
    seen, unseen = lmcache(env={"PYTHONHASHSEED": "0"}), lmcache(env={"PYTHONHASHSEED": "0"}, env_file="more.env")
    assert [findings(made)[0].rule for made in (seen, unseen)] == ["no-shared-backend"] * 2
    assert [findings(made)[0].sure for made in (seen, unseen)] == ["certain", "possible"]
