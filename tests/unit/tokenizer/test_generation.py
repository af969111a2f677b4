from __future__ import annotations

import asyncio
import time

import pytest

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.completion import Completion
from services.tokenizer.detokenizer import ByteLevelDetokenizer, text_table
from services.tokenizer.generation import Generation
from shared.errors import NumericError, SchedulerLostError
from shared.rpc import StatusError, reason_of
from tests.support.exchange_peer import make_end, make_error_end

TABLE = {ord(letter): letter.encode() for letter in "abcdefSTOP"}


def make_generation(*stop_strings: str, arrived_s: float | None = None) -> Generation:
    completion = Completion(ByteLevelDetokenizer(TABLE, text_table(TABLE)), stop_strings)
    arrived_s = time.monotonic() if arrived_s is None else arrived_s
    return Generation(completion, num_prompt_tokens=5, arrived_s=arrived_s)


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


async def collect(generation: Generation) -> list[tokenizer_pb2.GenerateResponse]:
    return [response async for response in generation.responses()]


async def test_what_has_piled_up_leaves_in_one_response() -> None:
    generation = make_generation()
    for token_id in ids("abc"):
        generation.receive([token_id], None)
    generation.receive(ids("d"), make_end(1, common_pb2.FINISH_REASON_MAX_TOKENS, 4))
    [response] = await collect(generation)
    assert (response.text, list(response.token_ids)) == ("abcd", ids("abcd"))
    assert response.finish.reason == common_pb2.FINISH_REASON_MAX_TOKENS


async def test_each_response_leaves_as_soon_as_there_is_something() -> None:
    generation = make_generation()
    responses = generation.responses()
    generation.receive(ids("a"), None)
    assert (await anext(responses)).text == "a"
    waiting = asyncio.ensure_future(anext(responses))
    generation.receive(ids("b"), None)
    assert (await waiting).text == "b"


async def test_the_finish_has_usage_and_times() -> None:
    generation = make_generation(arrived_s=time.monotonic() - 10)
    responses = generation.responses()
    generation.begin(num_cached_tokens=4)
    generation.receive(ids("a"), None)
    await anext(responses)
    assert generation.ttft_s is not None
    generation.arrived_s -= 5
    generation.receive(ids("bc"), make_end(1, common_pb2.FINISH_REASON_MAX_TOKENS, 3))
    finish = (await anext(responses)).finish
    assert finish.usage == common_pb2.Usage(num_prompt_tokens=5, num_completion_tokens=3, num_cached_tokens=4)
    assert finish.ttft.ToNanoseconds() == pytest.approx(generation.ttft_s * 1e9, abs=1)
    # From the first token to the end at least 5 s passed by the moved arrival, over two gaps.
    assert finish.mean_tpot.ToNanoseconds() >= 2.5e9


async def test_one_token_has_no_time_per_output_token() -> None:
    generation = make_generation()
    generation.receive(ids("a"), make_end(1, common_pb2.FINISH_REASON_EOS, 1, stop_token_id=97))
    [response] = await collect(generation)
    assert response.finish.HasField("ttft")
    assert not response.finish.HasField("mean_tpot")


@pytest.mark.parametrize("reason", [common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_STOP_TOKEN])
async def test_the_text_of_an_ending_token_is_left_out(reason: common_pb2.FinishReason) -> None:
    generation = make_generation()
    generation.receive(ids("ab"), make_end(1, reason, 2, stop_token_id=ord("b")))
    [response] = await collect(generation)
    assert (response.text, list(response.token_ids)) == ("a", ids("ab"))
    assert response.finish.stop_token_id == ord("b")


@pytest.mark.parametrize("reason", [common_pb2.FINISH_REASON_STOP_SEQUENCE, common_pb2.FINISH_REASON_MAX_TOKENS])
async def test_the_text_of_other_last_tokens_stays(reason: common_pb2.FinishReason) -> None:
    generation = make_generation()
    generation.receive(ids("ab"), make_end(1, reason, 2))
    [response] = await collect(generation)
    assert response.text == "ab"
    assert not response.finish.HasField("stop_token_id")


async def test_a_stop_string_ends_the_answer_before_the_cell_does() -> None:
    generation = make_generation("STOP")
    assert generation.receive(ids("aSTO"), None) is None
    assert generation.receive(ids("Pbc"), None) == 5
    assert generation.is_over
    [response] = await collect(generation)
    assert (response.text, list(response.token_ids)) == ("a", ids("aSTOP"))
    assert response.finish.reason == common_pb2.FINISH_REASON_STOP_STRING
    assert response.finish.stop_string == "STOP"
    assert response.finish.usage.num_completion_tokens == 5


async def test_a_stop_string_in_the_cells_last_tokens_wins_and_needs_no_stop() -> None:
    generation = make_generation("STOP")
    assert generation.receive(ids("aSTOPb"), make_end(1, common_pb2.FINISH_REASON_MAX_TOKENS, 6)) is None
    [response] = await collect(generation)
    assert (response.text, response.finish.stop_string) == ("a", "STOP")
    assert response.finish.usage.num_completion_tokens == 5


async def test_an_error_follows_what_was_received_before_it() -> None:
    generation = make_generation()
    generation.receive(ids("ab"), None)
    generation.receive([], make_error_end(1, NumericError("not finite", step=3)))
    responses = generation.responses()
    assert (await anext(responses)).text == "ab"
    with pytest.raises(StatusError) as caught:
        await anext(responses)
    assert reason_of(caught.value.status) == "NUMERIC_ERROR"


async def test_a_failure_after_the_end_changes_nothing() -> None:
    generation = make_generation()
    generation.receive(ids("a"), make_end(1, common_pb2.FINISH_REASON_MAX_TOKENS, 1))
    generation.fail(SchedulerLostError("lost"))
    [response] = await collect(generation)
    assert response.finish.reason == common_pb2.FINISH_REASON_MAX_TOKENS


async def test_a_failure_ends_a_running_answer() -> None:
    generation = make_generation()
    generation.fail(SchedulerLostError("lost"))
    with pytest.raises(SchedulerLostError):
        await collect(generation)


async def test_tokens_without_text_leave_at_once() -> None:
    generation = make_generation("STOP")
    responses = generation.responses()
    generation.receive(ids("S"), None)
    response = await anext(responses)
    assert (response.text, list(response.token_ids)) == ("", ids("S"))
