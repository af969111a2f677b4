"""WorkerService: claims by epoch, and steps from the scheduler to the device and back.

Runs on the RPC thread's event loop. It parses and orders; what is computed runs in the `DeviceLoop`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import grpc

from lockstep.internal.v1 import worker_pb2, worker_pb2_grpc
from lockstep.v1 import common_pb2
from services.worker.claim import Claim, StepStream
from services.worker.device_loop import DeviceLoop
from services.worker.step import Step, StepOutput
from services.worker.step_codec import parse_step, to_result
from shared.errors import (
    GroupHeldError,
    InternalError,
    InvalidRequestError,
    NotReadyError,
    ServiceError,
    StaleEpochError,
    StepMismatchError,
    Violation,
)

if TYPE_CHECKING:
    # The RPC server answers before torch is imported.
    from services.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)

SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name

# Far above any use; they keep a wrong number from taking the host's memory.
_MAX_SIZES = {"block_size": 4096, "max_num_seqs": 1 << 16, "max_num_batched_tokens": 1 << 24}


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves one model runner to one scheduler at a time.

    Invariant: steps are submitted to the device under the present claim only, and an epoch's empty batch stands in
    the device's queue before its first step.
    """

    def __init__(self, device: DeviceLoop) -> None:
        self._device = device
        self._runner: ModelRunner | None = None
        self._claim: Claim | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve `WorkerService` on `server`."""
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

    def set_runner(self, runner: ModelRunner) -> None:
        """The weights are loaded: from now on the worker can be claimed."""
        self._runner = runner

    async def Attach(
        self, request: worker_pb2.AttachRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.AttachResponse:
        """See worker.proto."""
        runner = self._runner
        if runner is None:
            raise NotReadyError("weights are loading")
        _check_sizes(request, runner)
        claim = self._take_claim(request, runner)
        # Shielded: a cancelled call leaves the epoch claimed, and its batch made.
        last_step_id = await asyncio.shield(claim.ready)
        if claim is not self._claim:
            raise self._stale("another Attach came in between")
        logger.info("attached", extra={"epoch": claim.epoch, "scheduler_instance_id": claim.scheduler_instance_id})
        return worker_pb2.AttachResponse(
            model_digest=runner.facts.model_digest,
            context_length=runner.facts.context_length,
            logits_width=runner.facts.logits_width,
            eos_token_ids=runner.facts.eos_token_ids,
            num_blocks=runner.num_blocks(request.block_size),
            numerics_fingerprint=runner.numerics_fingerprint,
            ops_backend=runner.ops_backend,
            last_step_id=last_step_id,
            num_draft_tokens=runner.num_draft_tokens,
            needs_all_tokens=runner.num_draft_tokens > 0,
            default_sampling=common_pb2.SamplingParams(**asdict(runner.facts.sampling_defaults)),
        )

    async def Execute(self, requests: AsyncIterator[worker_pb2.StepRequest], context: grpc.aio.ServicerContext) -> None:
        """See worker.proto."""
        claim, runner = self._claim, self._runner
        if claim is None or runner is None or claim.is_over:
            raise self._stale("no epoch is claimed")
        stream = claim.open_stream()
        try:
            await asyncio.shield(claim.ready)
            if claim.is_over:
                raise self._stale("the epoch was superseded")
            # Tells the scheduler that the stream stands, before there is a result.
            await context.send_initial_metadata(())
            reader = asyncio.create_task(self._launch_steps(requests, stream, runner))
            stream.read_by(reader)
            while (step := await stream.next_step()) is not None:
                await context.write(to_result(await step))
            await reader
        except asyncio.CancelledError:
            if claim is self._claim:
                raise
            raise self._stale("the epoch was superseded") from None
        finally:
            stream.close()

    def _take_claim(self, request: worker_pb2.AttachRequest, runner: ModelRunner) -> Claim:
        """Fence the present claim and make the offered one.

        Raises:
            StaleEpochError: the offered epoch is not above the present one; nothing has changed.
            GroupHeldError: another scheduler has a stream open; nothing has changed.
        """
        held = self._claim
        if request.epoch <= (held.epoch if held else 0):
            raise self._stale("the epoch offered is not above the worker's own")
        if held is not None:
            # A holder's own new epoch supersedes its old one, whose end may not have reached us yet.
            if held.is_held and held.scheduler_instance_id != request.scheduler_instance_id:
                raise GroupHeldError(
                    "another scheduler holds this worker", epoch=held.epoch, holder=held.scheduler_instance_id
                )
            held.supersede()
        reset = self._device.submit(
            runner.attach,
            block_size=request.block_size,
            max_num_seqs=request.max_num_seqs,
            max_num_batched_tokens=request.max_num_batched_tokens,
        )
        self._claim = Claim(request.epoch, request.scheduler_instance_id, asyncio.wrap_future(reset))
        return self._claim

    async def _launch_steps(
        self, requests: AsyncIterator[worker_pb2.StepRequest], stream: StepStream, runner: ModelRunner
    ) -> None:
        async for request in requests:
            self._check_order(request, stream)
            step = parse_step(request)
            stream.add(asyncio.wrap_future(self._device.submit(_run_step, runner, step)))

    def _check_order(self, request: worker_pb2.StepRequest, stream: StepStream) -> None:
        claim = stream.claim
        if request.epoch != claim.epoch or claim.is_over:
            raise self._stale("a step of another epoch")
        if not claim.try_bind(stream):
            raise GroupHeldError("another stream runs this epoch's steps", epoch=claim.epoch)
        if request.step_id != claim.next_step_id:
            raise StepMismatchError("not the next step", step_id=request.step_id, expected=claim.next_step_id)
        claim.next_step_id += 1

    def _stale(self, message: str) -> StaleEpochError:
        if self._claim is None:
            return StaleEpochError(message, epoch=0)
        return StaleEpochError(message, epoch=self._claim.epoch, holder=self._claim.scheduler_instance_id)


def _run_step(runner: ModelRunner, step: Step) -> StepOutput:
    # On the main thread. It logs here because the stream that would tell may be gone when the step fails.
    try:
        return runner.run_step(step)
    except ServiceError:
        raise
    except Exception as error:
        logger.exception("step failed", extra={"epoch": step.epoch, "step_id": step.step_id})
        raise InternalError("the step failed") from error


def _check_sizes(request: worker_pb2.AttachRequest, runner: ModelRunner) -> None:
    violations = [
        Violation(name, "OUT_OF_RANGE", f"must be between 1 and {limit}")
        for name, limit in _MAX_SIZES.items()
        if not 1 <= getattr(request, name) <= limit
    ]
    if not violations and runner.num_blocks(request.block_size) < 1:
        violations = [Violation("block_size", "OUT_OF_RANGE", "the KV cache's memory does not hold one block")]
    if violations:
        raise InvalidRequestError.from_violations(violations)
