"""A member of a TP group, which serves only health."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from typing_extensions import override

from lockstep.internal.v1 import worker_pb2
from services.worker.group.joined_link import JoinedLink, Relay
from services.worker.group.link import checksum
from services.worker.group.meeting import Connect
from services.worker.parallel.rendezvous import Rendezvous
from services.worker.process.device_loop import DeviceLoop
from services.worker.process.device_steps import DeviceSteps
from services.worker.process.exits import DomainEnd
from services.worker.process.rpc_thread import Role
from services.worker.runner.cache_room import CacheRoom
from shared.errors import DrainingError
from shared.network.rpc import Servicer
from shared.step.codec import parse_step
from shared.step.step import StepResult

if TYPE_CHECKING:
    from services.worker.config import WorkerSettings
    from services.worker.runner.model_runner import ModelRunner


class Member(Role, Relay):
    """Runs the epochs and steps that the leader relays, in order."""

    servicers: tuple[Servicer, ...] = ()
    service_names: tuple[str, ...] = ()

    def __init__(
        self, settings: WorkerSettings, device: DeviceLoop, end: DomainEnd, connect: Connect | None = None
    ) -> None:
        """`connect` is as in `JoinedLink`."""
        self._settings = settings
        self._device = device
        self._end = end
        self._link = JoinedLink(settings, end, connect)
        self._steps: DeviceSteps | None = None

    @override
    async def meet(self) -> Rendezvous:
        return await self._link.meet()

    @override
    async def open(self, runner: ModelRunner) -> None:
        self._steps = DeviceSteps(
            self._device, runner, self._end, is_alone=False, fail_on_token=self._settings.fail_on_token
        )
        await self._link.open(runner, self)

    def leave(self) -> None:
        """It ends with its leader."""

    @override
    async def close(self) -> None:
        await self._link.close()

    @override
    def take(self, message: worker_pb2.JoinResponse) -> None:
        assert self._steps is not None
        # A process that was asked to end computes nothing more.
        with contextlib.suppress(DrainingError):
            self._take(self._steps, message)

    def _take(self, steps: DeviceSteps, message: worker_pb2.JoinResponse) -> None:
        if message.HasField("attach"):
            epoch = message.attach.epoch
            steps.attach(message.attach).add_done_callback(lambda room: self._report_attached(epoch, room))
        else:
            step = parse_step(worker_pb2.StepRequest.FromString(message.step))
            steps.submit(step).add_done_callback(self._report_done)

    def _report_attached(self, epoch: int, future: asyncio.Future[CacheRoom]) -> None:
        if _has_result(future):
            room = future.result()
            attached = worker_pb2.MemberAttached(
                epoch=epoch,
                num_blocks=room.num_blocks,
                max_num_seqs=room.num_seqs,
                num_checkpoint_slots=room.num_checkpoints,
            )
            self._link.send(worker_pb2.JoinRequest(attached=attached))

    def _report_done(self, step: asyncio.Future[StepResult]) -> None:
        if _has_result(step):
            output = step.result()
            done = worker_pb2.Done(epoch=output.epoch, step_id=output.step_id, checksum=checksum(output))
            self._link.send(worker_pb2.JoinRequest(done=done))


def _has_result(future: asyncio.Future[CacheRoom] | asyncio.Future[StepResult]) -> bool:
    # A failure ends the process.
    return not future.cancelled() and future.exception() is None
