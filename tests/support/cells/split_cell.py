"""A cell whose services are started by the test, so that each can be killed and restarted."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.cli.cell_plan import plan_services
from services.cli.processes.service_command import ROLES, ServiceCommand
from services.cli.serve_settings import ServeSettings, split_service_flags
from shared.network.rpc import make_channel
from tests.support.system.patience import PATIENCE_S
from tests.support.system.processes import ROOT, module_command, module_environment
from tests.support.system.serving import wait_until_serving

# What a call of many items has in the cell takes several steps, so some of it is there whenever a process dies.
IN_SEVERAL_STEPS = ("--scheduler.max-num-batched-tokens=128", "--scheduler.max-num-seqs=32")

_POLL_S = 0.02


class SplitCell:
    """The processes of one cell, by role; created by `run_split_cell`. They log to the stderr of the test.

    Attributes:
        address: The address of its tokenizer service.
        scheduler_address: The address of its scheduler service for clients.
        cell_address: The address of its scheduler service for the cell.
    """

    def __init__(self, commands: Sequence[ServiceCommand]) -> None:
        self._commands = {command.role: command for command in commands}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.address = self._commands["tokenizer"].address
        self.scheduler_address = self._commands["scheduler"].address
        self.cell_address = self._commands["scheduler"].health_address

    def start(self, role: str) -> None:
        """Start a service that is not running."""
        environment = module_environment() | {"GRPC_VERBOSITY": "ERROR"}
        command = module_command(f"services.{role}", *self._commands[role].flags)
        self._processes[role] = subprocess.Popen(command, cwd=ROOT, env=environment)

    async def wait_until_serving(self, role: str) -> None:
        """Wait until a service reports SERVING; fails after five minutes.

        Raises:
            RuntimeError: Its process has ended.
        """
        process = self._processes[role]
        async with (
            asyncio.timeout(PATIENCE_S),
            make_channel(self._commands[role].health_address, internal=True) as channel,
        ):
            serving = asyncio.create_task(wait_until_serving(channel))
            try:
                while not serving.done():
                    if process.poll() is not None:
                        raise RuntimeError(f"the {role} ended with {process.returncode}")
                    await asyncio.wait([serving], timeout=_POLL_S)
                await serving
            finally:
                serving.cancel()

    async def wait_until_ended(self, role: str) -> int:
        """Wait until a service has ended by itself; returns its exit status. Fails after five minutes."""
        return await asyncio.to_thread(self._processes[role].wait, PATIENCE_S)

    async def wait_until_finished(self, num_requests: int) -> None:
        """Wait until the scheduler has finished so many requests; fails after five minutes."""
        async with asyncio.timeout(PATIENCE_S), make_channel(self.cell_address, internal=True) as channel:
            stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            while (await stub.GetState(scheduler_pb2.GetStateRequest())).num_finished < num_requests:
                pass

    def kill(self, role: str) -> None:
        """Kill a service with SIGKILL."""
        process = self._processes.pop(role)
        process.kill()
        process.wait()

    def kill_all(self) -> None:
        """Kill all running services."""
        for role in list(self._processes):
            self.kill(role)


@contextmanager
def run_split_cell(model_dir: Path, *flags: str) -> Iterator[SplitCell]:
    """Start a cell without waiting until it serves; `flags` are `lockstep serve` flags for its services."""
    with tempfile.TemporaryDirectory(prefix="lockstep-test-") as temp_dir:
        settings = ServeSettings(model_dir=model_dir, listen=f"unix:{temp_dir}/tokenizer.sock", http=False)
        _, service_flags = split_service_flags(flags)
        cell = SplitCell(plan_services(settings, service_flags, Path(temp_dir)))
        try:
            for role in ROLES:
                cell.start(role)
            yield cell
        finally:
            cell.kill_all()
