"""The driver's calls, with a library that notes them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from kvtally.device.driver import LIBRARY, NOT_READY, Driver
from kvtally.errors import IncompatibleError


class Library:
    """Answers every call with `code`, and hands its own context out."""

    def __init__(self) -> None:
        self.code = 0
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name == "cuCtxGetCurrent":
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_void_p)).contents.value = 77
            else:
                self.calls.append((name, *(getattr(value, "value", value) for value in arguments)))
            return self.code

        return call


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: library if name == LIBRARY else None)
    return library


def test_calls_reach_the_driver_as_they_are_meant(library: Library) -> None:
    driver = Driver()
    driver.enter()
    driver.copy(1, 2, 3, 4)
    driver.record(5, 6)
    driver.wait(7, 8)
    assert driver.is_done(9)
    assert library.calls == [
        ("cuCtxSetCurrent", 77),
        ("cuMemcpyAsync", 1, 2, 3, 4),
        ("cuEventRecord", 5, 6),
        ("cuStreamWaitEvent", 7, 8, 0),
        ("cuEventQuery", 9),
    ]


def test_what_is_under_way_is_no_error_and_every_error_is_raised(library: Library) -> None:
    driver = Driver()
    library.code = NOT_READY
    assert not driver.is_done(1)
    library.code = 700
    for call in (driver.enter, lambda: driver.copy(1, 2, 3, 4), lambda: driver.record(1, 2), lambda: driver.wait(1, 2)):
        with pytest.raises(RuntimeError, match="CUDA error 700"):
            call()
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        driver.is_done(1)


def test_without_the_library_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "PyDLL", missing)
    with pytest.raises(IncompatibleError, match="NVIDIA") as caught:
        Driver()
    assert caught.value.code == "KV-209"
