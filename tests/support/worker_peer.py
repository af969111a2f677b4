"""A WorkerService over real gRPC whose device is the worker model: for tests of the scheduler's shell."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import numpy as np

from lockstep.internal.v1 import worker_pb2, worker_pb2_grpc
from services.scheduler.batch import EnteringSequence, PrefillChunk, ScheduledBatch, Step, StepKind
from shared.errors import StaleEpochError
from shared.limits import TOKEN_DTYPE, SamplingParams
from tests.support.cell_model import VOCABULARY, WorkerModel

_KINDS = {
    worker_pb2.STEP_KIND_PREFILL: StepKind.PREFILL,
    worker_pb2.STEP_KIND_DECODE: StepKind.DECODE,
    worker_pb2.STEP_KIND_MIXED: StepKind.MIXED,
}


def column(data: bytes) -> list[int]:
    """The numbers of a column."""
    values: list[int] = np.frombuffer(data, TOKEN_DTYPE).tolist()
    return values


class WorkerPeer(worker_pb2_grpc.WorkerServiceServicer):
    """Answers steps until `lose_link` is set; keeps every request it got."""

    def __init__(self, *, num_blocks: int = 64, context_length: int = 512) -> None:
        self.num_blocks = num_blocks
        self.context_length = context_length
        self.lowest_epoch = 1
        self.lose_link = False
        self.requests: list[worker_pb2.StepRequest] = []
        self._model = WorkerModel(16)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve on `server`."""
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

    async def Attach(
        self, request: worker_pb2.AttachRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.AttachResponse:
        if request.epoch < self.lowest_epoch:
            raise StaleEpochError("the epoch is not above the worker's own", epoch=self.lowest_epoch - 1)
        self.lowest_epoch = request.epoch + 1
        self._model = WorkerModel(request.block_size)
        return worker_pb2.AttachResponse(
            model_digest="digest",
            context_length=self.context_length,
            logits_width=VOCABULARY,
            eos_token_ids=[7],
            num_blocks=self.num_blocks,
            ops_backend="model",
        )

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.StepRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.StepResult]:
        async for request in request_iterator:
            self.requests.append(request)
            if self.lose_link:
                return
            result = self._model.run(_decode_step(request))
            yield worker_pb2.StepResult(
                epoch=request.epoch, step_id=request.step_id, token_ids=result.token_ids.astype(TOKEN_DTYPE).tobytes()
            )


def _decode_step(request: worker_pb2.StepRequest) -> Step:
    enters = [
        EnteringSequence(
            _decode_chunk(enter.chunk),
            enter.num_cached_tokens,
            enter.num_prompt_tokens,
            column(enter.block_ids),
            SamplingParams(max_tokens=1, temperature=enter.temperature, seed=enter.seed),
        )
        for enter in request.enters
    ]
    # The worker derives its rows; it does not read them.
    batch = ScheduledBatch(
        _KINDS[request.kind],
        row_slots=np.empty(0, np.int32),
        decode_slots=np.frombuffer(request.decode_slots, TOKEN_DTYPE),
        partial_slots=[],
        leave_slots=column(request.leave_slots),
        chunks=[_decode_chunk(chunk) for chunk in request.chunks],
        enters=enters,
        append_slots=column(request.append_slots),
        append_block_ids=column(request.append_block_ids),
        skips_rows=request.HasField("decode_slots"),
    )
    return Step(request.epoch, request.step_id, batch)


def _decode_chunk(chunk: worker_pb2.PrefillChunk) -> PrefillChunk:
    return PrefillChunk(chunk.slot, chunk.token_ids, chunk.num_later_tokens)
