"""Long texts are encoded part by part, no further than the context, and never before short ones."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.chat.conversation import Conversation, Message
from services.tokenizer.request.checks import check_request
from services.tokenizer.request.prepare import RequestPreparer
from services.tokenizer.request.prompts import PromptEncoder
from services.tokenizer.text.encoder import Encoder
from services.tokenizer.text.encoding_pools import MAX_WAITING_BYTES, EncodingPool
from services.tokenizer.text_size import MAX_TEXT_BYTES
from shared.errors import PromptTooLongError, QueueFullError, TemplateFailedError
from shared.request.limits import ModelLimits
from tests.support.models.tiny_tokenizer import tiny_tokenizer
from tests.support.tokenizer.chat_templates import local_template

SENTENCE = "The quick brown fox jumps over the lazy dog. "
LARGEST = SENTENCE * (MAX_TEXT_BYTES // len(SENTENCE))
HUGE_CONTEXT = 10**9


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(tiny_tokenizer())


@pytest.fixture
def prompts(encoder: Encoder) -> PromptEncoder:
    return PromptEncoder(encoder, local_template("{{ messages[0].content }}", {}))


async def num_tokens_when_refused(prompts: PromptEncoder, prompt: str | Conversation, context_length: int) -> int:
    with pytest.raises(PromptTooLongError) as caught:
        await prompts.encode(prompt, context_length)
    assert caught.value.values["limit"] == str(context_length - 1)
    return int(caught.value.values["actual"])


async def test_a_text_is_encoded_no_further_than_the_context(prompts: PromptEncoder, encoder: Encoder) -> None:
    num_tokens = encoder.encode(SENTENCE * 1000, add_special_tokens=True).size
    context_length = 20 * num_tokens
    # The bound from counting bytes is lower.
    assert encoder.least_tokens(LARGEST) < context_length
    for prompt in (LARGEST, Conversation((Message("user", LARGEST),))):
        assert context_length <= await num_tokens_when_refused(prompts, prompt, context_length) < 21 * num_tokens


async def test_a_text_that_cannot_be_cut_is_refused_without_being_encoded(
    prompts: PromptEncoder, encoder: Encoder
) -> None:
    text = "ab" * (MAX_TEXT_BYTES // 2)
    assert await num_tokens_when_refused(prompts, text, 1000) == encoder.least_tokens(text)


@pytest.mark.parametrize("text", ["The fox", SENTENCE * 1000])
async def test_a_text_that_leaves_room_for_one_token_is_accepted(
    prompts: PromptEncoder, encoder: Encoder, text: str
) -> None:
    expected = encoder.encode(text, add_special_tokens=True)
    assert (await prompts.encode(text, expected.size + 1)).tolist() == expected.tolist()
    assert await num_tokens_when_refused(prompts, text, expected.size) == expected.size


async def test_a_short_text_does_not_wait_for_long_ones_and_too_much_text_is_refused(prompts: PromptEncoder) -> None:
    async with asyncio.TaskGroup() as group:
        num_taken = MAX_WAITING_BYTES // len(LARGEST)
        long_ones = [group.create_task(prompts.encode(LARGEST, HUGE_CONTEXT)) for _ in range(num_taken)]
        middling = group.create_task(prompts.encode(SENTENCE * 1000, HUGE_CONTEXT))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError) as caught:
            await prompts.encode(LARGEST, HUGE_CONTEXT)
        assert caught.value.retry_delay_s is not None
        assert caught.value.retry_delay_s > 1.0
        assert (await prompts.encode(SENTENCE, HUGE_CONTEXT)).size > 0
        assert not middling.done()
        # Long texts take turns.
        assert (await middling).size > 0
        assert not any(task.done() for task in long_ones)
        for task in long_ones:
            task.cancel()
    # The long texts are gone.
    assert (await prompts.encode(LARGEST[: len(LARGEST) // 10], HUGE_CONTEXT)).size > 0


async def test_a_text_is_always_accepted_if_no_other_is_waiting() -> None:
    pool = EncodingPool(1, "test")
    with pool.admit(MAX_WAITING_BYTES + 1), pytest.raises(QueueFullError), pool.admit(1):
        pass
    with pool.admit(MAX_WAITING_BYTES + 1):
        assert await pool.run(threading.get_ident) != threading.get_ident()


async def test_work_that_takes_too_long_is_stuck_until_it_ends() -> None:
    pool = EncodingPool(1, "test", max_work_s=0.0)
    begun, may_end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait()

    assert pool.stuck is None
    running = asyncio.ensure_future(pool.run(work))
    await asyncio.to_thread(begun.wait)
    assert pool.stuck == "work in the pool test is stuck"
    # A call that is cancelled does not end its work.
    running.cancel()
    waiting = asyncio.ensure_future(pool.run(lambda: None))
    await asyncio.sleep(0)
    assert pool.stuck is not None
    may_end.set()
    await waiting
    assert pool.stuck is None


async def test_if_one_prompt_is_refused_the_others_are_not_encoded_to_their_end(encoder: Encoder) -> None:
    limits = ModelLimits(HUGE_CONTEXT, 512, HUGE_CONTEXT)
    without_template: Any = SimpleNamespace(prompts=PromptEncoder(encoder, None))
    chat = tokenizer_pb2.Chat(messages=[tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_USER, content="Hello")])
    prompts = [tokenizer_pb2.Prompt(text=LARGEST[: MAX_TEXT_BYTES // 2]), tokenizer_pb2.Prompt(chat=chat)]
    message = tokenizer_pb2.GenerateRequest(prompts=tokenizer_pb2.PromptList(prompts=prompts))
    request = check_request(message, model_name="m", limits=limits)
    with pytest.raises(TemplateFailedError):
        await RequestPreparer(without_template, lambda: limits).prepare(request)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
