"""Adapters are known by their bytes: wherever they lie, whenever they were copied, and off the engine's step."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from kvtally.errors import IncompatibleError
from kvtally.vllm import adapters as adapters_module
from kvtally.vllm import weights
from kvtally.vllm.adapters import FILES, Adapter, Adapters
from kvtally.vllm.boundaries import Boundaries, Extras
from tests.waiting import HANG_S, eventually

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIGURATION, WEIGHTS, *_ = FILES
TOKENS = list(range(200))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a user whose files were all written long ago."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "SETTLED_NS", -(1 << 62))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were really read."""
    names: list[str] = []
    hash_files = weights._hash

    def count(files: Sequence[Path]) -> list[str]:
        names.extend(path.name for path in files)
        return hash_files(files)

    monkeypatch.setattr(weights, "_hash", count)
    return names


@pytest.fixture
def engine() -> Iterator[Adapters]:
    adapters = Adapters()
    yield adapters
    adapters.stop(HANG_S)


@pytest.fixture
def other() -> Iterator[Adapters]:
    """The adapters of an engine on another machine, or of the same after a restart."""
    adapters = Adapters()
    yield adapters
    adapters.stop(HANG_S)


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / CONFIGURATION).write_text('{"r": 8}')
    (folder / WEIGHTS).write_bytes(bytes(range(200)))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made(tmp_path / "lora")


def lora(path: Path | str, *, name: str = "sql", is_3d: bool = False) -> Any:
    return SimpleNamespace(lora_name=name, lora_path=str(path), is_3d_lora_weight=is_3d)


def identity(engine: Adapters, asked: Any) -> str:
    """Empty if it has none."""
    adapter = engine.adapter(asked)
    assert adapter is not None
    eventually(lambda: adapter.identity is not None)
    assert adapter.identity is not None
    return adapter.identity


def chains(engine: Adapters, asked: Any) -> list[bytes]:
    adapter = Adapter(identity(engine, asked))
    walked = Boundaries(64, Extras(adapter))
    walked.extend(TOKENS, len(TOKENS))
    return walked.chains


def rewrite(file: Path, content: bytes) -> None:
    """In place, until the file system shows it: coarse clocks tick every few milliseconds."""
    before = weights.Version.of(file)
    while weights.Version.of(file) == before:
        file.write_bytes(content)


# ---- equal bytes, equal names


def test_a_copy_elsewhere_has_the_same_keys(engine: Adapters, other: Adapters, folder: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "on" / "another" / "machine"))
    for file in copied.iterdir():
        os.utime(file, ns=(0, 1_000_000_007))
    (copied / "training.log").write_text("is no part of it")
    assert chains(other, lora(copied, name="the same by another name")) == chains(engine, lora(folder))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("position", [0, 4])
def test_one_byte_makes_another_adapter(
    engine: Adapters, other: Adapters, folder: Path, tmp_path: Path, name: str, position: int
) -> None:
    (folder / name).write_bytes(b"01234567")
    changed = Path(shutil.copytree(folder, tmp_path / "changed"))
    content = bytearray((changed / name).read_bytes())
    content[position] ^= 1
    (changed / name).write_bytes(content)
    first, second = chains(engine, lora(folder)), chains(other, lora(changed))
    assert not set(first) & set(second)


def test_a_file_by_another_name_is_another_adapter(
    engine: Adapters, other: Adapters, folder: Path, tmp_path: Path
) -> None:
    renamed = Path(shutil.copytree(folder, tmp_path / "renamed"))
    (renamed / WEIGHTS).rename(renamed / "adapter_model.bin")
    assert identity(engine, lora(folder)) != identity(other, lora(renamed))


def test_a_request_decides_how_the_weights_of_experts_are_read(engine: Adapters, folder: Path) -> None:
    assert identity(engine, lora(folder)) != identity(engine, lora(folder, is_3d=True)) != ""


def test_without_an_adapter_nothing_changes() -> None:
    assert Adapters().adapter(None) is None
    assert Extras(None).between(0, 64) == b""


def test_an_adapter_without_a_name_has_no_keys() -> None:
    """Least of all those of the bare model."""
    for unnamed in (Adapter(), Adapter("")):
        with pytest.raises(IncompatibleError):
            Boundaries(64, Extras(unnamed)).extend(TOKENS, 64)


# ---- files that change


def test_an_adapter_retrained_in_its_folder_is_another_one_after_a_restart(
    engine: Adapters, other: Adapters, folder: Path
) -> None:
    before = identity(engine, lora(folder))
    rewrite(folder / WEIGHTS, b"2" * 200)
    assert identity(other, lora(folder)) not in ("", before)


def test_an_adapter_whose_bytes_change_under_an_engine_has_no_name_there_any_more(
    engine: Adapters, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM may read them again whenever it had let go of it: nobody knows what it computes with."""
    content = (folder / WEIGHTS).read_bytes()
    assert identity(engine, lora(folder)) == identity(engine, lora(folder)) != ""
    rewrite(folder / WEIGHTS, b"2" * 200)
    assert [identity(engine, lora(folder)) for _ in range(2)] == ["", ""]
    rewrite(folder / WEIGHTS, content)
    assert identity(engine, lora(folder)) == ""
    assert identity(engine, lora(folder, name="another")) != ""
    said = [record.getMessage() for record in caplog.records]
    assert len([text for text in said if "sql" in text and "have changed" in text]) == 1


def test_an_adapter_that_was_only_touched_stays_what_it_is(engine: Adapters, folder: Path) -> None:
    before = identity(engine, lora(folder))
    rewrite(folder / WEIGHTS, (folder / WEIGHTS).read_bytes())
    assert identity(engine, lora(folder)) == before


def test_an_adapter_whose_files_are_gone_for_a_while(engine: Adapters, folder: Path, tmp_path: Path) -> None:
    before = identity(engine, lora(folder))
    folder.rename(tmp_path / "away")
    assert identity(engine, lora(folder)) == ""
    (tmp_path / "away").rename(folder)
    assert identity(engine, lora(folder)) == before
    shutil.rmtree(folder)
    made(folder)
    rewrite(folder / WEIGHTS, b"2" * 200)
    assert identity(engine, lora(folder)) == ""  # others in its place


def test_a_file_that_changes_while_it_is_read_gives_no_name(
    engine: Adapters, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hash_files = weights._hash

    def hash_late(files: Sequence[Path]) -> list[str]:
        digests = hash_files(files)
        rewrite(folder / WEIGHTS, os.urandom(200))
        return digests

    monkeypatch.setattr(weights, "_hash", hash_late)
    assert identity(engine, lora(folder)) == ""
    monkeypatch.setattr(weights, "_hash", hash_files)
    assert identity(engine, lora(folder)) != ""


# ---- read once, and elsewhere


def test_files_are_read_once_and_looked_at_for_every_request(
    engine: Adapters, other: Adapters, folder: Path, hashed: list[str]
) -> None:
    for _ in range(3):
        identity(engine, lora(folder))
    identity(other, lora(folder))
    assert hashed == [CONFIGURATION, WEIGHTS]


def test_files_that_changed_a_moment_ago_are_read_again(
    engine: Adapters, folder: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their times may not tell the next change from this one."""
    monkeypatch.setattr(weights, "SETTLED_NS", 1 << 62)
    assert identity(engine, lora(folder)) == identity(engine, lora(folder))
    assert hashed == 2 * [CONFIGURATION, WEIGHTS]


def test_nobody_waits_for_a_disk_that_hangs(
    engine: Adapters, folder: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that come meanwhile share what is found when it goes on."""
    goes_on, begun = threading.Event(), threading.Event()
    find = adapters_module._files

    def hang(folder: Path) -> list[Path]:
        begun.set()
        assert goes_on.wait(HANG_S)
        return find(folder)

    monkeypatch.setattr(adapters_module, "_files", hang)
    first = engine.adapter(lora(folder))
    assert begun.wait(HANG_S)
    later = [engine.adapter(lora(folder)) for _ in range(5)]
    assert first is not None
    assert first.identity is None
    assert len({id(adapter) for adapter in later}) == 1
    assert first not in later  # what it saw of the files may be older than they are
    goes_on.set()
    eventually(lambda: all(adapter is not None and adapter.identity for adapter in later))
    assert {adapter.identity for adapter in later if adapter is not None} == {first.identity}
    assert hashed == [CONFIGURATION, WEIGHTS]


def test_adapters_that_wait_are_bounded(engine: Adapters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters_module, "MOST_ADAPTERS", 2)
    goes_on = threading.Event()
    monkeypatch.setattr(adapters_module, "_files", lambda folder: goes_on.wait(HANG_S) and [])
    waiting = [engine.adapter(lora(f"/{number}")) for number in range(9)]
    assert [adapter.identity for adapter in waiting if adapter is not None][-3:] == ["", "", ""]
    goes_on.set()


def test_adapters_are_forgotten_at_last(engine: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters_module, "MOST_ADAPTERS", 2)
    for number in range(1, 4):
        made(tmp_path / str(number))
    for number in (1, 2, 1, 3):
        assert identity(engine, lora(tmp_path / str(number)))
    assert [Path(label.path).name for label in engine._known] == ["1", "3"]


# ---- names on the hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local cache with the adapter someone/adapter, as the hub's library makes it."""
    repository = tmp_path / "hub" / "models--someone--adapter"
    blobs, snapshot = made(repository / "blobs"), repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(blob)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot


def test_a_name_on_the_hub_is_known_once_vllm_has_loaded_it(
    engine: Adapters, other: Adapters, hub: Path, folder: Path
) -> None:
    """Only then is it clear which version that is. A folder with the same files is the same adapter."""
    asked = lora("someone/adapter")
    assert identity(engine, asked) == ""
    engine.used(asked)
    assert identity(engine, asked) == identity(other, lora(folder)) != ""
    engine.used(lora("someone/adapter", name="other"))
    rewrite(hub / WEIGHTS, b"2" * 200)  # a newer version
    assert identity(engine, asked) == ""
    assert identity(engine, lora("someone/adapter", name="other")) not in ("", identity(other, lora(folder)))


def test_an_entry_of_the_hubs_cache_is_a_folder(engine: Adapters, other: Adapters, hub: Path, folder: Path) -> None:
    assert identity(engine, lora(hub)) == identity(other, lora(folder)) != ""


def test_what_comes_from_another_hub_has_no_name(engine: Adapters, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    asked = lora("someone/adapter")
    engine.used(asked)
    assert identity(engine, asked) == ""


@pytest.mark.parametrize("path", ["someone/else", "~nobody-of-this-name/x", "x" * 5000, "a\0b", "/nowhere", "../x/y/z"])
def test_adapters_that_are_nowhere_cost_their_own_requests_only(
    engine: Adapters, hub: Path, folder: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked = lora(path)
    engine.used(asked)
    assert [identity(engine, asked) for _ in range(3)] == [""] * 3
    assert identity(engine, lora(folder)) != ""
    assert len([record for record in caplog.records if "neither saved nor reused" in record.getMessage()]) == 1


def test_an_empty_folder_is_no_adapter(engine: Adapters, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / CONFIGURATION).write_text("{}")
    assert identity(engine, lora(tmp_path / "empty")) == ""


def test_paths_are_found_as_vllm_finds_them(engine: Adapters, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.chdir(folder.parent)
    names = {identity(engine, lora(path)) for path in (folder, "~/lora", "lora", "./lora")}
    assert len(names) == 1
    assert "" not in names
