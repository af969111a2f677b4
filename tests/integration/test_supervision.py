"""A cell whose processes die recovers: they are restarted, and clients see at most a pause."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest

from lockstep.v1 import tokenizer_pb2
from tests.support.cells.cell import Cell, start_cell
from tests.support.clients.client import Client, Completion, connect, token_request

# Each row is computed alone, so an answer depends only on its request.
REFERENCE = "--worker.ops-backend=reference"


@pytest.fixture(scope="module")
def cell(tiny_model: Path) -> Iterator[Cell]:
    """A cell whose services the tests kill; they leave it serving."""
    with start_cell(tiny_model, REFERENCE) as cell:
        yield cell


def make_requests(count: int, *, max_tokens: int = 200) -> list[tokenizer_pb2.GenerateRequest]:
    """Requests long enough to be in the middle of their answer when a service is killed."""
    return [
        token_request(
            [3 + number, 9, 40 + number],
            max_tokens=max_tokens,
            ignore_eos=True,
            temperature=1.0 if number % 2 else 0.0,
            seed=number,
        )
        for number in range(count)
    ]


def start_all(client: Client, requests: Sequence[tokenizer_pb2.GenerateRequest]) -> list[asyncio.Task[Completion]]:
    return [asyncio.create_task(client.generate(request)) for request in requests]


async def wait_until_running(client: Client, count: int) -> None:
    await client.wait_until(lambda state: state.num_running >= count)


def assert_same(completions: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """Check that tokens, text and finish are the same."""
    for completion, other in zip(completions, expected, strict=True):
        assert (completion.token_ids, completion.text) == (other.token_ids, other.text)
        assert completion.reason == other.reason


@pytest.mark.parametrize("role", ["worker", "scheduler"])
async def test_requests_in_flight_outlive_a_service_that_is_killed(cell: Cell, role: str) -> None:
    requests = make_requests(4)
    async with connect(cell) as client:
        expected = await client.generate_all(requests)
        answers = start_all(client, requests)
        await wait_until_running(client, len(requests))
        pid = cell.kill(role)
        completions = await asyncio.gather(*answers)
        await cell.wait_until_serving(role, instead_of=pid)
        await client.wait_until_idle()

    assert_same(completions, expected)
    assert f"exited; restarting role={role} pid={pid} reason=the {role} was killed by SIGKILL" in cell.log()


async def test_a_tokenizer_that_is_killed_ends_its_streams_and_a_retry_is_answered(cell: Cell) -> None:
    [request] = make_requests(1)
    async with connect(cell) as client:
        expected = await client.generate(request)
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
    assert_same([completion], [expected])


async def test_a_service_that_cannot_start_is_tried_again_until_it_can(cell: Cell, tiny_model: Path) -> None:
    config = tiny_model / "config.json"
    hidden = config.rename(tiny_model / "hidden.json")
    try:
        pid = cell.kill("worker")
        cell.wait_for_log(str(config))
    finally:
        hidden.rename(config)
    await cell.wait_until_serving("worker", instead_of=pid)
    async with connect(cell) as client:
        [completion] = await client.generate_all(make_requests(1, max_tokens=4))

    assert len(completion.token_ids) == 4


async def test_a_process_that_no_longer_answers_is_killed_and_started_again(tiny_model: Path) -> None:
    requests = make_requests(2)
    with start_cell(tiny_model, REFERENCE, "--health-kill-s=2") as cell:
        async with connect(cell) as client:
            expected = await client.generate_all(requests)
            answers = start_all(client, requests)
            await wait_until_running(client, len(requests))
            pid = cell.send_signal("worker", signal.SIGSTOP)
            completions = await asyncio.gather(*answers)
            await cell.wait_until_serving("worker", instead_of=pid)
        log = cell.log()

    assert_same(completions, expected)
    assert "the worker was killed: it had not answered its health check for 2 s" in log


@pytest.mark.parametrize(
    ("flags", "victim", "domain"),
    [
        pytest.param(["--dp=2"], "worker 1.0", ["worker 1.0"], marks=pytest.mark.slow),
        (["--tp=2"], "worker 0.1", ["worker 0.0", "worker 0.1"]),
    ],
)
async def test_a_failure_domain_is_started_again_as_a_whole_and_no_other(
    tiny_model: Path, flags: list[str], victim: str, domain: list[str]
) -> None:
    requests = make_requests(6)
    with start_cell(tiny_model, REFERENCE, *flags) as cell:
        before = {name: process.pid for name, process in cell.role_to_process.items()}
        async with connect(cell) as client:
            expected = await client.generate_all(requests)
            answers = start_all(client, requests)
            await wait_until_running(client, len(requests))
            cell.kill(victim)
            completions = await asyncio.gather(*answers)
            for name in domain:
                await cell.wait_until_serving(name, instead_of=before[name])
            await client.wait_until(lambda state: state.ready)
        after = {name: process.pid for name, process in cell.find_processes().items()}
        log = cell.log()

    assert_same(completions, expected)
    assert sorted(name for name in before if before[name] != after[name]) == domain
    assert all(f"\n{name} | " in log for name in before if name.startswith("worker"))
