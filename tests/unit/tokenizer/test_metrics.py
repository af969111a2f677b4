"""A scrape over a real socket matches what has happened to the replica, and probes follow its link."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from lockstep.internal.v1 import exchange_pb2
from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.answer.request_totals import RequestTotals
from services.tokenizer.tracing.request_trace import SpanTotals
from shared.errors import PoisonRequestError
from tests.support.system.patience import PATIENCE_S
from tests.support.system.scraping import probes, scrape, values
from tests.support.tokenizer.exchange_peer import Row, make_end, make_error_end
from tests.support.tokenizer.tokenizer_service import Service, read_rest, run_tokenizer_service

MAX_TOKENS = common_pb2.FINISH_REASON_MAX_TOKENS
THE_FOX = tokenizer_pb2.GenerateRequest(text="The fox")


@asynccontextmanager
async def watched(model_dir: Path, tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Service, str]]:
    """The service and the address of its management port."""
    address = f"unix:{tmp_path}/manage.sock"
    async with run_tokenizer_service(model_dir, tmp_path, manage_listen=address, **settings) as service:
        yield service, address


async def scraped(address: str) -> dict[str, float]:
    """Samples that are not 0, by name."""
    return {name: value for name, value in values(await scrape(address)).items() if value}


async def answer_after(service: Service, num_resumes: int) -> None:
    """Let a request end after the cell reports this many resumes."""
    call, submit = await service.begin(THE_FOX)
    end = make_end(submit.handle, MAX_TOKENS, 1, num_resumes=num_resumes)
    service.peer.send(Row(submit.handle, 0, [70]), ends=[end])
    await read_rest(call)


async def fails(service: Service, request: tokenizer_pb2.GenerateRequest) -> None:
    """Send a request that is refused."""
    with pytest.raises(grpc.aio.AioRpcError):
        await service.stub.Generate(request).read()


async def test_lost_links_and_the_fate_of_their_requests_are_counted(model_dir: Path, tmp_path: Path) -> None:
    async with watched(model_dir, tmp_path, exact_fingerprint="a") as (service, address):
        await service.link()
        await answer_after(service, num_resumes=2)
        call, _ = await service.begin(THE_FOX)
        service.peer.cell_info.exact_fingerprint = "b"
        service.peer.end_stream()
        service.peer.attach()
        submit = await service.peer.submits.get()
        service.peer.send(ends=[make_end(submit.handle, MAX_TOKENS, 0, num_resumes=submit.num_earlier_resumes)])
        await read_rest(call)

        page = values(await scrape(address))
        assert {name: page[name] for name in page if "link" in name or "res" in name or "poison" in name} == {
            "lockstep_scheduler_linked": 1,
            "lockstep_scheduler_links_lost_total": 1,
            "lockstep_requests_resubmitted_total": 1,
            "lockstep_poison_requests_total": 0,
            "lockstep_resumes_total true": 2,
            "lockstep_resumes_total false": 1,
        }


async def test_the_times_tokens_and_finish_of_a_choice_are_counted(model_dir: Path, tmp_path: Path) -> None:
    async with watched(model_dir, tmp_path) as (service, address):
        await service.link()
        call, submit = await service.begin(THE_FOX)
        service.peer.send(Row(submit.handle, 0, [70, 71], queue_time_us=700_000))
        assert list((await call.read()).token_ids) == [70, 71]
        service.peer.send(Row(submit.handle, 2, [72]), ends=[make_end(submit.handle, MAX_TOKENS, 3)])
        await read_rest(call)

        page = await scraped(address)
        num_prompt_tokens = len(submit.prompt_token_ids) // 4
        for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time"):
            assert page[f"lockstep_{name}_seconds_count"] == page[f"lockstep_{name}_seconds_bucket +Inf"] == 1
            assert page[f"lockstep_{name}_seconds_sum"] > 0
        assert page["lockstep_request_queue_time_seconds_sum"] == pytest.approx(0.7)
        assert "lockstep_request_queue_time_seconds_bucket 0.5" not in page
        assert page["lockstep_request_queue_time_seconds_bucket 0.8"] == 1
        assert page["lockstep_prompt_tokens_total"] == page["lockstep_request_prompt_tokens_sum"] == num_prompt_tokens
        assert page["lockstep_generation_tokens_total"] == page["lockstep_request_generation_tokens_sum"] == 3
        assert page["lockstep_request_success_total max_tokens"] == 1
        assert [name for name in page if "failure" in name] == []


async def test_the_load_of_the_cell_is_that_of_the_last_heartbeat_and_unknown_without_a_link(
    model_dir: Path, tmp_path: Path
) -> None:
    async with watched(model_dir, tmp_path) as (service, address):
        await service.until_health_is(health_pb2.HealthCheckResponse.NOT_SERVING)
        assert await load(address) == {}
        service.peer.load = exchange_pb2.CellLoad(
            num_waiting=3, num_running=2, num_used_blocks=25, num_blocks=100, block_size=16
        )
        await service.link()
        told = {"num_requests_waiting": 3, "num_requests_running": 2, "kv_cache_usage_perc": 0.25}
        await until_load_is(address, {**told, "cache_config_info 16 100": 1})
        # Its workers are gone: it is not idle.
        service.peer.load = exchange_pb2.CellLoad(num_waiting=5, block_size=16)
        told = {"num_requests_waiting": 5, "num_requests_running": 0, "kv_cache_usage_perc": 1}
        await until_load_is(address, {**told, "cache_config_info 16 0": 1})
        service.peer.end_stream()
        await until_load_is(address, {})


async def load(address: str) -> dict[str, float]:
    """What the replica tells about its cell."""
    prefix = "lockstep_cell_"
    page = values(await scrape(address))
    return {name.removeprefix(prefix): value for name, value in page.items() if name.startswith(prefix)}


async def until_load_is(address: str, expected: dict[str, float]) -> None:
    """Wait until the replica tells this about its cell."""
    async with asyncio.timeout(PATIENCE_S):
        while await load(address) != expected:
            pass


async def test_a_prompt_is_counted_once_and_each_of_its_choices_by_itself(model_dir: Path, tmp_path: Path) -> None:
    async with watched(model_dir, tmp_path) as (service, address):
        await service.link()
        request = tokenizer_pb2.GenerateRequest(text="The fox", sampling=common_pb2.SamplingParams(n=2))
        call, submit = await service.begin(request)
        handles = [submit.handle, submit.handle + 1]
        rows = [Row(handle, 0, [70]) for handle in handles]
        service.peer.send(*rows, ends=[make_end(handle, MAX_TOKENS, 1) for handle in handles])
        while await call.read() is not grpc.aio.EOF:
            pass

        page = await scraped(address)
        assert page["lockstep_prompt_tokens_total"] == len(submit.prompt_token_ids) // 4
        assert (
            page["lockstep_request_success_total max_tokens"] == page["lockstep_time_to_first_token_seconds_count"] == 2
        )


async def test_a_scheduler_that_says_no_queue_time_leaves_it_out(model_dir: Path, tmp_path: Path) -> None:
    async with watched(model_dir, tmp_path) as (service, address):
        await service.link()
        await answer_after(service, num_resumes=0)
        page = await scraped(address)
        assert "lockstep_request_queue_time_seconds_count" not in page
        assert page["lockstep_time_to_first_token_seconds_count"] == 1


async def test_spans_are_counted_by_what_became_of_them(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals = RequestTotals()
    totals.spans = SpanTotals(num_exported=3, num_refused=2, num_overflowed=2)
    monkeypatch.setattr("services.tokenizer.service.RequestTotals", lambda: totals)
    async with watched(model_dir, tmp_path) as (service, address):
        await service.link()
        page = await scraped(address)
        spans = {name.split()[1]: value for name, value in page.items() if "spans" in name}
        assert spans == {"exported": 3, "lost": 4}


async def test_failures_are_counted_by_a_reason_that_no_client_chooses(model_dir: Path, tmp_path: Path) -> None:
    async with watched(model_dir, tmp_path) as (service, address):
        await fails(service, THE_FOX)
        await service.link()
        await fails(service, tokenizer_pb2.GenerateRequest())
        await fails(service, tokenizer_pb2.GenerateRequest(text="The fox", model="canary"))
        call, submit = await service.begin(THE_FOX)
        service.peer.send(ends=[make_error_end(submit.handle, PoisonRequestError("it crashes workers"))])
        with pytest.raises(grpc.aio.AioRpcError):
            await read_rest(call)
        call, submit = await service.begin(THE_FOX)
        call.cancel()
        await service.peer.aborts.get()

        page = await scraped(address)
        failures = {name.split()[1]: value for name, value in page.items() if "failure" in name}
        assert failures == {
            "NOT_READY": 1,
            "INVALID_REQUEST": 1,
            "MODEL_NOT_FOUND": 1,
            "POISON_REQUEST": 1,
            "CANCELLED": 1,
        }


async def test_a_replica_that_drains_is_not_ready_but_lives(model_dir: Path, tmp_path: Path) -> None:
    async with watched(model_dir, tmp_path) as (service, address):
        await service.link()
        call, submit = await service.begin(THE_FOX)
        service.stop.set()
        await service.until_health_is(health_pb2.HealthCheckResponse.NOT_SERVING)
        assert await probes(address) == {"livez": "200 ok", "startupz": "200 ok", "readyz": "503 leaving"}
        service.peer.send(Row(submit.handle, 0, [70]), ends=[make_end(submit.handle, MAX_TOKENS, 1)])
        await read_rest(call)
