"""A WorkerService over real gRPC whose device is the worker model: for tests of the scheduler's shell."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import numpy as np

from lockstep.internal.v1 import worker_pb2, worker_pb2_grpc
from lockstep.v1 import common_pb2
from services.worker.enter_checks import BatchLimits
from shared.errors import StaleEpochError
from shared.limits import TOKEN_DTYPE
from tests.support.cell_model import VOCABULARY, WorkerModel


def column(data: bytes) -> list[int]:
    """The numbers of a column."""
    values: list[int] = np.frombuffer(data, TOKEN_DTYPE).tolist()
    return values


class WorkerPeer(worker_pb2_grpc.WorkerServiceServicer):
    """Answers steps, but loses the link with its `lose_link_at`th one; keeps every request it got."""

    def __init__(self, *, num_blocks: int = 64, context_length: int = 512) -> None:
        self.num_blocks = num_blocks
        self.context_length = context_length
        self.lowest_epoch = 1
        self.lose_link_at: int | None = None
        # What requests leave to the model.
        self.default_sampling = common_pb2.SamplingParams()
        self.requests: list[worker_pb2.StepRequest] = []
        self._model: WorkerModel | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve on `server`."""
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

    async def Attach(
        self, request: worker_pb2.AttachRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.AttachResponse:
        if request.epoch < self.lowest_epoch:
            raise StaleEpochError("the epoch is not above the worker's own", epoch=self.lowest_epoch - 1)
        self.lowest_epoch = request.epoch + 1
        self._model = WorkerModel(
            BatchLimits(
                request.max_num_seqs,
                request.max_num_batched_tokens,
                request.block_size,
                self.num_blocks,
                self.context_length,
                VOCABULARY,
            )
        )
        return worker_pb2.AttachResponse(
            model_digest="digest",
            context_length=self.context_length,
            logits_width=VOCABULARY,
            eos_token_ids=[7],
            num_blocks=self.num_blocks,
            ops_backend="model",
            default_sampling=self.default_sampling,
        )

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.StepRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.StepResult]:
        async for request in request_iterator:
            self.requests.append(request)
            if len(self.requests) == self.lose_link_at:
                return
            assert self._model is not None
            yield self._model.answer(request)
