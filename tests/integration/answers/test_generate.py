"""Chats end to end on the real model, as seen by a client."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lockstep.v1 import tokenizer_pb2
from tests.support.cells.cell import Cell
from tests.support.clients.client import chat, chat_request, connect, text_request, token_request

QUESTION = ("user", "What is the capital of France?")


async def test_a_chat_is_answered(real_cell: Cell) -> None:
    async with connect(real_cell) as client:
        completion = await client.generate(chat_request(QUESTION, max_tokens=40))
    assert "Paris" in completion.text
    assert completion.reason == "EOS"
    assert completion.finish is not None
    usage = completion.finish.usage
    assert usage.num_prompt_tokens == completion.accepted.num_prompt_tokens
    assert usage.num_completion_tokens == len(completion.token_ids)
    assert completion.finish.stop_token_id == completion.token_ids[-1]
    assert completion.finish.ttft.ToMicroseconds() > 0
    assert completion.finish.mean_tpot.ToMicroseconds() > 0


async def test_the_text_is_the_tokens_decoded(real_cell: Cell) -> None:
    async with connect(real_cell) as client:
        requests = [
            text_request(text, temperature=1.5, seed=seed, max_tokens=64, ignore_eos=True)
            for seed, text in enumerate(["Emoji 😀🎉 and kanji 日本語:", "Write in Russian: Привет", "The"])
        ]
        for completion in await client.generate_all(requests):
            request = tokenizer_pb2.DetokenizeRequest(token_ids=completion.token_ids)
            assert completion.text == (await client.tokenizer.Detokenize(request)).text


async def test_a_seed_repeats_and_an_absent_one_is_drawn_and_echoed(real_cell: Cell) -> None:
    async with connect(real_cell) as client:
        request = text_request("Once upon a time", temperature=1.0, max_tokens=12)
        first, second = await client.generate_all([request, request])
        assert first.accepted.seed != second.accepted.seed
        request.sampling.seed = first.accepted.seed
        assert (await client.generate(request)).token_ids == first.token_ids


async def test_a_stop_string_split_over_tokens_cuts_the_text(real_cell: Cell) -> None:
    async with connect(real_cell) as client:
        whole = await client.generate(chat_request(QUESTION, max_tokens=24))
        # It spans from the middle of one word to the middle of the next.
        stop = whole.text[10:16]
        request = chat_request(QUESTION, max_tokens=24)
        request.stop.append(stop)
        stopped = await client.generate(request)
        assert stopped.text == whole.text[: whole.text.index(stop)]
        assert stopped.reason == "STOP_STRING"
        assert stopped.finish is not None
        assert stopped.finish.stop_string == stop
        num_tokens = stopped.finish.usage.num_completion_tokens
        assert stopped.token_ids == whole.token_ids[:num_tokens]
        text = (await client.tokenizer.Detokenize(tokenizer_pb2.DetokenizeRequest(token_ids=stopped.token_ids))).text
        assert stop in text
        await client.wait_until_idle()


async def test_stop_tokens_and_stop_sequences_end_the_answer(real_cell: Cell) -> None:
    async with connect(real_cell) as client:
        whole = await client.generate(chat_request(QUESTION, max_tokens=24))
        by_token = await client.generate(chat_request(QUESTION, max_tokens=24, stop_token_ids=[whole.token_ids[3]]))
        assert by_token.reason == "STOP_TOKEN"
        assert by_token.token_ids == whole.token_ids[:4]
        request = chat_request(QUESTION, max_tokens=24)
        request.sampling.stop_token_sequences.add(token_ids=whole.token_ids[2:5])
        by_sequence = await client.generate(request)
        assert by_sequence.reason == "STOP_SEQUENCE"
        assert by_sequence.token_ids == whole.token_ids[:5]


async def test_a_shared_prefix_is_computed_once(real_cell: Cell) -> None:
    prefix = "You are a helpful assistant that knows a lot about ships, sails and the sea. " * 8
    async with connect(real_cell) as client:
        first = await client.generate(text_request(prefix + "First question.", max_tokens=4))
        second = await client.generate(text_request(prefix + "Second question.", max_tokens=4))
    assert first.finish is not None
    assert second.finish is not None
    assert second.finish.usage.num_cached_tokens >= 96
    assert second.finish.usage.num_cached_tokens % 16 == 0


async def test_many_requests_run_together(real_cell: Cell) -> None:
    async with connect(real_cell) as client:
        before = await client.wait_until_idle()
        completions = await client.generate_all(
            text_request(f"Number {number} is", max_tokens=16, ignore_eos=True) for number in range(32)
        )
        after = await client.wait_until_idle()
    assert all(len(completion.token_ids) == 16 for completion in completions)
    # One after the other, 32 requests of 16 tokens would take 480 decode steps.
    assert after.num_decode_steps - before.num_decode_steps < 60
    assert after.num_free_blocks == after.num_blocks


async def test_a_cancelled_call_frees_its_blocks_and_its_neighbour_goes_on(real_cell: Cell) -> None:
    async with connect(real_cell) as client:
        alone = await client.generate(chat_request(QUESTION, max_tokens=20))
        neighbour = asyncio.create_task(client.generate(chat_request(QUESTION, max_tokens=20)))
        call = client.tokenizer.Generate(text_request("Count to a million:", max_tokens=4000, ignore_eos=True))
        await call.read()
        await call.read()
        call.cancel()
        assert (await neighbour).text == alone.text
        await client.wait_until_idle()


async def test_the_model_and_its_limits_are_told(real_cell: Cell, float32_model: Path) -> None:
    async with connect(real_cell) as client:
        info = await client.tokenizer.GetModelInfo(tokenizer_pb2.GetModelInfoRequest())
        state = await client.state()
    assert (info.model, info.context_length, info.logits_width) == (float32_model.name, 8192, 49152)
    assert (list(info.eos_token_ids), info.has_chat_template) == ([2], True)
    assert info.num_pool_tokens == state.num_blocks * state.block_size


async def test_a_chat_is_rendered_by_the_models_template(real_cell: Cell) -> None:
    async with connect(real_cell) as client:
        rendered = await client.tokenizer.RenderChat(tokenizer_pb2.RenderChatRequest(chat=chat(QUESTION)))
        assert rendered.text.endswith(f"<|im_start|>user\n{QUESTION[1]}<|im_end|>\n<|im_start|>assistant\n")
        by_chat = await client.generate(chat_request(QUESTION, max_tokens=8))
        by_ids = await client.generate(token_request(list(rendered.token_ids), max_tokens=8))
    assert by_chat.token_ids == by_ids.token_ids


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_the_mean_tpot_is_absent_for_one_token(real_cell: Cell, max_tokens: int) -> None:
    async with connect(real_cell) as client:
        completion = await client.generate(text_request("The", max_tokens=max_tokens, ignore_eos=True))
    assert completion.finish is not None
    assert completion.finish.HasField("mean_tpot") is (max_tokens > 1)
    assert completion.reason == "MAX_TOKENS"
