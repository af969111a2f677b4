"""A scrape over a real socket matches what a rank has computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.metrics import WorkerCollector
from services.worker.models.loader import LoadedModel
from services.worker.process.device_loop import DeviceLoop
from services.worker.process.device_steps import DeviceSteps
from services.worker.process.exits import DomainEnd
from shared.network.management import serve_management
from shared.network.probes import Probes
from shared.process.metrics import make_process_registry
from tests.support.system.scraping import scrape, values
from tests.support.worker.worker_runner import make_runner
from tests.support.worker.worker_service import PROMPTS, attach_request, prefill_of
from tests.support.worker.worker_steps import decode_step


async def scrape_rank(path: Path, collector: WorkerCollector) -> dict[str, float]:
    server = await serve_management(f"unix:{path}", make_process_registry(collector, None), Probes("nothing"))
    assert server is not None
    async with server:
        return values(await scrape(path))


async def test_a_rank_that_loads_has_only_the_metrics_of_its_process(tmp_path: Path) -> None:
    assert await scrape_rank(tmp_path / "manage", WorkerCollector()) == {}


async def test_steps_are_counted_by_kind_with_their_tokens_and_device_time(
    tmp_path: Path, loaded: LoadedModel, device: DeviceLoop
) -> None:
    runner, collector = make_runner(loaded), WorkerCollector()
    steps = DeviceSteps(device, runner, DomainEnd(device), is_alone=True)
    await steps.attach(attach_request(1))
    launched = (prefill_of(), decode_step(step_id=2), decode_step(step_id=3))
    times_us = [(await steps.submit(step)).device_time_us for step in launched]
    collector.runner = runner

    page = await scrape_rank(tmp_path / "manage", collector)
    assert page["lockstep_worker_info reference cpu 0 0"] == 1
    assert page["lockstep_step_tokens_total prefill"] == sum(map(len, PROMPTS))
    assert page["lockstep_step_tokens_total decode"] == 2 * len(PROMPTS)
    assert page["lockstep_step_tokens_total mixed"] == page["lockstep_step_tokens_total dummy"] == 0
    assert page["lockstep_step_device_time_seconds_count prefill"] == 1
    assert page["lockstep_step_device_time_seconds_count decode"] == 2
    assert page["lockstep_step_device_time_seconds_sum prefill"] == pytest.approx(1e-6 * times_us[0])
    assert page["lockstep_step_device_time_seconds_sum decode"] == pytest.approx(1e-6 * sum(times_us[1:]))
    assert page["lockstep_progress_total"] == runner.progress > 0
    assert page["lockstep_kv_cache_bytes"] == runner.kv_cache_bytes > 0
    assert [name for name in page if "state_cache" in name] == []
    # A CPU's memory is that of the process.
    assert [name for name in page if "device_memory" in name] == []
