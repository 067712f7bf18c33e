"""What names KV cache beside the tokens: weights, what is said of their use, multimodal items."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtally.vllm.boundaries import Boundaries, extras_of
from kvtally.vllm.identity import is_length_decisive, model_identity, override_digest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


# ---- what is said of the configuration


def test_what_nobody_says_has_no_name() -> None:
    assert override_digest({}, None) == ""


def test_an_override_of_the_rope_is_another_model() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8192}
    ropes = [yarn, {**yarn, "factor": 2.0}, {"rope_type": "default", "rope_theta": 1e6}]
    assert len({override_digest({"rope_parameters": rope}, None) for rope in ropes}) == 3
    assert override_digest(dict(reversed(yarn.items())), None) == override_digest(yarn, None)


def test_a_configuration_elsewhere_is_named_by_what_it_says(tmp_path: Path) -> None:
    digests = []
    for folder, text in (("a", "{}"), ("b", "{}"), ("c", '{"rope_theta": 7}')):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(text)
        digests.append(override_digest({}, str(tmp_path / folder)))
    assert digests[0] == digests[1] != digests[2]
    assert override_digest({}, "some/hub-model") != override_digest({}, "another/hub-model")


def test_what_json_does_not_know_has_the_same_name_after_a_restart() -> None:
    class Odd:
        """Another address for each, as in another process."""

    def odd() -> dict[Any, Any]:
        return {"object": Odd(), 5: Path("/x"), "nested": [(Odd(), 1)]}

    assert override_digest(odd(), None) == override_digest(odd(), None)
    assert override_digest(odd(), None) != override_digest({**odd(), 5: Path("/y")}, None)


def test_where_an_engine_was_started_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = override_digest({"a": 1}, None)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert override_digest({"a": 1}, None) == elsewhere


def test_functions_are_named_by_what_they_do() -> None:
    def times(factor: int) -> Any:
        return lambda config: config * factor

    digests = [override_digest(each, None) for each in (times(2), times(2), times(3), lambda config: config + 1)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


@pytest.mark.parametrize(
    ("config", "is_decisive"),
    [
        ({"rope_parameters": {"rope_type": "default"}}, False),
        ({"rope_parameters": {"rope_type": "longrope"}}, True),
        ({"rope_scaling": {"type": "su"}}, True),
        ({"text_config": {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}}, True),
        ({"text_config": {"attn_temperature_tuning": True}}, True),
    ],
)
def test_where_the_longest_context_decides_what_is_computed(config: dict[str, Any], is_decisive: bool) -> None:
    assert is_length_decisive(config) is is_decisive


# ---- the model's weights


def weights(directory: Path, content: bytes) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(content)
    return directory


@pytest.mark.parametrize(
    "inside",
    ["run/snapshots/latest", f"run/snapshots/{COMMIT}", f"models--a--b/{COMMIT}", f"models--a--b/snapshots/{COMMIT}x"],
)
def test_a_folder_that_only_looks_like_the_hubs_is_known_by_its_weights(tmp_path: Path, inside: str) -> None:
    alice = weights(tmp_path / "alice" / inside, b"A" * 4096)
    bob = weights(tmp_path / "bob" / inside, b"B" * 4096)
    first = model_identity(str(alice), None)
    assert first != model_identity(str(bob), None)
    (alice / "model.safetensors").write_bytes(b"C" * 4096)
    assert first != model_identity(str(alice), None)


@pytest.mark.parametrize("name", ["config.json", "params.json", "preprocessor_config.json"])
def test_a_folder_is_known_by_how_its_weights_are_to_be_used(tmp_path: Path, name: str) -> None:
    folder = weights(tmp_path / "model", b"A")
    identities = {model_identity(str(folder), None)}
    for theta in (1e4, 1e6):
        (folder / name).write_text(json.dumps({"rope_theta": theta}))
        identities.add(model_identity(str(folder), None))
    assert len(identities) == 3


def test_a_hub_entry_is_known_by_its_commit(tmp_path: Path) -> None:
    entry = weights(tmp_path / "hub" / "models--a--b" / "snapshots" / COMMIT, b"A")
    assert model_identity(str(entry), None) == f"hub:models--a--b@{COMMIT}"


def test_a_folder_may_be_where_we_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = weights(tmp_path / "model", b"A")
    monkeypatch.chdir(here)
    assert model_identity(".", None) == model_identity(str(here), None)


# ---- multimodal items


def item(identifier: str, offset: int) -> Any:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=40))


def asked(*items: Any) -> Any:
    return SimpleNamespace(mm_features=list(items), cache_salt=None)


def test_images_that_come_later_in_a_streaming_input_name_what_follows() -> None:
    tokens = [1] * 70 + [9] * 40 + [2] * 82

    def session(image: str) -> list[bytes]:
        request = asked()
        path = Boundaries(64, extras_of(request, None))
        path.extend(tokens, 64)
        request.mm_features.append(item(image, 70))  # as vLLM does it with the next part
        path.extend(tokens, 192)
        return path.chains

    whole = Boundaries(64, extras_of(asked(item("cat", 70)), None))
    whole.extend(tokens, 192)
    cat, dog = session("cat"), session("dog")
    assert cat == whole.chains
    assert cat[0] == dog[0]
    assert cat[1] != dog[1]
