"""S3 and its relatives: any S3 endpoint, Google Cloud Storage and Azure Blob Storage, by obstore.

Every name is a request, which takes tens of milliseconds and costs money: so `is_charged`, many threads, and one object
for each value, however large. Nothing expires by itself and nothing is refreshed: a lifecycle rule of the bucket
deletes what is old.

Credentials: `store.remote_user` (the access key) and `store.remote_password_file` (its secret); without them the
library's own chain: environment, web identity, container and instance roles. Requests are signed for each call.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import BaseError, GenericError, PermissionDeniedError, UnauthenticatedError
from obstore.store import AzureStore, GCSStore, S3Store

from kvtally.config.remote import Remote
from kvtally.errors import ConfigError, TierError
from kvtally.store.tiers.engines.base import (
    PROGRESS_S,
    Condition,
    Credentials,
    DeniedError,
    Landed,
    Listed,
    Stored,
    absent,
    length_of,
    scatter,
    wrong_length,
)

AT_ONCE = 64  # small requests
SMALL_S = 1.0
VALUE_S = 30.0  # a value that makes progress may take so long
CONNECT_S = 1.0
NAMES_AT_ONCE = 1_000  # in one request to delete


class ObjectStoreEngine:
    """An `Engine` on a bucket."""

    readers = 32
    writers = 16
    is_charged = True

    def __init__(self, remote: Remote, credentials: Credentials) -> None:
        self.name = remote.kind
        self._remote = remote
        self._small = _open(remote, credentials, SMALL_S)
        self._values = _open(remote, credentials, VALUE_S)
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="pool-small")

    # ---- the contract

    def get_small(self, names: Sequence[str]) -> list[bytes | None]:
        return self._all_at_once([(self._get_one, (name,)) for name in names])

    def put_small(self, items: Mapping[str, bytes], ttl_s: int) -> None:
        self._all_at_once([(self._put_one, item) for item in items.items()])

    def get_into(self, name: str, target: Sequence[memoryview], landed: Landed) -> None:
        wanted_bytes = length_of(target)
        with self._translated():
            try:
                found = obstore.get(self._values, name)
            except FileNotFoundError as error:
                raise self._absent(name, error) from error
            if found.meta["size"] != wanted_bytes:
                raise wrong_length(name, found.meta["size"], wanted_bytes)
            data = memoryview(found.bytes())
        if len(data) != wanted_bytes:
            raise wrong_length(name, len(data), wanted_bytes)
        scatter(data, target, landed)

    def put_from(self, name: str, source: Sequence[memoryview], ttl_s: int) -> None:
        data = source[0] if len(source) == 1 else b"".join(source)
        with self._translated():
            obstore.put(self._values, name, data, use_multipart=False)

    def touch(self, names: Sequence[Stored], ttl_s: int) -> None:
        """Nothing to do: age is counted from when it was written."""

    def remove(self, names: Sequence[Stored]) -> None:
        paths = [name for name, _ in names]
        with self._translated():
            for start in range(0, len(paths), NAMES_AT_ONCE):
                try:
                    obstore.delete(self._values, paths[start : start + NAMES_AT_ONCE])
                except FileNotFoundError:  # of several, some stores say so
                    continue

    def register(self, memory: memoryview) -> None:
        """Nothing to prepare."""

    def names(self, prefix: str) -> Iterator[Listed]:
        now_s = time.time()
        with self._translated():
            for found in obstore.list(self._values, prefix=prefix.rpartition("/")[0]):
                for item in found:
                    if item["path"].startswith(prefix):
                        yield Listed(item["path"], item["size"], now_s - item["last_modified"].timestamp())

    def condition(self) -> Condition:
        warnings = [
            (
                "a bucket keeps everything until a rule deletes it",
                f"Add a lifecycle rule that expires {self._remote.prefix}/ after some days.",
            )
        ]
        if self._remote.endpoint.startswith("http://"):
            warnings.append(
                ("prompts' KV crosses the network unencrypted", "Use https://, or a key file, unless it is private.")
            )
        return Condition(
            server=self._remote.endpoint or self._remote.kind, eviction="lifecycle rules", warnings=tuple(warnings)
        )

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- requests

    def _get_one(self, name: str) -> bytes | None:
        try:
            return bytes(obstore.get(self._small, name).bytes())
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise self._no_bucket() from error
            return None

    def _put_one(self, name: str, data: bytes) -> None:
        obstore.put(self._small, name, data, use_multipart=False)

    def _all_at_once(self, calls: Sequence[tuple[Any, tuple[Any, ...]]]) -> list[Any]:
        """Make these calls side by side. The first one that fails ends it: the others would only wait as long."""
        with self._translated():
            if len(calls) == 1:
                call, arguments = calls[0]
                return [call(*arguments)]
            try:
                futures = [self._threads.submit(call, *arguments) for call, arguments in calls]
            except RuntimeError as error:
                raise TierError("the pool is closed", remedy="Nothing to do.") from error
            _, undone = wait(futures, return_when=FIRST_EXCEPTION)
            for future in undone:
                future.cancel()
            if undone:
                next(future for future in futures if future not in undone and future.exception()).result()
            return [future.result() for future in futures]

    def _absent(self, name: str, error: FileNotFoundError) -> TierError:
        return self._no_bucket() if "NoSuchBucket" in str(error) else absent(name)

    def _no_bucket(self) -> TierError:
        what = f"there is no bucket {self._remote.bucket} at {self._remote.endpoint or self._remote.kind}"
        return DeniedError(what, remedy="Create it, or name another one.")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Whatever the library raises becomes an error of ours."""
        try:
            yield
        except (PermissionDeniedError, UnauthenticatedError) as error:
            remedy = "Check the credentials and what they allow: get, put, delete and list under the prefix."
            raise DeniedError(f"{self._remote} refuses this: {_first_line(error)}", remedy=remedy) from error
        except (GenericError, BaseError, OSError) as error:
            code = "KV-601" if "InsufficientStorage" in str(error) or "QuotaExceeded" in str(error) else None
            what = f"{self._remote} did not answer: {_first_line(error)}"
            remedy = "Nothing is lost but time; see whether it runs and can be reached from here."
            raise TierError(what, remedy=remedy, code=code) from error


def _open(remote: Remote, credentials: Credentials, timeout_s: float) -> Any:
    options: dict[str, Any] = {
        "timeout": timedelta(seconds=timeout_s),
        "read_timeout": timedelta(seconds=PROGRESS_S),
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "allow_http": remote.endpoint.startswith("http://"),
    }
    if remote.ca:
        try:
            options["root_certificate"] = Path(remote.ca).read_bytes()
        except OSError as error:
            what = f"the pool's ca cannot be read: {error}"
            raise ConfigError(what, remedy="Check the path and its mode.") from error
    retry: Any = {
        "max_retries": 1,
        "retry_timeout": timedelta(seconds=timeout_s),
        "backoff": {"init_backoff": timedelta(milliseconds=20), "max_backoff": timedelta(milliseconds=200), "base": 2},
    }
    named = {"endpoint": remote.endpoint, "region": remote.region}
    if remote.kind == "s3":
        named["region"] = remote.region or ("us-east-1" if remote.endpoint else "")
        if credentials.user:
            named |= {"access_key_id": credentials.user, "secret_access_key": credentials.password()}
    elif remote.kind == "az":
        named |= {"account_name": remote.account or credentials.user, "account_key": credentials.password()}
    config: Any = {name: value for name, value in named.items() if value}
    kinds: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
    try:
        return kinds[remote.kind](remote.bucket, config=config, client_options=options, retry_config=retry)
    except (BaseError, ValueError) as error:
        what = f"{remote} cannot be used: {_first_line(error)}"
        raise ConfigError(what, remedy="Check the address, its parameters and the credentials.") from error


def _first_line(error: Exception) -> str:
    """The library's words without its trace."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
