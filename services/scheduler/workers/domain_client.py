"""Keeps one failure domain attached."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial

import grpc

from lockstep.internal.v1 import worker_pb2
from services.scheduler.cell.domains.attach import DomainAttach
from services.scheduler.cell.domains.attach_events import (
    AttachEvent,
    CloseStreams,
    Command,
    Dropped,
    Offer,
    OpenStreams,
    Restart,
    RetryAt,
    RetryDue,
)
from services.scheduler.cell.events import DomainAttached, DomainLost, Event, Exit
from services.scheduler.core.batch.step import Step
from services.scheduler.workers.worker_client import GroupLink
from shared.ids import DpRank

logger = logging.getLogger(__name__)

# How long a group may take to hear the last word of a stream, and to end it.
_LAST_WORD_S = 1.0


class DomainClient:
    """Carries out the attach protocol's commands over links to a domain's groups.

    All other events of an epoch come between its `DomainAttached` and its `DomainLost`.
    """

    def __init__(
        self,
        attach: DomainAttach,
        rank_to_address: Mapping[DpRank, str],
        attach_request: worker_pb2.AttachRequest,
        *,
        connect: Callable[[str], grpc.aio.Channel],
        on_event: Callable[[Event], None],
        on_exit: Callable[[Exit], None],
    ) -> None:
        """Prepare the links; `run` attaches.

        Args:
            attach: Must be in its initial state.
            rank_to_address: The leaders of the domain's groups.
            attach_request: What the groups are offered, without the epoch.
            connect: Opens a channel to an address.
            on_exit: Called once.
        """
        self._attach = attach
        self._on_event = on_event
        self._on_exit = on_exit
        self._links = {
            rank: GroupLink(
                rank,
                partial(connect, address),
                attach_request,
                on_attach_event=self._on_attach_event,
                on_event=on_event,
            )
            for rank, address in rank_to_address.items()
        }
        self._loop = asyncio.get_running_loop()
        self._tasks = asyncio.TaskGroup()
        self._streams: list[asyncio.Task[None]] = []
        # Restarts requested since the last round began.
        self._restarts: list[asyncio.Task[None]] = []
        # The reason for the last round, so that it is logged once.
        self._last_reason: str | None = None

    async def run(self) -> None:
        """Keep the domain attached until cancelled.

        Raises:
            ExceptionGroup: a bug; the domain is not attached any more.
        """
        try:
            async with self._tasks:
                self._on_attach_event(RetryDue())
                # Keep the group open for tasks that are created later.
                await asyncio.Event().wait()
        finally:
            for link in self._links.values():
                await link.close()

    def send(self, rank: DpRank, step: Step) -> None:
        """Send a step of the current epoch to one of the domain's ranks."""
        self._links[rank].send(step)

    def beat(self, progress: int, *, is_staying: bool) -> None:
        """Send every group a heartbeat; see worker.proto."""
        for link in self._links.values():
            link.beat(progress, is_staying=is_staying)

    def drop(self, epoch: int, retry_s: float | None) -> None:
        """Break the links of an epoch that the engine gave up; `retry_s` is as in `DropDomain`."""
        self._on_attach_event(Dropped(epoch, retry_s))

    def release(self, epoch: int) -> None:
        """End the links of an epoch whose groups were drained, and tell them that no scheduler needs them any more."""
        self._on_attach_event(Dropped(epoch, is_released=True))

    async def say_last_word(self) -> None:
        """Tell the groups that no scheduler needs them any more, which ends the links; only before `run` ends."""
        for link in self._links.values():
            link.end_stream()
        if self._streams:
            await asyncio.wait(self._streams, timeout=_LAST_WORD_S)

    def end(self) -> None:
        """The groups are not there any more: no event may follow, and `run` is to be cancelled."""
        self._attach.end()

    def _on_attach_event(self, event: AttachEvent) -> None:
        for command in self._attach.on_event(event, self._loop.time()):
            self._perform(command)

    def _perform(self, command: Command) -> None:
        match command:
            case Offer(group, epoch):
                offer = self._links[DpRank(group)].offer(epoch, is_first_start=self._attach.is_first_start)
                self._tasks.create_task(offer)
            case Restart(group, epoch):
                logger.warning("restarting a group", extra={"rank": group, "epoch": epoch})
                self._restarts.append(self._tasks.create_task(self._links[DpRank(group)].restart(epoch)))
            case OpenStreams(epoch):
                self._streams = [self._tasks.create_task(link.run_stream(epoch)) for link in self._links.values()]
            case CloseStreams(is_last=is_last):
                self._close_streams(is_last=is_last)
            case RetryAt(when, reason):
                self._note_reason(reason)
                self._tasks.create_task(self._retry_at(when))
            case DomainAttached(_, facts):
                self._last_reason = None
                logger.info(
                    "workers attached",
                    extra={
                        "ranks": list(self._links),
                        "epoch": facts[0].epoch,
                        "num_blocks": [rank_facts.num_blocks for rank_facts in facts],
                        "max_num_seqs": [rank_facts.max_num_seqs for rank_facts in facts],
                        "context_length": facts[0].context_length,
                        "numerics_fingerprint": facts[0].numerics_fingerprint,
                        "is_exact": facts[0].is_exact,
                        "release": facts[0].introduction.release,
                        "wire_version": facts[0].introduction.wire_version,
                    },
                )
                self._on_event(command)
            case DomainLost():
                self._on_event(command)
            case Exit():
                self._on_exit(command)

    def _close_streams(self, *, is_last: bool) -> None:
        if is_last:
            for link in self._links.values():
                link.end_stream()
        for stream in self._streams:
            if is_last:
                self._loop.call_later(_LAST_WORD_S, stream.cancel)
            else:
                stream.cancel()

    def _note_reason(self, reason: str) -> None:
        # Log each reason once: rounds are repeated again and again while weights load.
        if reason != self._last_reason:
            logger.info("workers not attached", extra={"ranks": list(self._links), "reason": reason})
            self._last_reason = reason

    async def _retry_at(self, when: float) -> None:
        # Wait for restarts: an offer that overtook one would be accepted by processes that are about to end.
        restarts, self._restarts = self._restarts, []
        await asyncio.gather(*restarts)
        await asyncio.sleep(when - self._loop.time())
        self._on_attach_event(RetryDue())
