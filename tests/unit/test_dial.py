"""Links to other stores: made when needed, proved both ways, lost once, and never left over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from kvtally.config.peers import PeerList
from kvtally.errors import IncompatibleError, TransportError
from kvtally.log import Seldom
from kvtally.store import dial
from kvtally.store.dial import Dialer, PeerNames
from kvtally.store.jobs import PeerLink
from kvtally.store.server import new_event_loop
from kvtally.wire.auth import NONCE_BYTES, proof, store_proof
from kvtally.wire.frames import encode, request_reader
from kvtally.wire.limits import MIB
from kvtally.wire.messages import Done, Greeting, Hello, Offer, Ping, Refused, Reply, Request, Staged, Welcome
from tests.unit.bulk_kit import HOST, greeting, tls_pair
from tests.unit.shell import TOKEN, LoopFactory
from tests.waiting import Clock, comes_about

OTHER = "127.0.0.3"
LOOPS = [new_event_loop, asyncio.new_event_loop]
BULK_PORT = 4711

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Far:
    """Another store, as far as links go. `greeting`, `welcome` and `talk` may be replaced."""

    port: int = 0
    accepted: int = 0
    hellos: list[Hello] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)
    answers: bool = True
    talk: Talk | None = None
    nonce: bytes = b"n" * NONCE_BYTES
    welcome: Callable[[Hello], Reply] = lambda hello: Welcome(
        hello.id, 1, proof=store_proof(TOKEN, hello.nonce), bulk_port=BULK_PORT
    )

    @property
    def address(self) -> str:
        return f"tcp://{HOST}:{self.port}"

    def link(self, namespace: bytes = b"one") -> PeerLink:
        return PeerLink(self.address, namespace)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self.writers.append(writer)
        self.sources.add(writer.get_extra_info("peername")[0])
        with contextlib.suppress(ConnectionError):
            await (self.talk or self.serve)(reader, writer)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode(greeting(self.nonce)))
        frames = request_reader(MIB)
        while data := await reader.read(65536):
            for request in frames.feed(data):
                if isinstance(request, Hello):
                    self.hellos.append(request)
                    writer.write(encode(self.welcome(request)))
                    continue
                self.requests.append(request)
                if self.answers:
                    writer.write(encode(Done(request.id)))
        writer.close()


@dataclass
class Near:
    """This store, as far as links go."""

    dialer: Dialer
    said: list[tuple[PeerLink, Reply]]
    lost: list[tuple[PeerLink, str]]

    async def is_said(self, count: int) -> None:
        await comes_about(lambda: len(self.said) >= count)

    async def code(self) -> str:
        """Of the next loss."""
        await comes_about(lambda: self.lost)
        return self.lost.pop(0)[1]


@contextlib.asynccontextmanager
async def far(tls: ssl.SSLContext | None = None) -> AsyncIterator[Far]:
    other = Far()
    server = await asyncio.start_server(other.connected, HOST, 0, ssl=tls)
    other.port = server.sockets[0].getsockname()[1]
    try:
        yield other
    finally:
        server.close()
        for writer in other.writers:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def near(**options: object) -> AsyncIterator[Near]:
    said: list[tuple[PeerLink, Reply]] = []
    lost: list[tuple[PeerLink, str]] = []
    settings: dict[str, object] = {
        "store": "store-b",
        "address": f"tcp://{OTHER}:1",
        "token": TOKEN,
        "describe": lambda digest: b"described " + digest,
        "said": lambda link, reply: said.append((link, reply)),
        "lost": lambda link, code: lost.append((link, code)),
        **options,
    }
    dialer = Dialer(**settings)  # type: ignore[arg-type]
    tasks = asyncio.all_tasks()
    try:
        yield Near(dialer, said, lost)
    finally:
        await dialer.close()
        assert dialer.links == []
        await comes_about(lambda: not [task for task in asyncio.all_tasks() - tasks if "Dialer" in repr(task)])


def run(test: Callable[[], Awaitable[None]], loop_factory: LoopFactory = new_event_loop) -> None:
    async def whole() -> None:
        await test()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(whole())


# ---- a link's life


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_link_is_made_when_something_is_to_be_said(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with far() as other, near(source=OTHER) as this:
            assert other.accepted == 0
            for number in range(1, 4):
                this.dialer.send(other.link(), Ping(number))
            await this.is_said(3)
            assert this.said == [(other.link(), Done(number)) for number in range(1, 4)]
            this.dialer.send(other.link(), Ping(4))
            await this.is_said(4)
            assert (other.accepted, len(other.hellos), this.lost) == (1, 1, [])
            hello = other.hellos[0]
            assert (hello.peer, hello.namespace, hello.proof) == (True, b"described one", proof(TOKEN, other.nonce))
            assert len(hello.nonce) == NONCE_BYTES
            assert OTHER in hello.client
            assert other.sources == {OTHER}  # where this store is known from

    run(test, loop_factory)


def test_each_namespace_has_a_link_of_its_own() -> None:
    async def test() -> None:
        async with far() as other, near() as this:
            for number, namespace in enumerate((b"one", b"two", b"one"), 1):
                this.dialer.send(other.link(namespace), Ping(number))
            await this.is_said(3)
            assert sorted(hello.namespace for hello in other.hellos) == [b"described one", b"described two"]
            assert {link.namespace for link, reply in this.said if reply in (Done(1), Done(3))} == {b"one"}

    run(test)


def test_what_comes_unasked_is_heard_too() -> None:
    async def test() -> None:
        async with far() as other, near() as this:
            this.dialer.send(other.link(), Ping(1))
            await this.is_said(1)
            other.writers[0].write(encode(Staged(0, 5, 256)))
            await this.is_said(2)
            assert this.said[1] == (other.link(), Staged(0, 5, 256))

    run(test)


def test_a_link_that_ends_is_lost_once_and_made_again_when_needed() -> None:
    async def test() -> None:
        async with far() as other, near() as this:
            this.dialer.send(other.link(), Ping(1))
            await this.is_said(1)
            other.writers[0].transport.abort()
            await comes_about(lambda: this.lost)
            assert this.lost == [(other.link(), "KV-502")]
            this.dialer.send(other.link(), Ping(2))
            await this.is_said(2)
            assert (other.accepted, len(this.lost)) == (2, 1)

    run(test)


def test_the_store_may_ask_again_while_it_hears_of_the_loss() -> None:
    async def test() -> None:
        async with far() as other, near() as this:
            this.dialer.send(other.link(), Ping(1))
            await this.is_said(1)
            this.dialer._lost = lambda link, code: this.dialer.send(link, Ping(2))
            other.writers[0].transport.abort()
            await this.is_said(2)
            assert other.accepted == 2

    run(test)


# ---- links that cannot be made


def test_a_port_that_nobody_listens_on_is_lost_at_once() -> None:
    async def test() -> None:  # HANDSHAKE_S is far away: whoever waited for it would hang
        with socket.create_server((HOST, 0)) as taken:
            address = f"tcp://{HOST}:{taken.getsockname()[1]}"
        async with near() as this:
            this.dialer.send(PeerLink(address, b"one"), Ping(1))
            this.dialer.send(PeerLink(address, b"one"), Ping(2))
            assert await this.code() == "KV-500"
            assert (this.lost, this.dialer.links) == ([], [])

    run(test)


@pytest.mark.parametrize("address", ["tcp://no.such.name.invalid:1", "nonsense", "tcp://"])
def test_an_address_that_leads_nowhere(address: str) -> None:
    async def test() -> None:
        async with near() as this:
            this.dialer.send(PeerLink(address, b"one"), Ping(1))
            assert await this.code() == "KV-500"

    run(test)


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_store_that_says_nothing_is_lost_in_time(monkeypatch: pytest.MonkeyPatch, loop_factory: LoopFactory) -> None:
    monkeypatch.setattr(dial, "HANDSHAKE_S", 0.1)

    async def test() -> None:
        async with far() as other, near() as this:
            other.talk = _silence
            this.dialer.send(other.link(), Ping(1))
            assert await this.code() == "KV-501"
            await comes_about(lambda: other.writers[0].transport.is_closing())

    run(test, loop_factory)


async def _silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


@pytest.mark.parametrize(
    ("welcome", "code"),
    [
        (lambda hello: Welcome(hello.id, 1), "KV-205"),  # as the version before this one answers
        (lambda hello: Welcome(hello.id, 1, proof=store_proof("guess", hello.nonce), bulk_port=1), "KV-205"),
        (lambda hello: Welcome(hello.id, 1, proof=proof(TOKEN, hello.nonce), bulk_port=1), "KV-205"),
        (lambda hello: Welcome(hello.id, 1, proof=store_proof(TOKEN, hello.nonce)), "KV-503"),  # no port for bytes
        (lambda hello: Welcome(hello.id, 1, proof=store_proof(TOKEN, hello.nonce), bulk_port=70_000), "KV-503"),
        (lambda hello: Refused(0, "KV-210", "no peer", "Name it."), "KV-210"),
        (lambda hello: Refused(hello.id, "KV-202", "no such namespace", "Make them equal."), "KV-202"),
        (lambda hello: greeting(), "KV-503"),
        (lambda hello: Done(hello.id), "KV-503"),
    ],
    ids=["older", "guess", "reflected", "no port", "no such port", "refused", "namespace", "twice greeted", "done"],
)
def test_a_store_that_is_none_to_ask(welcome: Callable[[Hello], Reply], code: str) -> None:
    async def test() -> None:
        async with far() as other, near() as this:
            other.welcome = welcome
            this.dialer.send(other.link(), Ping(1))
            assert await this.code() == code
            assert (other.requests, this.said) == ([], [])
            assert this.dialer.bulk_endpoint(other.address) is None

    run(test)


@pytest.mark.parametrize(
    ("says", "code"),
    [
        (b"\xff\xff\xff\xff", "KV-503"),
        (encode(Done(1)), "KV-503"),
        (encode(greeting(protocol=99)), "KV-201"),
        (encode(Greeting(1, "x", "store-b", 1, True, greeting().limits, b"n" * 32)), "KV-200"),  # this very store
    ],
    ids=["junk", "no greeting", "another version", "itself"],
)
def test_a_greeting_that_is_none_to_answer(says: bytes, code: str) -> None:
    async def test() -> None:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(says)
            assert await reader.read() == b""

        async with far() as other, near() as this:
            other.talk = talk
            this.dialer.send(other.link(), Ping(1))
            assert await this.code() == code

    run(test)


def test_an_impostor_cannot_have_a_store_answer_its_own_nonce() -> None:
    """It greets a second link with the nonce that the first one sent, and uses the answer as its proof there."""

    async def test() -> None:
        first: list[tuple[Hello, asyncio.StreamWriter]] = []

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonce = first[0][0].nonce if first else os.urandom(NONCE_BYTES)
            writer.write(encode(greeting(nonce)))
            frames = request_reader(MIB)
            while data := await reader.read(65536):
                for request in frames.feed(data):
                    if isinstance(request, Hello) and not first:
                        first.append((request, writer))
                    elif isinstance(request, Hello):
                        hello, victim = first[0]
                        victim.write(encode(Welcome(hello.id, 1, proof=request.proof, bulk_port=BULK_PORT)))
                    else:
                        other.requests.append(request)

        async with far() as other, near() as this:
            other.talk = talk
            this.dialer.send(other.link(b"one"), Ping(1))
            await comes_about(lambda: first)
            this.dialer.send(other.link(b"two"), Ping(2))
            assert await this.code() == "KV-205"
            assert other.requests == []

    run(test)


def test_a_refusal_is_logged_once_a_minute_with_its_remedy(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    async def test() -> None:
        async with far() as other, near() as this:
            other.welcome = lambda hello: Refused(0, "KV-210", "127.0.0.3 is no peer", "Name it in store.peers.")
            for number in range(3):
                this.dialer.send(other.link(), Ping(number))
                await this.code()
            lines = [record.getMessage() for record in caplog.records]
            assert [line for line in lines if "KV-210" in line and "Name it in store.peers." in line] == lines[-1:]
            clock.forward(Seldom.AGAIN_S)
            this.dialer.send(other.link(), Ping(4))
            await this.code()
            assert len([1 for record in caplog.records if "KV-210" in record.getMessage()]) == 2

    with caplog.at_level(logging.WARNING):
        run(test)


# ---- TLS


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_tls(tls_files: tuple[str, str], loop_factory: LoopFactory) -> None:
    server, client = tls_pair(tls_files)

    async def test() -> None:
        async with far(server) as other, near(tls=client, bulk_tls=client) as this:
            this.dialer.send(other.link(), Ping(1))
            await this.is_said(1)
            bulk = this.dialer.bulk_endpoint(other.address)
            assert bulk is not None
            assert (bulk.tls, bulk.host) == (client, HOST)
        async with far(server) as other, near(tls=client) as this:
            this.dialer.send(other.link(), Ping(1))
            await this.is_said(1)
            bulk = this.dialer.bulk_endpoint(other.address)
            assert bulk is not None
            assert bulk.tls is None

    run(test, loop_factory)


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_tls_on_one_side_only(
    tls_files: tuple[str, str], loop_factory: LoopFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = tls_pair(tls_files)

    async def test() -> None:
        async with far() as other, near(tls=client) as this:
            this.dialer.send(other.link(), Ping(1))
            assert await this.code() == "KV-200"
        monkeypatch.setattr(dial, "HANDSHAKE_S", 0.2)  # a server that waits for TLS says nothing
        async with far(server) as other, near() as this:
            this.dialer.send(other.link(), Ping(1))
            assert await this.code() in ("KV-501", "KV-502")

    run(test, loop_factory)


def test_a_certificate_of_another_authority(tls_files: tuple[str, str]) -> None:
    server, _ = tls_pair(tls_files)

    async def test() -> None:
        async with far(server) as other, near(tls=ssl.create_default_context()) as this:
            this.dialer.send(other.link(), Ping(1))
            assert await this.code() == "KV-200"

    run(test)


# ---- where bytes are


def test_the_bulk_port_is_known_while_a_link_stands() -> None:
    async def test() -> None:
        async with far() as other, near(source=OTHER) as this:
            assert this.dialer.bulk_endpoint(other.address) is None
            this.dialer.send(other.link(b"one"), Ping(1))
            await this.is_said(1)
            known = this.dialer.bulk_endpoint(other.address)
            assert known is not None
            assert (known.targets, known.token, known.source) == (
                ((socket.AF_INET, (HOST, BULK_PORT)),),
                TOKEN,
                OTHER,
            )
            this.dialer.send(other.link(b"two"), Ping(2))
            await this.is_said(2)
            assert this.dialer.bulk_endpoint(other.address) is known  # so connections to it are kept
            other.writers[0].transport.abort()
            await this.code()
            assert this.dialer.bulk_endpoint(other.address) is known
            other.writers[1].transport.abort()
            await this.code()
            assert this.dialer.bulk_endpoint(other.address) is None

    run(test)


# ---- bounds


def test_a_quiet_link_is_closed_and_nobody_is_told(clock: Clock) -> None:
    async def test() -> None:
        async with far() as other, near() as this:
            this.dialer.send(other.link(), Ping(1))
            await this.is_said(1)
            clock.forward(dial.IDLE_S - 1)
            this.dialer._sweep()
            assert this.dialer.links == [other.link()]
            clock.forward(1)
            this.dialer._sweep()
            assert this.dialer.links == []
            await comes_about(lambda: other.writers[0].transport.is_closing())
            assert this.dialer.bulk_endpoint(other.address) is None
            this.dialer.send(other.link(), Ping(2))
            await this.is_said(2)
            assert (other.accepted, this.lost) == (2, [])

    run(test, asyncio.new_event_loop)


def test_sweeping_happens_by_itself(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial, "SWEEP_S", 0.01)

    async def test() -> None:
        async with far() as other, near() as this:
            this.dialer.send(other.link(), Ping(1))
            await this.is_said(1)
            clock.forward(dial.IDLE_S)
            await comes_about(lambda: not this.dialer.links)

    run(test, asyncio.new_event_loop)


def test_a_link_on_which_an_answer_is_awaited_is_not_idle(clock: Clock) -> None:
    async def test() -> None:
        async with far() as other, near() as this:
            other.answers = False
            this.dialer.send(other.link(), Ping(1))
            await comes_about(lambda: other.requests)
            clock.forward(10 * dial.IDLE_S)
            this.dialer._sweep()
            assert this.dialer.links == [other.link()]
            other.writers[0].write(encode(Refused(1, "KV-302", "too many", "Wait.")))  # an answer, too
            await this.is_said(1)
            clock.forward(dial.IDLE_S)
            this.dialer._sweep()
            assert (this.dialer.links, this.lost) == ([], [])

    run(test, asyncio.new_event_loop)


def test_of_too_many_links_the_quietest_makes_way(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial, "MOST_LINKS", 2)

    async def test() -> None:
        async with far() as other, near() as this:
            for number, namespace in enumerate((b"one", b"two"), 1):
                this.dialer.send(other.link(namespace), Ping(number))
                await this.is_said(number)
            this.dialer.send(other.link(b"three"), Ping(3))  # nobody has been quiet for long enough
            assert await this.code() == "KV-300"
            assert {link.namespace for link in this.dialer.links} == {b"one", b"two"}
            clock.forward(dial.FREE_AFTER_S)
            this.dialer.send(other.link(b"one"), Ping(4))
            await this.is_said(3)
            this.dialer.send(other.link(b"three"), Ping(5))
            await this.is_said(4)
            assert {link.namespace for link in this.dialer.links} == {b"one", b"three"}
            assert this.lost == []

    run(test, asyncio.new_event_loop)


@pytest.mark.parametrize("stands", [True, False])
def test_what_the_other_store_does_not_read_is_bounded(monkeypatch: pytest.MonkeyPatch, stands: bool) -> None:
    monkeypatch.setattr(dial, "MOST_WAITING_BYTES", 1 * MIB)

    async def test() -> None:
        async def stuck(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(encode(greeting(other.nonce)))
            if stands:
                (hello,) = request_reader(MIB).feed(await reader.read(65536))
                assert isinstance(hello, Hello)
                writer.write(encode(other.welcome(hello)))
                other.hellos.append(hello)
            await asyncio.Event().wait()

        async with far() as other, near() as this:
            other.talk = stuck
            number = 0
            if stands:
                this.dialer.send(other.link(), Ping(1))
                await comes_about(lambda: this.dialer.bulk_endpoint(other.address))
            while not this.lost:
                number += 1
                assert number < 1000
                this.dialer.send(other.link(), Offer(number, "", bytes(100_000), []))
                await asyncio.sleep(0)
            assert await this.code() == "KV-300"
            await this.dialer.close()

    run(test)


def test_after_closing_nothing_is_sent() -> None:
    async def test() -> None:
        async with far() as other, near() as this:
            this.dialer.send(other.link(), Ping(1))
            await this.dialer.close()
            this.dialer.send(other.link(), Ping(2))
            assert (this.dialer.links, this.lost) == ([], [])
            await asyncio.sleep(0.01)
            assert other.requests == []

    run(test)


# ---- who may come


def test_hosts_behind_names_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    where = {"node-b": ["10.0.0.8", "fd00::8"], "node-c": ["10.0.0.9"]}

    async def resolve(name: str, port: int, *, within_s: float) -> tuple[tuple[int, tuple[str, int]], ...]:
        if name not in where:
            raise OSError("no such name")
        return tuple((0, (host, port)) for host in where[name])

    monkeypatch.setattr(dial, "resolve", resolve)

    async def test() -> None:
        names = PeerNames(PeerList(["10.1.0.0/24", "node-b", "node-c", "node-d"]))
        assert names.may_come("10.1.0.7")
        assert not names.may_come("10.0.0.8")
        await names.look_up()
        assert names.may_come("10.0.0.8")
        assert names.may_come("::ffff:10.0.0.8")
        assert names.may_come("fd00::8")
        assert not names.may_come("10.0.0.10")
        where["node-b"] = ["10.0.0.10"]  # it has moved
        del where["node-c"]  # its name cannot be looked up now
        await names.look_up()
        assert not names.may_come("10.0.0.8")
        assert names.may_come("10.0.0.10")
        assert names.may_come("10.0.0.9")

    run(test)


def test_without_names_nothing_is_looked_up() -> None:
    run(PeerNames(PeerList(["10.0.0.0/24"])).run)


def test_errors_are_of_the_tree() -> None:
    for error in (IncompatibleError("a", remedy="b"), TransportError("a", remedy="b")):
        assert dial._explain(error, is_standing=True) == (error.code, str(error))
    assert dial._explain(TimeoutError(), is_standing=False)[0] == "KV-501"
    assert dial._explain(OSError("x"), is_standing=True)[0] == "KV-502"
