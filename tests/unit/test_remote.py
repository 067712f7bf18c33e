"""Addresses of pools: what is understood, and that what is wrong is named without repeating a secret."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtally.config import StoreConfig, load
from kvtally.config.remote import Remote, parse_remote
from kvtally.errors import ConfigError
from kvtally.store.server import check


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("valkey://kv", Remote(kind="valkey", host="kv", port=6379)),
        ("redis://kv:7000/3", Remote(kind="valkey", host="kv", port=7000, database=3)),
        ("valkeys://kv", Remote(kind="valkey", host="kv", port=6379, is_tls=True)),
        ("rediss://[::1]:7000?ca=/ca.pem", Remote(kind="valkey", host="::1", port=7000, is_tls=True, ca="/ca.pem")),
        (
            "valkey://kv?cluster=1&ttl=2d&prefix=a/b",
            Remote(kind="valkey", host="kv", port=6379, is_cluster=True, ttl_s=172_800, prefix="a/b"),
        ),
        ("valkey://kv?ttl=0", Remote(kind="valkey", host="kv", port=6379, ttl_s=0)),
        ("valkey://kv?ttl=90", Remote(kind="valkey", host="kv", port=6379, ttl_s=90)),
        ("s3://bucket", Remote(kind="s3", bucket="bucket", ttl_s=0)),
        (
            "s3://kv-cache/prod/a?region=eu-central-1",
            Remote(kind="s3", bucket="kv-cache", prefix="prod/a", region="eu-central-1", ttl_s=0),
        ),
        (
            "s3://bucket?endpoint=https://minio:9000/",
            Remote(kind="s3", bucket="bucket", endpoint="https://minio:9000", ttl_s=0),
        ),
        ("gs://bucket/p", Remote(kind="gs", bucket="bucket", prefix="p", ttl_s=0)),
        ("az://box?account=us", Remote(kind="az", bucket="box", account="us", ttl_s=0)),
        ("mooncake://m?insecure=1", Remote(kind="mooncake", host="m", port=50051)),
        (
            "mooncake://m:1?insecure=1&protocol=rdma&device=mlx5_0&segment=4GiB&advertise=10.0.0.1&metrics=9",
            Remote(
                kind="mooncake",
                host="m",
                port=1,
                protocol="rdma",
                device="mlx5_0",
                segment_bytes=4 << 30,
                advertise="10.0.0.1",
                metrics_port=9,
            ),
        ),
    ],
)
def test_understood(url: str, expected: Remote) -> None:
    assert parse_remote(url) == expected


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "no scheme"),
        ("kv:6379", "no scheme"),
        ("http://kv", "scheme http"),
        ("memcached://kv", "scheme memcached"),
        ("valkey://", "no host"),
        ("valkey://kv:99999", "not a URL"),
        ("valkey://[::1", "not a URL"),
        ("valkey://kv/abc", "database"),
        ("valkey://kv/1?cluster=1", "cluster"),
        ("valkey://kv?cluster=yes", "cluster"),
        ("valkey://kv?ttl=soon", "ttl"),
        ("valkey://kv?ttl=-1d", "ttl"),
        ("valkey://kv?tll=1d", "'tll'"),
        ("valkey://kv?ttl=1d&ttl=2d", "twice"),
        ("valkey://kv?ttl", "not a URL"),
        ("valkey://kv?prefix=", "prefix"),
        ("valkey://kv?prefix=a*b", "prefix"),
        ("valkey://kv?prefix=a/../b", "prefix"),
        ("valkey://kv#x", "#"),
        ("s3://", "no bucket"),
        ("s3://b", "bucket"),
        ("s3://minio:9000/bucket", "bucket"),
        ("s3://bucket?endpoint=minio:9000", "endpoint"),
        ("s3://bucket?endpoint=ftp://minio", "endpoint"),
        ("s3://bucket?endpoint=http://user:pw@minio", "endpoint"),
        ("s3://bucket?ttl=1d", "'ttl'"),
        ("gs://bucket?region=x", "'region'"),
        ("mooncake://m", "authentication"),
        ("mooncake://m?insecure=0", "authentication"),
        ("mooncake://m/1?insecure=1", "path"),
        ("mooncake://m?insecure=1&protocol=carrier-pigeon", "protocol"),
        ("mooncake://m?insecure=1&metrics=0", "metrics"),
        ("mooncake://m?insecure=1&segment=much", "segment"),
    ],
)
def test_refused_with_one_clear_word(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        parse_remote(url, "the address")
    assert str(caught.value).startswith("the address")
    assert caught.value.remedy


SECRETS = [
    "valkey://user:S3CRET@kv:6379",
    "valkey://:S3CRET@kv",
    "valkey://S3CRET@kv?nonsense=1",
    "redis://user:S3CRET@kv/abc?cluster=7",
    "s3://KEY:S3CRET@bucket/prefix",
    "s3://bucket?endpoint=http://KEY:S3CRET@minio",
    "s3://bucket?secret_access_key=S3CRET",
    "mooncake://S3CRET@m",
    "nonsense://user:S3CRET@kv",
]


@pytest.mark.parametrize("url", SECRETS)
@pytest.mark.parametrize("place", ["environment", "flag", "file"])
def test_no_secret_is_repeated(url: str, place: str, tmp_path: object) -> None:
    """Whoever writes one into the address by mistake does not find it in the log as well."""
    if place == "environment":
        settings = load(environ={"KVTALLY_STORE__REMOTE": url})
    elif place == "flag":
        settings = load(flags={"store.remote": url}, environ={})
    else:
        path = f"{tmp_path}/kvtally.yaml"
        with open(path, "w", encoding="utf-8") as file:
            file.write(f'store:\n  remote: "{url}"\n')
        settings = load(file=path, environ={})
    with pytest.raises(ConfigError) as caught:
        settings.store()
    assert "S3CRET" not in str(caught.value)


@given(st.text(max_size=60), st.sampled_from(["", "valkey://", "s3://", "mooncake://", "redis://h?", "s3://bkt?"]))
def test_any_text_is_an_address_or_refused(text: str, beginning: str) -> None:
    try:
        remote = parse_remote(beginning + text)
    except ConfigError:
        return
    assert remote.prefix
    assert remote.host or remote.bucket


class TestSettings:
    def test_all_of_them(self, tmp_path: object) -> None:
        for name in ("password", "key"):
            with open(f"{tmp_path}/{name}", "w", encoding="utf-8") as file:
                file.write("x")
        given = {
            "KVTALLY_STORE__REMOTE": "valkey://kv?ttl=1h",
            "KVTALLY_STORE__REMOTE_USER": "me",
            "KVTALLY_STORE__REMOTE_PASSWORD_FILE": f"{tmp_path}/password",
            "KVTALLY_STORE__REMOTE_KEY_FILE": f"{tmp_path}/key",
            "KVTALLY_STORE__REMOTE_WRITE_LIMIT": "100MB",
        }
        settings = load(environ=given)
        config = settings.store()
        assert config.remote == "valkey://kv?ttl=1h"
        assert config.remote_write_bytes_s == 100_000_000
        pool = settings.pool()
        assert pool is not None
        assert pool.remote.ttl_s == 3600
        assert pool[1:] == ("me", f"{tmp_path}/password", f"{tmp_path}/key")

    def test_none(self) -> None:
        assert load(environ={}).pool() is None
        assert load(environ={}).store().remote == ""

    @pytest.mark.parametrize("name", ["user", "password_file", "key_file", "write_limit"])
    def test_without_a_pool_the_others_mean_nothing(self, name: str) -> None:
        value = {"write_limit": "1GB", "user": "me"}.get(name, __file__)
        with pytest.raises(ConfigError, match=r"without store\.remote"):
            load(flags={f"store.remote_{name}": value}, environ={}).store()

    @pytest.mark.parametrize("name", ["password_file", "key_file"])
    def test_files_must_be_there(self, name: str) -> None:
        flags = {"store.remote": "valkey://kv", f"store.remote_{name}": "/not/there"}
        with pytest.raises(ConfigError, match="is not a file"):
            load(flags=flags, environ={}).store()


def test_a_store_does_not_pretend_to_use_a_pool(tmp_path: Path) -> None:
    config = StoreConfig(socket=str(tmp_path / "s.sock"), memory_bytes=1 << 20, remote="valkey://127.0.0.1:6379")
    with pytest.raises(ConfigError, match="do not use a pool yet"):
        check(config)
