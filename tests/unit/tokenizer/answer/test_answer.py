from __future__ import annotations

import asyncio
import string
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.internal.v1 import exchange_pb2
from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.answer.answer import Choice, Extras, Generation
from services.tokenizer.answer.completion import Completion
from services.tokenizer.answer.logprobs import LogprobColumns, LogprobQueue
from services.tokenizer.answer.request_totals import RequestTotals
from services.tokenizer.chat.conversation import Tool
from services.tokenizer.exchange.exchange_codec import read_prompt_logprobs, read_row_logprobs
from services.tokenizer.replies import ReplyParser, ReplyPart, ReplySetting, make_reply_parser
from services.tokenizer.replies.families.plain import PlainParser
from services.tokenizer.text.detokenizer import ByteLevelDetokenizer, text_table
from shared.errors import DrainingError, InternalError, NumericError, SchedulerLostError
from shared.ids import RequestHandle
from shared.network.statuses import StatusError, reason_of
from tests.support.clients.client import Answer
from tests.support.tokenizer.exchange_peer import (
    Position,
    Row,
    make_end,
    make_error_end,
    make_logprobs,
    make_outputs,
)

TABLE = {ord(letter): letter.encode() for letter in string.printable}
EOS, STOP_TOKEN = common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_STOP_TOKEN
STOP_SEQUENCE, MAX_TOKENS = common_pb2.FINISH_REASON_STOP_SEQUENCE, common_pb2.FINISH_REASON_MAX_TOKENS

PLAIN = Extras()
Response = tokenizer_pb2.GenerateResponse


def make_generation(
    *stop_strings: str,
    arrived_at: float | None = None,
    places: Sequence[tuple[int, int]] = ((0, 0),),
    first_extras: Extras = PLAIN,
    parser: ReplyParser | None = None,
) -> Generation:
    """An answer with a choice at each place; the first choice has extras, and a parser is for the only one."""
    generation = Generation(arrived_at=time.monotonic() if arrived_at is None else arrived_at, totals=RequestTotals())
    for place in places:
        extras = PLAIN if generation.choices else first_extras
        completion = Completion(
            ByteLevelDetokenizer(TABLE, text_table(TABLE)),
            stop_strings,
            parser=parser,
            includes_stop=extras.includes_stop,
        )
        generation.choices.append(Choice(generation, completion, num_prompt_tokens=5, place=place, extras=extras))
    return generation


def make_choice(
    *stop_strings: str, extras: Extras = PLAIN, parser: ReplyParser | None = None
) -> tuple[Generation, Choice]:
    """An answer with one choice."""
    generation = make_generation(*stop_strings, first_extras=extras, parser=parser)
    return generation, generation.choices[0]


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


async def collect(generation: Generation) -> list[Response]:
    return [response async for response in generation.responses()]


async def test_accumulated_tokens_are_sent_in_one_response() -> None:
    generation, choice = make_choice()
    for token_id in ids("abc"):
        choice.receive([token_id], None)
    choice.receive(ids("d"), make_end(1, MAX_TOKENS, 4))
    [response] = await collect(generation)
    assert (response.text, list(response.token_ids)) == ("abcd", ids("abcd"))
    assert response.finish.reason == MAX_TOKENS


async def test_each_response_is_sent_as_soon_as_there_are_tokens() -> None:
    generation, choice = make_choice()
    responses = generation.responses()
    choice.receive(ids("a"), None)
    assert (await anext(responses)).text == "a"
    waiting = asyncio.ensure_future(anext(responses))
    choice.receive(ids("b"), None)
    assert (await waiting).text == "b"


async def test_the_finish_has_usage_and_times() -> None:
    generation = make_generation(arrived_at=time.monotonic() - 10)
    [choice] = generation.choices
    responses = generation.responses()
    choice.begin(num_cached_tokens=4, queue_s=None)
    choice.receive(ids("a"), None)
    await anext(responses)
    assert choice.clock.ttft_s is not None
    choice.receive(ids("bc"), make_end(1, MAX_TOKENS, 3))
    response = await anext(responses)
    usage = common_pb2.Usage(num_prompt_tokens=5, num_completion_tokens=3, num_cached_tokens=4)
    assert response.finish.usage == response.usage == usage
    assert response.finish.ttft.ToNanoseconds() == pytest.approx(choice.clock.ttft_s * 1e9, abs=1)
    assert response.finish.HasField("mean_tpot")


async def test_a_stop_string_in_the_tokens_before_an_error_comes_first() -> None:
    generation, choice = make_choice("b")
    choice.receive(ids("ab"), make_error_end(1, NumericError("not finite")))
    [response] = await collect(generation)
    assert (response.text, response.finish.reason) == ("a", common_pb2.FINISH_REASON_STOP_STRING)
    assert response.finish.usage.num_completion_tokens == 2


async def test_one_token_has_no_time_per_output_token() -> None:
    generation, choice = make_choice()
    choice.receive(ids("a"), make_end(1, EOS, 1, stop_token_id=97))
    [response] = await collect(generation)
    assert response.finish.HasField("ttft")
    assert not response.finish.HasField("mean_tpot")


@pytest.mark.parametrize("reason", [EOS, STOP_TOKEN])
async def test_the_text_of_an_ending_token_is_omitted(reason: common_pb2.FinishReason) -> None:
    generation, choice = make_choice()
    choice.receive(ids("ab"), make_end(1, reason, 2, stop_token_id=ord("b")))
    [response] = await collect(generation)
    assert (response.text, list(response.token_ids)) == ("a", ids("ab"))
    assert response.finish.stop_token_id == ord("b")


@pytest.mark.parametrize("reason", [EOS, STOP_TOKEN])
async def test_the_text_of_an_ending_token_is_kept_on_request(reason: common_pb2.FinishReason) -> None:
    generation, choice = make_choice(extras=Extras(includes_stop=True))
    choice.receive(ids("ab"), make_end(1, reason, 2, stop_token_id=ord("b")))
    [response] = await collect(generation)
    assert (response.text, response.finish.stop_token_id) == ("ab", ord("b"))


@pytest.mark.parametrize("reason", [STOP_SEQUENCE, MAX_TOKENS])
async def test_the_text_of_other_last_tokens_is_kept(reason: common_pb2.FinishReason) -> None:
    generation, choice = make_choice()
    choice.receive(ids("ab"), make_end(1, reason, 2))
    [response] = await collect(generation)
    assert response.text == "ab"
    assert not response.finish.HasField("stop_token_id")


async def test_a_stop_string_ends_the_choice_before_the_cell_does() -> None:
    generation, choice = make_choice("STOP")
    assert choice.receive(ids("aSTO"), None) is None
    assert choice.receive(ids("Pbc"), None) == 5
    assert choice.is_over
    [response] = await collect(generation)
    assert (response.text, list(response.token_ids)) == ("a", ids("aSTOP"))
    assert response.finish.reason == common_pb2.FINISH_REASON_STOP_STRING
    assert response.finish.stop_string == "STOP"
    assert response.finish.usage.num_completion_tokens == 5


async def test_a_stop_string_in_the_cells_last_tokens_wins_and_needs_no_stop() -> None:
    generation, choice = make_choice("STOP")
    assert choice.receive(ids("aSTOPb"), make_end(1, MAX_TOKENS, 6)) is None
    [response] = await collect(generation)
    assert (response.text, response.finish.stop_string) == ("a", "STOP")
    assert response.finish.usage.num_completion_tokens == 5


async def test_an_error_follows_the_tokens_received_before_it() -> None:
    generation, choice = make_choice()
    choice.receive(ids("ab"), None)
    choice.receive([], make_error_end(1, NumericError("not finite", step=3)))
    responses = generation.responses()
    assert (await anext(responses)).text == "ab"
    with pytest.raises(StatusError) as caught:
        await anext(responses)
    assert reason_of(caught.value.status) == "NUMERIC_ERROR"


async def test_a_failure_after_the_end_changes_nothing() -> None:
    generation, choice = make_choice()
    choice.receive(ids("a"), make_end(1, MAX_TOKENS, 1))
    choice.fail(SchedulerLostError("lost"))
    [response] = await collect(generation)
    assert response.finish.reason == MAX_TOKENS


async def test_a_failure_ends_a_running_answer() -> None:
    generation, choice = make_choice()
    choice.fail(SchedulerLostError("lost"))
    with pytest.raises(SchedulerLostError):
        await collect(generation)


async def test_tokens_without_text_are_sent_at_once() -> None:
    generation, choice = make_choice("STOP")
    responses = generation.responses()
    choice.receive(ids("S"), None)
    response = await anext(responses)
    assert (response.text, list(response.token_ids)) == ("", ids("S"))


async def test_choices_are_sent_interleaved_each_with_its_place() -> None:
    generation = make_generation(places=[(0, 0), (0, 1), (1, 0)])
    first, second, other = generation.choices
    responses = generation.responses()
    second.receive(ids("a"), None)
    other.receive(ids("b"), None)
    second.receive(ids("c"), None)
    pieces = [await anext(responses) for _ in range(2)]
    first.receive(ids("d"), None)
    pieces.append(await anext(responses))
    assert [(piece.prompt, piece.choice, piece.text) for piece in pieces] == [(0, 1, "ac"), (1, 0, "b"), (0, 0, "d")]


async def test_every_choice_has_a_finish_and_the_last_response_the_total_usage() -> None:
    generation = make_generation(places=[(0, 0), (0, 1), (1, 0), (1, 1)])
    for number, choice in enumerate(generation.choices):
        choice.begin(num_cached_tokens=number + 1, queue_s=None)
        choice.receive(ids("a" * (number + 1)), make_end(1, MAX_TOKENS, number + 1))
    responses = await collect(generation)
    assert [response.finish.usage.num_completion_tokens for response in responses] == [1, 2, 3, 4]
    assert [response.HasField("usage") for response in responses] == [False, False, False, True]
    # Each prompt is counted with its first choice.
    usage = common_pb2.Usage(num_prompt_tokens=10, num_cached_tokens=4, num_completion_tokens=10)
    assert responses[-1].usage == usage


async def test_a_stop_string_ends_only_its_choice() -> None:
    generation = make_generation("STOP", places=[(0, 0), (0, 1)])
    stopped, other = generation.choices
    assert stopped.receive(ids("aSTOP"), None) == 5
    assert other.receive(ids("ab"), make_end(1, EOS, 2)) is None
    first, second = await collect(generation)
    assert (first.text, first.finish.stop_string) == ("a", "STOP")
    assert (second.text, second.finish.reason) == ("a", EOS)


async def test_an_error_of_one_choice_ends_all_after_their_received_tokens() -> None:
    generation = make_generation(places=[(0, 0), (0, 1), (0, 2)])
    finished, failed, other = generation.choices
    finished.receive(ids("a"), make_end(1, MAX_TOKENS, 1))
    other.receive(ids("b"), None)
    failed.receive([], make_error_end(2, NumericError("not finite", step=3)))
    assert other.receive(ids("c"), make_end(3, MAX_TOKENS, 2)) is None
    failed.receive([], make_error_end(2, SchedulerLostError("twice")))
    responses = generation.responses()
    received = [await anext(responses), await anext(responses)]
    assert [(response.text, response.HasField("finish")) for response in received] == [("a", True), ("b", False)]
    with pytest.raises(StatusError) as caught:
        await anext(responses)
    assert reason_of(caught.value.status) == "NUMERIC_ERROR"


async def test_a_failure_before_the_last_choice_has_finished_ends_the_answer() -> None:
    generation = make_generation(places=[(0, 0), (0, 1)])
    generation.choices[0].receive(ids("a"), make_end(1, MAX_TOKENS, 1))
    generation.fail(DrainingError("stopping"))
    responses = generation.responses()
    assert (await anext(responses)).HasField("finish")
    with pytest.raises(DrainingError):
        await anext(responses)


def position(token_id: int, num_top: int) -> Position:
    """The likeliest token at its place, and the ones that follow."""
    return Position(1, [(token_id, -0.5), *((ord("a") + place, -0.5 - place) for place in range(num_top))])


def bytes_of(token_id: int) -> bytes:
    """Letters encode to themselves; other tokens are parts of characters."""
    return bytes([token_id]) if 128 <= token_id < 256 else chr(token_id).encode()


def with_logprobs(num_top: int) -> Extras:
    """The extras for log-probabilities of tokens and of the prompt."""
    queue, prompt_queue = LogprobQueue(1 + num_top, bytes_of), LogprobQueue(1 + num_top, bytes_of)
    return Extras(logprobs=queue, prompt_logprobs=prompt_queue)


def row_logprobs(outputs: exchange_pb2.Outputs) -> LogprobColumns:
    """The log-probabilities of the row of handle 1."""
    return read_row_logprobs(outputs)[RequestHandle(1)]


def feed(choice: Choice, text: str, num_top: int, *, ends: bool = False) -> int | None:
    """Let a choice receive tokens with their log-probabilities."""
    outputs = make_outputs(Row(1, 0, ids(text), logprobs=[position(token_id, num_top) for token_id in ids(text)]))
    choice.receive_logprobs(row_logprobs(outputs))
    return choice.receive(ids(text), make_end(1, MAX_TOKENS, choice.num_tokens + len(text)) if ends else None)


async def test_each_token_is_sent_with_its_log_probability() -> None:
    generation, choice = make_choice(extras=with_logprobs(2))
    choice.receive_logprobs(
        row_logprobs(make_outputs(Row(1, 0, ids("d"), logprobs=[Position(7, [(100, -3.0), (97, -0.5)])])))
    )
    choice.receive(ids("d"), None)
    feed(choice, "ab", 2, ends=True)
    [response] = await collect(generation)
    assert list(response.token_ids) == ids("dab")
    assert [place.token.token_id for place in response.logprobs] == ids("dab")
    first, *_, last = response.logprobs
    assert first.token == common_pb2.TokenLogprob(token_id=100, logprob=-3.0, rank=7, text="d")
    assert list(first.top) == [common_pb2.TokenLogprob(token_id=97, logprob=-0.5, rank=1, text="a")]
    assert [(entry.text, entry.rank, entry.logprob) for entry in last.top] == [("a", 1, -0.5), ("b", 2, -1.5)]


async def test_a_partial_character_is_sent_with_its_bytes() -> None:
    queue = LogprobQueue(1, bytes_of)
    parts = [*"é".encode(), ord("a")]
    outputs = make_outputs(Row(1, 0, parts, logprobs=[position(token_id, 0) for token_id in parts]))
    queue.put(row_logprobs(outputs))
    received = [(place.token.text, place.token.raw_bytes) for place in queue.take(3)]
    assert received == [("\ufffd", b"\xc3"), ("\ufffd", b"\xa9"), ("a", b"")]


async def test_tokens_after_a_stop_string_have_no_log_probabilities() -> None:
    generation, choice = make_choice("STOP", extras=with_logprobs(0))
    assert feed(choice, "aSTOPbc", 0) == 5
    [response] = await collect(generation)
    assert [place.token.text for place in response.logprobs] == list("aSTOP")
    assert len(response.token_ids) == 5


async def test_many_log_probabilities_are_split_over_several_responses() -> None:
    generation = make_generation(places=[(0, 0), (0, 1)], first_extras=with_logprobs(20))
    choice, other = generation.choices
    feed(choice, "abc" * 20, 20, ends=True)
    other.receive(ids("d"), make_end(2, MAX_TOKENS, 1))
    responses = await collect(generation)
    assert [len(response.token_ids) for response in responses] == [24, 1, 24, 12]
    assert [response.HasField("finish") for response in responses] == [False, True, False, True]
    own = [response for response in responses if response.choice == 0]
    assert [place.token.text for response in own for place in response.logprobs] == list("abc" * 20)
    assert all(len(response.logprobs) == len(response.token_ids) for response in own)
    assert "".join(response.text for response in own) == "abc" * 20


async def test_the_prompts_log_probabilities_precede_the_first_token_of_any_choice() -> None:
    generation = make_generation(places=[(0, 0), (0, 1)], first_extras=with_logprobs(20))
    choice, other = generation.choices
    positions = {number: position(ord("a") + number % 5, 20) for number in range(1, 61)}
    choice.receive_prompt_logprobs(read_prompt_logprobs(make_logprobs(positions)))
    other.receive(ids("d"), None)
    responses = aiter(generation.responses())
    received = [await anext(responses) for _ in range(4)]
    assert [len(response.prompt_logprobs) for response in received] == [24, 24, 12, 0]
    assert received[-1].choice == 1
    prompt = [place.token.token_id for response in received for place in response.prompt_logprobs]
    assert prompt == [ord("a") + number % 5 for number in range(1, 61)]


REPLY = '<think>so</think>Hi<tool_call>{"name": "look", "arguments": {"a": 1}}</tool_call>'


async def test_a_reply_is_parsed_as_it_arrives() -> None:
    generation, choice = make_choice(parser=make_reply_parser("hermes", ReplySetting((Tool("look"),))))
    responses = generation.responses()
    answer = Answer()
    answer.add(Response(accepted=tokenizer_pb2.Accepted()))
    for token_id in ids(REPLY[:-1]):
        choice.receive([token_id], None)
        answer.add(await anext(responses))
    choice.receive(ids(REPLY[-1:]), make_end(1, MAX_TOKENS, len(REPLY)))
    answer.add(await anext(responses))
    [completion] = answer.choices.values()
    assert (completion.text, completion.reasoning, completion.token_ids) == ("Hi", "so", ids(REPLY))
    [call] = completion.tool_calls
    assert (call.name, call.arguments) == ("look", '{"a": 1}')


@pytest.mark.parametrize("stops", [(), ("nowhere",)])
@pytest.mark.parametrize("run_length", [1, 3, 1000])
async def test_a_response_has_reasoning_text_and_calls_in_the_replys_order(
    stops: tuple[str, ...], run_length: int
) -> None:
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    reply = f"<think>so</think>Hi{call}<think>hm</think>and{call}end"
    parser = make_reply_parser("hermes", ReplySetting((Tool("look"),)))
    generation, choice = make_choice(*stops, parser=parser)
    for start in range(0, len(reply), run_length):
        choice.receive(ids(reply[start : start + run_length]), None)
    choice.receive([], make_end(1, MAX_TOKENS, len(reply)))
    order: list[str] = []
    for response in await collect(generation):
        news = [response.reasoning, response.text, *(delta.name for delta in response.tool_calls)]
        order += [text for text in news if text]
    assert "".join(order) == "soHilookhmandlookend"


async def test_text_held_back_by_a_parser_is_sent_with_the_finish() -> None:
    generation, choice = make_choice("STOP", parser=make_reply_parser("hermes", ReplySetting((Tool("look"),))))
    responses = generation.responses()
    choice.receive(ids("Hi<tool_"), None)
    assert (await anext(responses)).text == "Hi"
    assert choice.receive(ids("STOP"), None) == 12
    response = await anext(responses)
    assert (response.text, response.finish.stop_string) == ("<tool_", "STOP")


class FailingParser(PlainParser):
    def feed(self, text: str) -> list[ReplyPart]:
        raise ValueError(text)


async def test_a_bug_in_a_parser_ends_only_its_own_answer(caplog: pytest.LogCaptureFixture) -> None:
    generation, choice = make_choice(parser=FailingParser(ReplySetting()))
    assert choice.receive(ids("abc"), None) is None
    with pytest.raises(InternalError, match="could not be read"):
        await collect(generation)
    assert "a reply could not be read" in caplog.messages
    assert "abc" not in caplog.text
    # What comes before the cell has been told to stop is ignored.
    assert choice.receive(ids("d"), None) is None


@given(
    st.lists(st.text("abcSTOP", min_size=1, max_size=12), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.booleans()), max_size=30),
)
def test_results_do_not_depend_on_how_choices_arrive_and_are_read(
    texts: list[str], schedule: list[tuple[int, int, bool]]
) -> None:
    async def serve() -> Answer:
        """The client's answer when the choices receive tokens in this order and the client reads in between."""
        generation = make_generation(
            "STOP", places=[(0, number) for number in range(len(texts))], first_extras=with_logprobs(600)
        )
        responses, answer = aiter(generation.responses()), Answer()
        answer.add(Response(accepted=tokenizer_pb2.Accepted()))
        num_received = [0] * len(texts)
        # At the end, all remaining tokens arrive.
        for number, num_tokens, reads in [*schedule, *((number, 12, False) for number in range(len(texts)))]:
            index = number % len(texts)
            choice, rest = generation.choices[index], texts[index][num_received[index] :][:num_tokens]
            if choice.is_over or not rest:
                continue
            num_received[index] += len(rest)
            feed(choice, rest, 600, ends=num_received[index] == len(texts[index]))
            if reads:
                answer.add(await anext(responses))
        async for response in responses:
            answer.add(response)
        answer.complete()
        return answer

    answer = asyncio.run(serve())
    assert answer.texts == [text.partition("STOP")[0] for text in texts]
    for text, choice in zip(texts, answer.choices.values(), strict=True):
        kept = text[: text.find("STOP") + 4] if "STOP" in text else text
        assert choice.token_ids == ids(kept)
        assert choice.finish is not None
        assert choice.finish.usage.num_completion_tokens == len(kept)
    # A response has room for one position with this many tokens.
    first = answer.choices[0, 0]
    assert [position.token.token_id for position in first.logprobs] == first.token_ids
