"""The few calls of NVIDIA's driver by which copies are queued, made without letting go of the interpreter.

The thread that queues copies shares its interpreter with the engine's. Every call of torch lets go of it and has to win
it back, and each time the engine's thread pays more for that than the call takes. These calls take microseconds and
never wait: copies are of pinned memory only (`cuda` has torch copy what is not). Owns nothing: streams and events are
torch's, by their handles. Loads the driver's library, so nobody without a GPU makes a `Driver`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from kvtally.errors import IncompatibleError

Address = ctypes.c_uint64
Handle = ctypes.c_void_p

LIBRARY = "libcuda.so.1"
NOT_READY = 600


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


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA error {code}")
