"""The only caller of ExchangeService."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc

from lockstep.internal.v1 import exchange_pb2, exchange_pb2_grpc
from lockstep.v1 import common_pb2
from services.tokenizer.exchange.cell_requests import CellRequests, Counters, Receiver
from services.tokenizer.exchange.exchange_link import ExchangeLink
from services.tokenizer.exchange.request_ledger import ExchangeError
from services.tokenizer.request.request import Request
from shared.errors import NotReadyError, SchedulerLostError
from shared.heartbeat import Silence, next_beat_at
from shared.ids import RequestHandle
from shared.limits import ModelLimits
from shared.rpc import Peer, make_channel, reason_of, status_from_rpc_error

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 2.0

_random = secrets.SystemRandom()


@dataclass(frozen=True, slots=True)
class Cell:
    """What the scheduler said about its cell."""

    scheduler_instance_id: str
    eos_token_ids: tuple[int, ...]
    limits: ModelLimits
    default_sampling: common_pb2.SamplingParams
    exact_fingerprint: str
    """Empty if the cell is not exact."""


@dataclass(frozen=True, slots=True)
class _LinkEnd:
    reason: str
    is_unexplained: bool = False
    """Whether the scheduler gave no reason itself, and so may be dead."""


class SchedulerClient:
    """Keeps the service linked to the cell, and submits requests to it.

    Invariant: linked exactly while there is a stream with a `CellInfo`, and the cell serves our model.
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
            addresses: Tried in turn; only one scheduler serves at a time.
            model_digest: A cell with a different one is refused.
            on_change: Called with `is_linked` each time it changes.
            silence_s: A link is given up after this silence.
            peer: As in `make_channel`.
        """
        self._requests = requests
        self._addresses = tuple(addresses)
        self._model_digest = model_digest
        self._on_change = on_change
        self._silence_s = silence_s
        self._peer = peer
        self._cell: Cell | None = None
        # Tries since the last link, and the pause after each address has been tried once.
        self._num_tries = 0
        self._retry_s = FIRST_RETRY_S

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

    async def run(self) -> None:
        """Link to the schedulers in turn until cancelled."""
        logger.info("linking to the scheduler", extra={"addresses": self._addresses})
        for address in itertools.cycle(self._addresses):
            end = await self._run_link(address)
            logger.warning("no link to the scheduler", extra={"address": address, "reason": end.reason})
            self._num_tries += 1
            if self._num_tries % len(self._addresses) == 0:
                # Random, so that the replicas of a cell do not all reconnect at once.
                await asyncio.sleep(_random.uniform(0.5, 1.0) * self._retry_s)
                self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)

    async def _run_link(self, address: str) -> _LinkEnd:
        link = self._requests.make_link()
        # A channel per link, so that no state of a lost link affects the next one, and certificates are today's.
        async with make_channel(address, internal=True, peer=self._peer) as channel:
            call = exchange_pb2_grpc.ExchangeServiceStub(channel).Exchange(link.messages())
            reader = asyncio.create_task(self._read(link, call))
            end = _LinkEnd("cancelled")
            try:
                end = await self._keep_alive(link, reader)
            finally:
                reader.cancel()
                await asyncio.wait([reader])
                await self._unlink(link, end)
        return end

    async def _keep_alive(self, link: ExchangeLink, reader: asyncio.Task[_LinkEnd]) -> _LinkEnd:
        silence = Silence(self._silence_s)
        while not silence.beat():
            link.beat()
            heard_at, now = link.heard_at, time.monotonic()
            await asyncio.wait([reader], timeout=next_beat_at(now) - now)
            if reader.done():
                return reader.result()
            if link.heard_at != heard_at:
                silence.note_alive()
        return _LinkEnd("the scheduler is not serving, or is silent", is_unexplained=True)

    async def _read(
        self,
        link: ExchangeLink,
        call: grpc.aio.StreamStreamCall[exchange_pb2.ExchangeRequest, exchange_pb2.ExchangeResponse],
    ) -> _LinkEnd:
        try:
            async for response in call:
                await self._on_response(link, response)
        except grpc.aio.AioRpcError as error:
            # A scheduler that ends the stream on purpose gives a reason.
            is_unexplained = reason_of(status_from_rpc_error(error)) is None
            return _LinkEnd(f"{error.code().name}: {error.details()}", is_unexplained)
        except ExchangeError as error:
            logger.error("the scheduler cannot be used", extra={"error": str(error)})
            return _LinkEnd(str(error))
        return _LinkEnd("the scheduler ended the stream")

    async def _on_response(self, link: ExchangeLink, response: exchange_pb2.ExchangeResponse) -> None:
        kind = response.WhichOneof("message")
        # If there are other schedulers, the heartbeats of one that is not serving do not count: try the next one.
        if self._cell is not None or kind != "heartbeat" or len(self._addresses) == 1:
            link.heard_at = time.monotonic()
        if self._cell is not None and kind == "outputs":
            self._requests.on_outputs(response.outputs)
        elif self._cell is None and kind == "cell_info":
            await self._accept_cell(link, response.cell_info)
        elif kind == "heartbeat":
            self._requests.note_scheduler_alive()
        else:
            raise ExchangeError("cell_info must come first, and only once")

    async def _accept_cell(self, link: ExchangeLink, info: exchange_pb2.CellInfo) -> None:
        if info.model_digest != self._model_digest:
            self._requests.fail_all(SchedulerLostError("the cell now serves another model"))
            raise ExchangeError(
                f"the cell serves another model: its digest is {info.model_digest}, ours is {self._model_digest}"
            )
        self._cell = Cell(
            info.scheduler_instance_id,
            tuple(info.eos_token_ids),
            ModelLimits(info.context_length, info.logits_width, info.num_pool_tokens),
            info.default_sampling,
            info.exact_fingerprint,
        )
        num_requests = self._requests.open_stream(link, info)
        self._num_tries, self._retry_s = 0, FIRST_RETRY_S
        facts = {"instance_id": info.scheduler_instance_id, "num_resubmitted": num_requests}
        logger.info("linked to the scheduler", extra=facts)
        await self._on_change(True)

    async def _unlink(self, link: ExchangeLink, end: _LinkEnd) -> None:
        was_linked = self._cell is not None
        self._cell = None
        self._requests.lose_stream(link, died_at=link.heard_at if end.is_unexplained else None)
        if was_linked:
            await self._on_change(False)
