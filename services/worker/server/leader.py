"""A TP group's leader."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from typing_extensions import override

from services.worker.group.group_servicer import GroupServicer
from services.worker.group.joined_link import JoinedLink
from services.worker.group.meeting import Retries
from services.worker.parallel.rendezvous import Rendezvous, open_rendezvous
from services.worker.process.device_loop import DeviceLoop
from services.worker.process.device_steps import DeviceSteps
from services.worker.process.exits import DomainEnd
from services.worker.process.rpc_thread import Role
from services.worker.server.servicer import SERVICE_NAME, WorkerServicer
from shared.network.addresses import split_address
from shared.network.rpc import Servicer

if TYPE_CHECKING:
    from services.worker.config import WorkerSettings
    from services.worker.runner.model_runner import ModelRunner


class Leader(Role):
    """Serves the scheduler and its followers; in coupled groups it follows the leader of DP rank 0."""

    service_names: tuple[str, ...] = (SERVICE_NAME,)

    def __init__(self, settings: WorkerSettings, device: DeviceLoop, end: DomainEnd) -> None:
        self._settings = settings
        self._device = device
        self._end = end
        self.group = GroupServicer(settings.layout, end, settings.silence_s)
        self._servicer = WorkerServicer(settings.layout, self.group, end, max_model_len=settings.context_limit)
        self._link = JoinedLink(settings, end) if settings.layout.follows else None
        self.servicers: tuple[Servicer, ...] = (self._servicer, self.group)

    async def meet(self) -> Rendezvous | None:
        """See `Role`: the domain's first leader begins a start of it, another one asks the first."""
        if self._settings.layout.is_alone:
            return None
        rendezvous = await (self._begin() if self._link is None else self._link.meet())
        self.group.tell(rendezvous)
        return rendezvous

    async def open(self, runner: ModelRunner) -> None:
        """Accept followers; returns when the group can be claimed. See `Role`."""
        await self.group.open(runner)
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

    @override
    def leave(self) -> None:
        self._servicer.leave()

    async def close(self) -> None:
        """Say goodbye to its own leader; its followers learn from their Join streams."""
        if self._link is not None:
            await self._link.close()

    async def _begin(self) -> Rendezvous:
        host = self._settings.store_host
        retries = Retries(f"listen for collectives on {host}", self._settings.meet_timeout_s)
        while True:
            try:
                # It may take seconds to resolve a name.
                rendezvous = await asyncio.to_thread(open_rendezvous, host)
            except OSError as error:
                # A name may resolve later, or still to the address of a pod that had it before.
                await retries.wait(str(error))
            else:
                return replace(rendezvous, collective_host=split_address(rendezvous.store)[0])
