"""What a store listens on: the unix socket it owns, addresses, TLS, and what is exchanged before the first frame.

Owns the socket's path, lock and mode, the peer check, and the passing of descriptors. Knows no messages beyond the
greeting it is handed. Neighbours: `server` (drives it), `connections` (takes over once a socket is greeted).
Everything here is a plain non-blocking system call or happens before the store serves.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import socket
import ssl
import stat
from pathlib import Path

from kvtally.config import LONGEST_SOCKET_PATH_BYTES
from kvtally.config.units import split_address
from kvtally.errors import ConfigError

_BACKLOG = 128


class UnixEndpoint:
    """The socket path of one store: locked first, before anything else is touched, and listened on last.

    The lock file stays behind on purpose: deleting it would let two stores lock two different files of the same name.
    """

    def __init__(self, path: str) -> None:
        """Lock the path. Raises ConfigError: KV-102 (path), KV-103 (directory), KV-104 (another store has it)."""
        self.path = path
        self._listener: socket.socket | None = None
        check_socket_path(path)
        directory = Path(path).parent
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_directory(directory)
            self._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _unusable(path, str(error)) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(
                f"another store already serves {path}",
                remedy="Use that one, stop it first, or give this store another --socket.",
                code="KV-104",
            ) from error

    def listen(self) -> socket.socket:
        """Bind and listen, mode 0600, in place of whatever socket a dead store left behind."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        previous_umask = os.umask(0o177)  # so that others cannot connect, not even for a moment
        try:
            if os.path.lexists(self.path):
                os.unlink(self.path)  # nobody listens there, because we hold the lock
            listener.bind(self.path)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise _unusable(self.path, str(error)) from error
        finally:
            os.umask(previous_umask)
        self._listener = listener
        return listener

    def stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            Path(self.path).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the socket and give up the lock, in this order."""
        self.stop_listening()
        os.close(self._lock)


def check_socket_path(path: str) -> None:
    """Raise ConfigError KV-102 for a path that cannot be a socket's. Touches nothing."""
    length = len(os.fsencode(path))
    if not 0 < length <= LONGEST_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"the socket path {path!r} has {length} bytes; a unix socket's may have 1 to {LONGEST_SOCKET_PATH_BYTES}",
            remedy="Choose a shorter --socket, for example beneath /run or $XDG_RUNTIME_DIR.",
            code="KV-102",
        )
    if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise ConfigError(
            f"{path} exists and is not a socket",
            remedy="Move it away, or choose another --socket.",
            code="KV-102",
        )


def send_greeting(connection: socket.socket, frame: bytes, arena_fd: int) -> int:
    """Send the greeting with the arena and the write end of a fresh liveness pipe; return its (non-blocking) read end.

    The peer's copy is then the only write end there is: the read end reports EOF when the peer's process is gone (or
    has closed it, or never took it). Raises OSError when the peer is not there any more.
    """
    read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        rights = array.array("i", [arena_fd, write_end])
        # A fresh socket's buffer takes a greeting whole, so there is no partial write to go on with.
        if connection.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]) != len(frame):
            raise BlockingIOError("the greeting did not fit into the socket's buffer")
    except OSError:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    return read_end


def bind_tcp(text: str, setting: str) -> socket.socket:
    """Bind without listening, to find out whether the port is in use before the store touches anything."""
    try:
        host, port = split_address(text)
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, protocol)
    except (ValueError, OSError) as error:
        raise _unbound(text, setting, error, "KV-102") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _unbound(text, setting, error, "KV-104" if error.errno == errno.EADDRINUSE else "KV-102") from error
    return listener


def start_listening(listener: socket.socket, setting: str) -> None:
    """Listen. Two sockets may be bound to one port until one of them listens, so this may find the port in use, too."""
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        raise _unbound(str(listener.getsockname()), setting, error, "KV-104") from error


def tls_context(cert: str, key: str) -> ssl.SSLContext | None:
    """The server's side of TLS, or None if it is not configured. Raises ConfigError."""
    if not cert and not key:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key or None)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"the TLS certificate {cert!r} and key {key!r} cannot be used: {error}",
            remedy="Point tls_cert and tls_key at a PEM certificate and its private key, readable by this user.",
        ) from error
    return context


def _check_directory(directory: Path) -> None:
    """Raise ConfigError if others can write to the directory: they could put their own socket in the store's place."""
    status = directory.stat()
    is_shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
    if status.st_uid not in (os.geteuid(), 0) or is_shared:
        raise _unusable(str(directory), "others may write to it, or own it")


def _unusable(path: str, why: str) -> ConfigError:
    return ConfigError(
        f"a socket cannot be kept at {path}: {why}",
        remedy="Choose a --socket in a directory that is yours and that only you can write to.",
        code="KV-103",
    )


def _unbound(text: str, setting: str, error: Exception, code: str) -> ConfigError:
    return ConfigError(
        f"{setting} cannot listen on {text!r}: {error}",
        remedy="Choose an address of this machine, as host:port, and a port that nobody uses.",
        code=code,
    )
