"""`kvtally doctor FILE...`: what is read out of each kind of file, with true lines, and what people are told."""

from __future__ import annotations

import contextlib
import json
import shlex
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvtally.cli.main import app
from kvtally.doctor.examine import Report, examine
from kvtally.doctor.model import Deployment, Place, Value
from kvtally.doctor.readers import assemble, read
from kvtally.doctor.rules import Level, Options, judge
from kvtally.doctor.shell import commands, options, words
from kvtally.errors import ConfigError

HERE = Path(__file__).parent / "doctor"
MIB = 1 << 20


def described(name: str) -> Deployment:
    (deployment,) = assemble([read((HERE / name).read_text(encoding="utf-8"), name)])
    return deployment


def of_text(text: str, file: str = "file.yaml") -> list[Deployment]:
    return assemble([read(text, file)])


def report_of(tmp_path: Path, *texts: str, suffix: str = ".yaml") -> Report:
    paths = []
    for index, text in enumerate(texts):
        paths.append(tmp_path / f"file{index}{suffix}")
        paths[-1].write_text(text, encoding="utf-8")
    return examine(paths, Options())


# ---- the person who saw no reuse for days


def test_the_first_document_gets_its_causes() -> None:
    report = examine([HERE / "first.yaml"], Options())
    assert report.exit_code == 1
    assert [(finding.level, finding.rule) for finding in report.findings[:4]] == [
        (Level.PROBLEM, "no-shared-backend"),
        (Level.RISK, "expandable-segments"),
        (Level.NOTE, "chunk-over-prompt"),
        (Level.NOTE, "plain-http"),
    ]
    assert "256 tokens" in report.findings[2].what
    assert [value.place.line for value in report.findings[0].evidence] == [39, 53]


def test_with_its_prompts_length_the_second_cause_is_a_problem_too() -> None:
    report = examine([HERE / "first.yaml"], Options(prompt_tokens=30))
    problems = [finding.rule for finding in report.findings if finding.level is Level.PROBLEM]
    assert problems == ["no-shared-backend", "chunk-over-prompt"]


def test_its_second_attempt_gets_its_cause(tmp_path: Path) -> None:
    """LMCache's own P/D mode behind a router that speaks plain HTTP: decode answered 500."""
    text = (HERE / "first.yaml").read_text(encoding="utf-8")
    own = '"lmcache.enable_pd":true,"lmcache.pd_skip_proxy_notification":true,'
    report = report_of(tmp_path, text.replace('{"discard_partial_chunks"', "{" + own + '"discard_partial_chunks"'))
    problems = [finding.rule for finding in report.findings if finding.level is Level.PROBLEM]
    assert problems == ["router-drops-parameters", "lmcache-pd-unsafe"]


def test_the_recipe_with_a_shared_backend_has_notes_only() -> None:
    report = examine([HERE / "shared-redis.yaml"], Options())
    assert report.exit_code == 0
    assert {finding.level for finding in report.findings} == {Level.NOTE}


def test_the_recipe_without_a_hash_seed_is_a_risk(tmp_path: Path) -> None:
    lines = (HERE / "shared-redis.yaml").read_text(encoding="utf-8").splitlines()
    report = report_of(tmp_path, "\n".join(line for line in lines if "PYTHONHASHSEED" not in line))
    assert [finding.rule for finding in report.findings if finding.level is not Level.NOTE] == ["hash-seed"]


# ---- kinds of files

HEALTHY = ("compose.yaml", "kserve.yaml", "llm-d-values.yaml", "model-serving.yaml", "nixl.sh", "up.yaml")


@pytest.mark.parametrize("name", [*HEALTHY, "production-stack-values.yaml", "shared-redis.yaml"])
def test_a_healthy_deployment_is_clean(name: str) -> None:
    report = examine([HERE / name], Options())
    assert [finding.rule for finding in report.findings if finding.level is not Level.NOTE] == []
    assert report.exit_code == 0


class Expected(NamedTuple):
    """Of a fixture: its kind, its routers, and for each engine its name, role, replicas, connector and its line."""

    file: str
    kind: str
    routers: list[tuple[str, str]]
    engines: list[tuple[str, str, int, str, int]]


@pytest.mark.parametrize(
    "expected",
    [
        Expected(
            "first.yaml",
            "Kthena ModelBooster",
            [("kthena", "lmcache")],
            [
                ("prefill", "prefill", 1, "LMCacheConnectorV1", 39),
                ("decode", "decode", 1, "LMCacheConnectorV1", 53),
            ],
        ),
        Expected(
            "model-serving.yaml",
            "manifests",
            [("kthena", "nixl")],
            [
                ("llama/prefill", "prefill", 2, "NixlConnector", 23),
                ("llama/decode", "decode", 1, "NixlConnector", 45),
            ],
        ),
        Expected(
            "kserve.yaml",
            "KServe LLMInferenceService",
            [("llm-d", "nixlv2")],
            [("decode", "decode", 1, "NixlConnector", 20), ("prefill", "prefill", 2, "NixlConnector", 34)],
        ),
        Expected(
            "llm-d-values.yaml",
            "llm-d values",
            [("llm-d", "nixlv2")],
            [("prefill", "prefill", 1, "NixlConnector", 29), ("decode", "decode", 2, "NixlConnector", 16)],
        ),
        Expected(
            "production-stack-values.yaml",
            "production-stack values",
            [("production-stack", "disaggregated_prefill")],
            [
                ("llama-prefill", "prefill", 1, "LMCacheConnectorV1", 9),
                ("llama-decode", "decode", 2, "LMCacheConnectorV1", 17),
            ],
        ),
        Expected(
            "compose.yaml",
            "compose file",
            [("kvtally", "lmcache")],
            [
                ("prefill", "prefill", 1, "OffloadingConnector", 9),
                ("decode", "decode", 1, "OffloadingConnector", 21),
            ],
        ),
        Expected(
            "nixl.sh",
            "command lines",
            [("proxy", "toy_proxy_server.py")],
            [("nixl.sh:8100", "prefill", 1, "NixlConnector", 11), ("nixl.sh:8200", "decode", 1, "NixlConnector", 15)],
        ),
        Expected(
            "up.yaml",
            "kvtally up file",
            [("kvtally", "kvtally")],
            [("prefill", "prefill", 1, "KVTally", 1), ("decode", "decode", 2, "KVTally", 1)],
        ),
    ],
    ids=lambda expected: expected.file,
)
def test_what_a_file_describes(expected: Expected) -> None:
    deployment = described(expected.file)
    assert deployment.kind == expected.kind
    assert [(router.kind, router.speaks.text) for router in deployment.routers] == expected.routers
    assert [
        (each.name, each.role, each.replicas, connector.name, connector.evidence.place.line)
        for each in deployment.instances
        for connector in each.connectors()
    ] == expected.engines


def test_lines_inside_a_block_of_text_are_those_of_the_file() -> None:
    deployment = described("model-serving.yaml")
    lines = (HERE / "model-serving.yaml").read_text(encoding="utf-8").splitlines()
    prefill = deployment.instances[0]
    assert prefill.connector is not None
    for value in (prefill.flags["tensor_parallel_size"], *prefill.connector.fields.values()):
        assert value.text in lines[value.place.line - 1]
    assert prefill.connector.fields["kv_role"].place.line == prefill.connector.evidence.place.line + 1


def test_a_model_server_apart_from_its_engines_is_put_beside_them(tmp_path: Path) -> None:
    serving, server, _ = (HERE / "model-serving.yaml").read_text(encoding="utf-8").split("\n---\n")
    report = report_of(tmp_path, serving, server.replace("type: nixl", "type: http"))
    assert report.findings[0].rule == "router-drops-parameters"
    assert [Path(value.place.file).name for value in report.findings[0].evidence] == ["file1.yaml", "file0.yaml"]


def test_the_spec_of_a_model_server_alone_is_known_for_what_it_is(tmp_path: Path) -> None:
    """As people paste it: without apiVersion and kind."""
    booster = (HERE / "first.yaml").read_text(encoding="utf-8").replace("LMCacheConnectorV1", "NixlConnector")
    report = report_of(tmp_path, booster, "spec:\n  kvConnector:\n    type: lmcache\n")
    assert "router-drops-parameters" in [finding.rule for finding in report.findings]


def test_a_transfer_config_alone() -> None:
    (deployment,) = of_text('{"kv_connector": "NixlConnector",\n "kv_role": "kv_producer"}', "prefill.json")
    assert [(each.name, each.role) for each in deployment.instances] == [("prefill.json", "prefill")]
    assert deployment.instances[0].connectors()[0].fields["kv_role"].place.line == 2


def test_an_engines_own_file_of_options() -> None:
    text = "model: m\nkv-transfer-config:\n  kv_connector: KVTally\n  kv_role: kv_both\nblock-size: 32\n"
    (deployment,) = of_text(text)
    assert deployment.instances[0].connectors()[0].evidence.place.line == 3
    assert deployment.instances[0].flags["block_size"].number == 32


CONFIG = '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}'
ESCAPED = json.dumps(CONFIG)[1:-1]


@pytest.mark.parametrize(
    "given",
    [
        "chunk_size: 64\nremote_url: redis://r:1\n",
        "apiVersion: v1\nkind: ConfigMap\ndata:\n  lmcache.yaml: |\n    chunk_size: 64\n    remote_url: redis://r:1\n",
    ],
    ids=["file", "config map"],
)
def test_lmcache_settings_of_another_file(given: str) -> None:
    engine = f"LMCACHE_CONFIG_FILE=/etc/lmcache.yaml vllm serve m --kv-transfer-config '{CONFIG}'"
    both = [read(engine, "run.sh"), read(given, "lmcache.yaml")]
    (instance,) = assemble(both)[0].instances
    assert {name: value.text for name, value in instance.lmcache.items()} == {
        "chunk_size": "64",
        "remote_url": "redis://r:1",
    }
    assert instance.lmcache["remote_url"].place.line == given.splitlines().index(given.splitlines()[-1]) + 1
    (alone,) = assemble([read(engine, "run.sh")])[0].instances
    assert alone.lmcache == {}
    assert [value.text for value in alone.unseen] == ["/etc/lmcache.yaml"]


@pytest.mark.parametrize(
    "text",
    [
        f"vllm serve m --kv-transfer-config '{CONFIG}'",
        f"exec python3 -m vllm.entrypoints.openai.api_server --model m --kv-transfer-config='{CONFIG}'",
        f"docker run --rm --gpus all -e A=1 vllm/vllm-openai:v0.32.0 --model m --kv-transfer-config '{CONFIG}'",
        "bash -lc " + shlex.quote(f"vllm serve m --kv-transfer-config '{CONFIG}'"),
        f"C='{CONFIG}'; nohup vllm serve m --kv-transfer-config \"$C\" >log 2>&1 &",
        f"vllm serve m \\\n  --port 1 \\\n  --kv-transfer-config '{CONFIG}'",
        "vllm serve m --kv-transfer-config.kv_connector LMCacheConnectorV1 --kv-transfer-config.kv_role kv_both",
    ],
)
def test_ways_to_start_an_engine(text: str) -> None:
    (deployment,) = of_text(text, "run.sh")
    (instance,) = deployment.instances
    assert instance.flags["model"].text == "m"
    assert [connector.name for connector in instance.connectors()] == ["LMCacheConnectorV1"]


@pytest.mark.parametrize(
    "container",
    [
        f"args: [serve-me, --kv-transfer-config, '{CONFIG}']",
        f"command: [vllm, serve]\n        args: [m, --kv-transfer-config, '{CONFIG}']",
        f"command: [sh, -c, \"vllm serve m --kv-transfer-config '{ESCAPED}'\"]",
        f"command: [/bin/bash, -c]\n        args: [\"vllm serve m --kv-transfer-config '{ESCAPED}'\"]",
    ],
)
def test_ways_to_write_a_container(container: str) -> None:
    text = (
        "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: decode}\n"
        "spec:\n  replicas: 3\n  template:\n    spec:\n"
        f"      containers:\n      - name: v\n        image: vllm/vllm-openai:v0.32.0\n        {container}\n"
    )
    (deployment,) = of_text(text)
    (instance,) = deployment.instances
    assert (instance.name, instance.replicas) == ("decode", 3)
    assert instance.connectors()[0].name == "LMCacheConnectorV1"


def test_scripts_in_a_config_map_that_pods_run() -> None:
    """The pods themselves name a script, and no engine."""
    pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: prefill}\nspec:\n  containers:\n"
    pod += "  - {name: v, image: vllm-ascend, command: [/bin/bash], args: ['-c', cd /w && ./prefill.sh]}\n"
    scripts = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: w}\ndata:\n"
    for name in ("prefill", "decode"):
        scripts += f"  {name}.sh: |\n    export A=1\n    vllm serve m --kv-transfer-config '{CONFIG}'\n"
    found = read(f"{pod}---\n{scripts}", "all.yaml")
    (deployment,) = assemble([found])
    lines = f"{pod}---\n{scripts}".splitlines()
    assert [each.role for each in deployment.instances] == ["prefill", "decode"]
    for instance in deployment.instances:
        assert "vllm serve" in lines[instance.connectors()[0].evidence.place.line - 1]
        assert instance.unseen
    assert [each.why for each in found.skipped] == ["Pod prefill starts no engine that doctor knows"]


def test_roles_follow_from_the_ports_that_a_router_names() -> None:
    text = "".join(f"vllm serve m --port {port} --kv-transfer-config '{CONFIG}' &\n" for port in (1111, 2222))
    text += "kvtally route --prefill http://a:1111 --decode http://a:2222 --flavour lmcache"
    (deployment,) = of_text(text, "all.sh")
    assert [each.role for each in deployment.instances] == ["prefill", "decode"]


def test_a_name_alone_makes_no_half_of_a_pair() -> None:
    """llm-d calls its only engines decode."""
    values = (HERE / "llm-d-values.yaml").read_text(encoding="utf-8").partition("\nprefill:")[0]
    (deployment,) = of_text(values)
    assert [each.role for each in deployment.instances] == ["both"]
    assert not deployment.is_disaggregated


def test_a_file_for_several_machines_is_one_deployment(tmp_path: Path) -> None:
    """Each of them has a store, but those pull from each other: nothing is wrong with that."""
    text = """
model: m
args: {max_num_seqs: 8, seed: 1}
nodes:
  a: {address: 10.0.0.7, prefill: 1}
  b: {address: 10.0.0.8, decode: {count: 2, args: {seed: 3}}, model: /m, args: {max_num_seqs: 9, seed: 2}}
"""
    (deployment,) = of_text(text)
    assert [(each.name, each.role, each.replicas) for each in deployment.instances] == [
        ("a prefill", "prefill", 1),
        ("b decode", "decode", 2),
    ]
    given = [[each.flags[name].text for name in ("model", "max_num_seqs", "seed")] for each in deployment.instances]
    assert given == [["m", "8", "1"], ["/m", "9", "3"]]
    assert deployment.is_disaggregated
    report = report_of(tmp_path, text.replace("model: /m, ", ""))
    assert (report.findings, report.exit_code) == ([], 0)


# ---- what is not examined is said


def test_unknown_kinds_are_named(tmp_path: Path) -> None:
    text = (HERE / "up.yaml").read_text(encoding="utf-8")
    report = report_of(tmp_path, text, "apiVersion: v1\nkind: Service\n---\nfoo: 1\nbar: 2\n")
    assert [each.why for each in report.skipped] == [
        "kind Service is not one that doctor examines",
        "unknown: no kind that doctor knows, only foo, bar",
    ]
    assert [each.place.line for each in report.skipped] == [1, 4]
    assert report.exit_code == 0


def test_templates_are_named(tmp_path: Path) -> None:
    command = "vllm serve ${MODEL} --kv-transfer-config '{{ .Values.config }}'"
    report = report_of(tmp_path, command, suffix=".sh")
    assert [each.why.split(" is ")[0] for each in report.skipped] == ["kv_connector of file0.sh", "model of file0.sh"]
    assert report.findings == []


BAD = {
    "binary": b"\0\1\2\3",
    "not UTF-8": "größe: 1".encode("latin-1"),
    "not YAML": b"a: [1, 2\nb: }",
    "a template": b"{{- if .Values.x }}\nkind: Pod\n{{- end }}",
    "empty": b"",
    "too large": b"#" * (MIB + 1),
    "too deep": b"[" * 100_000,
    "deep blocks": b"- " * 100_000,
    "too many": b"[" + b"1," * 400_000 + b"]",
    "an alias bomb": b"a: &a [1,1,1,1,1,1,1,1,1]\n"
    + b"".join(b"%c: &%c [%s]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 9)) for i in range(8)),
    "an alias to itself": b"a: &a [*a]",
    "nothing that starts an engine": b"#!/bin/sh\necho hello\n",
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_said_and_ends_with_2(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(BAD[name])
    done = CliRunner().invoke(app, ["doctor", str(path)])
    assert done.exit_code == 2, done.output
    assert "bad.yaml" in done.output
    assert "Traceback" not in done.output


def test_a_directory_and_a_missing_file_are_said(tmp_path: Path) -> None:
    report = examine([tmp_path, tmp_path / "none.yaml"], Options())
    assert report.exit_code == 2
    assert [each.what.rpartition("/")[2].partition(" ")[2] for each in report.unreadable] == [
        "is not a file",
        "cannot be read: No such file or directory",
    ]


def test_one_unreadable_file_does_not_hide_the_others(tmp_path: Path) -> None:
    report = report_of(tmp_path, (HERE / "first.yaml").read_text(encoding="utf-8"), "a: [")
    assert report.exit_code == 1
    assert report.findings[0].rule == "no-shared-backend"
    assert len(report.unreadable) == 1
    clean = report_of(tmp_path, (HERE / "up.yaml").read_text(encoding="utf-8"), "a: [")
    assert clean.exit_code == 1  # it cannot be called clean


def test_a_script_without_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="words"):
        read("a b c d\n" * 10_000, "run.sh")


def test_very_many_engines_are_not_all_compared(tmp_path: Path) -> None:
    services = {f"e{index}": {"image": "vllm", "command": "vllm serve m"} for index in range(500)}
    report = report_of(tmp_path, json.dumps({"services": services}))
    assert "436 more engines" in report.skipped[0].why


@settings(max_examples=150)
@given(st.text(alphabet=st.sampled_from("ab{}[]:,-|>&*!%#'\"\\$ \n\t()<;=~?@`0"), max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    for file in ("a.yaml", "a.sh", "a"):
        with contextlib.suppress(ConfigError):
            for deployment in assemble([read(text, file)]):
                assert deployment.instances


NAMES = [
    *("spec", "kind", "apiVersion", "services", "command", "args", "containers", "template", "workers", "backend"),
    *("roles", "entryTemplate", "prefill", "decode", "model", "env", "config", "modelArtifacts", "servingEngineSpec"),
    *("modelSpec", "vllmConfig", "kv-transfer-config", "kv_connector", "volumes"),
]


@settings(max_examples=150)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(NAMES),
                inner,
                max_size=4,
            )
        ),
        max_leaves=25,
    ),
    st.sampled_from(
        ["ModelBooster", "ModelServing", "ModelServer", "LLMInferenceService", "Deployment", "ConfigMap", ""]
    ),
)
def test_any_tree_is_read(tree: object, kind: str) -> None:
    """Nothing where it is expected to be is no reason to fall."""
    document = {**(tree if isinstance(tree, dict) else {"spec": tree}), "apiVersion": "v1", "kind": kind}
    for deployment in assemble([read(json.dumps(document), "a.yaml"), read(json.dumps(tree), "b.yaml")]):
        judge(deployment, Options())


# ---- the shell


def test_words_keep_their_lines() -> None:
    text = "a 'b\nc' \\\n  d # e\n\"f $X\" >out 2>&1 g"
    assert [(word.text, word.line) for word in words(text) if not word.is_operator] == [
        ("a", 1),
        ("b\nc", 1),
        ("d", 3),
        ("f $X", 4),
        ("g", 4),
    ]


def test_variables_that_the_script_sets_are_filled_in() -> None:
    text = "A=1\nexport B=2\nC=3 run $A ${B} '$A' $C ${D:-4} $E\nB=5\nrun $B"
    first, second = commands(text, Place("f", 1))
    assert [word.text for word in first.words] == ["run", "1", "2", "$A", "$C", "4", "$E"]
    assert {name: value.text for name, value in first.env.items()} == {"B": "2", "C": "3"}
    assert [word.text for word in second.words] == ["run", "5"]
    assert second.env["B"].text == "5"


def test_options_of_a_command() -> None:
    line = "--a 1 --b=2 --c --no-d x --prefill u v --prefill w"
    given = [Value(text, Place("f", 1)) for text in shlex.split(line)]
    named, rest = options(given)
    assert {name: value.text for name, value in named.items()} == {
        "a": "1",
        "b": "2",
        "c": "true",
        "no_d": "x",
        "prefill": "u v w",
    }
    assert rest == []


# ---- what is printed


def test_people_get_a_page_of_80_columns() -> None:
    done = CliRunner().invoke(app, ["doctor", str(HERE / "first.yaml")])
    assert done.exit_code == 1
    lines = done.output.splitlines()
    assert lines[0].startswith("Reuse will not work as it is configured: prefill and decode share no cache")
    long = [line for line in lines if len(line) > 80 and str(HERE) not in line]
    assert long == []
    for word in ("seen ", "why ", "remedy ", "source "):
        assert any(line.strip().startswith(word) for line in lines)


def test_a_clusters_answer_can_be_piped_in() -> None:
    text = (HERE / "first.yaml").read_text(encoding="utf-8")
    done = CliRunner().invoke(app, ["doctor", "--json", "-"], input=text)
    assert msgspec.json.decode(done.output.encode())["findings"][0]["evidence"][0]["place"]["file"] == "stdin"


def test_programs_get_json() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json", str(HERE / "first.yaml")])
    report = msgspec.json.decode(done.output.encode())
    first = report["findings"][0]
    assert set(first) == {
        *("rule", "title", "level", "sure", "deployment", "what", "evidence", "why", "remedy", "source")
    }
    assert first["evidence"][0]["place"]["line"] == 39
    assert report["deployments"][0]["connectors"] == ["LMCacheConnectorV1"]


def test_what_a_file_says_cannot_move_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text('vllm serve m --kv-transfer-config \'{"kv_connector":"\\u001b[2J","kv_role":"kv_both"}\'')
    done = CliRunner().invoke(app, ["doctor", str(path)])
    assert done.exit_code == 1
    assert "\x1b" not in done.output
