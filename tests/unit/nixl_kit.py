"""For tests of NIXL without it: a library in its place, whose READs go as a test wants them to."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvtally.store.tiers.nixl import WHEELS

VARIABLES = ("NIXL_LOG_LEVEL", "UCX_LOG_FILE", "UCX_ERROR_SIGNALS", "UCX_TLS")


class NotFoundError(Exception):
    """One of the library's errors: they have no base class of their own."""


class FakeAgent:
    """The library's agent, between agents of this process. A test decides how each READ goes on."""

    network: dict[bytes, FakeAgent] = {}
    refuses = ""  # the call that fails

    def __init__(self, name: str, settings: Any) -> None:
        self.name = name.encode()
        self.connected: list[bytes] = []
        self.states: dict[int, Callable[[], str]] = {}  # by number of the READ; done at once unless it is here
        self.posted: list[tuple[Any, Any]] = []
        self.released: set[int] = set()
        self.polls = 0
        self.is_registered = False
        FakeAgent.network[self.name] = self

    def _call(self, name: str) -> None:
        if FakeAgent.refuses == name:
            raise NotFoundError(name)

    def create_backend(self, backend: str) -> None:
        self._call("create_backend")

    def register_memory(self, regions: Any, kind: str) -> str:
        self._call("register_memory")
        self.is_registered = True
        return "region"

    def deregister_memory(self, region: str) -> None:
        self.is_registered = False

    def get_agent_metadata(self) -> bytes:
        return self.name

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self._call("add_remote_agent")
        self.connected.append(metadata)
        return metadata

    def remove_remote_agent(self, name: bytes) -> None:
        self.connected.remove(name)

    def get_xfer_descs(self, descriptors: Any, kind: str) -> Any:
        return descriptors

    def initialize_xfer(self, operation: str, here: Any, there: Any, name: bytes) -> int:
        assert operation == "READ"
        assert name in self.connected
        self.posted.append((here, there))
        return len(self.posted) - 1

    def transfer(self, number: int) -> str:
        return self._state(number)

    def check_xfer_state(self, number: int) -> str:
        assert number not in self.released
        self.polls += 1
        return self._state(number)

    def release_xfer_handle(self, number: int) -> None:
        self.released.add(number)

    def _state(self, number: int) -> str:
        state = self.states.get(number, lambda: "DONE")()
        if state == "DONE":
            for (here, size, _), (there, same, _) in zip(*self.posted[number], strict=True):
                assert size == same
                ctypes.memmove(here, there, size)
        return state


class Script:
    """The state of a READ: in progress until it is told."""

    def __init__(self, state: str = "PROC") -> None:
        self.state = state

    def __call__(self) -> str:
        if self.state == "raises":
            raise NotFoundError("NIXL_ERR_REMOTE_DISCONNECT")
        return self.state


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake in the place of the wheel."""
    library = SimpleNamespace(
        nixl_agent=FakeAgent,
        nixl_agent_config=lambda **settings: settings,
        nixl_thread_sync_t=SimpleNamespace(NIXL_THREAD_SYNC_STRICT=1),
        _bindings=SimpleNamespace(nixlNotFoundError=NotFoundError, nixlXferDList=list),
    )
    monkeypatch.setitem(sys.modules, WHEELS[0], library)
    monkeypatch.setattr(FakeAgent, "network", {})
    monkeypatch.setattr(FakeAgent, "refuses", "")
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "x")  # so that what is set here does not outlive the test
        monkeypatch.delenv(variable)
