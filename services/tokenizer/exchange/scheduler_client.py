"""Which of the cell's schedulers gets the requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import grpc

from lockstep.internal.v1 import exchange_pb2
from services.tokenizer.exchange.cell_requests import CellRequests
from services.tokenizer.exchange.linked_cell import LinkedCell, decode_cell_info
from services.tokenizer.exchange.request_ledger import ExchangeError
from services.tokenizer.exchange.scheduler_stream import SchedulerStream, StreamEnd
from shared.backoff import Backoff
from shared.errors import ModelChangedError, NotReadyError
from shared.network.rpc import Peer, make_channel

logger = logging.getLogger(__name__)

_UNLINKED = "not linked to a scheduler that holds workers"
_NO_WORKERS = "the cell's workers are lost, and have not come back yet"
_NO_OPEN_WORKERS = "the cell's workers take no new requests: they drain, or try requests that may have crashed them"
_TRIAL = "requests wait while others that may have ended the scheduler are tried"

_FIRST_RETRY_S = 0.1
_LONGEST_RETRY_S = 2.0


class SchedulerClient:
    """Keeps a stream to each scheduler of the cell, and submits all requests on one of them, the used one.

    The claim on the workers elects the leader; this side only follows what schedulers say about themselves:

    - The first scheduler that holds workers is used. It stays the used one while its workers are lost and come back.
    - It is left when its stream ends, or when it holds no worker and another one does; one that is silent for longer
      than the lease holds none. All requests are then submitted to the other one, as a higher attempt, and nothing that
      the old stream brings is delivered any more.

                         A holds        A is killed      B takes the workers         A is back
        stream to A      used           ends                                         standby
        stream to B      standby        standby          used

    Two schedulers may each hold a part of a cell, until one of them exits; that alone moves no request. Each move has a
    cause of its own: a stream ended, or a scheduler lost its last worker or was silent for the lease.

    What the cell is stays known from the first link on, so that calls go on being checked, and text being encoded,
    while there is none; what must be computed waits in `requests` for the next one.

    Invariant: linked exactly while there is a used stream, `requests.stream`. Its cell serves our model. No other one
    carries a submit.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        model_digest: str,
        requests: CellRequests,
        on_change: Callable[[], Awaitable[None]],
        *,
        silence_s: float,
        peer: Peer | None = None,
    ) -> None:
        """Prepare to link; `run` does it.

        Args:
            addresses: One for each scheduler.
            model_digest: A cell with a different one is refused.
            on_change: Called whenever a scheduler's words or a stream's end have changed `why_not_computed`.
            silence_s: A stream is given up after this silence.
            peer: As in `make_channel`.
        """
        self.requests = requests
        self._addresses = tuple(addresses)
        self._model_digest = model_digest
        self._on_change = on_change
        self._silence_s = silence_s
        self._peer = peer
        # The open ones, oldest first.
        self._streams: list[SchedulerStream] = []
        self._cell: LinkedCell | None = None
        self._is_draining = False
        # What `on_change` was last called for.
        self._why_not_computed: str | None = _UNLINKED
        # The digest of the last cell that reported it.
        self._weights_digest = ""

    @property
    def is_linked(self) -> bool:
        """Whether there is a link."""
        return self.requests.stream is not None

    @property
    def why_not_computed(self) -> str | None:
        """Why a request would wait now before it is computed, other than for its turn; None if it would not.

        The scheduler says whether its workers take work, as `SchedulerHeartbeat.takes_work` defines it. One that is
        silent for longer than the lease holds none.
        """
        used, now = self.requests.stream, time.monotonic()
        if used is None:
            return _UNLINKED
        if not used.holds_workers(now):
            return _NO_WORKERS
        if not used.takes_work(now):
            return _NO_OPEN_WORKERS
        return _TRIAL if self.requests.is_trying() else None

    @property
    def worker_start_s(self) -> float | None:
        """How long a restart of the cell's workers takes, as far as is known."""
        return None if self._cell is None else self._cell.worker_start_s

    def cell(self) -> LinkedCell:
        """The linked cell, or the last one.

        Raises:
            NotReadyError: there has been no link yet.
        """
        if self._cell is None:
            raise NotReadyError("the service has not been connected to a scheduler yet")
        return self._cell

    def channel(self) -> grpc.aio.Channel:
        """The connection to the linked scheduler, which the end of the link closes.

        Raises:
            NotReadyError: there is no link.
        """
        used = self.requests.stream
        if used is None or used.channel is None:
            raise NotReadyError("the service is not connected to a scheduler")
        return used.channel

    @property
    def load(self) -> exchange_pb2.CellLoad | None:
        """How busy the linked cell is, by its scheduler's last heartbeat; None while there is none."""
        used = self.requests.stream
        return None if used is None else used.load

    def announce_drain(self) -> None:
        """Tell every scheduler, now and when it is linked, that this replica lets its answers finish and then ends."""
        self._is_draining = True
        for stream in self._streams:
            stream.announce_drain()

    async def run(self) -> None:
        """Keep the links until cancelled.

        Raises:
            ExceptionGroup: a bug.
        """
        logger.info("linking to the schedulers", extra={"addresses": self._addresses})
        async with asyncio.TaskGroup() as tasks:
            for address in self._addresses:
                tasks.create_task(self._keep_linked(address))

    def open(self) -> SchedulerStream:
        """Begin a stream to one of the schedulers, for as long as `on_end` has not ended it."""
        stream = SchedulerStream(self.requests.make_submit, self.requests.is_trying)
        if self._is_draining:
            stream.announce_drain()
        self._streams.append(stream)
        return stream

    async def on_heard(self, stream: SchedulerStream) -> None:
        """A scheduler sent a heartbeat or its `cell_info`.

        Raises:
            ExchangeError: it cannot be used.
        """
        self.requests.note_scheduler_alive()
        self.requests.note_heard(stream)
        if stream.cell_info is not None and stream.cell_info.model_digest != self._model_digest:
            self._refuse(stream, stream.cell_info.model_digest)
        await self._choose()
        self._update_cell()

    async def on_end(self, stream: SchedulerStream, end: StreamEnd) -> None:
        """A stream has ended."""
        if stream in self._streams:
            self._give_up(stream, is_unexplained=end.is_unexplained)
            await self._choose()

    async def _keep_linked(self, address: str) -> None:
        """Keep a stream to one address, whether its scheduler holds the workers or is a standby.

        When a stream ends, the next one is opened after a random pause, which doubles while there is no answer.
        """
        backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        # Why there is no stream, so that it is logged once; None while the scheduler answers.
        last_reason: str | None = None
        while True:
            stream = self.open()
            end = await self._run_stream(stream, address)
            if stream.has_answered:
                backoff.reset()
                last_reason = None
            if end.reason != last_reason:
                logger.warning("no link to the scheduler", extra={"address": address, "reason": end.reason})
                last_reason = end.reason
            await asyncio.sleep(backoff.next_delay_s())

    async def _run_stream(self, stream: SchedulerStream, address: str) -> StreamEnd:
        end = StreamEnd("cancelled")
        # A channel per stream, so that no state of a lost one affects the next, and certificates are today's.
        async with make_channel(address, internal=True, peer=self._peer) as channel:
            try:
                end = await stream.run(
                    channel, silence_s=self._silence_s, on_heard=self.on_heard, on_outputs=self.requests.on_outputs
                )
            except ExchangeError as error:
                logger.error("the scheduler cannot be used", extra={"address": address, "error": str(error)})
                end = StreamEnd(str(error))
            finally:
                await self.on_end(stream, end)
        return end

    def _refuse(self, stream: SchedulerStream, model_digest: str) -> None:
        if self.requests.stream is None:
            self.requests.fail_all(ModelChangedError("the cell now serves another model"))
        self._give_up(stream, is_unexplained=False)
        raise ExchangeError(
            f"the cell serves another model: its digest is {model_digest}, ours is {self._model_digest}"
        )

    async def _choose(self) -> None:
        """Use another stream if that is due."""
        now = time.monotonic()
        best = next((stream for stream in self._streams if stream.holds_workers(now)), None)
        used = self.requests.stream
        used_holds = used is not None and used.holds_workers(now)
        if best is not None and not used_holds:
            if used is not None:
                used.leave("another scheduler holds the workers")
                self._give_up(used, is_unexplained=not used.is_alive(now))
            self._use(best)
        if self.why_not_computed != self._why_not_computed:
            self._why_not_computed = self.why_not_computed
            await self._on_change()

    def _give_up(self, stream: SchedulerStream, *, is_unexplained: bool) -> None:
        """Forget a stream. An end without a reason counts as the scheduler's death, if the stream was used."""
        self._streams.remove(stream)
        self.requests.lose_stream(stream, died_at=stream.heard_at if is_unexplained else None)

    def _use(self, stream: SchedulerStream) -> None:
        info = stream.cell_info
        assert info is not None, "it holds workers"
        self._cell = decode_cell_info(info)
        self._note_weights(info.weights_digest)
        num_requests = self.requests.open_stream(stream, info)
        facts = {
            "instance_id": info.scheduler_instance_id,
            "num_resubmitted": num_requests,
            "release": info.introduction.release,
            "wire_version": info.introduction.wire_version,
        }
        logger.info("linked to the scheduler", extra=facts)

    def _note_weights(self, weights_digest: str) -> None:
        """An answer that began with other weights cannot go on."""
        if weights_digest and self._weights_digest not in ("", weights_digest):
            logger.warning("the cell serves other weights now", extra={"weights_digest": weights_digest})
            self.requests.fail_begun(ModelChangedError("the cell now serves other weights"))
        self._weights_digest = weights_digest or self._weights_digest

    def _update_cell(self) -> None:
        """Workers may have come or gone since the used scheduler described its cell."""
        used = self.requests.stream
        info = None if used is None else used.cell_info
        if info is not None and (cell := decode_cell_info(info)) != self._cell:
            self._cell = cell
            self._note_weights(cell.weights_digest)
            self.requests.note_cell(info)
            facts = {"num_pool_tokens": cell.limits.num_pool_tokens, "wire_version": cell.introduction.wire_version}
            logger.info("the cell has changed", extra=facts)
