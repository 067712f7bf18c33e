"""The few calls to NVIDIA's driver that queue copies and kernels without releasing the interpreter.

The thread that queues copies shares its interpreter with the engine's thread. Each call to torch releases the
interpreter and takes it back, which costs the engine's thread more than the call itself takes. These calls take
microseconds and never wait: they copy pinned memory only (`cuda` leaves the rest to torch). Owns nothing: streams and
events are torch's and kernels are Triton's, used by their handles. A `Driver` loads the driver's library, so it can be
made only where there is a GPU.
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
TRITONS_BYTES = (POINTER_BYTES, POINTER_BYTES)  # parameters that Triton adds after ours: scratch memory, unused here
SPARE = 6  # empty parameters after those, in case Triton adds more


class Driver:
    """Make it while the GPU to be used is torch's current device and has a context."""

    def __init__(self) -> None:
        try:
            library = ctypes.PyDLL(LIBRARY)  # PyDLL, unlike CDLL, does not release the interpreter
        except OSError as error:
            raise IncompatibleError(
                f"{LIBRARY} cannot be loaded ({error}): kvtally serves NVIDIA GPUs and CPUs only",
                remedy="Install NVIDIA's driver where the engine runs; give a container access to the GPU.",
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
        numbers = [ctypes.c_uint] * 7  # three sizes of the grid, three of a program, and bytes of shared memory
        self._launch = call("cuLaunchKernel", Handle, *numbers, Handle, Handle, Handle)
        size = ctypes.POINTER(ctypes.c_size_t)
        try:
            self._parameter = call("cuFuncGetParamInfo", Handle, ctypes.c_size_t, size, size)
        except AttributeError:  # a driver older than CUDA 12.4
            self._parameter = lambda *_: NOT_READY
        self._context = Handle()
        _check(call("cuCtxGetCurrent", ctypes.POINTER(Handle))(ctypes.byref(self._context)))

    def enter(self) -> None:
        """From now on this thread's calls go to this GPU."""
        _check(self._enter(self._context))

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Copy between two addresses, each on the GPU or in pinned memory, in stream order."""
        _check(self._copy(target, source, size_bytes, stream))

    def record(self, event: int, stream: int) -> None:
        _check(self._record(event, stream))

    def wait(self, stream: int, event: int) -> None:
        """Whatever is queued on the stream from now on waits for the event."""
        _check(self._wait(stream, event, 0))

    def is_done(self, event: int) -> bool:
        code = self._query(event)
        if code != NOT_READY:
            _check(code)
        return code == 0

    def kernel(self, compiled: Any, sizes_bytes: Sequence[int]) -> Kernel | None:
        """A kernel that Triton has compiled, for arguments of these sizes. None: its parameters are not as expected."""
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
    """A kernel that is launched many times, with other arguments each time: addresses and non-negative integers."""

    def __init__(self, launch: Callable[..., int], function: int, metadata: Any, parameters: int) -> None:
        parameters += SPARE
        self._launch, self._function = launch, function
        self._threads, self._shared_bytes = WARP_THREADS * metadata.num_warps, metadata.shared
        self._values = (ctypes.c_uint64 * parameters)()  # the driver reads as many bytes of each as its parameter has
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
