"""Which of the cell's schedulers gets the requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from lockstep.internal.v1 import exchange_pb2
from services.tokenizer.exchange.cell_requests import CellRequests, Counters, Receiver
from services.tokenizer.exchange.request_ledger import ExchangeError
from services.tokenizer.exchange.scheduler_link import Cell, SchedulerLink, SchedulerStream, StreamEnd
from services.tokenizer.request.request import Request
from shared.errors import ModelChangedError, NotReadyError
from shared.ids import RequestHandle
from shared.limits import ModelLimits
from shared.network.rpc import Peer

logger = logging.getLogger(__name__)


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

    Invariant: linked exactly while there is a used stream. Its cell serves our model. No other stream carries a submit.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        model_digest: str,
        requests: CellRequests,
        on_change: Callable[[bool], Awaitable[None]],
        *,
        silence_s: float,
        peer: Peer | None = None,
    ) -> None:
        """Prepare to link; `run` does it.

        Args:
            addresses: One for each scheduler.
            model_digest: A cell with a different one is refused.
            on_change: Called with `is_linked` each time it changes.
            silence_s: A stream is given up after this silence.
            peer: As in `make_channel`.
        """
        self._requests = requests
        self._addresses = tuple(addresses)
        self._model_digest = model_digest
        self._on_change = on_change
        self._links = [SchedulerLink(address, self, silence_s=silence_s, peer=peer) for address in addresses]
        # The open ones, oldest first.
        self._streams: list[SchedulerStream] = []
        self._used: SchedulerStream | None = None
        self._cell: Cell | None = None
        self._is_draining = False
        # Of the last cell that reported it.
        self._weights_digest = ""

    @property
    def is_linked(self) -> bool:
        """Whether there is a link."""
        return self._cell is not None

    def cell(self) -> Cell:
        """The linked cell.

        Raises:
            NotReadyError: there is no link.
        """
        if self._cell is None:
            raise NotReadyError("the service is not connected to a scheduler")
        return self._cell

    @property
    def load(self) -> exchange_pb2.CellLoad | None:
        """How busy the linked cell is, by its scheduler's last heartbeat; None while there is none."""
        return None if self._used is None else self._used.load

    @property
    def counters(self) -> Counters:
        """Counts since the process started."""
        return self._requests.counters

    def submit(
        self,
        request: Request,
        receivers: Sequence[Receiver],
        *,
        arrived_at: float,
        deadline_at: float | None,
    ) -> RequestHandle:
        """See `CellRequests.submit`."""
        return self._requests.submit(request, receivers, arrived_at=arrived_at, deadline_at=deadline_at)

    def abort(self, handle: RequestHandle) -> None:
        """See `CellRequests.abort`."""
        self._requests.abort(handle)

    def announce_drain(self) -> None:
        """Tell every scheduler, now and when it is linked, that this replica lets its answers finish and then ends."""
        self._is_draining = True
        for stream in self._streams:
            stream.sender.announce_drain()

    async def run(self) -> None:
        """Keep the links until cancelled.

        Raises:
            ExceptionGroup: a bug.
        """
        logger.info("linking to the schedulers", extra={"addresses": self._addresses})
        async with asyncio.TaskGroup() as tasks:
            for link in self._links:
                tasks.create_task(link.run())

    def open(self) -> SchedulerStream:
        """See `StreamUser`."""
        stream = SchedulerStream(self._requests.make_link())
        if self._is_draining:
            stream.sender.announce_drain()
        self._streams.append(stream)
        return stream

    async def on_heard(self, stream: SchedulerStream) -> None:
        """See `StreamUser`."""
        self._requests.note_scheduler_alive()
        self._requests.note_heard(stream.sender)
        if stream.cell_info is not None and stream.cell_info.model_digest != self._model_digest:
            self._refuse(stream, stream.cell_info.model_digest)
        await self._choose()
        self._update_cell()

    def on_outputs(self, stream: SchedulerStream, outputs: exchange_pb2.Outputs) -> None:
        """See `StreamUser`."""
        if stream is self._used:
            self._requests.on_outputs(outputs)

    async def on_end(self, stream: SchedulerStream, end: StreamEnd) -> None:
        """See `StreamUser`."""
        if stream in self._streams:
            self._give_up(stream, is_unexplained=end.is_unexplained)
            await self._choose()

    def _refuse(self, stream: SchedulerStream, model_digest: str) -> None:
        if self._used is None:
            self._requests.fail_all(ModelChangedError("the cell now serves another model"))
        self._give_up(stream, is_unexplained=False)
        raise ExchangeError(
            f"the cell serves another model: its digest is {model_digest}, ours is {self._model_digest}"
        )

    async def _choose(self) -> None:
        """Use another stream if that is due."""
        was_linked, now = self.is_linked, time.monotonic()
        best = next((stream for stream in self._streams if stream.holds_workers(now)), None)
        used_holds = self._used is not None and self._used.holds_workers(now)
        if best is not None and not used_holds:
            if self._used is not None:
                self._used.leave("another scheduler holds the workers")
                self._give_up(self._used, is_unexplained=not self._used.is_alive(now))
            self._use(best)
        if self._used is None:
            self._cell = None
        if self.is_linked != was_linked:
            await self._on_change(self.is_linked)

    def _give_up(self, stream: SchedulerStream, *, is_unexplained: bool) -> None:
        """Forget a stream. An end without a reason counts as the scheduler's death, if the stream was used."""
        self._streams.remove(stream)
        if stream is self._used:
            self._used = None
        self._requests.lose_stream(stream.sender, died_at=stream.sender.heard_at if is_unexplained else None)

    def _use(self, stream: SchedulerStream) -> None:
        info = stream.cell_info
        assert info is not None, "it holds workers"
        self._used, self._cell = stream, _describe(info)
        self._note_weights(info.weights_digest)
        num_requests = self._requests.open_stream(stream.sender, info)
        facts = {"instance_id": info.scheduler_instance_id, "num_resubmitted": num_requests}
        logger.info("linked to the scheduler", extra=facts)

    def _note_weights(self, weights_digest: str) -> None:
        """An answer that began with other weights cannot go on."""
        if weights_digest and self._weights_digest not in ("", weights_digest):
            logger.warning("the cell serves other weights now", extra={"weights_digest": weights_digest})
            self._requests.fail_all(ModelChangedError("the cell now serves other weights"))
        self._weights_digest = weights_digest or self._weights_digest

    def _update_cell(self) -> None:
        """Workers may have come or gone since the used scheduler described its cell."""
        info = None if self._used is None else self._used.cell_info
        if info is not None and (cell := _describe(info)) != self._cell:
            self._cell = cell
            self._note_weights(cell.weights_digest)
            self._requests.note_exactness(cell.exact_fingerprint)
            logger.info("the cell has changed", extra={"num_pool_tokens": cell.limits.num_pool_tokens})


def _describe(info: exchange_pb2.CellInfo) -> Cell:
    return Cell(
        info.scheduler_instance_id,
        tuple(info.eos_token_ids),
        ModelLimits(info.context_length, info.logits_width, info.num_pool_tokens),
        info.default_sampling,
        info.exact_fingerprint,
        info.weights_digest,
    )
