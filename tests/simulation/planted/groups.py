"""Bugs between the processes of a TP group that the simulation must detect."""

from __future__ import annotations

import asyncio
from typing import Any

from lockstep.internal.v1 import worker_pb2
from services.worker.group.group_servicer import Follower, GroupServicer
from services.worker.group.member import Member
from services.worker.process.device_steps import DeviceSteps
from services.worker.process.exits import DomainEnd
from shared.errors import InternalError
from shared.network.heartbeat import Silence
from tests.simulation.faults import Fault
from tests.simulation.planted.planting import Patch, PlantedBug, planter

GROUP_BUGS: list[PlantedBug] = []
_planted = planter(GROUP_BUGS)


@_planted()
def _a_group_can_be_claimed_before_its_members_have_joined(patch: Patch) -> None:
    """A leader accepts an offer as soon as it has loaded its own weights."""

    async def open_at_once(self: GroupServicer, runner: Any) -> None:
        self._runner = runner
        self._is_loaded.set()

    patch.setattr(GroupServicer, "open", open_at_once)


@_planted(Fault.LINK_BREAK, Fault.RESULT_NONSENSE, seed=2)
def _an_attach_is_answered_before_the_members(patch: Patch) -> None:
    """A leader answers an offer before its members have ended the previous epoch."""
    relay_attach = GroupServicer.relay_attach

    def wait_for_none(self: GroupServicer, request: worker_pb2.AttachRequest) -> list[asyncio.Task[int]]:
        relay_attach(self, request)
        return []

    patch.setattr(GroupServicer, "relay_attach", wait_for_none)


@_planted(Fault.WORKER_HANG, Fault.MEMBER_HANG, seed=3)
def _a_member_keeps_a_step_over_a_change_of_epoch(patch: Patch) -> None:
    """A new epoch overtakes the steps that a member's device has not begun."""
    take, submit = Member._take, DeviceSteps.submit
    kept: dict[DeviceSteps, list[Any]] = {}

    def submit_one_by_one(self: DeviceSteps, step: Any) -> Any:
        submitted = submit(self, step)
        kept[self].append(submitted)
        return submitted

    def take_between_steps(self: Member, steps: DeviceSteps, message: worker_pb2.JoinResponse) -> None:
        waiting = [step for step in kept.setdefault(steps, []) if not step.done()]
        if waiting and message.HasField("step"):
            waiting[-1].add_done_callback(lambda _: take(self, steps, message))
        else:
            take(self, steps, message)

    patch.setattr(DeviceSteps, "submit", submit_one_by_one)
    patch.setattr(Member, "_take", take_between_steps)


@_planted()
def _answers_do_not_wait_for_members(patch: Patch) -> None:
    """A step is answered once the leader has run it, without waiting for its members."""

    async def agree_at_once(*_: Any) -> None: ...

    patch.setattr(GroupServicer, "agree", agree_at_once)


@_planted(Fault.LINK_BREAK, Fault.RESULT_NONSENSE, seed=3, raises=InternalError)
def _what_members_drew_in_old_epochs_counts(patch: Patch) -> None:
    """A member's report about an abandoned step is taken for the next step's."""

    async def take_next(self: Follower, *_: int) -> int:
        return (await self._dones.get()).checksum

    patch.setattr(Follower, "checksum", take_next)


@_planted(Fault.MEMBER_CRASH, Fault.MEMBER_LINK_BREAK, seed=3)
def _a_broken_link_ends_no_process(patch: Patch) -> None:
    """A process dies, and the rest of the group wait for it."""
    patch.setattr(DomainEnd, "fail", lambda *_, **__: None)


@_planted(Fault.MEMBER_STOP, Fault.MEMBER_LINK_SILENT, seed=3)
def _silence_ends_no_process(patch: Patch) -> None:
    """A process is stopped or cut off, and the rest of the group wait for it."""
    patch.setattr(Silence, "beat", lambda _: False)
