"""What a store listens on: the unix socket it owns, addresses, TLS, and what is exchanged before the first frame.

Owns the socket's path, lock and mode, accepting, and the passing of descriptors. Knows no messages beyond a refusal and
the greeting it is handed. Neighbours: `server` and `bulk` (drive it), `connections` (takes over once a socket is
greeted).
Everything here is a plain non-blocking system call or happens before the store serves.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import socket
import ssl
import stat
from abc import ABC, abstractmethod
from pathlib import Path

from kvtally.config import LONGEST_SOCKET_PATH_BYTES
from kvtally.config.units import split_address
from kvtally.errors import ConfigError, KVTallyError
from kvtally.wire.frames import encode
from kvtally.wire.messages import Refused

logger = logging.getLogger("kvtally.store")

_BACKLOG = 128
_ACCEPT_PAUSE_S = 1.0  # after the process ran out of descriptors
_ACCEPTS_PER_WAKE = 16


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


class Acceptor(ABC):
    """Accepts on one listening socket, in the event loop's thread."""

    def __init__(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._resume()

    def stop_accepting(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()

    @abstractmethod
    def _take(self, peer: socket.socket) -> None:
        """A new connection, whose socket does not block. If this raises OSError, the peer has left."""

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_WAKE):
            try:
                peer, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors or memory left; the listener stays readable, so stop watching it
                logger.error("cannot accept a connection: %s", error)
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_ACCEPT_PAUSE_S, self._resume)
                return
            peer.setblocking(False)
            try:
                self._take(peer)
            except OSError:  # it left, or there is no descriptor for its pipe
                peer.close()


def refuse(peer: socket.socket, error: KVTallyError, *, has_tls: bool) -> None:
    """Close a connection that nobody has taken, and say why if that is possible: not before TLS is negotiated."""
    logger.info("connection refused: %s", error)
    if not has_tls:
        with contextlib.suppress(OSError):
            peer.send(encode(Refused(0, error.code, error.message, error.remedy)))
    peer.close()


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


def peers_context(authority: str) -> ssl.SSLContext | None:
    """This store's side of TLS when it connects to peers, or None if it is not configured. Raises ConfigError."""
    if not authority:
        return None
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"the certificate authority {authority!r} cannot be used: {error}",
            remedy="Point peers_ca at the PEM certificate of the authority that signed the peers' certificates.",
        ) from error


def check_certificate(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> None:
    """Raise ConfigError if peers that trust the same authority would not accept this store's certificate.

    The two sides shake hands here, in memory: nobody is connected to.
    """
    ends = [(ssl.MemoryBIO(), ssl.MemoryBIO()) for _ in range(2)]
    (to_server, from_server), (to_client, from_client) = ends
    sides = [
        (client.wrap_bio(to_client, from_client, server_hostname=host), from_client, to_server),
        (server.wrap_bio(to_server, from_server, server_side=True), from_server, to_client),
    ]
    waiting = True
    while waiting:
        waiting = False
        for side, out, other in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                waiting = True
            except ssl.SSLError as error:
                raise ConfigError(
                    f"peers will not accept this store's TLS certificate for {host}: {error}",
                    remedy="Use a certificate for the host that store.advertise (or store.tcp) names, signed by the "
                    "authority in peers_ca, and not expired.",
                ) from error
            other.write(out.read())


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
