"""The link to one of several schedulers, over real gRPC."""

from __future__ import annotations

import time
from pathlib import Path

from tokenizers import Tokenizer

from lockstep.v1 import common_pb2, tokenizer_pb2
from tests.support.exchange_peer import Row, make_end, read_column
from tests.support.tokenizer_service import Service, read_rest, run_tokenizer_service

HELLO = tokenizer_pb2.GenerateRequest(text="The fox")
EOS, MAX_TOKENS = common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_MAX_TOKENS


async def test_heartbeats_are_sent_before_and_after_the_cell_info(service: Service) -> None:
    for _ in range(3):
        await service.peer.heartbeats.get()
    call, submit = await service.begin(HELLO)
    await service.peer.heartbeats.get()
    service.peer.send(Row(submit.handle, 0, [70]), ends=[make_end(submit.handle, MAX_TOKENS, 1)])
    _, token_ids, _ = await read_rest(call)
    assert (token_ids, service.peer.num_streams) == ([70], 1)


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


async def test_a_scheduler_that_is_live_but_not_serving_is_left_for_the_next(model_dir: Path, tmp_path: Path) -> None:
    async with run_tokenizer_service(model_dir, tmp_path, num_schedulers=2, scheduler_silence_s=1.0) as service:
        await service.peers[0].heartbeats.get()
        await service.link(1)
        assert service.peers[0].num_streams > 0


async def test_the_only_scheduler_is_waited_for_while_it_is_live(model_dir: Path, tmp_path: Path) -> None:
    async with run_tokenizer_service(model_dir, tmp_path, scheduler_silence_s=1.0) as service:
        for _ in range(5):
            await service.peer.heartbeats.get()
        await service.link()
        assert service.peer.num_streams == 1


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


async def test_schedulers_are_tried_in_turn_until_one_serves(model_dir: Path, tmp_path: Path) -> None:
    async with run_tokenizer_service(model_dir, tmp_path, num_schedulers=2, scheduler_silence_s=1.0) as service:
        for peer in service.peers:
            peer.end_stream()
            peer.end_stream()
        await service.link(1)
        assert [peer.num_streams for peer in service.peers] == [3, 3]


async def test_the_clients_own_pause_is_not_taken_for_the_schedulers_silence(model_dir: Path, tmp_path: Path) -> None:
    async with run_tokenizer_service(model_dir, tmp_path, scheduler_silence_s=1.0) as service:
        await service.link()
        # The pause: nothing on this event loop runs.
        time.sleep(1.5)  # noqa: ASYNC251 - only a blocking call pauses the loop
        for _ in range(3):
            await service.peer.heartbeats.get()
        assert service.peer.num_streams == 1
