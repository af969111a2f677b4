"""A scrape over a real socket matches the engine's state."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from prometheus_client import Metric

from services.scheduler.cell.engine import Engine
from services.scheduler.cell.events import ChoiceSoFar, Endpoint, EndpointsFound, Submission
from services.scheduler.cell.requests.tenant_totals import MAX_TENANTS
from services.scheduler.core.policy import RECOVERY_BUCKETS_S, CacheSettings, CellTopology, SchedulerPolicy
from services.scheduler.discovery.last_seen import LastSeen
from services.scheduler.metrics import make_registry
from services.scheduler.server.idle_check import IdleCheck
from shared.ids import RequestHandle
from shared.network.management import serve_management
from shared.network.probes import Probes
from shared.request.sampling_params import SamplingParams
from shared.tenants.tenant import Tenant
from tests.support.scheduler.engine_driver import EngineDriver, token_bytes
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
        "lockstep_tenant_requests_in_flight default": 2,
        "lockstep_tenant_requests_waiting default": 1,
        "lockstep_tenant_requests_refused_total default": 0,
        # The second request found two blocks of the first one's prompt.
        "lockstep_tenant_prompt_tokens_total default": 39 + 7,
        "lockstep_tenant_completion_tokens_total default": 4,
        "lockstep_kv_cache_usage_perc": state.num_used_blocks / state.num_blocks,
        "lockstep_rank_kv_cache_usage_perc 0": state.num_used_blocks / state.num_blocks,
        "lockstep_kv_cache_blocks 0 used": state.num_used_blocks,
        "lockstep_kv_cache_blocks 0 cached": state.num_cached_blocks,
        "lockstep_kv_cache_blocks 0 blank": state.num_free_blocks - state.num_cached_blocks,
        "lockstep_kv_cache_block_size_tokens": state.block_size,
        "lockstep_prefix_cache_queries_total": state.counters.num_prefix_queried_tokens,
        "lockstep_prefix_cache_hits_total": state.counters.num_prefix_hit_tokens,
        "lockstep_prefix_tokens_lost_to_state_total": 0,
        "lockstep_state_checkpoints 0 used": 0,
        "lockstep_state_checkpoints 0 free": 0,
        "lockstep_steps_total prefill 0": state.ranks[0].num_steps.prefill,
        "lockstep_steps_total decode 0": state.ranks[0].num_steps.decode,
        "lockstep_steps_total mixed 0": 0,
        "lockstep_steps_total dummy 0": 0,
        "lockstep_lost_epochs_total": 0,
        **{f"lockstep_recovery_seconds_bucket {bound}": 0 for bound in (*RECOVERY_BUCKETS_S, "+Inf")},
        "lockstep_recovery_seconds_count": 0,
        "lockstep_recovery_seconds_sum": 0,
        "lockstep_poison_requests_total": 0,
        "lockstep_refused_models_total": 0,
        "lockstep_unfit_workers_total": 0,
        "lockstep_late_results_total": 0,
        "lockstep_spec_decode_num_draft_tokens_total": state.counters.num_draft_tokens,
        "lockstep_spec_decode_num_accepted_tokens_total": state.counters.num_accepted_tokens,
        "lockstep_integrity_checks_total": 0,
        "lockstep_integrity_failures_total": 0,
    }


async def test_saved_states_and_what_was_lost_without_them_are_counted(tmp_path: Path) -> None:
    driver = EngineDriver(num_checkpoint_slots=5)
    for handle in (1, 2):
        driver.submit(handle, list(range(40)))
        driver.run()
    scraped = values(await scrape_cell(tmp_path / "metrics", driver.engine))
    assert scraped["lockstep_state_checkpoints 0 used"] == 1
    assert scraped["lockstep_state_checkpoints 0 free"] == 4
    assert scraped["lockstep_prefix_tokens_lost_to_state_total"] == 32


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


async def test_tenants_have_their_own_series_and_those_beyond_a_hundred_share_one(tmp_path: Path) -> None:
    driver = EngineDriver(num_blocks=256)
    for number in range(MAX_TENANTS + 2):
        driver.submit(2 * number + 1, [7] * 40, max_tokens=5, tenant=Tenant(f"t{number}", max_in_flight=1))
        driver.submit(2 * number + 2, [7] * 40, tenant=Tenant(f"t{number}", max_in_flight=1))
    scraped = values(await scrape_cell(tmp_path / "before", driver.engine))
    assert scraped["lockstep_tenant_requests_in_flight t0"] == scraped["lockstep_tenant_requests_in_flight t98"] == 1
    assert scraped["lockstep_tenant_requests_in_flight other"] == 3
    assert (scraped["lockstep_tenant_requests_refused_total t0"], scraped["lockstep_tenant_requests_waiting t0"]) == (
        1,
        0,
    )
    assert sum(name.startswith("lockstep_tenant_requests_in_flight ") for name in scraped) == MAX_TENANTS + 1
    driver.run()
    scraped = values(await scrape_cell(tmp_path / "after", driver.engine))
    assert scraped["lockstep_tenant_requests_in_flight other"] == 0
    assert scraped["lockstep_tenant_requests_refused_total other"] == 3
    # No tenant found another's prompt.
    assert scraped["lockstep_tenant_prompt_tokens_total t5"] == 40
    assert scraped["lockstep_tenant_prompt_tokens_total other"] == 3 * 40
    assert scraped["lockstep_tenant_completion_tokens_total other"] == 3 * 5


async def test_tokens_are_counted_for_their_tenant_however_a_choice_ends(tmp_path: Path) -> None:
    driver = EngineDriver()
    a, b, params = Tenant("a"), Tenant("b"), SamplingParams(max_tokens=9, ignore_eos=True)
    driver.submit(1, [1, 2, 3], max_tokens=9, tenant=a)
    driver.submit(2, [1, 2, 4], max_tokens=9, tenant=b)
    for _ in range(3):
        driver.step()
    aborted, output = driver.choices[1, 1].tokens, driver.choices[1, 2].tokens
    driver.abort(1)
    so_far = (ChoiceSoFar(token_bytes(output)),)
    again = Submission(
        RequestHandle(3), "1-2", token_bytes([1, 2, 4]), params, attempt=2, tenant=b, choices_so_far=so_far
    )
    driver.resume(1, again, list(output))
    driver.run()
    scraped = values(await scrape_cell(tmp_path / "metrics", driver.engine))
    assert scraped["lockstep_tenant_completion_tokens_total a"] == len(aborted) == 2
    # The first attempt's tokens are not counted twice.
    assert scraped["lockstep_tenant_completion_tokens_total b"] == 9 > len(output) > 0


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
