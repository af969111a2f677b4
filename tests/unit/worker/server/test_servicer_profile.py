"""Traces of the next steps."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from lockstep.internal.v1 import worker_pb2
from services.worker.models.loader import LoadedModel
from tests.support.worker.worker_runner import make_runner
from tests.support.worker.worker_service import Worker, error_of, prefill_of
from tests.support.worker.worker_steps import decode_step


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    return tmp_path / "below" / "traces"


@pytest.fixture
async def profiled(loading_worker: Worker, loaded: LoadedModel, traces: Path) -> Worker:
    """A worker that may record steps, with an epoch."""
    loading_worker.open(make_runner(loaded), profile_dir=traces)
    await loading_worker.attach(1)
    return loading_worker


def names_in(traces: Path) -> list[str]:
    return [path.name for path in traces.iterdir()]


def block(traces: Path) -> None:
    """Let a file be where the directory should be."""
    traces.parent.mkdir()
    traces.write_text("no directory", encoding="utf-8")


def profile(worker: Worker, num_steps: int) -> Any:
    return worker.stub.Profile(worker_pb2.ProfileRequest(num_steps=num_steps))


async def begun(worker: Worker) -> None:
    """Wait until the worker has handled every call before this one."""
    await error_of(worker.attach(0))
    await asyncio.to_thread(worker.device.submit(lambda: None).result)


async def test_a_profile_is_a_trace_of_the_next_steps(profiled: Worker, traces: Path) -> None:
    recording = asyncio.ensure_future(profile(profiled, 3))
    await begun(profiled)
    await profiled.run(prefill_of(), *(decode_step(step_id=step_id) for step_id in range(2, 6)))
    response = await recording
    assert names_in(traces) == [response.file_name]
    assert response.file_name.startswith("worker-0.0-")
    events = json.loads((traces / response.file_name).read_text(encoding="utf-8"))["traceEvents"]
    # One embedding lookup for each of the three steps.
    assert sum(event.get("name") == "aten::embedding" for event in events) == 3


async def test_one_profile_is_recorded_at_a_time(profiled: Worker, traces: Path) -> None:
    recording = asyncio.ensure_future(profile(profiled, 1))
    await begun(profiled)
    code, reason, _ = await error_of(profile(profiled, 1))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "PROFILING_UNAVAILABLE")
    await profiled.run(prefill_of())
    await recording
    assert len(names_in(traces)) == 1


async def test_a_trace_that_cannot_be_written_is_an_error(profiled: Worker, traces: Path) -> None:
    block(traces)
    recording = asyncio.ensure_future(error_of(profile(profiled, 1)))
    await begun(profiled)
    await profiled.run(prefill_of())
    code, _, _ = await recording
    assert code is grpc.StatusCode.INTERNAL


async def test_without_a_directory_nothing_is_recorded(worker: Worker) -> None:
    await worker.attach(1)
    with pytest.raises(grpc.aio.AioRpcError, match="the worker was started without --profile-dir"):
        await profile(worker, 1)


@pytest.mark.parametrize("num_steps", [0, 101, 2**32 - 1])
async def test_a_number_of_steps_out_of_range_is_refused(profiled: Worker, num_steps: int) -> None:
    code, reason, _ = await error_of(profile(profiled, num_steps))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")


async def test_a_loading_worker_records_nothing(loading_worker: Worker) -> None:
    code, reason, _ = await error_of(profile(loading_worker, 1))
    assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_READY")
