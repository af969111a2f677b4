"""What a failed step or epoch means for its process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from lockstep.internal.v1 import worker_pb2
from services.worker.layout import RankLayout
from services.worker.process.device_loop import DeviceLoop
from services.worker.process.device_steps import DeviceSteps
from services.worker.process.exits import DomainEnd
from services.worker.runner.model_runner import ModelRunner
from shared.errors import InternalError, StepMismatchError
from shared.step.step import Step, StepResult
from tests.support.worker.worker_steps import decode_step


@dataclass
class FailingRunner:
    """Fails every epoch and every step on a device, when it is launched or when it is finished."""

    error: Exception
    device: torch.device
    fails_late: bool
    is_computed = False
    layout = RankLayout()

    def attach(self, **_: int) -> int:
        raise self.error

    def launch(self, step: Step) -> FailingRunner:
        if not self.fails_late:
            raise self.error
        return self

    def finish(self) -> StepResult:
        raise self.error


class CountingEnd:
    """Counts failed steps that end the domain."""

    def __init__(self) -> None:
        self.num_failed = 0

    def fail_step(self, **_: object) -> None:
        self.num_failed += 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("fails", ["at attach", "at launch", "at its end"])
@pytest.mark.parametrize(
    ("is_alone", "error", "ends"),
    [
        (True, InternalError("a bug"), True),
        (True, MemoryError(), True),
        (False, InternalError("a partner is lost"), True),
        (True, StepMismatchError("refused"), False),
        (False, StepMismatchError("refused"), True),
    ],
)
async def test_an_error_of_its_own_ends_the_process_and_a_refusal_only_beside_partners(
    device: str, is_alone: bool, error: Exception, ends: bool, fails: str
) -> None:
    loop, end = DeviceLoop(), CountingEnd()
    runner = FailingRunner(error, torch.device(device), fails == "at its end")
    steps = DeviceSteps(loop, cast(ModelRunner, runner), cast(DomainEnd, end), is_alone=is_alone)
    request = worker_pb2.AttachRequest(epoch=1, block_size=16, max_num_seqs=4, max_num_batched_tokens=64)
    submitted: asyncio.Future[Any] = steps.attach(request) if fails == "at attach" else steps.submit(decode_step())
    running = asyncio.create_task(asyncio.to_thread(loop.run))
    with pytest.raises(type(error)):
        await submitted
    loop.stop()
    await running
    await asyncio.sleep(0)
    assert end.num_failed == ends
