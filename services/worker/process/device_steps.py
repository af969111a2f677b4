"""Epochs and steps as device work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.internal.v1 import worker_pb2
from services.worker.process.device_loop import DeviceLoop, Launch
from services.worker.process.exits import DomainEnd, ExitCode, end_process
from services.worker.process.step_profiler import StepProfiler
from services.worker.runner.cache_room import CacheRoom
from shared.errors import DrainingError, InternalError, ServiceError
from shared.step.step import Step, StepResult

if TYPE_CHECKING:
    # The RPC server answers before torch is imported.
    from services.worker.runner.model_runner import ModelRunner
    from services.worker.runner.steps.pending_step import PendingStep


class DeviceSteps:
    """Queues a runner's work on the device, in order, as futures of the RPC thread's event loop.

    A step or an epoch that fails by an error of this process ends it, on every device: the one that replaces it has a
    new context and new memory, and a process that lives and cannot compute would fail one request after the other. One
    that is refused ends it only in a domain of several processes, where partners would wait inside a collective.
    """

    def __init__(
        self,
        device: DeviceLoop,
        runner: ModelRunner,
        end: DomainEnd,
        *,
        is_alone: bool,
        fail_on_token: int | None = None,
        profile_dir: Path | None = None,
    ) -> None:
        """Failpoint and profiles: see `WorkerSettings`."""
        self.runner = runner
        self._device = device
        self._end = end
        self._is_alone = is_alone
        self._fail_on_token = fail_on_token
        layout = runner.layout
        self._profiler = StepProfiler(profile_dir, f"worker-{layout.dp_rank}.{layout.tp_rank}")
        is_watched = fail_on_token is not None or profile_dir is not None
        self._launch: Callable[[Step], PendingStep] = self._launch_watched if is_watched else runner.launch

    def attach(self, request: worker_pb2.AttachRequest) -> asyncio.Future[CacheRoom]:
        """Begin an epoch after the submitted steps; the result is its room, possibly without a KV block."""
        future = asyncio.wrap_future(self._device.submit(self._attach, request))
        future.add_done_callback(self._end_if_failed)
        return future

    def submit(self, step: Step) -> asyncio.Future[StepResult]:
        """Run a step. Cancelling drops one that was not launched, unless a partner may have begun it.

        A failure has its consequences here, so the future need not be looked at.
        """
        future = asyncio.wrap_future(self._device.put(Launch(partial(self._launch, step))))
        future.add_done_callback(self._end_if_failed)
        if self._is_alone:
            return future
        shielded = asyncio.shield(future)
        # Else asyncio would log what it fails with.
        shielded.add_done_callback(lambda step: step.cancelled() or step.exception())
        return shielded

    async def profile(self, num_steps: int) -> str:
        """Record the next steps; the name of their trace's file. Cancelling drops the recording.

        Raises:
            ProfilingUnavailableError: there is no directory for traces, or a recording has begun before.
            InternalError: the file cannot be written.
        """
        recording: Future[str] = Future()
        try:
            await asyncio.wrap_future(self._device.submit(self._profiler.begin, num_steps, recording))
            return await asyncio.wrap_future(recording)
        except asyncio.CancelledError:
            with suppress(DrainingError):
                self._device.submit(self._profiler.abandon, recording)
            raise

    def _attach(self, request: worker_pb2.AttachRequest) -> CacheRoom:
        self.runner.attach(
            block_size=request.block_size,
            max_num_seqs=request.max_num_seqs,
            max_num_batched_tokens=_max_num_tokens(request, self.runner),
        )
        return self.runner.room

    def _launch_watched(self, step: Step) -> PendingStep:
        """Launch a step of a process with a failpoint or a directory for profiles."""
        brought = (step.chunks.token_ids, step.enters.told_token_ids)
        if self._fail_on_token is not None and any((column == self._fail_on_token).any() for column in brought):
            end_process(ExitCode.FAILPOINT, "the step contains the --fail-on-token token", step_id=step.step_id)
        pending = self.runner.launch(step)
        self._profiler.count_launch()
        return pending

    def _end_if_failed(self, future: asyncio.Future[CacheRoom] | asyncio.Future[StepResult]) -> None:
        if future.cancelled() or (error := future.exception()) is None:
            return
        if isinstance(error, DrainingError):
            return
        is_refused = isinstance(error, ServiceError) and not isinstance(error, InternalError)
        if not self._is_alone or not is_refused:
            self._end.fail_step(error=str(error))


def _max_num_tokens(request: worker_pb2.AttachRequest, runner: ModelRunner) -> int:
    if request.HasField("max_num_batched_tokens"):
        return request.max_num_batched_tokens
    return runner.step_proposal.num_prompt_tokens + request.max_num_seqs
