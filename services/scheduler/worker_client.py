"""The link to the worker: the only caller of WorkerService.

It attaches, opens the step stream, carries steps there and results back, and begins anew when the link breaks.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable
from dataclasses import replace

import grpc
import numpy as np
from google.rpc import error_details_pb2

from lockstep.internal.v1 import worker_pb2, worker_pb2_grpc
from services.scheduler.batch import EnteringSequence, PrefillChunk, Step, StepKind, StepResult
from services.scheduler.events import Event, StepReturned, WorkerAttached, WorkerFacts, WorkerLost
from services.scheduler.logprobs import Logprobs
from services.scheduler.slot_table import Slots
from shared.errors import StaleEpochError
from shared.limits import TOKEN_DTYPE
from shared.rpc import make_channel, reason_of, status_from_rpc_error
from shared.sampling_codec import decode_logprobs, encode_options

logger = logging.getLogger(__name__)

RETRY_DELAY_S = 0.5

_NO_ROWS = np.empty(0, TOKEN_DTYPE)

_STEP_KINDS = {
    StepKind.PREFILL: worker_pb2.STEP_KIND_PREFILL,
    StepKind.DECODE: worker_pb2.STEP_KIND_DECODE,
    StepKind.MIXED: worker_pb2.STEP_KIND_MIXED,
}


class WorkerClient:
    """Keeps one worker attached.

    Every event of the link goes to `on_event`; `WorkerAttached` and `WorkerLost` of an epoch bracket all else.
    """

    def __init__(
        self, address: str, attach_request: worker_pb2.AttachRequest, on_event: Callable[[Event], None]
    ) -> None:
        self._address = address
        self._attach_request = attach_request
        self._on_event = on_event
        self._epoch = 0
        self._steps: asyncio.Queue[Step] = asyncio.Queue()
        self._call: grpc.aio.StreamStreamCall | None = None
        # Why the worker could not be attached the last time.
        self._refusal: str | None = None

    def send(self, step: Step) -> None:
        """Send a step of the present epoch, behind those before it."""
        self._steps.put_nowait(step)

    def drop(self, epoch: int) -> None:
        """Break the link of an epoch, because what came over it makes no sense."""
        if self._call is not None and epoch == self._epoch:
            self._call.cancel()

    async def run(self) -> None:
        """Attach and serve the link, again and again, until cancelled."""
        while True:
            async with make_channel(self._address, internal=True) as channel:
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                facts = await self._attach(stub)
                if facts is not None:
                    await self._serve_link(stub, facts)
            await asyncio.sleep(RETRY_DELAY_S)

    async def _attach(self, stub: worker_pb2_grpc.WorkerServiceStub) -> WorkerFacts | None:
        """Claim the worker; None when it is not there, not ready, or asks for a higher epoch."""
        self._epoch += 1
        self._attach_request.epoch = self._epoch
        try:
            response = await stub.Attach(self._attach_request)
        except grpc.aio.AioRpcError as error:
            status = status_from_rpc_error(error)
            reason = reason_of(status)
            # Once per reason: it is tried again and again while weights load.
            if reason != self._refusal:
                logger.info("the worker is not attached", extra={"reason": reason, "status": error.code().name})
                self._refusal = reason
            if reason == StaleEpochError.reason:
                self._epoch = max(self._epoch, _epoch_held(status.details))
            return None
        logger.info(
            "worker attached",
            extra={
                "epoch": self._epoch,
                "num_blocks": response.num_blocks,
                "context_length": response.context_length,
                "ops_backend": response.ops_backend,
                "numerics_fingerprint": response.numerics_fingerprint,
            },
        )
        return WorkerFacts(
            self._epoch,
            response.model_digest,
            response.context_length,
            response.logits_width,
            tuple(response.eos_token_ids),
            response.num_blocks,
            response.num_draft_tokens,
            response.needs_all_tokens,
            response.default_sampling.SerializeToString(),
        )

    async def _serve_link(self, stub: worker_pb2_grpc.WorkerServiceStub, facts: WorkerFacts) -> None:
        self._refusal = None
        self._steps = asyncio.Queue()
        self._call = stub.Execute()
        self._on_event(WorkerAttached(facts))
        sender = asyncio.create_task(self._send_steps(self._call, self._steps))
        try:
            async for message in self._call:
                self._on_event(StepReturned(decode_result(message)))
            logger.warning("the worker ended the step stream")
        except (grpc.aio.AioRpcError, ValueError) as error:
            logger.warning("the link to the worker broke", extra={"error": _describe(error)})
        finally:
            sender.cancel()
            self._call.cancel()
            self._call = None
            self._on_event(WorkerLost(facts.epoch))

    async def _send_steps(self, call: grpc.aio.StreamStreamCall, steps: asyncio.Queue[Step]) -> None:
        while True:
            step = await steps.get()
            try:
                await call.write(encode_step(step))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                # The reader meets the same end and tells why.
                return


def encode_step(step: Step) -> worker_pb2.StepRequest:
    """The message of a step: changes only, columns as little-endian int32."""
    batch = step.batch
    request = worker_pb2.StepRequest(epoch=step.epoch, step_id=step.step_id, kind=_STEP_KINDS[batch.kind])
    if batch.leave_slots:
        request.leave_slots = _column(batch.leave_slots)
    if batch.append_block_ids:
        request.append_slots = _column(batch.append_slots)
        request.append_block_ids = _column(batch.append_block_ids)
    if batch.skips_rows:
        request.decode_slots = _column(batch.decode_slots)
    if batch.enters:
        request.enters.extend(_encode_entering(entering) for entering in batch.enters)
    if batch.chunks:
        request.chunks.extend(_encode_chunk(chunk) for chunk in batch.chunks)
    return request


def decode_result(message: worker_pb2.StepResult) -> StepResult:
    """Parse a result's columns.

    Raises:
        ValueError: a column is no multiple of 4 bytes.
    """
    token_ids = np.frombuffer(message.token_ids, TOKEN_DTYPE)
    rows = message.not_finite_rows
    not_finite_rows = np.frombuffer(rows, TOKEN_DTYPE) if rows else _NO_ROWS
    plain = StepResult(message.epoch, message.step_id, token_ids, not_finite_rows)
    # What follows is rare, and 512 plain rows are to cost no more for it.
    if not (
        message.num_draft_tokens
        or message.HasField("logprobs")
        or message.prompt_logprobs
        or message.counts
        or message.failed_grammar_rows
    ):
        return plain
    return replace(
        plain,
        counts=np.frombuffer(message.counts, TOKEN_DTYPE) if message.HasField("counts") else None,
        num_draft_tokens=message.num_draft_tokens,
        logprobs=Logprobs(*decode_logprobs(message.logprobs)) if message.HasField("logprobs") else None,
        prompt_logprobs=tuple(
            (chunk.slot, Logprobs(*decode_logprobs(chunk.logprobs))) for chunk in message.prompt_logprobs
        ),
        failed_grammar_rows=np.frombuffer(message.failed_grammar_rows, TOKEN_DTYPE),
    )


def _encode_entering(entering: EnteringSequence) -> worker_pb2.EnterSequence:
    options = entering.params.options
    return worker_pb2.EnterSequence(
        chunk=_encode_chunk(entering.chunk),
        num_cached_tokens=entering.num_cached_tokens,
        num_prompt_tokens=entering.num_prompt_tokens,
        block_ids=_column(entering.block_ids),
        temperature=entering.params.temperature,
        top_k=entering.params.top_k,
        top_p=entering.params.top_p,
        seed=entering.params.seed,
        choice=entering.choice,
        options=None if options is None else encode_options(options),
        stop_token_ids=_column(entering.stop_token_ids) if entering.stop_token_ids else b"",
        cached_token_ids=entering.cached_token_bytes,
        max_num_tokens=entering.max_num_tokens,
    )


def _encode_chunk(chunk: PrefillChunk) -> worker_pb2.PrefillChunk:
    return worker_pb2.PrefillChunk(
        slot=chunk.slot, token_ids=chunk.token_bytes, num_later_tokens=chunk.num_later_tokens
    )


def _column(values: list[int] | tuple[int, ...] | array[int] | Slots) -> bytes:
    return np.asarray(values, TOKEN_DTYPE).tobytes()


def _epoch_held(details: list[object]) -> int:
    """The epoch that a stale claim was refused for; 0 when the answer does not say."""
    info = error_details_pb2.ErrorInfo()
    for detail in details:
        if detail.Unpack(info):  # type: ignore[attr-defined]
            held = info.metadata.get("epoch", "")
            return int(held) if held.isdecimal() else 0
    return 0


def _describe(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)
