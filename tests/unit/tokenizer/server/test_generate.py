"""Options, choices and lists of prompts over real gRPC, with the scheduler played by the test."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from tokenizers import Tokenizer

from lockstep.internal.v1 import exchange_pb2
from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.server.generate import echo_pieces
from shared.errors import AbortedByCallError
from shared.network.statuses import reason_of, status_from_rpc_error
from shared.request.sampling_codec import decode_options
from shared.request.sampling_params import SamplingOptions
from tests.support.clients.client import Answer, read_answer
from tests.support.models.tiny_tokenizer import CONTEXT_LENGTH, IM_END, IM_END_ID
from tests.support.system.patience import PATIENCE_S
from tests.support.tokenizer.exchange_peer import Position, PromptRow, Row, make_end, make_error_end, read_column
from tests.support.tokenizer.tokenizer_service import NUM_POOL_TOKENS, Service, run_tokenizer_service

EOS, MAX_TOKENS = common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_MAX_TOKENS
STOP_TOKEN = common_pb2.FINISH_REASON_STOP_TOKEN

Request = tokenizer_pb2.GenerateRequest
Prompt = tokenizer_pb2.Prompt


async def submit(service: Service, request: Request, num_prompts: int = 1) -> tuple[Any, list[exchange_pb2.Submit]]:
    """Start a request; returns the call, and the submits of its prompts that the peer received."""
    call = service.stub.Generate(request)
    return call, [await service.peer.submits.get() for _ in range(num_prompts)]


async def answer_with(
    service: Service, request: Request, token_ids: list[int], reason: common_pb2.FinishReason = MAX_TOKENS
) -> Answer:
    """The answer to a request for one choice with these tokens."""
    call, [sent] = await submit(service, request)
    service.peer.send(Row(sent.handle, 0, token_ids), ends=[make_end(sent.handle, reason, len(token_ids))])
    return await read_answer(call)


async def error_of(call: Any) -> tuple[grpc.StatusCode, str | None]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_answer(call)
    return caught.value.code(), reason_of(status_from_rpc_error(caught.value))


async def test_choices_stream_interleaved_each_to_its_own_end(service: Service, tokenizer: Tokenizer) -> None:
    request = Request(text="The fox", sampling={"n": 3}, stop=[" lazy d"])
    call, [sent] = await submit(service, request)
    assert sent.n == 3
    jumps, lazy, dog = (tokenizer.encode(text).ids for text in ("jumps", "the lazy dog", "dog"))
    handles = [sent.handle + number for number in range(3)]
    service.peer.send(Row(handles[0], 0, jumps[:1], num_cached_tokens=1), Row(handles[2], 0, dog))
    service.peer.send(Row(handles[1], 0, lazy), Row(handles[0], 1, jumps[1:]))
    stop_at = await service.peer.stop_ats.get()
    assert stop_at.handle == handles[1]
    service.peer.send(
        Row(handles[0], len(jumps), [IM_END_ID]),
        ends=[
            make_end(handles[0], EOS, len(jumps) + 1, stop_token_id=IM_END_ID),
            make_end(handles[1], common_pb2.FINISH_REASON_STOP_STRING, stop_at.num_tokens),
            make_end(handles[2], MAX_TOKENS, len(dog)),
        ],
    )
    answer = await read_answer(call)
    assert answer.texts == ["jumps", "the", "dog"]
    assert [choice.reason for choice in answer.choices.values()] == ["EOS", "STOP_STRING", "MAX_TOKENS"]
    assert answer.choices[0, 0].token_ids == [*jumps, IM_END_ID]
    prompt_length = len(tokenizer.encode("The fox").ids)
    assert answer.usage == common_pb2.Usage(
        num_prompt_tokens=prompt_length,
        num_cached_tokens=1,
        num_completion_tokens=len(jumps) + 1 + stop_at.num_tokens + len(dog),
    )


async def test_an_error_of_one_choice_ends_the_call_and_aborts_the_others(service: Service) -> None:
    call, [sent] = await submit(service, Request(text="x", sampling={"n": 2}))
    service.peer.send(ends=[make_error_end(sent.handle + 1, AbortedByCallError("aborted"))])
    assert await error_of(call) == (grpc.StatusCode.CANCELLED, "ABORTED_BY_CALL")
    assert await service.peer.aborts.get() == sent.handle


async def test_cancelling_aborts_the_unfinished_choices_of_every_prompt(service: Service) -> None:
    prompts = [Prompt(text="a"), Prompt(text="b")]
    request = Request(prompts={"prompts": prompts}, sampling={"n": 2})
    call, [first, second] = await submit(service, request, num_prompts=2)
    service.peer.send(ends=[make_end(first.handle + number, EOS, 0) for number in range(2)])
    finishes = 0
    while finishes < 2:
        finishes += (await call.read()).HasField("finish")
    call.cancel()
    assert await service.peer.aborts.get() == second.handle
    assert service.peer.aborts.empty()


async def test_every_prompt_is_a_separate_request(service: Service, tokenizer: Tokenizer) -> None:
    chat = tokenizer_pb2.Chat(messages=[{"role": tokenizer_pb2.ROLE_USER, "content": "hi"}])
    prompts = [Prompt(text="The fox"), Prompt(tokens={"token_ids": [5, 6]}), Prompt(chat=chat)]
    request = Request(request_id="r", prompts={"prompts": prompts}, sampling={"n": 2})
    call, sent = await submit(service, request, num_prompts=3)
    assert [each.request_id for each in sent] == ["r-0", "r-1", "r-2"]
    lengths = [len(read_column(each.prompt_token_ids)) for each in sent]
    assert lengths[:2] == [len(tokenizer.encode("The fox").ids), 2]
    assert len({each.seed for each in sent}) == 1
    for index, each in enumerate(sent):
        for number in range(2):
            text = tokenizer.encode(f"{index} {number}").ids
            handle = each.handle + number
            service.peer.send(Row(handle, 0, text), ends=[make_end(handle, MAX_TOKENS, len(text))])
    answer = await read_answer(call)
    assert answer.texts == ["0 0", "0 1", "1 0", "1 1", "2 0", "2 1"]
    accepted = [answer.choices[index, 1].accepted for index in range(3)]
    assert [each.request_id for each in accepted] == ["r-0", "r-1", "r-2"]
    assert [each.num_prompt_tokens for each in accepted] == lengths
    assert [each.max_tokens for each in accepted] == [NUM_POOL_TOKENS - length for length in lengths]
    assert answer.usage is not None
    assert answer.usage.num_prompt_tokens == sum(lengths)


async def test_the_ids_of_all_prompts_are_reserved(service: Service) -> None:
    request = Request(request_id="r", prompts={"prompts": [Prompt(text="a"), Prompt(text="b")]})
    call, _ = await submit(service, request, num_prompts=2)
    for taken in ("r", "r-1"):
        duplicate = await error_of(service.stub.Generate(Request(text="x", request_id=taken)))
        assert duplicate == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST")
    other, _ = await submit(service, Request(text="x", request_id="r-2"))
    other.cancel()
    call.cancel()


async def test_a_lost_scheduler_pauses_every_choice(service: Service) -> None:
    call, [sent] = await submit(service, Request(text="x", sampling={"n": 3, "num_logprobs": 0}))
    handles = [sent.handle + number for number in range(3)]
    position = Position(1, [(70, -0.5)])
    service.peer.send(
        Row(handles[0], 0, [70], logprobs=[position]),
        Row(handles[1], 0, [70, 71], logprobs=[position] * 2),
        ends=[make_end(handles[0], MAX_TOKENS, 1)],
    )
    answer, responses = Answer(), aiter(call)
    while sum(len(choice.token_ids) for choice in answer.choices.values()) < 3:
        answer.add(await anext(responses))
    service.peer.end_stream()
    await service.until_health_is(health_pb2.HealthCheckResponse.NOT_SERVING)
    await service.link()
    again = await service.peer.submits.get()
    choices = [(read_column(choice.token_ids), choice.has_ended) for choice in again.choices_so_far]
    assert (again.handle, again.n, choices) == (sent.handle, 3, [([70], True), ([70, 71], False), ([], False)])
    service.peer.send(
        Row(handles[1], 1, [71, 72], logprobs=[position] * 2),
        Row(handles[2], 0, [73], logprobs=[position]),
        ends=[make_end(handle, MAX_TOKENS, 0) for handle in handles[1:]],
    )
    async for response in responses:
        answer.add(response)
    assert [choice.token_ids for choice in answer.choices.values()] == [[70], [70, 71, 72], [73]]
    assert [len(choice.logprobs) for choice in answer.choices.values()] == [1, 3, 1]


async def test_an_answer_can_begin_with_its_prompt(service: Service, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("jumps").ids
    text = await answer_with(service, Request(text="The\u0301 fox ", echo=True), ids)
    assert text.texts == ["The\u0301 fox jumps"]
    prompt = {"token_ids": [*tokenizer.encode("The fox ").ids, IM_END_ID]}
    tokens = await answer_with(service, Request(tokens=prompt, echo=True), ids)
    assert tokens.texts == ["The fox jumps"]
    shown = await answer_with(service, Request(tokens=prompt, echo=True, skip_special_tokens=False), ids)
    assert shown.texts == [f"The fox {IM_END}jumps"]
    chat = tokenizer_pb2.Chat(messages=[{"role": tokenizer_pb2.ROLE_USER, "content": "The fox"}])
    spoken = await answer_with(service, Request(chat=chat, echo=True), ids)
    assert spoken.texts == ["system\nYou are helpful\nuser\nThe fox\nassistant\njumps"]


async def test_every_choice_begins_with_the_prompt_once(service: Service) -> None:
    call, [sent] = await submit(service, Request(text="x", echo=True, sampling={"n": 2}))
    for number in range(2):
        handle = sent.handle + number
        service.peer.send(Row(handle, 0, [70]), Row(handle, 1, [71]), ends=[make_end(handle, MAX_TOKENS, 2)])
    answer = await read_answer(call)
    assert [text.count("x") for text in answer.texts] == [1, 1]
    assert [text[0] for text in answer.texts] == ["x", "x"]


def test_a_long_prompt_is_echoed_in_pieces_that_fit_in_a_message() -> None:
    text = "😀" * 2**20
    pieces = list(echo_pieces(text))
    assert "".join(pieces) == text
    assert max(len(piece.encode()) for piece in pieces) <= 1024 * 1024
    assert list(echo_pieces("")) == []


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({}, "the"),
        ({"include_stop": True}, "the"),
        ({"skip_special_tokens": False}, "the"),
        ({"skip_special_tokens": False, "include_stop": True}, f"the{IM_END}"),
    ],
    ids=str,
)
async def test_the_text_of_the_last_token_is_kept_if_it_has_any_and_is_requested(
    service: Service, tokenizer: Tokenizer, form: dict[str, Any], text: str
) -> None:
    ids = [*tokenizer.encode("the").ids, IM_END_ID]
    assert (await answer_with(service, Request(text="x", **form), ids, EOS)).texts == [text]


async def test_special_tokens_within_a_text_are_shown_on_request(service: Service, tokenizer: Tokenizer) -> None:
    ids = [IM_END_ID, *tokenizer.encode("fox").ids]
    assert (await answer_with(service, Request(text="x"), ids)).texts == ["fox"]
    assert (await answer_with(service, Request(text="x", skip_special_tokens=False), ids)).texts == [f"{IM_END}fox"]


async def test_a_stop_string_is_kept_in_the_text_on_request(service: Service, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the lazy dog").ids
    request = Request(text="x", stop=[" lazy"], include_stop=True)
    assert (await answer_with(service, request, ids)).texts == ["the lazy"]
    token = await answer_with(service, Request(text="x", include_stop=True), ids, STOP_TOKEN)
    assert token.texts == ["the lazy dog"]


async def test_min_tokens_apply_to_stop_strings(service: Service) -> None:
    # Tokens from 70 on are single letters.
    call, [sent] = await submit(service, Request(text="x", stop=["g"], sampling={"min_tokens": 2}))
    service.peer.send(Row(sent.handle, 0, [70 + ord("g") - ord("d")] * 3))
    answer = await read_answer(call)
    [choice] = answer.choices.values()
    assert (choice.reason, len(choice.token_ids)) == ("STOP_STRING", 3)


async def test_options_reach_the_cell_with_the_tokens_of_bad_words(service: Service, tokenizer: Tokenizer) -> None:
    sampling = {"min_p": 0.5, "bad_words": [{"token_ids": [7, 8]}], "logit_bias": {5: 1.0}, "num_logprobs": 2}
    call, [sent] = await submit(service, Request(text="x", bad_words=["fox"], sampling=sampling))
    fox, spaced = (tuple(tokenizer.encode(text).ids) for text in ("fox", " fox"))
    assert decode_options(sent.options) == SamplingOptions(
        min_p=0.5, bad_words=((7, 8), fox, spaced), logit_bias=((5, 1.0),), num_logprobs=2
    )
    call.cancel()
    call, [sent] = await submit(service, Request(text="x"))
    assert not sent.HasField("options")
    call.cancel()


async def test_a_special_token_in_a_bad_word_is_text(service: Service) -> None:
    call, [sent] = await submit(service, Request(text="x", bad_words=[IM_END]))
    assert all(IM_END_ID not in run for run in decode_options(sent.options).bad_words)
    call.cancel()


async def test_the_models_defaults_reach_the_cell(service: Service) -> None:
    service.peer.cell_info.default_sampling.CopyFrom(
        common_pb2.SamplingParams(temperature=0.5, top_k=7, max_tokens=CONTEXT_LENGTH * 10, repetition_penalty=1.5)
    )
    service.peer.end_stream()
    await service.until_health_is(health_pb2.HealthCheckResponse.NOT_SERVING)
    await service.link()
    call, [sent] = await submit(service, Request(text="x", sampling={"top_k": 0}))
    assert (sent.temperature, sent.top_k, sent.options.repetition_penalty) == (0.5, 0, 1.5)
    assert sent.max_tokens == NUM_POOL_TOKENS - len(read_column(sent.prompt_token_ids))
    call.cancel()


async def test_log_probabilities_include_the_tokens_texts(service: Service, tokenizer: Tokenizer) -> None:
    request = Request(text="The fox", sampling={"num_logprobs": 1, "num_prompt_logprobs": 0})
    call, [sent] = await submit(service, request)
    prompt = read_column(sent.prompt_token_ids)
    [dog] = tokenizer.encode(" dog").ids
    service.peer.send(prompts=[PromptRow(sent.handle, 1, [Position(3, [(token_id, -2.0)]) for token_id in prompt[1:]])])
    service.peer.send(
        Row(sent.handle, 0, [dog], logprobs=[Position(2, [(dog, -0.75), (IM_END_ID, -0.5)])]),
        ends=[make_end(sent.handle, MAX_TOKENS, 1)],
    )
    [choice] = (await read_answer(call)).choices.values()
    assert "".join(position.token.text for position in choice.prompt_logprobs) == tokenizer.decode(prompt[1:])
    assert {(position.token.rank, len(position.top)) for position in choice.prompt_logprobs} == {(3, 0)}
    [position] = choice.logprobs
    assert position.token == common_pb2.TokenLogprob(token_id=dog, logprob=-0.75, rank=2, text=" dog")
    assert list(position.top) == [common_pb2.TokenLogprob(token_id=IM_END_ID, logprob=-0.5, rank=1, text=IM_END)]


@pytest.mark.parametrize("sampling", [{}, {"num_logprobs": 1}])
async def test_requested_tokens_have_their_log_probabilities_in_their_order(
    service: Service, tokenizer: Tokenizer, sampling: dict[str, int]
) -> None:
    [dog, fox], num_top = tokenizer.encode(" dog fox").ids, len(sampling)
    request = Request(text="The", sampling={**sampling, "logprob_token_ids": [fox, IM_END_ID, fox]})
    call, [sent] = await submit(service, request)
    assert decode_options(sent.options).logprob_token_ids == (fox, IM_END_ID, fox)
    requested = [(fox, -3.0), (IM_END_ID, -0.5), (fox, -3.0)]
    position = Position(2, [(dog, -0.75), *requested, (IM_END_ID, -0.5)][: 4 + num_top], requested_ranks=(9, 1, 9))
    service.peer.send(
        Row(sent.handle, 0, [dog, dog], logprobs=[position] * 2), ends=[make_end(sent.handle, MAX_TOKENS, 2)]
    )
    [choice] = (await read_answer(call)).choices.values()
    first, second = choice.logprobs
    assert first == second
    assert first.token == common_pb2.TokenLogprob(token_id=dog, logprob=-0.75, rank=2, text=" dog")
    end = common_pb2.TokenLogprob(token_id=IM_END_ID, logprob=-0.5, rank=1, text=IM_END)
    unlikely = common_pb2.TokenLogprob(token_id=fox, logprob=-3.0, rank=9, text=" fox")
    assert list(first.requested) == [unlikely, end, unlikely]
    assert list(first.top) == [end] * num_top


@pytest.mark.parametrize("ids", [[0] * 21, [2**32 - 1]])
async def test_bad_requested_tokens_are_refused(service: Service, ids: list[int]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await service.stub.Complete(Request(text="The", sampling={"logprob_token_ids": ids}))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


REPLY = '<think>hm</think>Hi<tool_call>{"name": "look", "arguments": {"a": 1}}</tool_call>'


async def test_a_reply_to_a_conversation_is_parsed_unless_the_raw_text_is_requested(
    tools_model_dir: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    chat = tokenizer_pb2.Chat(messages=[{"role": tokenizer_pb2.ROLE_USER, "content": "hi"}], tools=[{"name": "look"}])
    ids = tokenizer.encode(REPLY).ids
    async with run_tokenizer_service(tools_model_dir, tmp_path, reply_parser="hermes") as service:
        await service.link()
        [read] = (await answer_with(service, Request(chat=chat), ids)).choices.values()
        raw = await answer_with(service, Request(chat=chat, raw_text=True), ids)
        text = await answer_with(service, Request(text="hi"), ids)
    assert (read.text, read.reasoning, read.token_ids) == ("Hi", "hm", ids)
    assert [(call.name, call.arguments) for call in read.tool_calls] == [("look", '{"a": 1}')]
    assert raw.texts == text.texts == [REPLY]


async def test_a_reply_of_special_tokens_is_parsed(model_dir: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    chat = tokenizer_pb2.Chat(messages=[{"role": tokenizer_pb2.ROLE_USER, "content": "hi"}])
    ids = [*tokenizer.encode("fox").ids, IM_END_ID, *tokenizer.encode(" dog").ids]
    async with run_tokenizer_service(model_dir, tmp_path, reply_parser="harmony") as service:
        await service.link()
        hidden = await answer_with(service, Request(chat=chat), ids)
        shown = await answer_with(service, Request(chat=chat, skip_special_tokens=False), ids)
    assert hidden.texts == ["fox dog"]
    assert shown.texts == [f"fox{IM_END} dog"]


async def test_the_form_of_a_text_reaches_the_cell_as_a_grammar(service: Service) -> None:
    sampling = {"min_p": 0.5}
    call, [sent] = await submit(service, Request(text="x", structured_output={"regex": "[a-c]+"}, sampling=sampling))
    options = decode_options(sent.options)
    assert (options.min_p, options.needs_all_tokens) == (0.5, True)
    assert options.grammar != ""
    call.cancel()


async def test_an_empty_form_is_refused_by_its_field(service: Service) -> None:
    call = service.stub.Generate(Request(text="x", structured_output={"regex": "["}))
    assert await error_of(call) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert "structured_output.regex" in (await call.details())


async def test_required_tools_constrain_each_prompt_separately(tools_model_dir: Path, tmp_path: Path) -> None:
    message = {"role": tokenizer_pb2.ROLE_USER, "content": "hi"}
    chats = [
        tokenizer_pb2.Chat(messages=[message], tools=[{"name": "look"}], tool_mode=mode)
        for mode in (tokenizer_pb2.TOOL_MODE_REQUIRED, tokenizer_pb2.TOOL_MODE_AUTO)
    ]
    request = Request(prompts={"prompts": [Prompt(chat=chat) for chat in chats]})
    async with run_tokenizer_service(tools_model_dir, tmp_path, reply_parser="hermes") as service:
        await service.link()
        call, sent = await submit(service, request, num_prompts=2)
        assert [each.HasField("options") for each in sent] == [True, False]
        assert "look" in sent[0].options.grammar
        call.cancel()


async def test_a_refusal_of_one_of_several_prompts_names_that_prompts_field(service: Service) -> None:
    message = {"role": tokenizer_pb2.ROLE_USER, "content": "hi"}
    chats = [tokenizer_pb2.Chat(messages=[message], tools=tools) for tools in ([], [{"name": "look"}])]
    call = service.stub.Generate(Request(prompts={"prompts": [Prompt(chat=chat) for chat in chats]}))
    assert await error_of(call) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert (await call.details()).startswith("prompts.prompts[1].chat.tools: must be empty")


@pytest.mark.parametrize("takes_tools", [True, False])
async def test_a_model_that_calls_no_tools_cannot_be_forced_to(
    model_dir: Path, tools_model_dir: Path, tmp_path: Path, takes_tools: bool
) -> None:
    chat = tokenizer_pb2.Chat(
        messages=[{"role": tokenizer_pb2.ROLE_USER, "content": "hi"}], tools=[{"name": "look"}], tool_name="look"
    )
    async with run_tokenizer_service(tools_model_dir if takes_tools else model_dir, tmp_path) as service:
        await service.link()
        call = service.stub.Generate(Request(chat=chat))
        assert await error_of(call) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
        assert ("chat.tool_mode" if takes_tools else "chat.tools: must be empty") in (await call.details())


async def test_tools_that_the_template_does_not_list_are_refused_unless_they_are_hidden(service: Service) -> None:
    chat = tokenizer_pb2.Chat(messages=[{"role": tokenizer_pb2.ROLE_USER, "content": "hi"}], tools=[{"name": "look"}])
    call = service.stub.Generate(Request(chat=chat))
    assert await error_of(call) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert "chat.tools: must be empty: the model's chat template takes no tools" in (await call.details())
    chat.tool_mode = tokenizer_pb2.TOOL_MODE_NONE
    call, _ = await submit(service, Request(chat=chat))
    call.cancel()


async def test_stopping_the_service_ends_all_choices_with_their_call(service: Service) -> None:
    call, [sent] = await submit(service, Request(text="x", sampling={"n": 2}))
    service.stop.set()
    await service.until_health_is(health_pb2.HealthCheckResponse.NOT_SERVING)
    for number in range(2):
        handle = sent.handle + number
        service.peer.send(Row(handle, 0, [70]), ends=[make_end(handle, MAX_TOKENS, 1)])
    assert len((await read_answer(call)).choices) == 2
    assert await asyncio.wait_for(service.task, PATIENCE_S) == 0


EXACT = Request(text="The fox", determinism="DETERMINISM_EXACT")
UNAVAILABLE = (grpc.StatusCode.FAILED_PRECONDITION, "EXACT_UNAVAILABLE")


async def test_exactness_is_refused_if_the_cell_cannot_provide_it(service: Service) -> None:
    assert await error_of(service.stub.Generate(EXACT)) == UNAVAILABLE
    assert not (await service.stub.GetModelInfo(tokenizer_pb2.GetModelInfoRequest())).has_exact_determinism
    for determinism in ("DETERMINISM_UNSPECIFIED", "DETERMINISM_ORDINARY"):
        call, [sent] = await submit(service, Request(text="The fox", determinism=determinism))
        assert sent.determinism == common_pb2.DETERMINISM_ORDINARY
        call.cancel()


async def test_an_exact_request_continues_only_in_cells_with_the_same_fingerprint(
    model_dir: Path, tmp_path: Path
) -> None:
    async with run_tokenizer_service(model_dir, tmp_path, exact_fingerprint="a") as service:
        await service.link()
        assert (await service.stub.GetModelInfo(tokenizer_pb2.GetModelInfoRequest())).has_exact_determinism
        call, [sent] = await submit(service, EXACT)
        assert sent.determinism == common_pb2.DETERMINISM_EXACT
        for fingerprint in ("a", "b"):
            service.peer.cell_info.exact_fingerprint = fingerprint
            service.peer.end_stream()
            service.peer.attach()
            if fingerprint == "a":
                assert (await service.peer.submits.get()).attempt == 2
        assert await error_of(call) == UNAVAILABLE


async def test_each_choice_reports_its_recoveries(model_dir: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with run_tokenizer_service(model_dir, tmp_path, exact_fingerprint="a") as service:
        await service.link()
        call, [sent] = await submit(service, Request(text="The fox", sampling={"n": 2}, stop=[" lazy d"]))
        service.peer.send(ends=[make_end(sent.handle, MAX_TOKENS, 0)])
        service.peer.end_stream()
        service.peer.attach()
        assert (await service.peer.submits.get()).num_earlier_resumes == 1
        service.peer.send(Row(sent.handle + 1, 0, tokenizer.encode("the lazy dog").ids))
        undisturbed, resumed = [choice.finish for choice in (await read_answer(call)).choices.values()]
        assert undisturbed is not None
        assert not undisturbed.HasField("recovery")
        assert resumed is not None
        # Only the replica knows of the end by a stop string.
        assert resumed.recovery == common_pb2.Recovery(resume_count=1, resume_exact=True)


async def test_a_choice_reports_resumes_that_a_dead_scheduler_had_counted(model_dir: Path, tmp_path: Path) -> None:
    async with run_tokenizer_service(model_dir, tmp_path) as service:
        await service.link()
        call, [sent] = await submit(service, Request(text="The fox", sampling={"n": 2}))
        resume = exchange_pb2.ChoiceResume(handle=sent.handle, num_resumes=2)
        service.peer.send_outputs(exchange_pb2.Outputs(resumes=[resume]))
        service.peer.end_stream()
        service.peer.attach()
        num_earlier = (await service.peer.submits.get()).num_earlier_resumes
        handles = (sent.handle, sent.handle + 1)
        service.peer.send(ends=[make_end(handle, MAX_TOKENS, 0, num_resumes=num_earlier) for handle in handles])
        finishes = [choice.finish for choice in (await read_answer(call)).choices.values()]
        assert [finish.recovery.resume_count for finish in finishes if finish is not None] == [3, 1]


async def test_a_choice_ended_by_a_stop_string_reports_its_cells_resumes(
    model_dir: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with run_tokenizer_service(model_dir, tmp_path) as service:
        await service.link()
        call, [sent] = await submit(service, Request(text="The fox", stop=[" lazy d"]))
        service.peer.send_outputs(
            exchange_pb2.Outputs(resumes=[exchange_pb2.ChoiceResume(handle=sent.handle, num_resumes=2)])
        )
        service.peer.send(Row(sent.handle, 0, tokenizer.encode("the lazy dog").ids))
        [choice] = (await read_answer(call)).choices.values()
        assert choice.finish is not None
        assert choice.finish.reason == common_pb2.FINISH_REASON_STOP_STRING
        assert choice.finish.recovery == common_pb2.Recovery(resume_count=2)
