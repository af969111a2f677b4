"""The death of a worker or a scheduler is only a pause: every stream continues with the tokens it would have had."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from lockstep.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from shared.network.rpc import make_channel
from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.cells.cell import REFERENCE, start_cell
from tests.support.cells.split_cell import SplitCell, run_split_cell
from tests.support.clients.client import Client, Completion, connect, token_request
from tests.support.clients.token_client import Request, generate_tokens, prompt_request, read_to_end
from tests.support.system.processes import start_service
from tests.support.system.serving import wait_until_serving
from tests.support.tokenizer.trace_collector import TraceCollector, run_collector


@pytest.fixture(scope="module")
def collector() -> Iterator[TraceCollector]:
    """What gets the spans of the cell's requests."""
    with run_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def cell(tiny_model: Path, collector: TraceCollector) -> Iterator[SplitCell]:
    """A cell whose scheduler the tests kill and replace; it exports spans at once."""
    endpoint = f"--tokenizer.otlp-endpoint={collector.endpoint}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        with run_split_cell(tiny_model, REFERENCE, endpoint) as cell:
            yield cell


@asynccontextmanager
async def connect_to(cell: SplitCell) -> AsyncIterator[Client]:
    """Wait until a cell is serving, and connect to it."""
    await cell.wait_until_serving("tokenizer")
    async with connect(cell) as client:
        yield client


async def replace_scheduler(cell: SplitCell) -> None:
    """Kill the scheduler, start another one in its place, and wait until it is serving."""
    cell.kill("scheduler")
    cell.start("scheduler")
    await cell.wait_until_serving("scheduler")


def make_requests(count: int) -> list[tokenizer_pb2.GenerateRequest]:
    """Requests long enough to be in the middle of their answer when the test interferes."""
    return [
        token_request(
            [3 + number, 9, 40 + number],
            max_tokens=400 - 10 * number,
            ignore_eos=True,
            temperature=1.0 if number % 2 else 0.0,
            seed=number,
        )
        for number in range(count)
    ]


async def begin(client: Client, request: tokenizer_pb2.GenerateRequest) -> Any:
    """Start a call and read its first two responses; returns both."""
    call = client.tokenizer.Generate(request)
    return call, [await call.read(), await call.read()]


async def read_on(call: Any, responses: list[tokenizer_pb2.GenerateResponse]) -> Completion:
    """Read the rest of a call; returns its whole answer, including the responses already read."""
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    completion = Completion(responses[0].accepted)
    for response in responses:
        completion.text += response.text
        completion.token_ids += response.token_ids
    completion.finish = responses[-1].finish
    return completion


@pytest.mark.slow
async def test_a_test_that_waits_for_a_service_fails_when_it_has_ended(tiny_model: Path) -> None:
    with (
        run_split_cell(tiny_model, "--scheduler.no-such-flag=1") as broken,
        pytest.raises(RuntimeError, match="the scheduler ended with 2"),
    ):
        await broken.wait_until_serving("scheduler")


@pytest.mark.slow
async def test_streams_go_on_when_the_scheduler_is_killed_and_started_again(cell: SplitCell) -> None:
    requests = make_requests(6)
    async with connect_to(cell) as client:
        undisturbed = await client.generate_all(requests)
        begun = [await begin(client, request) for request in requests]
        for _ in range(2):
            await replace_scheduler(cell)
            await client.wait_until(lambda state: state.num_running)
        completions = [await read_on(call, responses) for call, responses in begun]
        after = await client.wait_until_idle()
    for completion, expected in zip(completions, undisturbed, strict=True):
        assert (completion.token_ids, completion.text) == (expected.token_ids, expected.text)
        assert completion.reason == expected.reason == "MAX_TOKENS"
        assert completion.finish is not None
        assert completion.finish.usage.num_completion_tokens == len(completion.token_ids)
    # The last scheduler only knows the resubmitted requests.
    assert after.num_finished == len(requests)


@pytest.mark.slow
async def test_a_trace_shows_the_deaths_of_a_worker_and_of_a_scheduler(
    cell: SplitCell, collector: TraceCollector
) -> None:
    request = make_requests(1)[0]
    request.request_id, trace_id = "traced", "4bf92f3577b34da6a3ce929d0e0e4736"
    async with connect_to(cell) as client:
        began_at = time.monotonic()
        metadata = (("traceparent", f"00-{trace_id}-00f067aa0ba902b7-01"),)
        call = client.tokenizer.Generate(request, metadata=metadata)
        responses = [await call.read(), await call.read()]
        cell.kill("worker")
        num_tokens = (await client.wait_until(lambda state: not state.ready)).num_completion_tokens
        cell.start("worker")
        await client.wait_until(lambda state: state.num_completion_tokens > num_tokens + 20)
        await replace_scheduler(cell)
        completion = await read_on(call, responses)
        took_s = time.monotonic() - began_at
    trace = await asyncio.to_thread(collector.trace_of, "traced")
    trace.check()
    assert (trace.root.span.trace_id.hex(), trace.names[:3]) == (trace_id, ["render", "queue", "prefill"])
    assert [name for name in trace.names[3:] if name != "decode"] == ["resume", "resume"]
    assert 0.8 * trace.root.duration_s <= sum(each.duration_s for each in trace.children)
    assert trace.root.duration_s <= took_s
    assert trace.root.attributes["gen_ai.usage.output_tokens"] == len(completion.token_ids)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.proof), 2])
async def test_streams_go_on_when_the_worker_is_killed_and_started_again(tiny_model: Path, depth: int) -> None:
    requests = make_requests(6)
    with run_split_cell(tiny_model, REFERENCE, f"--scheduler.max-steps-in-flight={depth}") as cell:
        async with connect_to(cell) as client:
            undisturbed = await client.generate_all(requests)
            begun = [await begin(client, request) for request in requests[:4]]
            for _ in range(2):
                cell.kill("worker")
                await client.wait_until(lambda state: not state.ready)
                # New requests are not refused meanwhile.
                begun.append((client.tokenizer.Generate(requests[len(begun)]), []))
                cell.start("worker")
                await client.wait_until(lambda state: state.num_running)
            completions = [await read_on(call, responses) for call, responses in begun]
            after = await client.wait_until_idle()
    for completion, expected in zip(completions, undisturbed, strict=True):
        assert (completion.token_ids, completion.text) == (expected.token_ids, expected.text)
        assert completion.reason == expected.reason
    assert (after.num_lost_epochs, after.num_finished) == (2, 2 * len(requests))


def replace_model(model_dir: Path, part: str) -> None:
    """Make another model of a directory, by its configuration or by one bit of its weights."""
    if part == "config.json":
        config = json.loads((model_dir / part).read_text())
        (model_dir / part).write_text(json.dumps(config | {"rope_theta": 5000.0}))
    else:
        data = bytearray((model_dir / part).read_bytes())
        data[-1] ^= 1
        (model_dir / part).write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("part", [pytest.param("config.json", marks=pytest.mark.proof), "model.safetensors"])
async def test_requests_end_when_the_model_is_replaced_and_the_new_one_is_served(
    tiny_model: Path, tmp_path: Path, part: str
) -> None:
    model_dir = shutil.copytree(tiny_model, tmp_path / "model")
    with run_split_cell(model_dir, REFERENCE) as cell:
        async with connect_to(cell) as client:
            begun = [await begin(client, request) for request in make_requests(2)]
            cell.kill("worker")
            replace_model(model_dir, part)
            cell.start("worker")
            for call, responses in begun:
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await read_on(call, responses)
                assert error.value.code() is grpc.StatusCode.UNAVAILABLE
                assert reason_of(status_from_rpc_error(error.value)) == "MODEL_CHANGED"
        assert await cell.wait_until_ended("scheduler") == 1
        cell.kill("tokenizer")
        for role in ("scheduler", "tokenizer"):
            cell.start(role)
        async with connect_to(cell) as client:
            assert (await client.generate(make_requests(1)[0])).reason == "MAX_TOKENS"


async def test_a_stop_string_is_found_across_the_death_of_a_scheduler(cell: SplitCell) -> None:
    async with connect_to(cell) as client:
        request = make_requests(1)[0]
        whole = await client.generate(request)
        request.stop.append(whole.text[-20:-4])
        undisturbed = await client.generate(request)
        call, responses = await begin(client, request)
        await replace_scheduler(cell)
        completion = await read_on(call, responses)
        after = await client.wait_until_idle()
    assert (completion.token_ids, completion.text) == (undisturbed.token_ids, undisturbed.text)
    assert completion.finish is not None
    assert completion.finish.stop_string == request.stop[0]
    assert after.num_free_blocks == after.num_blocks


async def test_a_scheduler_that_stays_away_ends_the_streams(cell: SplitCell, tiny_model: Path, tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'tokenizer.sock'}"
    links = (f"--listen={address}", f"--scheduler={cell.cell_address}")
    async with connect_to(cell), make_channel(address) as channel:
        with start_service("tokenizer", f"--model-dir={tiny_model}", *links, "--scheduler-lost-s=0.5"):
            await wait_until_serving(channel)
            call = tokenizer_pb2_grpc.TokenizerServiceStub(channel).Generate(make_requests(1)[0])
            responses = [await call.read(), await call.read()]
            cell.kill("scheduler")
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await read_on(call, responses)
        cell.start("scheduler")
        await cell.wait_until_serving("scheduler")
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert reason_of(status_from_rpc_error(error.value)) == "SCHEDULER_LOST"


async def test_a_direct_client_goes_on_by_itself_with_what_it_has(cell: SplitCell) -> None:
    request = prompt_request([3, 9, 40], max_tokens=400, ignore_eos=True, temperature=1.0, seed=5)
    async with connect_to(cell) as client:
        undisturbed = await generate_tokens(client.scheduler, request)
        call = client.scheduler.Generate(request)
        responses = [await call.read(), await call.read()]
        cell.kill("scheduler")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await read_to_end(call, responses)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        tokens = [token_id for response in responses for token_id in response.token_ids]
        cell.start("scheduler")
        await cell.wait_until_serving("scheduler")
        rest = Request()
        rest.CopyFrom(request)
        rest.choices_so_far.add(token_ids=tokens)
        completion = await generate_tokens(client.scheduler, rest)
    assert 0 < len(tokens) < 400
    assert tokens + completion.token_ids == undisturbed.token_ids
    assert completion.finish is not None
    assert completion.finish.reason == common_pb2.FINISH_REASON_MAX_TOKENS
    assert completion.finish.usage.num_completion_tokens == 400


@pytest.mark.slow
async def test_a_lone_request_outlives_two_planned_stops_of_its_only_worker(tiny_model: Path) -> None:
    request = make_requests(1)[0]
    with start_cell(tiny_model, REFERENCE, "--drain-s=0") as cell:
        async with connect(cell) as client:
            undisturbed = await client.generate(request)
            call, responses = await begin(client, request)
            for _ in range(2):
                await client.wait_until(lambda state: state.num_running)
                pid = cell.send_signal("worker", signal.SIGTERM)
                await cell.wait_until_serving("worker", instead_of=pid)
            completion = await read_on(call, responses)
            after = await client.wait_until_idle()
        assert cell.log().count("the worker exited with code 0") == 2
    assert (completion.token_ids, completion.text) == (undisturbed.token_ids, undisturbed.text)
    assert completion.finish is not None
    assert completion.finish.recovery.resume_count == 2
    assert (after.num_lost_epochs, after.num_suspects) == (0, 0)
