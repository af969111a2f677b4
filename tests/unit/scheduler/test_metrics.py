"""A scrape over a real socket matches the engine's state."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from prometheus_client import Metric

from services.scheduler.cell.engine import Engine
from services.scheduler.cell.events import Endpoint, EndpointsFound
from services.scheduler.core.policy import RECOVERY_BUCKETS_S, CacheSettings, CellTopology, SchedulerPolicy
from services.scheduler.discovery.last_seen import LastSeen
from services.scheduler.metrics import make_registry
from services.scheduler.server.idle_check import IdleCheck
from shared.network.management import serve_management
from shared.network.probes import Probes
from tests.support.scheduler.engine_driver import EngineDriver
from tests.support.system.scraping import scrape, values


async def scrape_cell(path: Path, engine: Engine) -> list[Metric]:
    idle_check = IdleCheck(engine, asyncio.get_running_loop())
    server = await serve_management(f"unix:{path}", make_registry(engine, idle_check, None), Probes("nothing"))
    assert server is not None
    async with server:
        return await scrape(path)


async def test_values_match_the_state(tmp_path: Path) -> None:
    driver = EngineDriver(num_blocks=8, policy=SchedulerPolicy(max_num_seqs=1), num_draft_tokens=1)
    driver.submit(1, list(range(1, 40)), max_tokens=4)
    driver.run()
    driver.submit(2, list(range(1, 40)), max_tokens=6)
    driver.submit(3, [1, 2])
    driver.step()
    driver.step()
    state = driver.engine.state()

    scraped = values(await scrape_cell(tmp_path / "metrics", driver.engine))

    assert (state.num_waiting, state.num_running, state.num_used_blocks, state.counters.num_finished) == (1, 1, 3, 1)
    assert state.num_cached_blocks + state.num_used_blocks < state.num_blocks
    assert state.counters.num_prefix_hit_tokens == 32
    assert (state.ranks[0].num_steps.prefill, state.ranks[0].num_steps.mixed) == (2, 0)
    assert state.counters.num_draft_tokens == state.counters.num_accepted_tokens > 0
    assert scraped == {
        "lockstep_worker_attached 0": 1,
        "lockstep_num_requests_waiting": state.num_waiting,
        "lockstep_num_requests_running": state.num_running,
        "lockstep_rank_num_requests_waiting 0": state.num_waiting,
        "lockstep_rank_num_requests_running 0": state.num_running,
        "lockstep_requests_finished_total": state.counters.num_finished,
        "lockstep_num_preemptions_total": state.counters.num_preemptions,
        "lockstep_kv_cache_usage_perc": state.num_used_blocks / state.num_blocks,
        "lockstep_rank_kv_cache_usage_perc 0": state.num_used_blocks / state.num_blocks,
        "lockstep_kv_cache_blocks 0 used": state.num_used_blocks,
        "lockstep_kv_cache_blocks 0 cached": state.num_cached_blocks,
        "lockstep_kv_cache_blocks 0 blank": state.num_free_blocks - state.num_cached_blocks,
        "lockstep_kv_cache_block_size_tokens": state.block_size,
        "lockstep_prefix_cache_queries_total": state.counters.num_prefix_queried_tokens,
        "lockstep_prefix_cache_hits_total": state.counters.num_prefix_hit_tokens,
        "lockstep_steps_total prefill 0": state.ranks[0].num_steps.prefill,
        "lockstep_steps_total decode 0": state.ranks[0].num_steps.decode,
        "lockstep_steps_total mixed 0": 0,
        "lockstep_steps_total dummy 0": 0,
        "lockstep_lost_epochs_total": 0,
        **{f"lockstep_recovery_seconds_bucket {bound}": 0 for bound in (*RECOVERY_BUCKETS_S, "+Inf")},
        "lockstep_recovery_seconds_count": 0,
        "lockstep_recovery_seconds_sum": 0,
        "lockstep_replayed_tokens_total": 0,
        "lockstep_replay_mismatches_total": 0,
        "lockstep_poison_requests_total": 0,
        "lockstep_refused_models_total": 0,
        "lockstep_unfit_workers_total": 0,
        "lockstep_late_results_total": 0,
        "lockstep_spec_decode_num_draft_tokens_total": state.counters.num_draft_tokens,
        "lockstep_spec_decode_num_accepted_tokens_total": state.counters.num_accepted_tokens,
        "lockstep_integrity_checks_total": 0,
        "lockstep_integrity_failures_total": 0,
    }


async def test_what_a_load_balancer_reads_is_one_series_for_the_whole_cell(tmp_path: Path) -> None:
    driver = EngineDriver(topology=CellTopology(2), num_blocks=8, policy=SchedulerPolicy(max_num_seqs=1))
    for handle in range(1, 5):
        driver.submit(handle, [handle] * 20)
    driver.step()
    state = driver.engine.state()
    families = {family.name: family for family in await scrape_cell(tmp_path / "metrics", driver.engine)}
    for name, total in (
        ("lockstep_num_requests_running", state.num_running),
        ("lockstep_num_requests_waiting", state.num_waiting),
        ("lockstep_kv_cache_usage_perc", state.num_used_blocks / state.num_blocks),
    ):
        [sample] = families[name].samples
        assert (sample.labels, sample.value) == ({}, total)
        ranks = families[name.replace("lockstep_", "lockstep_rank_")].samples
        assert [sample.labels for sample in ranks] == [{"rank": "0"}, {"rank": "1"}]
        assert 0 < sum(sample.value for sample in ranks) == pytest.approx(total * (2 if "perc" in name else 1))


async def test_a_cell_without_a_worker_can_be_scraped(tmp_path: Path) -> None:
    scraped = values(await scrape_cell(tmp_path / "metrics", Engine(SchedulerPolicy(), CacheSettings())))
    assert scraped["lockstep_worker_attached 0"] == 0
    assert scraped["lockstep_kv_cache_usage_perc"] == scraped["lockstep_rank_kv_cache_usage_perc 0"] == 0
    assert sum(value for name, value in scraped.items() if name.startswith("lockstep_kv_cache_blocks")) == 0


async def test_recoveries_are_counted_by_duration(tmp_path: Path) -> None:
    driver = EngineDriver()
    driver.submit(1, [1, 2, 3], max_tokens=9)
    driver.step()
    driver.lose()
    driver.now += 0.2
    driver.attach()
    driver.run()
    scraped = values(await scrape_cell(tmp_path / "metrics", driver.engine))
    assert (scraped["lockstep_lost_epochs_total"], scraped["lockstep_recovery_seconds_count"]) == (1, 1)
    buckets = [scraped[f"lockstep_recovery_seconds_bucket {bound}"] for bound in (1.0, 3.0, 100.0)]
    assert buckets == [0, 1, 1]
    # The pause, and the step that returned the next token.
    assert scraped["lockstep_recovery_seconds_sum"] == pytest.approx(1.2)


async def test_every_metric_has_documentation_and_process_metrics_are_included(tmp_path: Path) -> None:
    families = await scrape_cell(tmp_path / "metrics", Engine(SchedulerPolicy(), CacheSettings()))
    assert [family.name for family in families if not family.documentation] == []
    assert "process_cpu_seconds" in {family.name for family in families}


async def test_places_without_an_endpoint_are_no_ranks(tmp_path: Path) -> None:
    driver = EngineDriver(topology=CellTopology(3, is_dynamic=True), attach=False)
    found = tuple(Endpoint(f"10.0.0.{number}:1") for number in range(5))
    driver.on_event(EndpointsFound(found[:2]))
    driver.attach(1)
    idle_check = IdleCheck(driver.engine, asyncio.get_running_loop())
    last_seen = LastSeen(time.monotonic() - 100.0, found)
    registry = make_registry(driver.engine, idle_check, None, last_seen)
    server = await serve_management(f"unix:{tmp_path}/metrics", registry, Probes("nothing"))
    assert server is not None
    async with server:
        scraped = values(await scrape(tmp_path / "metrics"))
    ranks = {name: value for name, value in scraped.items() if name.startswith("lockstep_worker_attached")}
    assert ranks == {"lockstep_worker_attached 0": 0, "lockstep_worker_attached 1": 1}
    assert not any(name.split()[1:2] == ["2"] for name in scraped)
    assert scraped["lockstep_discovery_endpoints"] == 5
    assert scraped["lockstep_discovery_unplaced_endpoints"] == 0
    assert scraped["lockstep_discovery_staleness_seconds"] >= 100.0
