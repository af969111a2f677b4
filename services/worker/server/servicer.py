"""WorkerService: epoch claims, and steps from the scheduler to the group and back.

Runs on the RPC thread's event loop; the `DeviceLoop` computes the steps.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import grpc
from google.protobuf import duration_pb2

from lockstep.internal.v1 import worker_pb2, worker_pb2_grpc
from lockstep.v1 import common_pb2
from services.worker.group.group_servicer import GroupServicer
from services.worker.group.link import to_layout_message
from services.worker.layout import RankLayout
from services.worker.process.device_steps import DeviceSteps
from services.worker.process.exits import DomainEnd, ExitCode
from services.worker.runner.cache_room import CacheRoom, fewest
from services.worker.server.claim import NOTHING_ADMITTED, ClaimLedger
from services.worker.server.context_room import ContextRoom
from services.worker.server.departure import Departure
from services.worker.server.step_stream import Epoch, StepStream, retrieve
from shared.errors import InvalidRequestError, NotReadyError, ServiceError, StaleEpochError, Violation
from shared.network.heartbeat import next_beat_at
from shared.step.codec import encode_result, parse_step
from shared.wire import LAST_WORD, VECTORS, introduce_self, read_introduction

if TYPE_CHECKING:
    # The RPC server answers before torch is imported.
    from services.worker.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name

# A launched step is stuck if the device makes no progress for this long: Attach then answers without waiting for it.
STUCK_S = 10.0
# Time for the answer to a Restart to be sent before the process ends.
_ANSWER_S = 0.1

# A trace has thousands of events per step, and is written while no step is launched.
_MAX_PROFILED_STEPS = 100
# Far above any real use; they keep a wrong number from exhausting the host's memory.
_MAX_SIZES = {"block_size": 4096, "max_num_seqs": 1 << 16, "max_num_batched_tokens": 1 << 24}


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves one group to one scheduler at a time.

    Invariant: only steps that the claim ledger admits are submitted to the device, each epoch's after its empty batch.
    """

    def __init__(
        self,
        layout: RankLayout,
        group: GroupServicer,
        end: DomainEnd,
        *,
        max_model_len: int | None = None,
        stuck_s: float = STUCK_S,
    ) -> None:
        """Nothing is loaded yet.

        Args:
            max_model_len: See `ContextRoom`.
            stuck_s: A step is stuck if it has not returned within this time.
        """
        self._layout = layout
        self._group = group
        self._end = end
        self._stuck_s = stuck_s
        self.context_room = ContextRoom(max_model_len)
        self._steps: DeviceSteps | None = None
        # Hardly later than the process: the RPC server answers before torch is imported.
        self._started_at = time.monotonic()
        self._start_time = duration_pb2.Duration()
        self._ledger = ClaimLedger()
        self._epoch: Epoch | None = None
        self._stream_numbers = itertools.count(1)
        self._departure = Departure(self._ledger, end.stop)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve `WorkerService` on `server`."""
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

    def open(self, steps: DeviceSteps) -> None:
        """Let schedulers claim the group, once weights are loaded and members have joined."""
        self._steps = steps
        self._start_time.FromMilliseconds(round(1e3 * (time.monotonic() - self._started_at)))

    def leave(self) -> None:
        """The failure domain was asked to end: let schedulers finish what they need the group for; see `Departure`."""
        self._departure.ask()

    async def Attach(
        self, request: worker_pb2.AttachRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.AttachResponse:
        """See worker.proto."""
        try:
            return await self._attach(request)
        except ServiceError:
            raise
        except Exception as error:
            # A group that cannot even be attached serves nobody, and only a new process may.
            self._end.fail_step(error=str(error))
            raise

    async def _attach(self, request: worker_pb2.AttachRequest) -> worker_pb2.AttachResponse:
        steps = self._steps
        if steps is None:
            raise NotReadyError("weights are loading, or members have not joined")
        _check_sizes(request)
        if steps.runner.state_bytes_per_slot:
            # A scheduler that knows nothing of states would continue prefixes without them.
            read_introduction(request.introduction).check(frozenset({"recurrent_state"}))
        if steps.runner.facts.task == "embed":
            # It would ask for completions.
            read_introduction(request.introduction).check(frozenset({VECTORS}))
        epoch = self._begin(request, steps)
        is_stuck = not await self._is_ready(epoch, steps.runner)
        if epoch is not self._epoch:
            raise self._stale("superseded by another Attach")
        runner = steps.runner
        room = runner.room if is_stuck else epoch.ready.result()
        if not is_stuck:
            self._check_room(request, runner, room)
        logger.info(
            "attached",
            extra={
                "epoch": epoch.number,
                "scheduler_instance_id": self._ledger.holder,
                "is_stuck": is_stuck,
                "release": request.introduction.release,
                "wire_version": request.introduction.wire_version,
            },
        )
        if room.num_seqs < request.max_num_seqs and not is_stuck:
            logger.warning(
                "there is room for fewer sequences than the scheduler would run",
                extra={
                    "num_seqs": room.num_seqs,
                    "max_num_seqs": request.max_num_seqs,
                    "state_bytes_per_slot": runner.state_bytes_per_slot,
                },
            )
        return self._describe(runner, epoch, room=room, is_stuck=is_stuck)

    async def Execute(self, requests: AsyncIterator[worker_pb2.StepRequest], context: grpc.aio.ServicerContext) -> None:
        """See worker.proto."""
        epoch, steps = self._epoch, self._steps
        if epoch is None or steps is None or not self._ledger.is_open:
            raise self._stale("no epoch is claimed")
        stream = epoch.open_stream(next(self._stream_numbers))
        try:
            await asyncio.shield(epoch.ready)
            if epoch is not self._epoch or not self._ledger.is_open:
                raise self._stale("the epoch was superseded")
            # Separately, before any write: a write cancelled while it sends the headers leaves a call that never ends.
            await context.send_initial_metadata(())
            stream.read_by(asyncio.create_task(self._read_steps(requests, stream, steps)))
            await self._answer(stream, epoch, context)
        except asyncio.CancelledError:
            if epoch is self._epoch:
                raise
            raise self._stale("the epoch was superseded") from None
        finally:
            self._ledger.end_stream(stream.number)
            epoch.close_stream(stream)
            if not self._has_streams:
                self._departure.lose_stream()

    async def Restart(
        self, request: worker_pb2.RestartRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.RestartResponse:
        """See worker.proto."""
        self._ledger.check_restart(request.epoch, request.scheduler_instance_id)
        loop = asyncio.get_running_loop()
        loop.call_later(_ANSWER_S, self._end.fail, ExitCode.RESTART, "the scheduler asked for a restart")
        return worker_pb2.RestartResponse()

    async def Profile(
        self, request: worker_pb2.ProfileRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ProfileResponse:
        """See worker.proto."""
        if self._steps is None:
            raise NotReadyError("weights are loading, or members have not joined")
        if not 1 <= request.num_steps <= _MAX_PROFILED_STEPS:
            text = f"must be between 1 and {_MAX_PROFILED_STEPS}"
            raise InvalidRequestError.from_violations([Violation("num_steps", "OUT_OF_RANGE", text)])
        return worker_pb2.ProfileResponse(file_name=await self._steps.profile(request.num_steps))

    @property
    def _has_streams(self) -> bool:
        return self._epoch is not None and self._epoch.has_streams

    async def _is_ready(self, epoch: Epoch, runner: ModelRunner) -> bool:
        """Wait for the epoch's empty batch; False if the device makes no progress for `stuck_s` meanwhile.

        Only the waiting ends then: as after a cancelled call, the epoch is still claimed and its batch still made. If
        no step was ever admitted, none can be stuck, and allocating a large cache may take longer.
        """
        may_be_stuck = epoch.last_admitted != NOTHING_ADMITTED
        while epoch is self._epoch:
            progress = runner.progress
            await asyncio.wait({epoch.ready}, timeout=self._stuck_s if may_be_stuck else None)
            if epoch.ready.done():
                return True
            # Graphs that are captured again may take longer too; their layers count as progress.
            if runner.progress == progress:
                break
        return epoch.ready.done()

    def _begin(self, request: worker_pb2.AttachRequest, steps: DeviceSteps) -> Epoch:
        """Fence the current epoch and begin the offered one. Raises as `ClaimLedger.offer`."""
        last_admitted = self._ledger.last_admitted
        self._ledger.offer(request.epoch, request.scheduler_instance_id, time.monotonic())
        drain_time = request.drain_time
        self._departure.note_claim(
            drain_time.seconds + drain_time.nanos / 1e9 if request.HasField("drain_time") else None,
            says_last_word=LAST_WORD in read_introduction(request.introduction).capabilities,
        )
        if self._epoch is not None:
            self._epoch.supersede()
        members = self._group.relay_attach(request)
        ready = asyncio.ensure_future(_common_room([steps.attach(request), *members], steps.runner))
        self._epoch = Epoch(request.epoch, ready, last_admitted)
        return self._epoch

    async def _read_steps(
        self, requests: AsyncIterator[worker_pb2.StepRequest], stream: StepStream, steps: DeviceSteps
    ) -> None:
        async for request in requests:
            if request.HasField("heartbeat"):
                self._ledger.on_heartbeat(stream.number, request.epoch, request.scheduler_instance_id, time.monotonic())
                self._departure.hear(is_staying=request.heartbeat.is_staying, is_last=request.heartbeat.is_last)
                continue
            step = parse_step(request)
            self._ledger.admit(stream.number, step.epoch, step.step_id, time.monotonic())
            self._group.relay_step(request)
            stream.add(steps.submit(step))

    async def _answer(self, stream: StepStream, epoch: Epoch, context: grpc.aio.ServicerContext) -> None:
        """Write results and heartbeats until the scheduler has ended its side.

        The first heartbeat, sent at once, shows that the stream is open.
        """
        # A call allows one write at a time.
        writing = asyncio.Lock()
        beats = [asyncio.create_task(beat(epoch, context, writing)) for beat in (self._beat, self._beat_when_leaving)]
        for task in beats:
            task.add_done_callback(retrieve)
        try:
            while (step := await stream.steps.get()) is not None:
                output = await step
                await self._group.agree(output)
                async with writing:
                    await context.write(encode_result(output))
            await stream.finish()
        finally:
            for task in beats:
                task.cancel()

    async def _beat(self, epoch: Epoch, context: grpc.aio.ServicerContext, writing: asyncio.Lock) -> None:
        while True:
            await self._write_beat(epoch, context, writing)
            now = time.monotonic()
            await asyncio.sleep(next_beat_at(now) - now)

    async def _beat_when_leaving(self, epoch: Epoch, context: grpc.aio.ServicerContext, writing: asyncio.Lock) -> None:
        await self._departure.leaving.wait()
        await self._write_beat(epoch, context, writing)

    async def _write_beat(self, epoch: Epoch, context: grpc.aio.ServicerContext, writing: asyncio.Lock) -> None:
        assert self._steps is not None
        progress, is_leaving = self._steps.runner.progress, self._departure.leaving.is_set()
        heartbeat = worker_pb2.Heartbeat(progress=progress, is_leaving=is_leaving)
        async with writing:
            await context.write(worker_pb2.StepResult(epoch=epoch.number, heartbeat=heartbeat))

    def _stale(self, message: str) -> StaleEpochError:
        return self._ledger.stale(message, time.monotonic())

    def _check_room(self, request: worker_pb2.AttachRequest, runner: ModelRunner, room: CacheRoom) -> None:
        """End the process if the cell's first start does not hold the context that the settings name.

        Raises:
            InvalidRequestError: the process is ending.
        """
        is_first_start = request.is_first_start
        fault = self.context_room.find_fault(runner, room, request.block_size, is_first_start=is_first_start)
        if fault is not None:
            self._end.fail(ExitCode.REFUSED, fault)
            raise InvalidRequestError.from_violations([Violation("is_first_start", "OUT_OF_RANGE", fault)])

    def _describe(
        self, runner: ModelRunner, epoch: Epoch, *, room: CacheRoom, is_stuck: bool
    ) -> worker_pb2.AttachResponse:
        return worker_pb2.AttachResponse(
            model_digest=runner.facts.model_digest,
            context_length=runner.facts.context_length,
            logits_width=runner.facts.logits_width,
            eos_token_ids=runner.facts.eos_token_ids,
            num_blocks=room.num_blocks,
            max_num_seqs=room.num_seqs,
            num_checkpoint_slots=room.num_checkpoints,
            state_bytes_per_slot=runner.state_bytes_per_slot,
            numerics_fingerprint=self._group.fingerprint(runner.numerics_fingerprint),
            ops_backend=runner.ops_backend,
            last_step_id=epoch.last_admitted.step_id,
            num_draft_tokens=runner.num_draft_tokens,
            needs_all_tokens=runner.num_draft_tokens > 0,
            default_sampling=common_pb2.SamplingParams(**asdict(runner.facts.sampling_defaults)),
            is_exact=runner.is_exact,
            layout=to_layout_message(self._layout),
            is_stuck=is_stuck,
            last_step_epoch=epoch.last_admitted.epoch,
            proposed_prompt_tokens=runner.step_proposal.num_prompt_tokens,
            proposes_mixed_steps=runner.step_proposal.mixes,
            graph_batch_sizes=runner.graph_batch_sizes,
            weights_digest=runner.facts.weights_digest,
            introduction=introduce_self().encode(),
            start_time=self._start_time,
            implementation=runner.implementation,
            task=runner.facts.task,
        )


async def _common_room(rooms: list[asyncio.Future[CacheRoom]], runner: ModelRunner) -> CacheRoom:
    """What every process of the group has room for.

    Raises:
        InvalidRequestError: a process has not one KV block.
    """
    room = fewest(await asyncio.gather(*rooms))
    if not room.num_blocks:
        raise _no_room(runner.state_bytes_per_slot)
    return room


def _check_sizes(request: worker_pb2.AttachRequest) -> None:
    sizes = {"block_size": request.block_size, "max_num_seqs": request.max_num_seqs}
    if request.HasField("max_num_batched_tokens"):
        sizes["max_num_batched_tokens"] = request.max_num_batched_tokens
    violations = [
        Violation(name, "OUT_OF_RANGE", f"must be between 1 and {_MAX_SIZES[name]}")
        for name, size in sizes.items()
        if not 1 <= size <= _MAX_SIZES[name]
    ]
    if violations:
        raise InvalidRequestError.from_violations(violations)


def _no_room(state_bytes: int) -> InvalidRequestError:
    text = "the KV cache memory is too small for one block"
    if state_bytes:
        text += f" beside the recurrent states of one sequence and of padding, which have {state_bytes} bytes each"
    return InvalidRequestError.from_violations([Violation("block_size", "OUT_OF_RANGE", text)])
