"""What a failed step means for its process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import cast

import pytest
import torch

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
    """Fails every step on a device, when it is launched or when it is finished."""

    error: Exception
    device: torch.device
    fails_late: bool
    is_computed = False
    layout = RankLayout()

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


@pytest.mark.parametrize("fails_late", [False, True])
@pytest.mark.parametrize(
    ("device", "is_alone", "error", "ends"),
    [
        ("cpu", True, InternalError("a bug"), False),
        ("cpu", False, InternalError("a partner is lost"), True),
        ("cpu", False, StepMismatchError("refused"), True),
        ("cuda", True, InternalError("an illegal address"), True),
        ("cuda", True, StepMismatchError("refused"), False),
    ],
)
async def test_a_failed_step_ends_the_process_if_its_device_or_a_partner_is_lost(
    device: str, is_alone: bool, error: Exception, ends: bool, fails_late: bool
) -> None:
    loop, end = DeviceLoop(), CountingEnd()
    runner = FailingRunner(error, torch.device(device), fails_late)
    steps = DeviceSteps(loop, cast(ModelRunner, runner), cast(DomainEnd, end), is_alone=is_alone)
    submitted = steps.submit(decode_step())
    running = asyncio.create_task(asyncio.to_thread(loop.run))
    with pytest.raises(type(error)):
        await submitted
    loop.stop()
    await running
    await asyncio.sleep(0)
    assert end.num_failed == ends
