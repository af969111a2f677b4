"""A cell whose processes die recovers: they are restarted, and clients see at most a pause."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import psutil
import pytest

from lockstep.v1 import tokenizer_pb2
from tests.support.cells.cell import REFERENCE, Cell, start_cell
from tests.support.clients.client import Client, Completion, connect, varied_requests


@pytest.fixture(scope="module")
def cell(tiny_model: Path) -> Iterator[Cell]:
    """A cell whose services the tests kill; they leave it serving."""
    with start_cell(tiny_model, REFERENCE) as cell:
        yield cell


@pytest.fixture(scope="module")
def requests() -> list[tokenizer_pb2.GenerateRequest]:
    return varied_requests(2, max_tokens=200)


@pytest.fixture(scope="module")
def expected(cell: Cell, requests: list[tokenizer_pb2.GenerateRequest]) -> list[Completion]:
    """The undisturbed answers of `cell`."""

    async def run() -> list[Completion]:
        async with connect(cell) as client:
            return await client.generate_all(requests)

    return asyncio.run(run())


def start_all(client: Client, requests: Sequence[tokenizer_pb2.GenerateRequest]) -> list[asyncio.Task[Completion]]:
    return [asyncio.create_task(client.generate(request)) for request in requests]


async def wait_until_running(client: Client, count: int) -> None:
    await client.wait_until(lambda state: state.num_running >= count)


def assert_same(completions: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """Check that tokens, text and finish are the same."""
    for completion, other in zip(completions, expected, strict=True):
        assert (completion.token_ids, completion.text) == (other.token_ids, other.text)
        assert completion.reason == other.reason


async def test_requests_in_flight_outlive_a_scheduler_that_is_killed(
    cell: Cell, requests: list[tokenizer_pb2.GenerateRequest], expected: list[Completion]
) -> None:
    async with connect(cell) as client:
        answers = start_all(client, requests)
        await wait_until_running(client, len(requests))
        pid = cell.kill("scheduler")
        completions = await asyncio.gather(*answers)
        await cell.wait_until_serving("scheduler", instead_of=pid)
        await client.wait_until_idle()

    assert_same(completions, expected)
    assert f"exited; restarting role=scheduler pid={pid} reason=the scheduler was killed by SIGKILL" in cell.log()


async def test_requests_in_flight_outlive_a_worker_that_is_killed_and_is_started_until_it_can(
    cell: Cell, tiny_model: Path, requests: list[tokenizer_pb2.GenerateRequest], expected: list[Completion]
) -> None:
    config = tiny_model / "config.json"
    async with connect(cell) as client:
        answers = start_all(client, requests)
        await wait_until_running(client, len(requests))
        hidden = config.rename(tiny_model / "hidden.json")
        try:
            pid = cell.kill("worker")
            cell.wait_for_log(str(config))
        finally:
            hidden.rename(config)
        completions = await asyncio.gather(*answers)
        await cell.wait_until_serving("worker", instead_of=pid)
        await client.wait_until_idle()

    assert_same(completions, expected)
    assert f"exited; restarting role=worker pid={pid} reason=the worker was killed by SIGKILL" in cell.log()


async def test_a_tokenizer_that_is_killed_ends_its_streams_and_a_retry_is_answered(
    cell: Cell, requests: list[tokenizer_pb2.GenerateRequest], expected: list[Completion]
) -> None:
    request = requests[0]
    async with connect(cell) as client:
        [answer] = start_all(client, [request])
        await wait_until_running(client, 1)
        pid = cell.kill("tokenizer")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await answer
        await client.wait_until_idle()
        await cell.wait_until_serving("tokenizer", instead_of=pid)
    async with connect(cell) as client:
        completion = await client.generate(request)

    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert_same([completion], expected[:1])


async def test_a_rank_that_no_longer_answers_is_killed_and_its_domain_is_started_again_as_a_whole(
    tiny_model: Path, requests: list[tokenizer_pb2.GenerateRequest]
) -> None:
    with start_cell(tiny_model, REFERENCE, "--tp=2", "--health-kill-s=5") as cell:
        runtime_dir = cell.runtime_dir
        before = {name: process.pid for name, process in cell.role_to_process.items()}
        async with connect(cell) as client:
            undisturbed = await client.generate_all(requests)
            answers = start_all(client, requests)
            await wait_until_running(client, len(requests))
            cell.send_signal("worker 0.1", signal.SIGSTOP)
            completions = await asyncio.gather(*answers)
            for name in ("worker 0.0", "worker 0.1"):
                await cell.wait_until_serving(name, instead_of=before[name])
        after = {name: process.pid for name, process in cell.find_processes().items()}
        log = cell.log()
        pid = cell.kill("scheduler")
        cell.wait_for_log(f"exited; restarting role=scheduler pid={pid}")

        # It stops cleanly while a service waits for its next start.
        services = list(cell.find_processes().values())
        assert cell.stop() == 0

    assert_same(completions, undisturbed)
    assert "the worker 0.1 was killed: it had not answered its health check for 5 s" in log
    assert sorted(name for name in before if before[name] != after[name]) == ["worker 0.0", "worker 0.1"]
    assert all(f"\n{name} | " in log for name in ("worker 0.0", "worker 0.1"))
    assert not [p for p in services if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not runtime_dir.exists()


@pytest.mark.slow
async def test_a_failure_domain_is_started_again_and_no_other(tiny_model: Path) -> None:
    requests = varied_requests(4, max_tokens=200)
    with start_cell(tiny_model, REFERENCE, "--dp=2") as cell:
        before = {name: process.pid for name, process in cell.role_to_process.items()}
        async with connect(cell) as client:
            expected = await client.generate_all(requests)
            answers = start_all(client, requests)
            await wait_until_running(client, len(requests))
            cell.kill("worker 1.0")
            completions = await asyncio.gather(*answers)
            await cell.wait_until_serving("worker 1.0", instead_of=before["worker 1.0"])
            await client.wait_until(lambda state: state.ready)
        after = {name: process.pid for name, process in cell.find_processes().items()}
        log = cell.log()

    assert_same(completions, expected)
    assert [name for name in before if before[name] != after[name]] == ["worker 1.0"]
    assert all(f"\n{name} | " in log for name in before if name.startswith("worker"))
