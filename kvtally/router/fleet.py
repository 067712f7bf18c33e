"""The fleet: all instances that the router knows, which are up, how busy each is, which are being drained.

    health check every 2 s ─▶ up or down ─▶ Group.pick ─▶ core.routing.choose, cheapest
    a leg that could not connect ─▶ down, until a health check succeeds

Owns that state. An instance counts as up until something says otherwise, so a router may start before its engines. When
a health check finds one down, the legs that wait for its first byte end at once, and not at their deadline. Neighbours:
`prefill` and `proxy` (pick instances), `core.routing` (the rules).
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import cast

import aiohttp

from kvtally.config.instances import Instance
from kvtally.core.routing import Candidate, Held, Pace, Work, cheapest, choose
from kvtally.errors import ConfigError
from kvtally.router.upstream import EngineClient

logger = logging.getLogger(__name__)

CHECK_S = 2.0
SWEEP_S = 0.5  # how often deadlines are looked at
CHECK_TIMEOUT = aiohttp.ClientTimeout(total=3.0)
MOST_UNANSWERED = 3  # health checks; an instance that answers with an error, or refuses, is down at once
# Errors of this machine. They say nothing about the instance, which was never asked.
OUR_FAULT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL})


class Member:
    """One instance, as the router sees it."""

    __slots__ = (
        *("_unanswered", "client", "instance", "is_draining", "is_up", "legs", "name", "pace", "problem", "unfiled"),
        *("was_heard", "work"),
    )

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.name = instance.name
        self.client = EngineClient(instance.url)
        self.is_up = True
        self.is_draining = False
        self.problem = ""  # why it is down
        self.legs = 0  # requests in flight
        self.unfiled = 0  # how many of its last receipts never came
        self.pace = Pace()  # of its prefill legs; a leg is the asyncio.Timeout that ends it
        self.work = Work()  # what its prefill legs have it compute
        self.was_heard = False  # it answered a leg since the last sweep
        self._unanswered = 0  # health checks in a row

    @property
    def state(self) -> str:
        if not self.is_up:
            return "down"
        return "draining" if self.is_draining else "up"

    def avoid(self, problem: str) -> None:
        """A leg could not connect. Requests that the instance is computing may still end well, so they go on."""
        self.problem = problem
        if self.is_up:
            self.is_up = False
            logger.warning("instance %s is down: %s", self.name, problem)

    def went_down(self, problem: str) -> None:
        self.avoid(problem)
        self.client.give_up(f"it went down, {problem}")

    def missed_check(self) -> None:
        self._unanswered += 1
        if self._unanswered >= MOST_UNANSWERED:
            self.went_down(f"no answer to {self._unanswered} health checks")

    def came_up(self) -> bool:
        """True if it was down: it may have lost everything it held."""
        self._unanswered, self.problem = 0, ""
        self.pace.checked()
        if self.is_up:
            return False
        self.is_up = True
        logger.info("instance %s is up", self.name)
        return True

    def sweep(self, awake_s: float) -> None:
        """End waits that have lasted too long: for the next byte of an answer, or for a prefill that fell silent."""
        self.client.sweep()
        if self.was_heard:
            self.was_heard = False
            self.pace.heard(awake_s)
        now_s = asyncio.get_running_loop().time()
        for leg in self.pace.fell_silent(awake_s):
            cast("asyncio.Timeout", leg).reschedule(now_s)


class Group:
    """The instances that have one role."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self._turn = 0

    def pick(
        self,
        held: Mapping[str, Held],
        *,
        besides: Collection[Member] = (),
        weighed: Callable[[Member], Candidate] | None = None,
    ) -> Member | None:
        """One that is up and takes new requests, or None. With `weighed` the choice is made by cost."""
        eligible = [item for item in self.members if item.is_up and not item.is_draining and item not in besides]
        if len(eligible) < 2:
            return eligible[0] if eligible else None
        self._turn += 1
        if weighed is None:
            choice = choose([Candidate(item.name, item.legs) for item in eligible], held, turn=self._turn)
        else:
            choice = cheapest([weighed(item) for item in eligible], held, turn=self._turn)
        return next((item for item in eligible if choice and item.name == choice.name), None)


class Fleet:
    """All instances, by role. An instance with both roles is one member, with one load."""

    def __init__(self, prefill: Sequence[Instance], decode: Sequence[Instance], *, timeout_s: float) -> None:
        self.members: dict[str, Member] = {}
        self.awake_s = 0.0  # a clock that stands still while this process gets no CPU
        self._timeout_s = timeout_s
        self.prefill = Group([self._member(instance) for instance in prefill])
        self.decode = Group([self._member(instance) for instance in decode])

    def find(self, name: str) -> Member | None:
        """By name or URL."""
        return self.members.get(name.partition("://")[2] or name)

    async def watch(self, member: Member, session: aiohttp.ClientSession, restarted: Callable[[str], None]) -> None:
        """Check one instance again and again, until cancelled."""
        while True:
            await check(member, session, restarted)
            await asyncio.sleep(CHECK_S)

    async def sweep(self) -> None:
        """Enforce the deadlines of all legs, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            begun_s = loop.time()
            await asyncio.sleep(SWEEP_S)
            self.awake_s += min(loop.time() - begun_s, 2 * SWEEP_S)
            for member in self.members.values():
                member.sweep(self.awake_s)

    def _member(self, instance: Instance) -> Member:
        member = self.members.setdefault(instance.name, Member(instance))
        member.client.timeout_s = self._timeout_s
        if member.instance != instance:
            raise ConfigError(
                f"instance {instance.name} is named for prefill and for decode, with different options",
                remedy="Give it the same store in both.",
            )
        return member


async def check(member: Member, session: aiohttp.ClientSession, restarted: Callable[[str], None]) -> None:
    """One health check."""
    try:
        async with session.get(
            f"{member.instance.url}/health", timeout=CHECK_TIMEOUT, allow_redirects=False
        ) as response:
            if response.status == 200:
                if member.came_up():
                    restarted(member.name)
            else:
                member.went_down(f"/health answered {response.status}")
    except TimeoutError:
        member.missed_check()
    except (aiohttp.ClientError, OSError) as error:
        if not isinstance(error, OSError) or error.errno not in OUR_FAULT:
            member.went_down(str(error) or type(error).__name__)
