"""Weights are told apart by every byte, and read once: a digest is remembered as long as the file stays what it was."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtally.errors import IncompatibleError
from kvtally.vllm import weights
from kvtally.vllm.identity import model_identity
from kvtally.vllm.weights import Version, file_digests

MIB = 1 << 20


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a user whose files were all written long ago."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "SETTLED_NS", -(1 << 62))
    return tmp_path / "cache" / "kvtally"


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were really read."""
    names: list[str] = []
    hash_files: Callable[[Sequence[Path]], list[str]] = weights._hash

    def count(files: Sequence[Path]) -> list[str]:
        names.extend(path.name for path in files)
        return hash_files(files)

    monkeypatch.setattr(weights, "_hash", count)
    return names


def model(directory: Path, name: str = "model.safetensors", size_bytes: int = 4 * MIB) -> Path:
    directory.mkdir()
    file = directory / name
    file.write_bytes(bytes(size_bytes))
    return file


def change(file: Path, position: int) -> None:
    """One byte, in place, and the time of the last write is set back."""
    before = file.stat()
    while Version.of(file).changed_ns == before.st_ctime_ns:  # coarse clocks tick every few milliseconds
        with file.open("r+b") as opened:
            opened.seek(position)
            opened.write(b"!")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


# ---- every byte counts


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.gguf", "model.pt"])
@pytest.mark.parametrize("position", [0, 100_000, 2 * MIB + 77, 4 * MIB - 1])
def test_one_byte_makes_another_model(tmp_path: Path, cache: Path, name: str, position: int) -> None:
    file = model(tmp_path / "model", name)
    before = model_identity(str(file.parent), None)
    assert model_identity(str(file.parent), None) == before
    change(file, position)
    assert model_identity(str(file.parent), None) != before


def test_one_tensor_of_many_files_makes_another_model(tmp_path: Path, cache: Path) -> None:
    file = model(tmp_path / "model", "model-00001-of-00003.safetensors")
    others = [file.with_name(f"model-0000{number}-of-00003.safetensors") for number in (2, 3)]
    for other in others:
        other.write_bytes(bytes(MIB))
    before = model_identity(str(file.parent), None)
    change(others[0], MIB // 2)
    assert model_identity(str(file.parent), None) != before


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "quantize_config.json", "modeling_mine.py"])
def test_how_weights_are_used_makes_another_model(tmp_path: Path, cache: Path, name: str) -> None:
    file = model(tmp_path / "model", size_bytes=100)
    identities = {model_identity(str(file.parent), None)}
    for text in ("{}", "{ }"):
        (file.parent / name).write_text(text)
        identities.add(model_identity(str(file.parent), None))
    assert len(identities) == 3


@pytest.mark.parametrize("name", ["optimizer.pt", "training_args.bin", "rng_state_0.pth", "tokenizer.json"])
def test_what_is_no_part_of_the_model_changes_nothing(tmp_path: Path, cache: Path, name: str) -> None:
    file = model(tmp_path / "model", size_bytes=100)
    before = model_identity(str(file.parent), None)
    (file.parent / name).write_text("something else")
    assert model_identity(str(file.parent), None) == before


def test_large_files_are_hashed_in_segments(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SEGMENT_BYTES", MIB)
    monkeypatch.setattr(weights, "READ_BYTES", MIB // 3)  # no divisor
    first, second = model(tmp_path / "a", size_bytes=5 * MIB + 1), model(tmp_path / "b", size_bytes=5 * MIB + 1)
    empty = model(tmp_path / "c", size_bytes=0)
    same = file_digests([first, second, empty])
    assert same[0] == same[1] != same[2]
    for position in (0, MIB, 3 * MIB - 1, 5 * MIB):
        change(second, position)
        digests = file_digests([first, second, empty])
        assert digests[1] not in same
        assert [digests[0], digests[2]] == [same[0], same[2]]
        same.append(digests[1])


# ---- each is read once


def test_a_file_is_read_once(tmp_path: Path, cache: Path, hashed: list[str]) -> None:
    file = model(tmp_path / "model")
    digests = file_digests([file])
    assert file_digests([file]) == digests
    moved = file.rename(tmp_path / "elsewhere.bin")  # changes no byte, and its ctime: it is read again
    assert file_digests([moved]) == digests
    assert hashed == ["model.safetensors", "elsewhere.bin"]


def test_ranks_that_start_together_read_once(tmp_path: Path, cache: Path, hashed: list[str]) -> None:
    file = model(tmp_path / "model", size_bytes=32 * MIB)
    with ThreadPoolExecutor(4) as ranks:
        digests = list(ranks.map(file_digests, [[file]] * 4))
    assert digests == [digests[0]] * 4
    assert hashed == ["model.safetensors"]


def test_a_file_that_changed_a_moment_ago_is_read_again(
    tmp_path: Path, cache: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its times may not tell the next change from this one."""
    monkeypatch.setattr(weights, "SETTLED_NS", 1 << 62)
    file = model(tmp_path / "model")
    assert file_digests([file]) == file_digests([file])
    assert len(hashed) == 2
    assert not (cache / "weights.json").exists()


def test_a_file_that_changes_while_it_is_read_has_no_identity(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = model(tmp_path / "model")
    monkeypatch.setattr(weights, "_hash", lambda files: change(file, 5) or ["0" * 64])
    with pytest.raises(IncompatibleError, match="changed while it was read"):
        model_identity(str(file.parent), None)


@pytest.mark.parametrize("broken", ["", "[]", "{", '{"a": 1}', "null"])
def test_a_broken_memory_is_none(tmp_path: Path, cache: Path, hashed: list[str], broken: str) -> None:
    file = model(tmp_path / "model")
    right = file_digests([file])
    (cache / "weights.json").write_text(broken)
    assert file_digests([file]) == right
    assert len(hashed) == 2
    (cache / "weights.json").write_text(json.dumps({Version.of(file).key: "no digest"}))
    assert file_digests([file]) == right


def test_without_a_place_to_remember_every_start_reads(
    tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "SETTLED_NS", -(1 << 62))
    (tmp_path / "a file").touch()
    file = model(tmp_path / "model")
    assert file_digests([file], tmp_path / "a file") == file_digests([file], tmp_path / "a file")
    assert len(hashed) == 2


def test_the_oldest_digests_are_forgotten(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MOST_KNOWN", 2)
    (tmp_path / "models").mkdir()
    for number in range(3):
        file = tmp_path / "models" / str(number)
        file.write_bytes(bytes(number))
        file_digests([file])
    known = json.loads((cache / "weights.json").read_text())
    assert list(known) == [Version.of(tmp_path / "models" / str(number)).key for number in (1, 2)]
