"""A worker's service in the test process, and the scheduler's end of the links to it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from lockstep.internal.v1 import worker_pb2, worker_pb2_grpc
from services.worker.group.group_servicer import GroupServicer
from services.worker.layout import RankLayout
from services.worker.process.device_loop import DeviceLoop
from services.worker.process.device_steps import DeviceSteps
from services.worker.process.exits import DomainEnd, ExitCode
from services.worker.runner.model_runner import ModelRunner
from services.worker.server.servicer import WorkerServicer
from shared.network.statuses import reason_of, status_from_rpc_error
from shared.step.step import Step
from tests.support.worker.worker_steps import heartbeat_request, make_enter, prefill_step, to_request, unpack

PROMPTS = ([5, 9, 2, 44, 17], [3], [8, 1, 60, 33, 21, 4, 4, 90, 12])
BLOCK_SIZE = 4


@dataclass
class Worker:
    """A running worker service and the scheduler's end of its links; records how the process would have exited."""

    device: DeviceLoop
    channel: grpc.aio.Channel
    stuck_s: float
    servicer: WorkerServicer = field(init=False)
    stub: Any = field(init=False)
    ended: asyncio.Queue[ExitCode] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.stub = worker_pb2_grpc.WorkerServiceStub(self.channel)
        self.end = DomainEnd(self.device, lambda code, *_, **__: self.ended.put_nowait(code))
        layout = RankLayout()
        group = GroupServicer(layout, self.end, silence_s=3.0)
        self.servicer = WorkerServicer(layout, group, self.end, stuck_s=self.stuck_s)

    def open(self, runner: ModelRunner, *, profile_dir: Path | None = None) -> None:
        """Open the worker for claims."""
        self.servicer.open(DeviceSteps(self.device, runner, self.end, is_alone=True, profile_dir=profile_dir))

    async def attach(
        self, epoch: int, scheduler: str = "one", *, drain_s: float | None = None, **sizes: int
    ) -> worker_pb2.AttachResponse:
        """Claim the worker; see `attach_request`."""
        request = attach_request(epoch, scheduler, drain_s=drain_s, **sizes)
        response: worker_pb2.AttachResponse = await self.stub.Attach(request)
        return response

    async def execute(self, epoch: int = 1, scheduler: str = "one") -> Any:
        """Open a stream and identify its scheduler."""
        call = self.stub.Execute()
        await call.write(heartbeat_request(epoch, scheduler))
        return call

    async def run(self, *steps: Step, epoch: int = 1, scheduler: str = "one") -> list[list[int]]:
        """Send all steps at once, end the stream, and return each step's tokens."""
        call = await self.execute(epoch, scheduler)
        for step in steps:
            await call.write(request(step, epoch))
        await call.done_writing()
        return [unpack(result.token_ids) for result in await rest_of(call)]


def attach_request(
    epoch: int, scheduler: str = "one", *, drain_s: float | None = None, **sizes: int
) -> worker_pb2.AttachRequest:
    """A claim of a worker, with valid sizes; None is a scheduler that does not drain."""
    drain_time = None if drain_s is None else timedelta(seconds=drain_s)
    request = worker_pb2.AttachRequest(epoch=epoch, scheduler_instance_id=scheduler, drain_time=drain_time)
    for name, size in {"block_size": BLOCK_SIZE, "max_num_seqs": 8, "max_num_batched_tokens": 256, **sizes}.items():
        setattr(request, name, size)
    return request


def request(step: Step, epoch: int = 1) -> worker_pb2.StepRequest:
    """Encode a step."""
    return to_request(replace(step, epoch=epoch))


async def read(call: Any) -> worker_pb2.StepResult:
    """Read the next result."""
    while (result := await call.read()).HasField("heartbeat"):
        pass
    assert isinstance(result, worker_pb2.StepResult)
    return result


async def rest_of(call: Any) -> list[worker_pb2.StepResult]:
    """Read the results until the stream ends."""
    results = []
    while (result := await call.read()) is not grpc.aio.EOF:
        if not result.HasField("heartbeat"):
            results.append(result)
    return results


def blocks_of(row: int) -> list[int]:
    """The blocks of a row, for 24 tokens; different for each row."""
    return list(range(6 * row, 6 * row + 6))


def prefill_of(prompts: Sequence[Sequence[int]] = PROMPTS, *, step_id: int = 1) -> Step:
    """A step that prefills all of these prompts."""
    return prefill_step(
        *(make_enter(row, prompt, blocks_of(row)) for row, prompt in enumerate(prompts)), step_id=step_id
    )


async def error_of(awaitable: Any) -> tuple[grpc.StatusCode, str | None, dict[str, str]]:
    """The code, reason and values with which a call fails."""
    with pytest.raises(grpc.aio.AioRpcError) as error_info:
        await awaitable
    status = status_from_rpc_error(error_info.value)
    info = error_details_pb2.ErrorInfo()
    if status.details:
        status.details[0].Unpack(info)
    return error_info.value.code(), reason_of(status), dict(info.metadata)
