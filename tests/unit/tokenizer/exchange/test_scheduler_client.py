"""Links to several schedulers, of which one is used, over real gRPC."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.exchange import scheduler_stream, submit_suspects
from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.tokenizer.exchange_peer import ExchangePeer, Row, make_end, read_column
from tests.support.tokenizer.tokenizer_service import read_rest, run_tokenizer_service

HELLO = tokenizer_pb2.GenerateRequest(text="The fox")
EXACT = tokenizer_pb2.GenerateRequest(text="The fox", determinism=common_pb2.DETERMINISM_EXACT)
EOS, MAX_TOKENS = common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_MAX_TOKENS


async def test_if_the_first_scheduler_is_dead_the_second_serves(model_dir: Path, tmp_path: Path) -> None:
    async with run_tokenizer_service(model_dir, tmp_path, num_schedulers=2) as service:
        await service.peer_servers[0].stop(grace=0)
        await service.link(1)
        call = service.stub.Generate(HELLO)
        submit = await service.peers[1].submits.get()
        service.peers[1].send(Row(submit.handle, 0, [70]), ends=[make_end(submit.handle, MAX_TOKENS, 1)])
        _, token_ids, finish = await read_rest(call)
        assert token_ids == [70]
        assert not finish.HasField("recovery")


async def test_when_a_scheduler_dies_the_next_one_continues_at_the_right_place(
    model_dir: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with run_tokenizer_service(model_dir, tmp_path, num_schedulers=2, exact_fingerprint="a") as service:
        await service.link()
        first, second = service.peers
        call, submit = await service.begin(HELLO)
        ids = tokenizer.encode("the lazy dog").ids
        first.send(Row(submit.handle, 0, ids[:2], num_cached_tokens=1))
        received = await call.read()
        second.attach()
        await service.peer_servers[0].stop(grace=0)
        again = await second.submits.get()
        assert (again.attempt, read_column(again.choices_so_far[0].token_ids)) == (2, ids[:2])
        # A repeated token is dropped; the end includes the resumes that the workers caused meanwhile.
        end = make_end(again.handle, MAX_TOKENS, len(ids), num_resumes=3)
        second.send(Row(again.handle, 1, ids[1:]), ends=[end])
        text, token_ids, finish = await read_rest(call)
        assert (received.text + text, [*received.token_ids, *token_ids]) == ("the lazy dog", ids)
        assert finish.recovery == common_pb2.Recovery(resume_count=3, resume_exact=True)


async def test_a_silent_scheduler_loses_the_link_to_the_next_and_its_late_outputs_are_ignored(
    model_dir: Path, tmp_path: Path
) -> None:
    async with run_tokenizer_service(model_dir, tmp_path, num_schedulers=2, scheduler_silence_s=1.0) as service:
        await service.link()
        first, second = service.peers
        call, submit = await service.begin(HELLO)
        first.send(Row(submit.handle, 0, [70]))
        first.is_silent = True
        second.attach()
        again = await second.submits.get()
        await first.ended_streams.get()
        first.send(Row(submit.handle, 1, [99]), ends=[make_end(submit.handle, EOS, 2)])
        second.send(Row(again.handle, 1, [71]), ends=[make_end(again.handle, MAX_TOKENS, 2)])
        _, token_ids, finish = await read_rest(call)
        assert (token_ids, finish.reason) == ([70, 71], MAX_TOKENS)


async def test_a_standby_keeps_its_stream_and_gets_no_request(model_dir: Path, tmp_path: Path) -> None:
    async with run_tokenizer_service(model_dir, tmp_path, num_schedulers=2, scheduler_silence_s=1.0) as service:
        standby, used = service.peers
        await service.link(1)
        call = service.stub.Generate(HELLO)
        submit = await used.submits.get()
        await hear(standby, num_heartbeats=4)
        used.send(Row(submit.handle, 0, [70]), ends=[make_end(submit.handle, MAX_TOKENS, 1)])
        await read_rest(call)
        assert [(peer.num_streams, peer.num_messages) for peer in service.peers] == [(1, 0), (1, 1)]


async def test_a_scheduler_that_lost_its_workers_to_another_one_is_left_for_it_once(
    model_dir: Path, tmp_path: Path
) -> None:
    async with run_tokenizer_service(model_dir, tmp_path, num_schedulers=2) as service:
        await service.link()
        first, second = service.peers
        call, submit = await service.begin(HELLO)
        first.send(Row(submit.handle, 0, [70]))
        first.holds_workers = False
        second.attach()
        again = await second.submits.get()
        assert (again.attempt, read_column(again.choices_so_far[0].token_ids)) == (2, [70])
        # The first one may hold workers again, and still is a standby.
        await first.ended_streams.get()
        first.holds_workers = True
        first.attach()
        await hear(first)
        await finish(call, second, Row(again.handle, 1, [71]))
        assert (first.num_messages, second.num_messages) == (1, 1)


async def test_two_schedulers_that_both_hold_workers_move_no_request(model_dir: Path, tmp_path: Path) -> None:
    async with run_tokenizer_service(model_dir, tmp_path, num_schedulers=2) as service:
        await service.link()
        first, second = service.peers
        call, submit = await service.begin(HELLO)
        second.attach()
        await hear(second)
        await hear(first)
        await finish(call, first, Row(submit.handle, 0, [70]))
        assert [(peer.num_streams, peer.num_messages) for peer in service.peers] == [(1, 1), (1, 0)]


async def test_a_scheduler_whose_workers_start_again_keeps_its_requests(model_dir: Path, tmp_path: Path) -> None:
    async with run_tokenizer_service(model_dir, tmp_path, num_schedulers=2) as service:
        await service.link()
        first, standby = service.peers
        call, submit = await service.begin(HELLO)
        first.holds_workers = False
        await hear(first)
        await hear(standby)
        first.holds_workers = True
        await finish(call, first, Row(submit.handle, 0, [70]))
        assert [(peer.num_streams, peer.num_messages) for peer in service.peers] == [(1, 1), (1, 0)]


async def test_a_scheduler_that_is_silent_for_the_lease_is_left_for_one_that_holds_workers(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_stream, "LEASE_S", 1.5)
    async with run_tokenizer_service(model_dir, tmp_path, num_schedulers=2, scheduler_silence_s=300.0) as service:
        await service.link()
        first, second = service.peers
        call, submit = await service.begin(HELLO)
        first.is_silent = True
        second.attach()
        again = await second.submits.get()
        assert again.attempt == 2
        await finish(call, second, Row(submit.handle, 0, [70]))


async def test_a_second_scheduler_with_another_model_disturbs_no_request(model_dir: Path, tmp_path: Path) -> None:
    async with run_tokenizer_service(model_dir, tmp_path, num_schedulers=2) as service:
        await service.link()
        first, second = service.peers
        call, submit = await service.begin(HELLO)
        second.cell_info.model_digest = "another"
        first.holds_workers = False
        await hear(first)
        second.attach()
        await second.ended_streams.get()
        await finish(call, first, Row(submit.handle, 0, [70]))
        assert (first.num_streams, second.num_messages) == (1, 0)


async def test_answers_end_when_the_next_scheduler_serves_other_weights(model_dir: Path, tmp_path: Path) -> None:
    async with run_tokenizer_service(model_dir, tmp_path, num_schedulers=2) as service:
        first, second = service.peers
        first.cell_info.weights_digest, second.cell_info.weights_digest = "a", "b"
        await service.link()
        assert (await service.stub.GetModelInfo(tokenizer_pb2.GetModelInfoRequest())).weights_digest == "a"
        call, submit = await service.begin(HELLO)
        first.send(Row(submit.handle, 0, [70]))
        second.attach()
        await service.peer_servers[0].stop(grace=0)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await read_rest(call)
        assert reason_of(status_from_rpc_error(error.value)) == "MODEL_CHANGED"
        # What comes now is served with the new ones.
        again = service.stub.Generate(HELLO)
        submit = await second.submits.get()
        assert (submit.attempt, len(submit.choices_so_far)) == (1, 0)
        await finish(again, second, Row(submit.handle, 0, [70]))
        assert (await service.stub.GetModelInfo(tokenizer_pb2.GetModelInfoRequest())).weights_digest == "b"


async def test_answers_go_on_when_the_next_scheduler_does_not_tell_its_weights(model_dir: Path, tmp_path: Path) -> None:
    async with run_tokenizer_service(model_dir, tmp_path, num_schedulers=2) as service:
        first, second = service.peers
        first.cell_info.weights_digest = "a"
        await service.link()
        call, submit = await service.begin(HELLO)
        second.attach()
        await service.peer_servers[0].stop(grace=0)
        submit = await second.submits.get()
        assert submit.attempt == 2
        await finish(call, second, Row(submit.handle, 0, [70]))


async def test_a_scheduler_that_waits_for_its_workers_is_not_lost(model_dir: Path, tmp_path: Path) -> None:
    async with run_tokenizer_service(model_dir, tmp_path, scheduler_lost_s=2.0) as service:
        await service.link()
        call, _ = await service.begin(HELLO)
        service.peer.end_stream()
        # Two heartbeats per second.
        for _ in range(7):
            await service.peer.heartbeats.get()
        service.peer.attach()
        again = await service.peer.submits.get()
        service.peer.send(Row(again.handle, 0, [70]), ends=[make_end(again.handle, MAX_TOKENS, 1)])
        _, token_ids, _ = await read_rest(call)
        assert token_ids == [70]


@pytest.mark.parametrize("lives", [False, True])
async def test_a_request_is_blamed_only_after_a_scheduler_has_lived_without_it(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    for limit in ("_SHORTEST_CONTROL_S", "_LONGEST_CONTROL_S"):
        monkeypatch.setattr(submit_suspects, limit, 0.0 if lives else 3600.0)
    async with run_tokenizer_service(model_dir, tmp_path) as service:
        await service.link()
        peer = service.peer
        call, _ = await service.begin(HELLO)
        for number in range(2):
            start_next(peer, number)
            await peer.submits.get()
        start_next(peer, 2)
        # The control.
        if lives:
            await peer.submits.get()
            start_next(peer, 3)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await read_rest(call)
            assert reason_of(status_from_rpc_error(error.value)) == "POISON_REQUEST"
        else:
            await hear(peer)
            assert peer.submits.empty()
            start_next(peer, 3)
            submit = await peer.submits.get()
            await finish(call, peer, Row(submit.handle, 0, [70]))


def start_next(peer: ExchangePeer, number: int) -> None:
    """Let the scheduler die, and another one take the workers."""
    peer.break_stream()
    peer.cell_info.scheduler_instance_id = f"next {number}"
    peer.attach()


async def test_a_cell_that_changes_disturbs_no_request(model_dir: Path, tmp_path: Path) -> None:
    async with run_tokenizer_service(model_dir, tmp_path, exact_fingerprint="a") as service:
        await service.link()
        exact, submit = await service.begin(EXACT)
        service.peer.cell_info.num_pool_tokens, service.peer.cell_info.exact_fingerprint = 64, ""
        service.peer.describe_cell()
        await hear(service.peer)
        info = await service.stub.GetModelInfo(tokenizer_pb2.GetModelInfoRequest())
        assert (info.num_pool_tokens, info.has_exact_determinism) == (64, False)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await service.stub.Generate(EXACT).read()
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        # Its scheduler has promised.
        await finish(exact, service.peer, Row(submit.handle, 0, [70]))
        assert service.peer.num_streams == 1


async def test_a_stream_has_one_scheduler(model_dir: Path, tmp_path: Path) -> None:
    async with run_tokenizer_service(model_dir, tmp_path) as service:
        await service.link()
        service.peer.cell_info.scheduler_instance_id = "another"
        service.peer.describe_cell()
        await service.peer.ended_streams.get()


async def hear(peer: ExchangePeer, *, num_heartbeats: int = 2) -> None:
    """Wait until the service has surely heard what the peer says now, and until then a number of its heartbeats."""
    while not peer.heartbeats.empty():
        peer.heartbeats.get_nowait()
    for _ in range(num_heartbeats):
        await peer.heartbeats.get()


async def finish(call: Any, peer: ExchangePeer, row: Row) -> None:
    """Let a peer send the last token of a call, and read its answer."""
    peer.send(row, ends=[make_end(row.handle, MAX_TOKENS, row.first_index + len(row.token_ids))])
    await read_rest(call)
