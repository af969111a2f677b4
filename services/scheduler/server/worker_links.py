"""The links to the workers of a cell: all from the start, or as their endpoints come and go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.scheduler.cell.engine import Engine
from services.scheduler.cell.events import Endpoint, EndpointsFound, Event, Exit, LinkDomain, UnlinkDomain
from services.scheduler.core.batch.step import Step
from shared.ids import DpRank

logger = logging.getLogger(__name__)


class DomainLinks(Protocol):
    """The part of `DomainClient` used here."""

    async def run(self) -> None:
        """Keep the domain attached until cancelled."""

    def send(self, rank: DpRank, step: Step) -> None:
        """Send a step of the current epoch to one of the domain's ranks."""

    def beat(self, progress: int, *, is_staying: bool) -> None:
        """Send every group a heartbeat."""

    def drop(self, epoch: int, retry_s: float | None) -> None:
        """Break the links of an epoch that the engine gave up; `retry_s` is as in `DropDomain`."""

    def release(self, epoch: int) -> None:
        """End the links of an epoch whose groups were drained: no scheduler needs them any more."""

    async def say_last_word(self) -> None:
        """Tell the groups that no scheduler needs them any more, which ends the links."""

    def end(self) -> None:
        """Report nothing more: the groups are not there any more."""


class Discovery(Protocol):
    """Finds the workers of a cell whose endpoints come and go."""

    async def run(self, on_found: Callable[[tuple[Endpoint, ...]], None]) -> None:
        """Report each new set of endpoints, until cancelled."""


LinkDomainTo = Callable[[int, Sequence[str], Callable[[Event], None], Callable[[Exit], None]], DomainLinks]
"""Links a domain, given its number, its groups' addresses by rank, and functions that receive events and a request to
exit.
"""


@dataclass(frozen=True, slots=True)
class WorkerAccess:
    """How the workers are reached."""

    link_domain: LinkDomainTo
    leaders: Sequence[str] | Discovery
    """The addresses of the groups' leaders by DP rank, or what finds them."""


class WorkerLinks:
    """A cell's links, by domain."""

    def __init__(
        self, engine: Engine, access: WorkerAccess, on_event: Callable[[Event], None], on_exit: Callable[[Exit], None]
    ) -> None:
        """Make no link yet.

        Args:
            engine: Only read; events go to `on_event`.
        """
        self._engine = engine
        self._topology = engine.topology
        self._access = access
        self._on_event = on_event
        self._on_exit = on_exit
        self._links: dict[int, DomainLinks] = {}
        self._link_tasks: dict[int, asyncio.Task[None]] = {}
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> None:
        """Keep the workers attached until cancelled.

        Raises:
            ExceptionGroup: a bug.
        """
        async with self._tasks:
            leaders = self._access.leaders
            if not isinstance(leaders, Sequence):
                await leaders.run(self._on_found)
                return
            for domain in range(self._topology.num_domains):
                self._begin(domain, [leaders[rank] for rank in self._topology.ranks_of(domain)])

    def send(self, rank: DpRank, step: Step) -> None:
        """Send a step to a rank of an attached domain."""
        self._links[self._topology.domain_of(rank)].send(rank, step)

    def beat(self, progress: int, *, is_staying: bool) -> None:
        """Send every group a heartbeat; see worker.proto."""
        for links in self._links.values():
            links.beat(progress, is_staying=is_staying)

    def drop(self, domain: int, epoch: int, retry_s: float | None = None) -> None:
        """Close the streams of an epoch that the engine has ended; `retry_s` is as in `DropDomain`."""
        self._links[domain].drop(epoch, retry_s)

    def release(self, domain: int, epoch: int) -> None:
        """Close the streams of an epoch whose groups were drained, and tell these that no scheduler needs them."""
        self._links[domain].release(epoch)

    async def say_last_words(self) -> None:
        """Tell all groups that no scheduler needs them any more, which ends their links."""
        await asyncio.gather(*(links.say_last_word() for links in self._links.values()))

    def perform(self, action: LinkDomain | UnlinkDomain) -> None:
        """Link a domain that has no link, or end the link of one that is not attached."""
        match action:
            case LinkDomain(domain, address):
                logger.info("an endpoint was found", extra={"rank": domain, "address": address})
                self._begin(domain, [address])
            case UnlinkDomain(domain):
                logger.info("an endpoint is leaving or gone", extra={"rank": domain})
                self._links.pop(domain).end()
                self._link_tasks.pop(domain).cancel()

    def _begin(self, domain: int, addresses: Sequence[str]) -> None:
        def on_event(event: Event) -> None:
            # What an ended link still has to say is about workers that have lost their place.
            if self._links.get(domain) is links:
                self._on_event(event)

        links = self._access.link_domain(domain, addresses, on_event, self._on_exit)
        self._links[domain] = links
        self._link_tasks[domain] = self._tasks.create_task(links.run())

    def _on_found(self, endpoints: tuple[Endpoint, ...]) -> None:
        num_unplaced_before = self._engine.num_unplaced_endpoints
        self._on_event(EndpointsFound(endpoints))
        num_unplaced = self._engine.num_unplaced_endpoints
        if num_unplaced > num_unplaced_before:
            facts = {"num_endpoints": len(endpoints), "num_unplaced": num_unplaced}
            logger.warning("more endpoints than --max-dp: some workers stay idle", extra=facts)
