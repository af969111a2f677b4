"""Recordings whose caller has gone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.worker.models.loader import LoadedModel
from services.worker.process.device_loop import DeviceLoop
from services.worker.process.device_steps import DeviceSteps
from services.worker.process.exits import DomainEnd
from tests.support.worker.worker_runner import make_runner
from tests.support.worker.worker_service import prefill_of


async def test_a_cancelled_recording_is_dropped_and_another_may_begin(
    device: DeviceLoop, loaded: LoadedModel, tmp_path: Path
) -> None:
    runner = make_runner(loaded)
    runner.attach(block_size=4, max_num_seqs=8, max_num_batched_tokens=256)
    steps = DeviceSteps(device, runner, DomainEnd(device), is_alone=True, profile_dir=tmp_path)
    dropped = asyncio.create_task(steps.profile(1))
    await asyncio.to_thread(device.submit(lambda: None).result)
    dropped.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dropped
    recorded = asyncio.create_task(steps.profile(1))
    await asyncio.to_thread(device.submit(lambda: None).result)
    await steps.submit(prefill_of())
    assert names_in(tmp_path) == [await recorded]


def names_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]
