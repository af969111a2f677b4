"""On a tokenizer of Llama 2's kind an answer keeps its first space, and characters of several tokens stay whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.worker.runner.matchers import GrammarMatchers
from services.worker.sampling.sampling_state import SamplingState
from shared.model_files.model_dir import TOKENIZER
from shared.request.sampling_codec import decode_options
from tests.support.clients.client import Answer, read_answer
from tests.support.models.tiny_tokenizer import IM_END_ID, VOCABULARY_SIZE, write_tiny_tokenizer
from tests.support.tokenizer.exchange_peer import Position, Row, make_end
from tests.support.tokenizer.many_tokenizers import llama_2_decoder, spell, with_byte_tokens
from tests.support.tokenizer.tokenizer_service import Service, run_tokenizer_service
from tests.support.worker.worker_steps import column

Request = tokenizer_pb2.GenerateRequest


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return with_byte_tokens(llama_2_decoder(), ["▁", "▁blue", "▁today", ".", "▁yes", "y", "es", "▁n"])


@pytest.fixture
async def service(tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[Service]:
    model_dir = tmp_path / "llama-2"
    model_dir.mkdir()
    write_tiny_tokenizer(model_dir)
    tokenizer.save(str(model_dir / TOKENIZER))
    async with run_tokenizer_service(model_dir, tmp_path) as running:
        await running.link()
        yield running


async def answer(service: Service, request: Request, token_ids: list[int]) -> Answer:
    """The streamed answer with these tokens, each sent by itself."""
    call = service.stub.Generate(request)
    sent = await service.peer.submits.get()
    for index, token_id in enumerate(token_ids):
        service.peer.send(Row(sent.handle, index, [token_id]))
    service.peer.send(ends=[make_end(sent.handle, common_pb2.FINISH_REASON_MAX_TOKENS, len(token_ids))])
    return await read_answer(call)


@pytest.mark.parametrize(("echo", "text"), [(False, " blue today."), (True, "The sky is blue today.")])
async def test_the_text_of_an_answer_is_what_it_adds_to_the_prompt(
    service: Service, tokenizer: Tokenizer, echo: bool, text: str
) -> None:
    token_ids = spell(tokenizer, "▁blue", "▁today", ".")
    streamed = await answer(service, Request(text="The sky is", echo=echo), token_ids)
    assert streamed.texts == [text]


async def test_so_it_is_after_a_prompt_of_ids_that_ends_within_a_character(
    service: Service, tokenizer: Tokenizer
) -> None:
    prompt = spell(tokenizer, "▁today", "😀")
    request = Request(tokens={"token_ids": prompt[:-2]}, echo=True)
    streamed = await answer(service, request, [*prompt[-2:], *spell(tokenizer, "▁blue")])
    assert streamed.texts == ["today😀 blue"]


async def test_a_stop_string_may_begin_with_the_first_space(service: Service, tokenizer: Tokenizer) -> None:
    call = service.stub.Generate(Request(text="The sky is", stop=[" blue"]))
    sent = await service.peer.submits.get()
    service.peer.send(Row(sent.handle, 0, spell(tokenizer, "▁blue")))
    assert (await service.peer.stop_ats.get()).num_tokens == 1
    service.peer.send(ends=[make_end(sent.handle, common_pb2.FINISH_REASON_STOP_STRING, 1)])
    streamed = await read_answer(call)
    assert (streamed.texts, streamed.choices[0, 0].reason) == ([""], "STOP_STRING")


@pytest.mark.parametrize("choices", [[" yes", " no"], ["yes", " blue"], [" é"]])
async def test_what_a_form_allows_is_the_text(
    service: Service, tokenizer: Tokenizer, tmp_path: Path, choices: list[str]
) -> None:
    matchers = GrammarMatchers(tmp_path / "llama-2", VOCABULARY_SIZE, (IM_END_ID,))
    written = set()
    for seed in range(8):
        random = np.random.default_rng(seed)
        call = service.stub.Generate(Request(text="The sky is", structured_output={"choices": {"texts": choices}}))
        sent = await service.peer.submits.get()
        state = SamplingState(
            decode_options(sent.options),
            stop_token_ids=column([]),
            num_prompt_tokens=1,
            logits_width=VOCABULARY_SIZE,
            matcher=matchers.make(decode_options(sent.options).grammar),
            eos_token_ids=(IM_END_ID,),
        )
        state.extend(column([0]))
        token_ids: list[int] = []
        while not token_ids or token_ids[-1] != IM_END_ID:
            allowed = np.flatnonzero(state.process(np.zeros(VOCABULARY_SIZE, np.float32), 1) > -np.inf)
            token_ids.append(int(random.choice(allowed)))
            state.append(token_ids[-1])
        end = make_end(sent.handle, common_pb2.FINISH_REASON_EOS, len(token_ids), stop_token_id=IM_END_ID)
        service.peer.send(Row(sent.handle, 0, token_ids), ends=[end])
        [choice] = (await read_answer(call)).choices.values()
        assert choice.text in choices
        written.add(choice.text)
    assert written == set(choices)


async def test_characters_of_several_tokens_stay_whole(service: Service, tokenizer: Tokenizer) -> None:
    emoji = "😀👩‍👩‍👧‍👦🇩🇪"
    streamed = await answer(service, Request(text="The sky is"), spell(tokenizer, emoji, "▁blue"))
    assert streamed.texts == [emoji + " blue"]


async def test_log_probabilities_have_the_same_text(service: Service, tokenizer: Tokenizer) -> None:
    token_ids = spell(tokenizer, "▁blue", "▁today")
    call = service.stub.Generate(Request(text="The sky is", sampling={"num_logprobs": 0}))
    sent = await service.peer.submits.get()
    logprobs = [Position(1, [(token_id, -0.5)]) for token_id in token_ids]
    service.peer.send(Row(sent.handle, 0, token_ids, logprobs=logprobs))
    service.peer.send(ends=[make_end(sent.handle, common_pb2.FINISH_REASON_MAX_TOKENS, len(token_ids))])
    streamed = await read_answer(call)
    texts = [position.token.text for position in streamed.choices[0, 0].logprobs]
    assert ("".join(texts), streamed.texts) == (" blue today", [" blue today"])


async def test_ids_are_decoded_as_a_text_of_their_own(service: Service, tokenizer: Tokenizer) -> None:
    token_ids = spell(tokenizer, "▁blue", "▁today", "😀")
    decoded = await service.stub.Detokenize(tokenizer_pb2.DetokenizeRequest(token_ids=token_ids))
    assert decoded.text == tokenizer.decode(token_ids) == "blue today😀"
