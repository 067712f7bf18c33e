"""The few calls of NVIDIA's driver by which copies and kernels are queued, without letting go of the interpreter.

The thread that queues copies shares its interpreter with the engine's. Every call of torch lets go of it and has to win
it back, and each time the engine's thread pays more for that than the call takes. These calls take microseconds and
never wait: copies are of pinned memory only (`cuda` has torch copy what is not). Owns nothing: streams and events are
torch's, kernels are Triton's, by their handles. Loads the driver's library, so nobody without a GPU makes a `Driver`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from kvtally.errors import IncompatibleError

Address = ctypes.c_uint64
Handle = ctypes.c_void_p

LIBRARY = "libcuda.so.1"
NOT_READY = 600
WARP_THREADS = 32
POINTER_BYTES = 8
TRITONS_BYTES = (POINTER_BYTES, POINTER_BYTES)  # parameters it adds behind ours: scratch memory, which ours do not use
SPARE = 6  # parameters, empty like those, should it add more


class Driver:
    """Made where the GPU to be used is torch's current one, with its context."""

    def __init__(self) -> None:
        try:
            library = ctypes.PyDLL(LIBRARY)  # PyDLL, unlike CDLL, keeps the interpreter
        except OSError as error:
            raise IncompatibleError(
                f"{LIBRARY} cannot be loaded ({error}): only NVIDIA's GPUs, and CPUs, are served",
                remedy="Install NVIDIA's driver where the engine runs; in a container, give it the GPU.",
                code="KV-209",
            ) from error

        def call(name: str, *arguments: object) -> Callable[..., int]:
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = ctypes.c_int
            return function  # type: ignore[no-any-return]

        self._copy = call("cuMemcpyAsync", Address, Address, ctypes.c_size_t, Handle)
        self._record = call("cuEventRecord", Handle, Handle)
        self._wait = call("cuStreamWaitEvent", Handle, Handle, ctypes.c_uint)
        self._query = call("cuEventQuery", Handle)
        self._enter = call("cuCtxSetCurrent", Handle)
        numbers = [ctypes.c_uint] * 7  # the grid's three sizes, a program's, and how much shared memory it has
        self._launch = call("cuLaunchKernel", Handle, *numbers, Handle, Handle, Handle)
        size = ctypes.POINTER(ctypes.c_size_t)
        try:
            self._parameter = call("cuFuncGetParamInfo", Handle, ctypes.c_size_t, size, size)
        except AttributeError:  # a driver older than CUDA 12.4
            self._parameter = lambda *_: NOT_READY
        self._context = Handle()
        _check(call("cuCtxGetCurrent", ctypes.POINTER(Handle))(ctypes.byref(self._context)))

    def enter(self) -> None:
        """This thread's calls are for this GPU from now on."""
        _check(self._enter(self._context))

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Between two addresses, each of the GPU or of pinned memory, in the order of the stream."""
        _check(self._copy(target, source, size_bytes, stream))

    def record(self, event: int, stream: int) -> None:
        _check(self._record(event, stream))

    def wait(self, stream: int, event: int) -> None:
        """What is queued on the stream from now on waits for the event."""
        _check(self._wait(stream, event, 0))

    def is_done(self, event: int) -> bool:
        code = self._query(event)
        if code != NOT_READY:
            _check(code)
        return code == 0

    def kernel(self, compiled: Any, sizes_bytes: Sequence[int]) -> Kernel | None:
        """What Triton has compiled, for arguments of these sizes. None: its parameters are not what we know of them."""
        function = getattr(compiled, "function", None)
        if function is None:
            return None
        size, offset = ctypes.c_size_t(), ctypes.c_size_t()
        sizes = [*sizes_bytes, *TRITONS_BYTES]
        for index, size_bytes in enumerate(sizes):
            if self._parameter(function, index, ctypes.byref(offset), ctypes.byref(size)) or size.value != size_bytes:
                return None
        return Kernel(self._launch, function, compiled.metadata, len(sizes))


class Kernel:
    """Launched again and again, each time with other arguments: addresses and whole numbers that are not negative."""

    def __init__(self, launch: Callable[..., int], function: int, metadata: Any, parameters: int) -> None:
        parameters += SPARE
        self._launch, self._function = launch, function
        self._threads, self._shared_bytes = WARP_THREADS * metadata.num_warps, metadata.shared
        self._values = (ctypes.c_uint64 * parameters)()  # the driver takes as much of each as its parameter is long
        at, step = ctypes.addressof(self._values), ctypes.sizeof(ctypes.c_uint64)
        self._places = (ctypes.c_void_p * parameters)(*range(at, at + step * parameters, step))

    def launch(self, grid: tuple[int, int], stream: int, arguments: Sequence[int]) -> None:
        self._values[: len(arguments)] = list(arguments)
        columns, rows = grid
        _check(
            self._launch(
                self._function, columns, rows, 1, self._threads, 1, 1, self._shared_bytes, stream, self._places, None
            )
        )


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA error {code}")
