"""A WorkerService over real gRPC whose device is the worker model, for tests of the scheduler service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import grpc
import numpy as np

from lockstep.internal.v1 import worker_pb2, worker_pb2_grpc
from lockstep.v1 import common_pb2
from services.worker.batch.enter_checks import BatchLimits
from services.worker.server.claim import ClaimLedger
from shared.request.limits import TOKEN_DTYPE
from shared.wire import introduce_self
from tests.support.scheduler.cell_model import VOCABULARY, WorkerModel

_BEAT_S = 0.5


def column(data: bytes) -> list[int]:
    """Decode a column."""
    values: list[int] = np.frombuffer(data, TOKEN_DTYPE).tolist()
    return values


class WorkerPeer(worker_pb2_grpc.WorkerServiceServicer):
    """Answers steps, but breaks the link at step `lose_link_at`; keeps every request that is not a heartbeat.

    Claims are checked by the real claim ledger.

    Attributes:
        response: Its answer to an offer, without its blocks and its last step.
        attaches: The claims it accepted.
        num_refused: The number of claims it refused.
        restarts: The restart requests it allowed; it keeps running nevertheless.
        is_silent: Set to True to stop sending heartbeats.
        num_heard: Heartbeats received.
        num_last_words: How often a scheduler said that none needs it any more.
    """

    def __init__(self, *, num_blocks: int = 64, context_length: int = 512) -> None:
        self.num_blocks = num_blocks
        self.context_length = context_length
        self.ledger = ClaimLedger()
        self.lose_link_at: int | None = None
        self.requests: list[worker_pb2.StepRequest] = []
        self.attaches: list[worker_pb2.AttachRequest] = []
        self.num_refused = 0
        self.restarts: list[worker_pb2.RestartRequest] = []
        self.is_silent = False
        self.num_heard = 0
        self.num_last_words = 0
        self.response = worker_pb2.AttachResponse(
            model_digest="digest",
            weights_digest="weights",
            context_length=context_length,
            logits_width=VOCABULARY,
            eos_token_ids=[7],
            ops_backend="model",
            proposed_prompt_tokens=16384,
            introduction=introduce_self().encode(),
        )
        self.place(0, 1, is_coupled=False)
        self._num_streams = 0
        self._model: WorkerModel | None = None

    @property
    def default_sampling(self) -> common_pb2.SamplingParams:
        """The model's default sampling parameters."""
        return self.response.default_sampling

    def place(self, rank: int, dp_size: int, *, is_coupled: bool) -> None:
        """Set its place in the cell."""
        self.response.layout.CopyFrom(
            worker_pb2.RankLayout(dp_rank=rank, dp_size=dp_size, tp_size=1, has_expert_parallel=is_coupled)
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve on `server`."""
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

    async def Attach(
        self, request: worker_pb2.AttachRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.AttachResponse:
        last = self.ledger.last_admitted
        self.num_refused += 1
        self.ledger.offer(request.epoch, request.scheduler_instance_id, time.monotonic())
        self.num_refused -= 1
        self.attaches.append(request)
        self._model = WorkerModel(
            BatchLimits(
                request.max_num_seqs,
                request.max_num_batched_tokens or self.response.proposed_prompt_tokens + request.max_num_seqs,
                request.block_size,
                self.num_blocks,
                self.context_length,
                VOCABULARY,
            )
        )
        response = worker_pb2.AttachResponse(
            num_blocks=self.num_blocks, last_step_epoch=last.epoch, last_step_id=last.step_id
        )
        response.MergeFrom(self.response)
        return response

    async def Restart(
        self, request: worker_pb2.RestartRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.RestartResponse:
        self.ledger.check_restart(request.epoch, request.scheduler_instance_id)
        self.restarts.append(request)
        self.ledger = ClaimLedger()
        return worker_pb2.RestartResponse()

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.StepRequest], context: grpc.aio.ServicerContext
    ) -> None:
        self._num_streams += 1
        number = self._num_streams
        # As a real worker does, for the same reason.
        await context.send_initial_metadata(())
        beats = asyncio.create_task(self._beat(context))
        try:
            async for request in request_iterator:
                if request.HasField("heartbeat"):
                    self.num_heard += 1
                    self.num_last_words += request.heartbeat.is_last
                    self.ledger.on_heartbeat(number, request.epoch, request.scheduler_instance_id, time.monotonic())
                    continue
                self.ledger.admit(number, request.epoch, request.step_id, time.monotonic())
                self.requests.append(request)
                if len(self.requests) == self.lose_link_at:
                    return
                await context.write(await self.answer(request))
        finally:
            beats.cancel()
            self.ledger.end_stream(number)

    async def answer(self, request: worker_pb2.StepRequest) -> worker_pb2.StepResult:
        """Compute a step's result."""
        assert self._model is not None
        return self._model.answer(request)

    async def _beat(self, context: grpc.aio.ServicerContext) -> None:
        progress = 0
        while True:
            progress += 1
            if not self.is_silent:
                heartbeat = worker_pb2.Heartbeat(progress=progress, is_leaving=self.ledger.is_leaving)
                await context.write(worker_pb2.StepResult(heartbeat=heartbeat))
            await asyncio.sleep(_BEAT_S)
