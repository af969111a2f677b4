"""The link to each scheduler, used or not, over real gRPC."""

from __future__ import annotations

import time
from pathlib import Path

from lockstep.v1 import common_pb2, tokenizer_pb2
from tests.support.tokenizer.exchange_peer import Row, make_end
from tests.support.tokenizer.tokenizer_service import Service, read_rest, run_tokenizer_service

HELLO = tokenizer_pb2.GenerateRequest(text="The fox")
MAX_TOKENS = common_pb2.FINISH_REASON_MAX_TOKENS


async def test_heartbeats_are_sent_before_and_after_the_cell_info(service: Service) -> None:
    for _ in range(3):
        await service.peer.heartbeats.get()
    call, submit = await service.begin(HELLO)
    await service.peer.heartbeats.get()
    service.peer.send(Row(submit.handle, 0, [70]), ends=[make_end(submit.handle, MAX_TOKENS, 1)])
    _, token_ids, _ = await read_rest(call)
    assert (token_ids, service.peer.num_streams) == ([70], 1)


async def test_a_silent_standby_is_linked_again_and_costs_requests_nothing(model_dir: Path, tmp_path: Path) -> None:
    async with run_tokenizer_service(model_dir, tmp_path, num_schedulers=2, scheduler_silence_s=1.0) as service:
        await service.link()
        call, submit = await service.begin(HELLO)
        used, standby = service.peers
        standby.is_silent = True
        await standby.ended_streams.get()
        used.send(Row(submit.handle, 0, [70]), ends=[make_end(submit.handle, MAX_TOKENS, 1)])
        _, _, finish = await read_rest(call)
        assert not finish.HasField("recovery")
        await standby.ended_streams.get()
        assert used.num_streams == 1


async def test_the_only_scheduler_is_waited_for_while_it_is_live(model_dir: Path, tmp_path: Path) -> None:
    async with run_tokenizer_service(model_dir, tmp_path, scheduler_silence_s=1.0) as service:
        for _ in range(5):
            await service.peer.heartbeats.get()
        await service.link()
        assert service.peer.num_streams == 1


async def test_each_scheduler_is_linked_again_until_one_serves(model_dir: Path, tmp_path: Path) -> None:
    async with run_tokenizer_service(model_dir, tmp_path, num_schedulers=2, scheduler_silence_s=1.0) as service:
        for peer in service.peers:
            peer.end_stream()
            peer.end_stream()
        for peer in service.peers:
            await peer.ended_streams.get()
            await peer.ended_streams.get()
        await service.link(1)
        assert service.peers[1].num_streams == 3


async def test_the_clients_own_pause_is_not_taken_for_the_schedulers_silence(model_dir: Path, tmp_path: Path) -> None:
    async with run_tokenizer_service(model_dir, tmp_path, scheduler_silence_s=1.0) as service:
        await service.link()
        # The pause: nothing on this event loop runs.
        time.sleep(1.5)  # noqa: ASYNC251 - only a blocking call pauses the loop
        for _ in range(3):
            await service.peer.heartbeats.get()
        assert service.peer.num_streams == 1
