"""The scheduler's shell over real gRPC, with a replica on one side and a worker on the other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from lockstep.internal.v1 import exchange_pb2, exchange_pb2_grpc, worker_pb2
from lockstep.v1 import common_pb2
from services.scheduler.cell.events import Action, ClientMessage
from services.scheduler.server.cell_server import CellServer
from services.scheduler.server.client_link import MAX_UNREAD_S, ClientLink
from services.scheduler.server.exchange_codec import decode_request
from shared.errors import NotReadyError
from shared.network.statuses import reason_of, status_from_rpc_error
from shared.wire import NOT_INTRODUCED, introduce_self, lower_of, read_introduction
from tests.support.clients.narrow_channel import open_narrow_channel
from tests.support.clients.token_client import error_of, reason, seeded
from tests.support.scheduler.cell_model import expected_completion
from tests.support.scheduler.engine_driver import token_bytes
from tests.support.scheduler.gated_worker import GatedWorker
from tests.support.scheduler.scheduler_shell import ReplicaStream, running_cell
from tests.support.scheduler.worker_peer import WorkerPeer, column
from tests.support.system.health import check_health
from tests.support.system.patience import PATIENCE_S


def submit(handle: int, prompt: list[int], max_tokens: int) -> exchange_pb2.ExchangeRequest:
    request = exchange_pb2.Submit(
        handle=handle,
        request_id=f"request-{handle}",
        prompt_token_ids=token_bytes(prompt),
        max_tokens=max_tokens,
        top_p=1.0,
        ignore_eos=True,
    )
    return exchange_pb2.ExchangeRequest(submits=[request])


async def read_outputs(
    call: ReplicaStream, num_ends: int
) -> tuple[dict[int, list[int]], list[exchange_pb2.RequestEnd], int]:
    """Read until this many requests have ended; returns tokens by handle, the ends, and the number of messages."""
    tokens: dict[int, list[int]] = {}
    ends: list[exchange_pb2.RequestEnd] = []
    num_messages = 0
    while len(ends) < num_ends:
        outputs = (await call.read()).outputs
        num_messages += 1
        rows = zip(
            column(outputs.handles),
            column(outputs.first_indexes),
            column(outputs.counts),
            column(outputs.token_ids),
            strict=True,
        )
        for handle, first_index, count, token_id in rows:
            assert (first_index, count) == (len(tokens.setdefault(handle, [])), 1)
            tokens[handle].append(token_id)
        ends += outputs.ends
    return tokens, ends, num_messages


async def test_a_replica_gets_the_cell_info_first_and_then_one_message_per_step(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        call = cell.exchange()
        info = (await call.read()).cell_info
        assert (info.model_digest, info.context_length, info.num_pool_tokens) == ("digest", 512, 1024)
        message = submit(1, [1, 2, 3], 9)
        message.MergeFrom(submit(2, [4, 5], 9))
        await call.write(message)
        tokens, ends, num_messages = await read_outputs(call, 2)
        assert tokens == {1: expected_completion([1, 2, 3], 0, 9), 2: expected_completion([4, 5], 0, 9)}
        assert [end.finish_reason for end in ends] == [common_pb2.FINISH_REASON_MAX_TOKENS] * 2
        # Both were prefilled in one step, and each step sent one message.
        assert num_messages == len(cell.worker.requests) == 9
        state = await cell.state()
        assert (state.ready, state.num_used_blocks, state.num_finished) == (True, 0, 2)
        assert (state.num_prefill_steps, state.num_decode_steps) == (1, 8)


async def test_a_lost_worker_pauses_requests_and_health_recovers(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        call = cell.exchange()
        await call.read()
        assert await check_health(cell.channel)
        cell.worker.lose_link_at = 4
        await call.write(submit(1, [1, 2, 3], 9))
        tokens, ends, _ = await read_outputs(call, 1)
        assert tokens[1] == expected_completion([1, 2, 3], 0, 9)
        assert ends[0].finish_reason == common_pb2.FINISH_REASON_MAX_TOKENS
        # The worker was attached again under a higher epoch.
        assert cell.worker.requests[-1].epoch > 1
        assert cell.server.engine.state().counters.num_lost_epochs == 1
        assert await check_health(cell.channel)


async def test_replicas_are_told_when_a_worker_returns_with_another_pool_or_other_numerics(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        call = cell.exchange()
        first = (await call.read()).cell_info
        cell.worker.num_blocks, cell.worker.lose_link_at = 32, 4
        cell.worker.response.is_exact, cell.worker.response.numerics_fingerprint = True, "reference"
        await call.write(submit(1, [1, 2, 3], 9))
        messages = [await call.read()]
        while not any(end.handle == 1 for end in messages[-1].outputs.ends):
            messages.append(await call.read())
        [second] = [message.cell_info for message in messages if message.HasField("cell_info")]
        expected = exchange_pb2.CellInfo()
        expected.CopyFrom(first)
        expected.num_pool_tokens, expected.exact_fingerprint = 512, "reference"
        assert (first.num_pool_tokens, second) == (1024, expected)


async def test_the_offered_epoch_exceeds_the_workers_own(tmp_path: Path) -> None:
    worker = WorkerPeer()
    worker.ledger.offer(40, "another", 0.0)
    async with running_cell(tmp_path, worker) as cell:
        await cell.exchange().read()
        assert cell.server.engine.facts.model is not None
        assert cell.server.engine.facts.model.epoch == 41


async def test_a_refused_request_ends_with_its_status_and_others_continue(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        call = cell.exchange()
        await call.read()
        message = submit(1, [1, 2, 3], 5)
        message.MergeFrom(submit(2, [1, 99_999], 5))
        await call.write(message)
        tokens, ends, _ = await read_outputs(call, 2)
        assert (ends[0].handle, reason_of(ends[0].error)) == (2, "INVALID_REQUEST")
        assert tokens[1] == expected_completion([1, 2, 3], 0, 5)


async def test_a_worker_that_does_not_introduce_itself_gets_no_options(tmp_path: Path) -> None:
    worker = WorkerPeer()
    worker.response.ClearField("introduction")
    async with running_cell(tmp_path, worker) as cell:
        call = cell.exchange()
        introduction = (await call.read()).cell_info.introduction
        assert read_introduction(introduction) == lower_of(introduce_self(), NOT_INTRODUCED)
        assert read_introduction(worker.attaches[-1].introduction) == introduce_self()
        message = submit(1, [1, 2, 3], 5)
        message.MergeFrom(submit(2, [1, 2, 3], 5))
        message.submits[1].options.min_p = 0.5
        await call.write(message)
        tokens, ends, _ = await read_outputs(call, 2)
        assert (ends[0].handle, reason_of(ends[0].error)) == (2, "NOT_SUPPORTED")
        assert tokens == {1: expected_completion([1, 2, 3], 0, 5)}


async def test_only_a_replica_that_knows_timings_is_told_them(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        for introduction in (None, exchange_pb2.ExchangeRequest(introduction=introduce_self().encode()).introduction):
            call = cell.exchange()
            await call.read()
            await call.write(exchange_pb2.ExchangeRequest(introduction=introduction))
            await call.write(submit(1, [1, 2, 3], 1))
            outputs = (await call.read()).outputs
            [start], [end] = outputs.starts, outputs.ends
            knows = introduction is not None
            assert (start.HasField("prefill_time_us"), end.HasField("queue_time_us")) == (knows, knows)
            assert not knows or end.queue_time_us == start.queue_time_us


async def test_a_broken_stream_aborts_its_requests(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        broken, other = cell.exchange(), cell.exchange()
        await broken.read()
        await other.read()
        await broken.write(submit(1, [1, 2, 3], 500))
        await broken.read()
        broken.cancel()
        request = submit(7, [5], 3)
        await other.write(request)
        tokens, _, _ = await read_outputs(other, 1)
        assert tokens == {7: expected_completion([5], 0, 3)}
        await cell.wait_until_free()


@pytest.mark.parametrize("field", ["prompt_token_ids", "stop_token_ids"])
async def test_a_torn_column_ends_only_its_stream(tmp_path: Path, field: str) -> None:
    async with running_cell(tmp_path) as cell:
        call = cell.exchange()
        await call.read()
        message = submit(1, [1], 1)
        setattr(message.submits[0], field, b"\0" * 5)
        await call.write(message)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert reason_of(status_from_rpc_error(error.value)) == "INVALID_REQUEST"
        assert (await cell.state()).ready


async def test_a_deadline_within_the_loops_clock_resolution_affects_no_other_request(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        call = cell.exchange()
        await call.read()
        hurried = cell.server.connect()
        # Several events in one iteration of the loop, whose clock does not advance meanwhile. Their handles are not
        # reused, since they may still be in flight when the next request arrives.
        for handle in range(2, 6):
            message = submit(handle, [4, 5], 400)
            message.submits[0].time_left.FromMicroseconds(200)
            cell.server.on_event(decode_request(hurried.number, message))
        await call.write(submit(1, [1, 2, 3], 9))
        tokens, _, _ = await read_outputs(call, 1)
        assert tokens == {1: expected_completion([1, 2, 3], 0, 9)}
        await cell.wait_until_free()


async def test_a_replica_gets_heartbeats_even_before_any_worker_is_attached(tmp_path: Path) -> None:
    worker = GatedWorker()
    async with running_cell(tmp_path, worker) as cell:
        call = cell.exchange()
        reading = asyncio.create_task(call.read())
        await cell.wait_until(lambda _: call.num_heartbeats > 1)
        worker.gate.set()
        assert (await reading).HasField("cell_info")


async def test_a_replica_learns_at_once_whether_the_cell_is_ready_and_how_busy_it_is(tmp_path: Path) -> None:
    worker = GatedWorker()
    async with running_cell(tmp_path, worker) as cell:
        [heartbeat] = await first_messages(cell.server)
        assert not heartbeat.heartbeat.holds_workers
        worker.gate.set()
        await cell.wait_until_ready()
        cell_info, heartbeat = await first_messages(cell.server)
        assert cell_info.cell_info.num_pool_tokens == 1024
        load = exchange_pb2.CellLoad(num_blocks=64, block_size=16)
        assert heartbeat.heartbeat == exchange_pb2.SchedulerHeartbeat(
            progress=heartbeat.heartbeat.progress, holds_workers=True, load=load, takes_work=True, has_trial=False
        )


async def first_messages(server: CellServer) -> list[Any]:
    """What a replica is sent in the turn of the event loop in which it connects."""
    link = server.connect()
    link.close(None)
    return [message async for message in link.messages()]


async def test_heartbeats_tell_how_busy_the_cell_is(tmp_path: Path) -> None:
    worker = GatedWorker(is_open=True)
    async with running_cell(tmp_path, worker, max_num_seqs=1) as cell:
        call = cell.exchange()
        await call.read()
        worker.gate.clear()
        for handle in (1, 2, 3):
            await call.write(submit(handle, [1, 2, 3], 5))
        reading = asyncio.create_task(read_outputs(call, 3))
        await cell.wait_until(lambda _: call.load.num_running and call.load.num_waiting == 2)
        assert call.load == exchange_pb2.CellLoad(
            num_waiting=2, num_running=1, num_used_blocks=call.load.num_used_blocks, num_blocks=64, block_size=16
        )
        assert 0 < call.load.num_used_blocks < 64
        worker.gate.set()
        await reading
        listening = asyncio.create_task(call.read())
        await cell.wait_until(lambda _: not (call.load.num_running or call.load.num_waiting))
        listening.cancel()


async def test_a_silent_replica_loses_its_stream_and_its_requests(tmp_path: Path) -> None:
    worker = GatedWorker(is_open=True)
    async with running_cell(tmp_path, worker, worker_silence_s=1.0) as cell:
        silent, other = cell.exchange(), cell.exchange()
        await silent.read()
        await other.read()
        worker.gate.clear()
        # Heartbeats are expected of a replica from its first one on; the other replica has sent none.
        await silent.write(exchange_pb2.ExchangeRequest(is_heartbeat=True))
        await silent.write(submit(1, [1, 2, 3], 500))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await read_outputs(silent, 1)
        assert reason_of(status_from_rpc_error(error.value)) == "NOT_READY"
        worker.gate.set()
        await cell.wait_until_free()
        await other.write(submit(1, [5], 3))
        assert (await read_outputs(other, 1))[0] == {1: expected_completion([5], 0, 3)}


async def test_replicas_and_direct_clients_get_an_error_when_the_scheduler_ends(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        replica = cell.exchange()
        await replica.read()
        call = cell.scheduler.Generate(seeded([1], max_tokens=500))
        first = await call.read()
        cell.server.close()
        responses = [first]
        for error in (
            await error_of(call, responses),
            await error_of(cell.scheduler.Generate(seeded([1]))),
        ):
            assert (error.code(), reason(error)) == (grpc.StatusCode.UNAVAILABLE, "SCHEDULER_LOST")
        with pytest.raises(grpc.aio.AioRpcError) as end:
            await replica.read()
        assert reason_of(status_from_rpc_error(end.value)) == "SCHEDULER_LOST"
    # Tokens sent before the end are valid: another scheduler can continue after them.
    tokens = [token_id for response in responses for token_id in response.token_ids]
    assert tokens == expected_completion([1], 0, 500)[: len(tokens)]


async def test_a_replica_that_stops_reading_loses_its_stream_and_its_requests_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.scheduler.server.client_link.MAX_UNREAD_S", 0.2)
    worker = GatedWorker(is_open=True)
    async with running_cell(tmp_path, worker) as cell, open_narrow_channel(f"unix:{tmp_path}/cell") as channel:
        stuck = ReplicaStream(exchange_pb2_grpc.ExchangeServiceStub(channel).Exchange())
        await stuck.read()
        await stuck.write(submit(1, [1, 2, 3], 400))
        # By then its window is full, and the next write is blocked.
        # On a busy machine its stream may be closed already.
        await cell.wait_until(lambda state: state.num_decode_steps > 100 or not cell.server.clients)
        worker.gate.clear()
        await cell.wait_until(lambda state: not state.num_running + state.num_waiting)
        worker.gate.set()
        await cell.wait_until_free()
        assert (await cell.state()).num_decode_steps < 390
        # Once it reads again, it gets the reason.
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await read_outputs(stuck, 1)
        assert reason_of(status_from_rpc_error(error.value)) == "NOT_READY"


async def test_nothing_is_computed_for_messages_on_an_abandoned_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.scheduler.server.client_link.MAX_UNREAD_S", PATIENCE_S)
    monkeypatch.setattr("services.scheduler.server.servicer.LAST_WORDS_S", PATIENCE_S)
    worker = GatedWorker(is_open=True)
    async with running_cell(tmp_path, worker) as cell, open_narrow_channel(f"unix:{tmp_path}/cell") as channel:
        replica = ReplicaStream(exchange_pb2_grpc.ExchangeServiceStub(channel).Exchange())
        await replica.read()
        # It does not read the answer, so closing its stream waits for it.
        await replica.write(submit(1, [1, 2, 3], 400))
        await cell.wait_until(lambda state: state.num_finished)
        worker.gate.clear()
        for handle in (2, 2):
            await replica.write(submit(handle, [5], 400))
        await cell.wait_until(lambda _: not cell.server.clients)
        await replica.write(submit(3, [7], 400))
        with pytest.raises(grpc.aio.AioRpcError):
            await read_outputs(replica, 2)
        state = await cell.state()
        assert (state.num_waiting, state.num_running) == (0, 0)


def is_writing_to_replicas() -> bool:
    """Whether a handler is still writing to a replica's stream."""
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    return "ExchangeServicer._write" in names


async def test_the_handler_of_a_replica_that_does_not_read_stops_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.scheduler.server.client_link.MAX_UNREAD_S", PATIENCE_S)
    async with running_cell(tmp_path) as cell, open_narrow_channel(f"unix:{tmp_path}/cell") as channel:
        stuck = ReplicaStream(exchange_pb2_grpc.ExchangeServiceStub(channel).Exchange())
        await stuck.read()
        await stuck.write(submit(1, [1, 2, 3], 400))
        await cell.wait_until(lambda state: state.num_finished)
        message = submit(2, [1], 1)
        message.submits[0].prompt_token_ids = b"torn!"
        assert is_writing_to_replicas()
        await stuck.write(message)
        await cell.wait_until(lambda _: not is_writing_to_replicas())
        assert not cell.server.clients


@pytest.mark.parametrize("ends_by", ["cancel", "torn message"])
async def test_a_stream_that_ends_during_a_write_is_not_reported_as_a_bug(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, ends_by: str
) -> None:
    monkeypatch.setattr("services.scheduler.server.client_link.MAX_UNREAD_S", PATIENCE_S)
    async with running_cell(tmp_path) as cell, open_narrow_channel(f"unix:{tmp_path}/cell") as channel:
        stuck = ReplicaStream(exchange_pb2_grpc.ExchangeServiceStub(channel).Exchange())
        await stuck.read()
        await stuck.write(submit(1, [1, 2, 3], 500))
        await cell.wait_until(lambda state: state.num_decode_steps > 100)
        if ends_by == "cancel":
            stuck.cancel()
        else:
            message = submit(2, [1], 1)
            message.submits[0].prompt_token_ids = b"torn!"
            await stuck.write(message)
        await cell.wait_until_free()
    assert "bug" not in caplog.text


async def test_a_bug_ends_the_scheduler_and_is_not_taken_for_a_broken_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = GatedWorker(is_open=True)
    async with running_cell(tmp_path, worker) as cell:
        await cell.wait_until_ready()
        worker.gate.clear()
        call = cell.scheduler.Generate(seeded([1], max_tokens=500))
        await call.read()

        def fail(*_: object) -> list[Action]:
            raise ValueError("planted")

        monkeypatch.setattr(cell.server.engine, "on_event", fail)
        worker.gate.set()
        await cell.server.failed.wait()
        cell.server.close()
        error = await error_of(call)
        assert (error.code(), reason(error)) == (grpc.StatusCode.UNAVAILABLE, "SCHEDULER_LOST")
    assert "ValueError: planted" in caplog.text
    assert "the link to the worker broke" not in caplog.text


async def test_a_bug_in_encoding_a_step_ends_the_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> worker_pb2.StepRequest:
        raise ValueError("planted")

    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        monkeypatch.setattr("services.scheduler.workers.worker_client.encode_step", fail)
        call = cell.scheduler.Generate(seeded([1], max_tokens=500))
        await cell.server.failed.wait()
        cell.server.close()
        assert reason(await error_of(call)) == "SCHEDULER_LOST"
    assert "ValueError: planted" in caplog.text


async def test_a_bug_in_reading_a_replicas_message_ends_only_its_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> ClientMessage:
        raise KeyError("planted")

    async with running_cell(tmp_path) as cell:
        replica = cell.exchange()
        await replica.read()
        monkeypatch.setattr("services.scheduler.server.servicer.decode_request", fail)
        await replica.write(submit(1, [1, 2, 3], 5))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await read_outputs(replica, 1)
        assert reason_of(status_from_rpc_error(error.value)) == "INTERNAL"
        monkeypatch.undo()
        other = cell.exchange()
        await other.read()
        await other.write(submit(1, [5], 3))
        assert (await read_outputs(other, 1))[0] == {1: expected_completion([5], 0, 3)}


async def test_a_replica_that_does_not_read_is_forgotten_once() -> None:
    closed: list[None] = []
    link = ClientLink(1, lambda: closed.append(None))
    message = exchange_pb2.ExchangeResponse()
    link.send(message, 10.0)
    link.send(message, 10.0 + MAX_UNREAD_S)
    assert not link.is_closed
    for _ in range(2):
        link.send(message, 10.1 + MAX_UNREAD_S)
    assert isinstance(await link.closed, NotReadyError)
    # Not while the engine's actions are being executed.
    assert not closed
    assert len([message async for message in link.messages()]) == 2
    await asyncio.sleep(0)
    assert len(closed) == 1


async def test_a_replica_that_reads_keeps_its_stream_indefinitely() -> None:
    link = ClientLink(1, lambda: None)
    received: list[object] = []
    reader = asyncio.create_task(read_all(link, received))
    for now in (10.0, 100.0, 1000.0):
        link.send(exchange_pb2.ExchangeResponse(), now)
        link.send(exchange_pb2.ExchangeResponse(), now)
        # The reader runs and takes both.
        await asyncio.sleep(0)
    link.close(None)
    await reader
    assert len(received) == 6


async def read_all(link: ClientLink, received: list[object]) -> None:
    received += [message async for message in link.messages()]
