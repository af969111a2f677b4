"""The tokenizer service over real gRPC, with its scheduler played by the test."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from tokenizers import Tokenizer

from lockstep.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from shared.errors import DeadlinePassedError, DuplicateRequestError, NumericError
from shared.model_files.model_dir import model_digest
from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.clients.narrow_channel import WINDOW_BYTES, open_narrow_channel
from tests.support.models.tiny_tokenizer import (
    CHATML,
    CONTEXT_LENGTH,
    IM_END_ID,
    IM_START_ID,
    VOCABULARY_SIZE,
    write_tiny_tokenizer,
)
from tests.support.tokenizer.exchange_peer import Row, make_end, make_error_end, make_outputs, read_column
from tests.support.tokenizer.tokenizer_service import NUM_POOL_TOKENS, Service, read_rest, run_tokenizer_service

HELLO = tokenizer_pb2.GenerateRequest(text="The fox")
# More tokens than fit in a narrow window.
LARGE = [70] * (WINDOW_BYTES + 50)
EOS, MAX_TOKENS = common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_MAX_TOKENS


def violations(error: grpc.aio.AioRpcError) -> dict[str, str]:
    """The reason for each refused field."""
    bad_request = error_details_pb2.BadRequest()
    for detail in status_from_rpc_error(error).details:
        if detail.Unpack(bad_request):
            return {violation.field: violation.reason for violation in bad_request.field_violations}
    return {}


async def refusal(call: Any) -> tuple[grpc.StatusCode, str | None, dict[str, str]]:
    """The status, reason and violations of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_rest(call)
    return caught.value.code(), reason_of(status_from_rpc_error(caught.value)), violations(caught.value)


async def test_an_answer_streams_from_the_cell_to_the_client(service: Service, tokenizer: Tokenizer) -> None:
    call, submit = await service.begin(HELLO)
    ids = tokenizer.encode("jumps 😀 你好").ids
    for index, token_id in enumerate(ids):
        service.peer.send(Row(submit.handle, index, [token_id], num_cached_tokens=1))
    end = make_end(submit.handle, EOS, len(ids) + 1, stop_token_id=IM_END_ID)
    service.peer.send(Row(submit.handle, len(ids), [IM_END_ID]), ends=[end])
    text, token_ids, finish = await read_rest(call)
    assert (text, token_ids) == ("jumps 😀 你好", [*ids, IM_END_ID])
    assert (finish.reason, finish.stop_token_id) == (EOS, IM_END_ID)
    assert read_column(submit.prompt_token_ids) == tokenizer.encode("The fox").ids
    num_prompt_tokens = len(tokenizer.encode("The fox").ids)
    assert finish.usage == common_pb2.Usage(
        num_prompt_tokens=num_prompt_tokens, num_completion_tokens=len(ids) + 1, num_cached_tokens=1
    )
    assert finish.HasField("ttft")
    assert finish.HasField("mean_tpot")


async def test_the_first_response_shows_the_resolved_request(service: Service, tokenizer: Tokenizer) -> None:
    call = service.stub.Generate(HELLO)
    accepted = (await call.read()).accepted
    submit = await service.peer.submits.get()
    num_prompt_tokens = len(tokenizer.encode("The fox").ids)
    assert (accepted.model, accepted.num_prompt_tokens) == ("tiny", num_prompt_tokens)
    assert accepted.max_tokens == submit.max_tokens == NUM_POOL_TOKENS - num_prompt_tokens
    assert accepted.request_id == submit.request_id != ""
    assert accepted.seed == submit.seed
    assert (submit.temperature, submit.top_k, submit.top_p, submit.ignore_eos) == (1.0, 0, 1.0, False)
    call.cancel()


async def test_given_parameters_reach_the_cell(service: Service) -> None:
    sampling = common_pb2.SamplingParams(
        max_tokens=5, temperature=0, seed=7, stop_token_ids=[9], stop_token_sequences=[{"token_ids": [1, 2]}]
    )
    call, submit = await service.begin(
        tokenizer_pb2.GenerateRequest(request_id="mine", tokens={"token_ids": [5, 6]}, sampling=sampling)
    )
    assert (submit.request_id, submit.max_tokens, submit.temperature, submit.seed) == ("mine", 5, 0, 7)
    assert read_column(submit.prompt_token_ids) == [5, 6]
    assert read_column(submit.stop_token_ids) == [9]
    assert [read_column(sequence) for sequence in submit.stop_token_sequences] == [[1, 2]]
    call.cancel()


async def test_a_conversation_is_rendered_for_the_cell(service: Service, tokenizer: Tokenizer) -> None:
    chat = tokenizer_pb2.Chat(messages=[{"role": tokenizer_pb2.ROLE_USER, "content": "The fox"}])
    call, submit = await service.begin(tokenizer_pb2.GenerateRequest(chat=chat))
    rendered = await service.stub.RenderChat(tokenizer_pb2.RenderChatRequest(chat=chat))
    assert rendered.text.endswith("<|im_start|>user\nThe fox<|im_end|>\n<|im_start|>assistant\n")
    assert read_column(submit.prompt_token_ids) == list(rendered.token_ids)
    assert list(rendered.token_ids) == tokenizer.encode(rendered.text, add_special_tokens=False).ids
    assert rendered.token_ids[0] == IM_START_ID
    call.cancel()


async def test_a_stop_string_ends_the_stream_at_once_and_the_cell_is_notified(
    service: Service, tokenizer: Tokenizer
) -> None:
    call, submit = await service.begin(tokenizer_pb2.GenerateRequest(text="x", stop=[" lazy d"]))
    ids = tokenizer.encode("the lazy dog sleeps").ids
    for index, token_id in enumerate(ids):
        service.peer.send(Row(submit.handle, index, [token_id]))
    text, token_ids, finish = await read_rest(call)
    stop_at = await service.peer.stop_ats.get()
    assert text == "the"
    assert (finish.reason, finish.stop_string) == (common_pb2.FINISH_REASON_STOP_STRING, " lazy d")
    assert tokenizer.decode(token_ids).startswith("the lazy d")
    assert not tokenizer.decode(token_ids[:-1]).startswith("the lazy d")
    assert finish.usage.num_completion_tokens == len(token_ids) == stop_at.num_tokens
    assert stop_at.handle == submit.handle
    service.peer.send(ends=[make_end(submit.handle, common_pb2.FINISH_REASON_STOP_STRING, stop_at.num_tokens)])
    # Nothing more is sent for it: the next message to the cell is the next request.
    num_messages = service.peer.num_messages
    other, _ = await service.begin(HELLO)
    assert service.peer.num_messages == num_messages + 1
    assert service.peer.aborts.empty()
    other.cancel()


async def test_cancelling_a_call_aborts_only_its_request(service: Service) -> None:
    call, submit = await service.begin(tokenizer_pb2.GenerateRequest(text="x", request_id="again"))
    neighbour, other = await service.begin(HELLO)
    call.cancel()
    assert await service.peer.aborts.get() == submit.handle
    again, _ = await service.begin(tokenizer_pb2.GenerateRequest(text="x", request_id="again"))
    service.peer.send(Row(other.handle, 0, [70]), ends=[make_end(other.handle, MAX_TOKENS, 1)])
    _, token_ids, _ = await read_rest(neighbour)
    assert token_ids == [70]
    again.cancel()


async def test_a_passed_deadline_aborts_the_request(service: Service) -> None:
    call = service.stub.Generate(HELLO, timeout=3)
    submit = await service.peer.submits.get()
    assert await service.peer.aborts.get() == submit.handle
    assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_an_error_of_the_cell_reaches_the_client_unchanged(service: Service) -> None:
    call, submit = await service.begin(HELLO)
    end = make_error_end(submit.handle, NumericError("the logits were not finite", step=4))
    service.peer.send(Row(submit.handle, 0, [70]), ends=[end])
    assert list((await call.read()).token_ids) == [70]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert status_from_rpc_error(caught.value) == end.error


async def test_the_cells_refusal_of_a_duplicate_reaches_the_client(service: Service) -> None:
    call, submit = await service.begin(HELLO)
    service.peer.send(ends=[make_error_end(submit.handle, DuplicateRequestError("in flight"))])
    assert await refusal(call) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST", {})


async def test_an_id_in_flight_is_refused(service: Service) -> None:
    request = tokenizer_pb2.GenerateRequest(text="x", request_id="same")
    first, _ = await service.begin(request)
    assert await refusal(service.stub.Generate(request)) == (
        grpc.StatusCode.ALREADY_EXISTS,
        "DUPLICATE_REQUEST",
        {},
    )
    first.cancel()


async def test_a_lost_scheduler_pauses_a_call_and_the_next_one_continues(
    service: Service, tokenizer: Tokenizer
) -> None:
    request = tokenizer_pb2.GenerateRequest(text="x", stop=[" lazy d"], priority="PRIORITY_LOW", cache_salt="salt")
    call, first = await service.begin(request)
    ids = tokenizer.encode("the lazy dog sleeps").ids
    service.peer.send(Row(first.handle, 0, ids[:3], num_cached_tokens=1))
    received = await call.read()
    service.peer.end_stream()
    await service.until_health_is(health_pb2.HealthCheckResponse.NOT_SERVING)
    await service.link()
    second = await service.peer.submits.get()
    assert (second.attempt, read_column(second.choices_so_far[0].token_ids)) == (2, ids[:3])
    assert second.num_earlier_resumes == 1
    for changed in ("attempt", "choices_so_far", "age", "num_earlier_resumes"):
        first.ClearField(changed)
        second.ClearField(changed)
    assert second == first
    assert (first.priority, first.cache_salt) == (common_pb2.PRIORITY_LOW, b"salt")
    service.peer.send(Row(second.handle, 3, ids[3:]))
    text, token_ids, finish = await read_rest(call)
    assert (received.text + text, finish.stop_string) == ("the", " lazy d")
    all_ids = [*received.token_ids, *token_ids]
    assert all_ids == ids[: len(all_ids)]
    # The stop counts the tokens of both attempts.
    assert (await service.peer.stop_ats.get()).num_tokens == finish.usage.num_completion_tokens == len(all_ids)
    assert finish.usage.num_cached_tokens == 1
    assert finish.recovery == common_pb2.Recovery(resume_count=1, resume_exact=False)


async def test_a_scheduler_that_does_not_return_ends_its_requests(model_dir: Path, tmp_path: Path) -> None:
    async with run_tokenizer_service(model_dir, tmp_path, scheduler_lost_s=0.05) as service:
        await service.link()
        call, _ = await service.begin(HELLO)
        service.peer.end_stream()
        assert await refusal(call) == (grpc.StatusCode.UNAVAILABLE, "SCHEDULER_LOST", {})
        await service.link()
        again, _ = await service.begin(HELLO)
        again.cancel()


async def test_a_next_scheduler_with_another_model_ends_the_requests(service: Service) -> None:
    call, _ = await service.begin(HELLO)
    service.peer.cell_info.model_digest = "other"
    service.peer.end_stream()
    service.peer.attach()
    assert await refusal(call) == (grpc.StatusCode.UNAVAILABLE, "MODEL_CHANGED", {})


async def test_malformed_outputs_break_the_link(service: Service) -> None:
    call, submit = await service.begin(HELLO)
    outputs = make_outputs(Row(submit.handle, 0, [70]))
    outputs.counts = b""
    service.peer.send_outputs(outputs)
    await service.until_health_is(health_pb2.HealthCheckResponse.NOT_SERVING)
    await service.link()
    again = await service.peer.submits.get()
    service.peer.send(Row(again.handle, 0, [70]), ends=[make_end(again.handle, MAX_TOKENS, 1)])
    _, token_ids, _ = await read_rest(call)
    assert token_ids == [70]


async def test_a_client_that_stops_reading_loses_its_answer_and_its_neighbour_does_not(
    model_dir: Path, tmp_path: Path
) -> None:
    async with (
        run_tokenizer_service(model_dir, tmp_path, max_unread_s=0.2) as service,
        open_narrow_channel(f"unix:{tmp_path}/tokenizer.sock") as channel,
    ):
        await service.link()
        call = tokenizer_pb2_grpc.TokenizerServiceStub(channel).Generate(HELLO)
        submit = await service.peer.submits.get()
        neighbour, other = await service.begin(HELLO)
        service.peer.send(Row(submit.handle, 0, LARGE), Row(other.handle, 0, [70]))
        assert await service.peer.aborts.get() == submit.handle
        service.peer.send(Row(other.handle, 1, [71]), ends=[make_end(other.handle, MAX_TOKENS, 2)])
        _, token_ids, _ = await read_rest(neighbour)
        assert token_ids == [70, 71]
        # Once it reads again, it gets the error.
        assert await refusal(call) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT_TOO_SLOW", {})


async def test_tokens_held_back_by_a_blocked_write_are_sent_in_one_response(service: Service, tmp_path: Path) -> None:
    async def answer_a_neighbour() -> None:
        """All outputs sent before have arrived afterwards."""
        neighbour, other = await service.begin(HELLO)
        service.peer.send(Row(other.handle, 0, [70]), ends=[make_end(other.handle, MAX_TOKENS, 1)])
        await read_rest(neighbour)

    async with open_narrow_channel(f"unix:{tmp_path}/tokenizer.sock") as channel:
        call = tokenizer_pb2_grpc.TokenizerServiceStub(channel).Generate(HELLO)
        submit = await service.peer.submits.get()
        service.peer.send(Row(submit.handle, 0, LARGE))
        await answer_a_neighbour()
        for index in range(40):
            service.peer.send(Row(submit.handle, len(LARGE) + index, [71]))
        service.peer.send(ends=[make_end(submit.handle, MAX_TOKENS, len(LARGE) + 40)])
        await answer_a_neighbour()
        responses = [response async for response in call]
    assert [len(response.token_ids) for response in responses] == [0, len(LARGE), 40]
    assert responses[-1].HasField("finish")


async def test_the_callers_deadline_reaches_the_cell(service: Service) -> None:
    call = service.stub.Generate(HELLO, timeout=50)
    submit = await service.peer.submits.get()
    # The deadline is rounded up a little on the wire.
    assert 40 < submit.time_left.ToSeconds() < 60
    call.cancel()
    call, submit = await service.begin(HELLO)
    assert not submit.HasField("time_left")
    assert submit.age.ToSeconds() < 40
    call.cancel()


async def test_a_deadline_that_passed_in_the_cell_reaches_the_client(service: Service) -> None:
    call, submit = await service.begin(HELLO)
    service.peer.send(ends=[make_error_end(submit.handle, DeadlinePassedError("passed"))])
    assert await refusal(call) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_PASSED", {})


@pytest.mark.parametrize(
    ("method", "request_message"),
    [
        ("Tokenize", tokenizer_pb2.TokenizeRequest()),
        ("Detokenize", tokenizer_pb2.DetokenizeRequest()),
        ("RenderChat", tokenizer_pb2.RenderChatRequest()),
        ("GetModelInfo", tokenizer_pb2.GetModelInfoRequest()),
    ],
)
async def test_without_a_cell_nothing_is_served(
    model_dir: Path, tmp_path: Path, method: str, request_message: Any
) -> None:
    async with run_tokenizer_service(model_dir, tmp_path) as service:
        await service.until_health_is(health_pb2.HealthCheckResponse.NOT_SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(service.stub, method)(request_message)
        assert reason_of(status_from_rpc_error(caught.value)) == "NOT_READY"


async def test_a_cell_of_another_model_is_refused(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_tokenizer_service(model_dir, tmp_path, model_digest_of_cell="other") as service:
        await service.until_health_is(health_pb2.HealthCheckResponse.NOT_SERVING)
        service.peer.attach()
        await service.peer.ended_streams.get()
        assert await refusal(service.stub.Generate(HELLO)) == (grpc.StatusCode.UNAVAILABLE, "NOT_READY", {})
    assert "the cell serves another model" in str([vars(record) for record in caplog.records])


BIG = "x" * (3 * 1024 * 1024 + 1)
LONG = "The fox " * 50_000


@pytest.mark.parametrize(
    ("request_message", "expected"),
    [
        (
            tokenizer_pb2.GenerateRequest(text=""),
            (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", {"text": "PROMPT_EMPTY"}),
        ),
        (
            tokenizer_pb2.GenerateRequest(tokens={"token_ids": [5, VOCABULARY_SIZE]}),
            (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", {"tokens.token_ids[1]": "TOKEN_ID_OUT_OF_RANGE"}),
        ),
        (
            tokenizer_pb2.GenerateRequest(tokens={"token_ids": [5] * 4_000_000}),
            (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG", {}),
        ),
        (
            tokenizer_pb2.GenerateRequest(text="1" * 256),
            (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG", {}),
        ),
        (
            tokenizer_pb2.GenerateRequest(text="12", sampling={"max_tokens": 255}),
            (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_EXCEEDED", {}),
        ),
        (
            tokenizer_pb2.GenerateRequest(text="12", sampling={"max_tokens": NUM_POOL_TOKENS - 1}),
            (grpc.StatusCode.FAILED_PRECONDITION, "KV_CAPACITY_EXCEEDED", {}),
        ),
        (tokenizer_pb2.GenerateRequest(text=BIG), (grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_TOO_LARGE", {})),
        (tokenizer_pb2.GenerateRequest(text=BIG + BIG), (grpc.StatusCode.RESOURCE_EXHAUSTED, None, {})),
        (
            tokenizer_pb2.GenerateRequest(text="x", model="../../etc/passwd"),
            (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", {}),
        ),
        (
            tokenizer_pb2.GenerateRequest(
                text="x", request_id="a b", stop=[""], sampling={"temperature": float("nan"), "max_tokens": 0}
            ),
            (
                grpc.StatusCode.INVALID_ARGUMENT,
                "INVALID_REQUEST",
                {
                    "request_id": "OUT_OF_RANGE",
                    "stop[0]": "OUT_OF_RANGE",
                    "sampling.max_tokens": "OUT_OF_RANGE",
                    "sampling.temperature": "NOT_FINITE",
                },
            ),
        ),
    ],
    ids=["empty", "id", "4M ids", "long", "context", "pool", "3 MiB", "4 MiB", "model", "several"],
)
async def test_a_bad_request_is_refused_and_its_neighbour_is_unaffected(
    service: Service, request_message: tokenizer_pb2.GenerateRequest, expected: Any
) -> None:
    neighbour, submit = await service.begin(HELLO)
    assert await refusal(service.stub.Generate(request_message)) == expected
    assert service.peer.submits.empty()
    service.peer.send(Row(submit.handle, 0, [70]), ends=[make_end(submit.handle, MAX_TOKENS, 1)])
    _, token_ids, _ = await read_rest(neighbour)
    assert token_ids == [70]


async def test_text_is_converted_to_ids_and_back(service: Service, tokenizer: Tokenizer) -> None:
    text = "The fox 123 你好 😀"
    tokenized = await service.stub.Tokenize(tokenizer_pb2.TokenizeRequest(text=text))
    assert list(tokenized.token_ids) == tokenizer.encode(text).ids
    ids = [IM_START_ID, *tokenized.token_ids, IM_END_ID]
    detokenized = await service.stub.Detokenize(tokenizer_pb2.DetokenizeRequest(token_ids=ids))
    assert detokenized.text == text
    assert (await service.stub.Tokenize(tokenizer_pb2.TokenizeRequest())).token_ids == []
    assert (await service.stub.Detokenize(tokenizer_pb2.DetokenizeRequest())).text == ""


@pytest.mark.parametrize(
    ("method", "request_message", "reason", "fields"),
    [
        ("Tokenize", tokenizer_pb2.TokenizeRequest(text=BIG), "REQUEST_TOO_LARGE", {}),
        (
            "Detokenize",
            tokenizer_pb2.DetokenizeRequest(token_ids=[1, 2**32 - 1]),
            "INVALID_REQUEST",
            {"token_ids[1]": "TOKEN_ID_OUT_OF_RANGE"},
        ),
        ("Tokenize", tokenizer_pb2.TokenizeRequest(text=LONG), "PROMPT_TOO_LONG", {}),
        (
            "Detokenize",
            tokenizer_pb2.DetokenizeRequest(token_ids=[70] * (CONTEXT_LENGTH + 1)),
            "INVALID_REQUEST",
            {"token_ids": "OUT_OF_RANGE"},
        ),
        (
            "RenderChat",
            tokenizer_pb2.RenderChatRequest(chat={"messages": [{"role": 2, "content": LONG}]}),
            "PROMPT_TOO_LONG",
            {},
        ),
        ("RenderChat", tokenizer_pb2.RenderChatRequest(), "INVALID_REQUEST", {"chat.messages": "OUT_OF_RANGE"}),
        (
            "RenderChat",
            tokenizer_pb2.RenderChatRequest(chat={"messages": [{"role": 9, "content": "x"}]}),
            "INVALID_REQUEST",
            {"chat.messages[0].role": "OUT_OF_RANGE"},
        ),
    ],
)
async def test_a_bad_unary_request_is_refused(
    service: Service, method: str, request_message: Any, reason: str, fields: dict[str, str]
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(service.stub, method)(request_message)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(status_from_rpc_error(caught.value)) == reason
    assert violations(caught.value) == fields


async def test_the_model_and_its_limits_are_reported(service: Service, model_dir: Path) -> None:
    info = await service.stub.GetModelInfo(tokenizer_pb2.GetModelInfoRequest())
    assert info == tokenizer_pb2.GetModelInfoResponse(
        model="tiny",
        model_digest=model_digest(model_dir),
        context_length=256,
        logits_width=VOCABULARY_SIZE,
        eos_token_ids=[IM_END_ID],
        num_pool_tokens=NUM_POOL_TOKENS,
        has_chat_template=True,
    )


async def test_the_parsers_of_replies_are_named(
    tools_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with run_tokenizer_service(tools_model_dir, tmp_path, reply_parser="harmony") as service:
            await service.link()
            info = await service.stub.GetModelInfo(tokenizer_pb2.GetModelInfoRequest())
    assert (info.tool_parser, info.reasoning_parser) == ("harmony", "harmony")
    first = next(record for record in caplog.records if record.__dict__.get("model") == "tiny-tools")
    assert (first.__dict__["tool_parser"], first.__dict__["reasoning_parser"]) == ("harmony", "harmony")


async def test_generic_tools_are_in_the_prompt_and_said(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chat = tokenizer_pb2.Chat(
        messages=[{"role": tokenizer_pb2.ROLE_USER, "content": "Hi"}], tools=[{"name": "look", "parameters": "{}"}]
    )
    digests = []
    for generic_tools in (False, True):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            async with run_tokenizer_service(model_dir, tmp_path, generic_tools=generic_tools) as service:
                await service.link()
                info = await service.stub.GetModelInfo(tokenizer_pb2.GetModelInfoRequest())
                # The prompt with tools is longer than the small model's context.
                why = "the text has at least .* tokens" if generic_tools else "takes no tools"
                with pytest.raises(grpc.aio.AioRpcError, match=why):
                    await service.stub.RenderChat(tokenizer_pb2.RenderChatRequest(chat=chat))
        read = next(record for record in caplog.records if record.getMessage() == "model read").__dict__
        assert read["tool_parser"] == info.tool_parser == ("generic" if generic_tools else "")
        digests.append((info.model_digest, read["chat_template"]))
    (model, template), (same_model, other_template) = digests
    assert (model == same_model, template == other_template) == (True, False)


async def test_a_model_of_which_only_the_text_is_served_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = {"model_type": "qwen3_vl_text", "vocab_size": VOCABULARY_SIZE, "max_position_embeddings": 256}
    config = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tiny_tokenizer(tmp_path)
    with caplog.at_level(logging.INFO):
        async with run_tokenizer_service(tmp_path, tmp_path) as service:
            await service.link()
            assert (await service.stub.GetModelInfo(tokenizer_pb2.GetModelInfoRequest())).serves_text_only
    assert [record.__dict__.get("serves_text_only") for record in caplog.records if record.message == "model read"] == [
        True
    ]


async def test_a_model_without_a_template_serves_text_and_refuses_chat(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, chat_template=None)
    async with run_tokenizer_service(tmp_path, tmp_path) as service:
        await service.link()
        chat = tokenizer_pb2.Chat(messages=[{"role": tokenizer_pb2.ROLE_USER, "content": "x"}])
        assert await refusal(service.stub.Generate(tokenizer_pb2.GenerateRequest(chat=chat))) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "TEMPLATE_FAILED",
            {},
        )
        assert not (await service.stub.GetModelInfo(tokenizer_pb2.GetModelInfoRequest())).has_chat_template
        call, _ = await service.begin(HELLO)
        call.cancel()


async def test_messages_that_the_template_refuses_are_an_invalid_request(tmp_path: Path) -> None:
    refuses_two = "{% if messages | length > 1 %}{{ raise_exception('only one') }}{% endif %}" + CHATML
    write_tiny_tokenizer(tmp_path, chat_template=refuses_two)
    async with run_tokenizer_service(tmp_path, tmp_path) as service:
        await service.link()
        chat = tokenizer_pb2.Chat(messages=[{"role": tokenizer_pb2.ROLE_USER, "content": "x"}] * 2)
        assert await refusal(service.stub.Generate(tokenizer_pb2.GenerateRequest(chat=chat))) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_REQUEST",
            {"chat.messages": "TEMPLATE_FAILED"},
        )
        with pytest.raises(grpc.aio.AioRpcError, match="the chat template rejected the messages: only one"):
            await service.stub.RenderChat(tokenizer_pb2.RenderChatRequest(chat=chat))


async def test_a_stopping_service_finishes_its_streams_and_accepts_no_new_ones(service: Service) -> None:
    call, submit = await service.begin(HELLO)
    service.stop.set()
    await service.until_health_is(health_pb2.HealthCheckResponse.NOT_SERVING)
    assert await refusal(service.stub.Generate(HELLO)) == (grpc.StatusCode.UNAVAILABLE, "DRAINING", {})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.stub.GetModelInfo(tokenizer_pb2.GetModelInfoRequest())
    assert reason_of(status_from_rpc_error(caught.value)) == "DRAINING"
    service.peer.send(Row(submit.handle, 0, [70]), ends=[make_end(submit.handle, MAX_TOKENS, 1)])
    _, token_ids, finish = await read_rest(call)
    assert (token_ids, finish.reason) == ([70], MAX_TOKENS)
    assert await service.task == 0


async def test_a_request_is_logged_once_without_its_text(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    request = tokenizer_pb2.GenerateRequest(text="canary prompt", request_id="logged", stop=["canary stop"])
    call, submit = await service.begin(request)
    service.peer.send(Row(submit.handle, 0, [70], num_cached_tokens=3), ends=[make_end(submit.handle, MAX_TOKENS, 1)])
    await read_rest(call)
    [record] = [vars(record) for record in caplog.records if vars(record).get("request_id") == "logged"]
    assert (record["outcome"], record["num_completion_tokens"], record["num_cached_tokens"]) == ("MAX_TOKENS", 1, 3)
    assert {"num_prompt_tokens", "ttft_ms", "total_ms"} <= record.keys()
    assert "canary" not in str([vars(record) for record in caplog.records])
