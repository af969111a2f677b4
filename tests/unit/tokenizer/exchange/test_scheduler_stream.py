"""One stream to a scheduler: what is sent on it, and how it is kept, the latter over real gRPC."""

from __future__ import annotations

import time
from pathlib import Path

from lockstep.internal.v1 import exchange_pb2
from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.exchange.scheduler_stream import SchedulerStream
from shared.ids import RequestHandle
from tests.support.tokenizer.exchange_peer import Row, column, make_end, read_column
from tests.support.tokenizer.tokenizer_service import Service, read_rest, run_tokenizer_service

HELLO = tokenizer_pb2.GenerateRequest(text="The fox")
MAX_TOKENS = common_pb2.FINISH_REASON_MAX_TOKENS


def make_submit(handle: int) -> exchange_pb2.Submit | None:
    """The submit of a request with an odd handle; those with even handles have ended."""
    return exchange_pb2.Submit(handle=handle, prompt_token_ids=column([5])) if handle % 2 else None


class Stream(SchedulerStream):
    """A stream that takes handles as plain numbers."""

    def submit(self, handle: int) -> None:
        super().submit(RequestHandle(handle))

    def stop_at(self, handle: int, num_tokens: int) -> None:
        super().stop_at(RequestHandle(handle), num_tokens)

    def abort(self, handle: int) -> None:
        super().abort(RequestHandle(handle))


async def next_message(stream: SchedulerStream) -> exchange_pb2.ExchangeRequest:
    """The next message, without the introduction that a stream's first one has."""
    message = await anext(stream.messages())
    message.ClearField("introduction")
    return message


async def test_accumulated_messages_are_sent_as_one() -> None:
    stream = Stream(make_submit)
    stream.submit(3)
    stream.submit(5)
    stream.stop_at(1, 2)
    stream.abort(7)
    message = await next_message(stream)
    assert [submit.handle for submit in message.submits] == [3, 5]
    assert list(message.stop_ats) == [exchange_pb2.StopAt(handle=1, num_tokens=2)]
    assert read_column(message.abort_handles) == [7]


async def test_sent_items_are_not_sent_again() -> None:
    stream = Stream(make_submit)
    stream.submit(3)
    stream.stop_at(1, 2)
    stream.abort(7)
    await next_message(stream)
    stream.submit(5)
    message = await next_message(stream)
    assert [submit.handle for submit in message.submits] == [5]
    assert (len(message.stop_ats), message.abort_handles) == (0, b"")


async def test_submits_are_built_when_they_are_sent() -> None:
    outputs: dict[int, bytes] = {}
    stream = Stream(lambda handle: exchange_pb2.Submit(handle=handle, prompt_token_ids=outputs[handle]))
    stream.submit(1)
    outputs[1] = column([4])
    assert (await next_message(stream)).submits[0].prompt_token_ids == column([4])


async def test_a_request_that_ended_before_it_was_sent_is_not_sent() -> None:
    stream = Stream(make_submit)
    stream.submit(2)
    stream.submit(3)
    message = await next_message(stream)
    assert [submit.handle for submit in message.submits] == [3]


async def test_no_empty_message_is_sent() -> None:
    stream = Stream(make_submit)
    messages = stream.messages()
    stream.submit(2)
    stream.abort(9)
    await anext(messages)
    stream.submit(2)
    stream.submit(4)
    stream.close()
    assert [message async for message in messages] == []


async def test_submits_with_long_prompts_and_outputs_are_split_over_several_messages() -> None:
    column_of_6_mb = bytes(6_000_000)
    stream = Stream(
        lambda handle: exchange_pb2.Submit(
            handle=handle,
            prompt_token_ids=column_of_6_mb if handle < 3 else b"",
            choices_so_far=[{"token_ids": column_of_6_mb}] if handle >= 3 else (),
        )
    )
    for handle in (1, 2, 3, 4, 5):
        stream.submit(handle)
    sent = [[submit.handle for submit in (await next_message(stream)).submits] for _ in range(3)]
    assert sent == [[1, 2], [3, 4], [5]]


async def test_a_flood_of_submits_and_aborts_is_split_over_messages_that_are_soon_made_and_read() -> None:
    stream = Stream(make_submit)
    handles = list(range(1, 1001, 2))
    for handle in handles:
        stream.submit(handle)
        stream.abort(handle + 1)
    messages = stream.messages()
    stream.beat()
    submits, aborts, sizes = list[int](), list[int](), list[int]()
    while len(submits) < len(handles):
        message = await anext(messages)
        # A heartbeat waits for none of them.
        assert message.is_heartbeat == (not sizes)
        sizes.append(len(message.submits))
        submits += [submit.handle for submit in message.submits]
        aborts += read_column(message.abort_handles)
    assert max(sizes) <= 64
    assert (submits, aborts) == (handles, [handle + 1 for handle in handles])


async def test_a_heartbeat_is_sent_alone_or_with_accumulated_items() -> None:
    stream = Stream(make_submit)
    stream.beat()
    assert await next_message(stream) == exchange_pb2.ExchangeRequest(is_heartbeat=True)
    stream.abort(7)
    stream.beat()
    stream.beat()
    message = await next_message(stream)
    assert (message.is_heartbeat, read_column(message.abort_handles)) == (True, [7])
    stream.submit(3)
    assert not (await next_message(stream)).is_heartbeat


async def test_a_closed_stream_has_no_more_messages() -> None:
    stream = Stream(make_submit)
    stream.submit(1)
    stream.close()
    stream.abort(1)
    assert [message async for message in stream.messages()] == []


async def test_a_drain_is_said_at_once_and_by_every_later_message() -> None:
    stream = Stream(make_submit)
    stream.announce_drain()
    assert await next_message(stream) == exchange_pb2.ExchangeRequest(is_heartbeat=True, is_draining=True)
    stream.abort(7)
    assert (await next_message(stream)).is_draining


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
