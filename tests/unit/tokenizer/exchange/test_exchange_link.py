from __future__ import annotations

from lockstep.internal.v1 import exchange_pb2
from services.tokenizer.exchange.exchange_link import ExchangeLink
from shared.ids import RequestHandle
from tests.support.tokenizer.exchange_peer import column, read_column


def make_submit(handle: int) -> exchange_pb2.Submit | None:
    """The submit of a request with an odd handle; those with even handles have ended."""
    return exchange_pb2.Submit(handle=handle, prompt_token_ids=column([5])) if handle % 2 else None


class Link(ExchangeLink):
    """A link that takes handles as plain numbers."""

    def submit(self, handle: int) -> None:
        super().submit(RequestHandle(handle))

    def stop_at(self, handle: int, num_tokens: int) -> None:
        super().stop_at(RequestHandle(handle), num_tokens)

    def abort(self, handle: int) -> None:
        super().abort(RequestHandle(handle))


async def next_message(link: ExchangeLink) -> exchange_pb2.ExchangeRequest:
    return await anext(link.messages())


async def test_accumulated_messages_are_sent_as_one() -> None:
    link = Link(make_submit)
    link.submit(3)
    link.submit(5)
    link.stop_at(1, 2)
    link.abort(7)
    message = await next_message(link)
    assert [submit.handle for submit in message.submits] == [3, 5]
    assert list(message.stop_ats) == [exchange_pb2.StopAt(handle=1, num_tokens=2)]
    assert read_column(message.abort_handles) == [7]


async def test_sent_items_are_not_sent_again() -> None:
    link = Link(make_submit)
    link.submit(3)
    link.stop_at(1, 2)
    link.abort(7)
    await next_message(link)
    link.submit(5)
    message = await next_message(link)
    assert [submit.handle for submit in message.submits] == [5]
    assert (len(message.stop_ats), message.abort_handles) == (0, b"")


async def test_submits_are_built_when_they_are_sent() -> None:
    outputs: dict[int, bytes] = {}
    link = Link(lambda handle: exchange_pb2.Submit(handle=handle, prompt_token_ids=outputs[handle]))
    link.submit(1)
    outputs[1] = column([4])
    assert (await next_message(link)).submits[0].prompt_token_ids == column([4])


async def test_a_request_that_ended_before_it_was_sent_is_not_sent() -> None:
    link = Link(make_submit)
    link.submit(2)
    link.submit(3)
    message = await next_message(link)
    assert [submit.handle for submit in message.submits] == [3]


async def test_no_empty_message_is_sent() -> None:
    link = Link(make_submit)
    messages = link.messages()
    link.submit(2)
    link.abort(9)
    await anext(messages)
    link.submit(2)
    link.submit(4)
    link.close()
    assert [message async for message in messages] == []


async def test_submits_with_long_prompts_and_outputs_are_split_over_several_messages() -> None:
    column_of_6_mb = bytes(6_000_000)
    link = Link(
        lambda handle: exchange_pb2.Submit(
            handle=handle,
            prompt_token_ids=column_of_6_mb if handle < 3 else b"",
            choices_so_far=[{"token_ids": column_of_6_mb}] if handle >= 3 else (),
        )
    )
    for handle in (1, 2, 3, 4, 5):
        link.submit(handle)
    sent = [[submit.handle for submit in (await next_message(link)).submits] for _ in range(3)]
    assert sent == [[1, 2], [3, 4], [5]]


async def test_a_heartbeat_is_sent_alone_or_with_accumulated_items() -> None:
    link = Link(make_submit)
    link.beat()
    assert await next_message(link) == exchange_pb2.ExchangeRequest(is_heartbeat=True)
    link.abort(7)
    link.beat()
    link.beat()
    message = await next_message(link)
    assert (message.is_heartbeat, read_column(message.abort_handles)) == (True, [7])
    link.submit(3)
    assert not (await next_message(link)).is_heartbeat


async def test_a_closed_link_has_no_more_messages() -> None:
    link = Link(make_submit)
    link.submit(1)
    link.close()
    link.abort(1)
    assert [message async for message in link.messages()] == []


async def test_a_drain_is_said_at_once_and_by_every_later_message() -> None:
    link = Link(make_submit)
    link.announce_drain()
    assert await next_message(link) == exchange_pb2.ExchangeRequest(is_heartbeat=True, is_draining=True)
    link.abort(7)
    assert (await next_message(link)).is_draining
