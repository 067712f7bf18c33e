"""`kvtally pool` in processes of its own, on real servers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtally.processes import own_environment
from tests.pool.kit import KEY, Kit, Site, close_sites, held, namespace_of, prompt, save
from tests.pool.kit import site as site_of
from tests.pool.servers import PASSWORD, missing
from tests.waiting import HANG_S

KINDS = [kind for kind in ("valkey", "valkey cluster", "s3", "mooncake") if not missing(kind)]


@pytest.fixture(params=KINDS or ["valkey"])
def kit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    kit = Kit(site_of(request.param, tmp_path_factory))
    yield kit
    kit.close()


@pytest.fixture(scope="module", autouse=True)
def _sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield
    close_sites(tmp_path_factory)


def run(*arguments: str, directory: Path) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "kvtally", "pool", *arguments],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        cwd=directory,
        env=own_environment(),
    )
    return done.returncode, done.stdout, done.stderr


def arguments_of(kit: Kit) -> list[str]:
    site: Site = kit.site
    url: str = site.server.url
    if site.kind == "s3":
        url = url.replace("?", f"/{kit.prefix}?", 1)
    else:
        url += ("&" if "?" in url else "?") + f"prefix={kit.prefix}"
    given = [url]
    if site.credentials.user:
        given += ["--user", site.credentials.user]
    if site.credentials.password_file:
        given += ["--password-file", site.credentials.password_file]
    return given


def test_check_stat_and_forget(kit: Kit, tmp_path: Path) -> None:
    given = arguments_of(kit)
    code, out, err = run("check", *given, "--json", directory=tmp_path)
    assert code == 0, err
    found = json.loads(out)
    assert found["condition"]["server"]
    assert found["get_bytes_s"] > 0
    assert kit.names() == [f"{kit.prefix}/format"]
    namespace, other = namespace_of(3_000_000, model="first"), namespace_of(model="second")
    tier = kit.open()
    save(tier, prompt(namespace, 1, 3))
    save(tier, prompt(other, 1, 2))
    code, out, err = run("stat", *given, "--json", directory=tmp_path)
    assert code == 0, err
    uses = json.loads(out)["namespaces"]
    assert [(use["model"], use["boundaries"], use["objects"], use["bytes"]) for use in uses] == [
        ("first", 3, 3, 9_000_000),
        ("second", 2, 2, 10_000),
    ]
    code, out, err = run("forget", *given, "--namespace", namespace.digest.hex()[:12], "--yes", directory=tmp_path)
    assert code == 0, err
    fresh = kit.open()
    assert held(fresh, prompt(namespace, 1, 3)) == 0
    assert held(fresh, prompt(other, 1, 2)) == 2
    code, out, err = run("stat", *given, directory=tmp_path)
    assert code == 0, err
    assert "second" in out
    assert "first" not in out


def test_wrong_input_ends_with_2_and_touches_nothing(kit: Kit, tmp_path: Path) -> None:
    given = arguments_of(kit)
    before = kit.names()
    key, wrong = tmp_path / "key", tmp_path / "wrong"
    key.write_text(KEY.hex())
    key.chmod(0o644)
    wrong.write_text("not the password")
    cases = [[*given, "--key-file", str(key)], [given[0] + "&unknown=1", *given[1:]]]
    if "--password-file" in given:
        cases.append([*given, "--password-file", str(wrong)])
    for case in cases:
        code, out, err = run("check", *case, directory=tmp_path)
        assert (code, out) == (2, ""), err
        assert err.startswith("error: ") or "error: " in err
        assert "remedy: " in err
        assert PASSWORD not in err
    assert kit.names() == before
