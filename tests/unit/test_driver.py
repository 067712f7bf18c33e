"""The driver's calls, with a library that notes them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from kvtally.device.driver import LIBRARY, NOT_READY, Driver
from kvtally.errors import IncompatibleError


class Library:
    """Answers every call with `code`, and hands its own context out. Every kernel has parameters of these `sizes`."""

    def __init__(self) -> None:
        self.code = 0
        self.calls: list[tuple[Any, ...]] = []
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name == "cuCtxGetCurrent":
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_void_p)).contents.value = 77
            elif name == "cuFuncGetParamInfo":
                _, index, _, size = arguments
                if index >= len(self.sizes):
                    return 1
                ctypes.cast(size, ctypes.POINTER(ctypes.c_size_t)).contents.value = self.sizes[index]
            elif name == "cuLaunchKernel":
                *numbers, places, extra = arguments
                taken = [ctypes.string_at(place, size) for place, size in zip(places, self.sizes, strict=False)]
                self.calls.append((name, *numbers, [int.from_bytes(value, "little") for value in taken], extra))
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


class Compiled:
    """What Triton answers when it has compiled something."""

    class metadata:
        num_warps = 4
        shared = 1024

    function = 99


def test_a_kernel_gets_its_arguments_and_nothing_for_what_triton_adds(library: Library) -> None:
    library.sizes = [8, 4, 8, 8]
    kernel = Driver().kernel(Compiled, [8, 4])
    assert kernel is not None
    kernel.launch((5, 6), 7, [1 << 40, 3])
    kernel.launch((1, 1), 7, [2, 4])
    assert library.calls == [
        ("cuLaunchKernel", 99, 5, 6, 1, 128, 1, 1, 1024, 7, [1 << 40, 3, 0, 0], None),
        ("cuLaunchKernel", 99, 1, 1, 1, 128, 1, 1, 1024, 7, [2, 4, 0, 0], None),
    ]
    library.code = 700
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        kernel.launch((1, 1), 7, [2, 4])


@pytest.mark.parametrize("sizes", [[], [8], [4, 8, 8, 8], [8, 8, 8, 8], [8, 4], [8, 4, 8], [8, 4, 8, 4]])
def test_a_kernel_with_other_parameters_is_left_to_triton(library: Library, sizes: list[int]) -> None:
    library.sizes = sizes
    assert Driver().kernel(Compiled, [8, 4]) is None


def test_kernels_are_left_to_triton_where_the_driver_cannot_say(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older(Library):
        def __getattr__(self, name: str) -> Callable[..., int]:
            if name == "cuFuncGetParamInfo":
                raise AttributeError(name)
            return super().__getattr__(name)

    older = Older()
    older.sizes = [8]
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: older)
    assert Driver().kernel(Compiled, [8]) is None
    assert Driver().kernel(None, [8]) is None  # what Triton's interpreter answers


def test_without_the_library_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "PyDLL", missing)
    with pytest.raises(IncompatibleError, match="NVIDIA") as caught:
        Driver()
    assert caught.value.code == "KV-209"
