"""The only caller of ExchangeService: keeps one stream to the cell's scheduler and opens a new one when it breaks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from lockstep.internal.v1 import exchange_pb2, exchange_pb2_grpc
from lockstep.v1 import common_pb2
from services.tokenizer.cell_requests import CellRequests
from services.tokenizer.exchange_link import ExchangeLink
from services.tokenizer.request_ledger import ExchangeError
from shared.errors import NotReadyError, SchedulerLostError
from shared.limits import ModelLimits
from shared.rpc import make_channel

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class Cell:
    """The cell at the other end."""

    scheduler_instance_id: str
    eos_token_ids: tuple[int, ...]
    limits: ModelLimits
    default_sampling: common_pb2.SamplingParams


class SchedulerClient:
    """Links the service to its cell, whose `requests` wait while there is no link.

    Invariant: there is a link exactly while the scheduler's stream lives and has told its cell, and the cell serves
    our model.
    """

    def __init__(
        self, address: str, model_digest: str, requests: CellRequests, on_change: Callable[[bool], Awaitable[None]]
    ) -> None:
        """Prepare to link; `run` does it.

        Args:
            address: The scheduler's.
            model_digest: A cell with another one is refused.
            requests: What the link carries.
            on_change: Told whether there is a link, whenever that has changed.
        """
        self.requests = requests
        self._address = address
        self._model_digest = model_digest
        self._on_change = on_change
        self._cell: Cell | None = None
        self._retry_s = FIRST_RETRY_S

    def cell(self) -> Cell:
        """The cell that the service is linked to.

        Raises:
            NotReadyError: there is no link.
        """
        if self._cell is None:
            raise NotReadyError("the service is not linked to its cell")
        return self._cell

    async def run(self) -> None:
        """Keep linked until cancelled."""
        async with make_channel(self._address, internal=True) as channel:
            stub = exchange_pb2_grpc.ExchangeServiceStub(channel)
            logger.info("linking to the scheduler", extra={"address": self._address})
            while True:
                reason = await self._run_stream(stub)
                logger.warning("no link to the scheduler", extra={"reason": reason, "retry_s": self._retry_s})
                await asyncio.sleep(self._retry_s)
                self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)

    async def _run_stream(self, stub: exchange_pb2_grpc.ExchangeServiceStub) -> str:
        """Open a stream and serve it to its end; returns why it ended."""
        link = self.requests.make_link()
        # Before the scheduler listens this waits for it, as the channel's own back-off has it.
        call = stub.Exchange(link.messages(), wait_for_ready=True)
        try:
            async for response in call:
                await self._on_response(link, response)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except ExchangeError as error:
            logger.error("this scheduler cannot be used", extra={"error": str(error)})
            return str(error)
        finally:
            call.cancel()
            was_linked = self._cell is not None
            self._cell = None
            self.requests.lose_stream(link)
            if was_linked:
                await self._on_change(False)
        return "the scheduler ended the stream"

    async def _on_response(self, link: ExchangeLink, response: exchange_pb2.ExchangeResponse) -> None:
        if self._cell is not None and response.HasField("outputs"):
            self.requests.on_outputs(response.outputs)
        elif self._cell is None and response.HasField("cell_info"):
            self._cell = self._accept_cell(response.cell_info)
            num_requests = self.requests.open_stream(link)
            self._retry_s = FIRST_RETRY_S
            facts = {"instance_id": self._cell.scheduler_instance_id, "num_resubmitted": num_requests}
            logger.info("linked to the scheduler", extra=facts)
            await self._on_change(True)
        else:
            raise ExchangeError("cell_info comes first, and once")

    def _accept_cell(self, info: exchange_pb2.CellInfo) -> Cell:
        if info.model_digest != self._model_digest:
            self.requests.fail_all(SchedulerLostError("the cell serves another model by now"))
            raise ExchangeError(
                f"the cell serves another model: its digest is {info.model_digest}, ours {self._model_digest}"
            )
        return Cell(
            info.scheduler_instance_id,
            tuple(info.eos_token_ids),
            ModelLimits(info.context_length, info.logits_width, info.num_pool_tokens),
            info.default_sampling,
        )
