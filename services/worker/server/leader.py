"""A TP group's leader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.worker.group.group_servicer import GroupServicer
from services.worker.group.joined_link import JoinedLink
from services.worker.process.device_loop import DeviceLoop
from services.worker.process.device_steps import DeviceSteps
from services.worker.process.exits import DomainEnd
from services.worker.server.servicer import SERVICE_NAME, WorkerServicer
from shared.rpc import Servicer

if TYPE_CHECKING:
    from services.worker.config import WorkerSettings
    from services.worker.runner.model_runner import ModelRunner


class Leader:
    """Serves the scheduler and its followers; in coupled groups it follows the leader of DP rank 0."""

    service_names: tuple[str, ...] = (SERVICE_NAME,)

    def __init__(self, settings: WorkerSettings, device: DeviceLoop, end: DomainEnd) -> None:
        self._settings = settings
        self._device = device
        self._end = end
        self._group = GroupServicer(settings.layout, settings.domain_start_id, end, settings.silence_s)
        self._servicer = WorkerServicer(settings.layout, self._group, end)
        self._link = JoinedLink(settings, end) if settings.layout.follows else None
        self.servicers: tuple[Servicer, ...] = (self._servicer, self._group)

    async def open(self, runner: ModelRunner) -> None:
        """Accept followers; returns when the group can be claimed. See `Role`."""
        await self._group.open(runner)
        if self._link is not None:
            await self._link.open(runner)
        layout = self._settings.layout
        steps = DeviceSteps(
            self._device,
            runner,
            self._end,
            is_alone=layout.is_alone,
            fail_on_token=self._settings.fail_on_token,
            profile_dir=self._settings.profile_dir,
        )
        self._servicer.open(steps)

    def leave(self) -> None:
        """See `Role`."""
        self._servicer.leave()

    async def close(self) -> None:
        """Say goodbye to its own leader; its followers learn from their Join streams."""
        if self._link is not None:
            await self._link.close()
