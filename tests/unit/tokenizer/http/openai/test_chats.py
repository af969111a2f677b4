"""Chats over real HTTP, with the scheduler played by the test."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from tokenizers import Tokenizer

from lockstep.internal.v1 import exchange_pb2
from lockstep.v1 import common_pb2, tokenizer_pb2
from shared.errors import AbortedByCallError
from tests.support.clients.client import read_answer
from tests.support.models.tiny_tokenizer import CONTEXT_LENGTH, IM_END_ID
from tests.support.tokenizer.exchange_peer import Row, make_end, make_error_end, read_column
from tests.support.tokenizer.http_client import MAX_TOKENS, MESSAGES, HttpService
from tests.support.tokenizer.tokenizer_service import NUM_POOL_TOKENS

CHAT = "/v1/chat/completions"
EOS = common_pb2.FINISH_REASON_EOS


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": MESSAGES, **fields}


async def test_a_whole_answer_has_openais_form(http: HttpService, tokenizer: Tokenizer) -> None:
    task, [sent] = await http.begin(CHAT, chat(seed=-2, max_completion_tokens=9), headers={"X-Request-Id": "mine"})
    assert (sent.seed, sent.max_tokens) == (2**64 - 2, 9)
    prompt_length = len(read_column(sent.prompt_token_ids))
    ids = [*tokenizer.encode("The fox").ids, IM_END_ID]
    http.send(sent, ids, EOS)
    answer = await task
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    assert answer.headers["X-Request-Id"] == "mine"
    value = answer.value
    assert value["id"] == f"chatcmpl-{sent.request_id}"
    assert (value["object"], value["model"]) == ("chat.completion", "tiny")
    assert value["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "The fox", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert value["usage"] == {
        "prompt_tokens": prompt_length,
        "completion_tokens": len(ids),
        "total_tokens": prompt_length + len(ids),
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert value["lockstep"] == {"seed": 2**64 - 2, "resume_count": 0, "resume_exact": True}
    assert value["system_fingerprint"].startswith("fp_")


async def test_a_stream_has_a_role_texts_one_finish_and_usage(http: HttpService, tokenizer: Tokenizer) -> None:
    options = {"include_usage": True}
    task, [sent] = await http.begin(CHAT, chat(stream=True, n=2, stream_options=options))
    ids = tokenizer.encode("jumps over").ids
    for number in range(2):
        http.service.peer.send(Row(sent.handle + number, 0, ids[:1]))
    http.service.peer.send(
        *(Row(sent.handle + number, 1, ids[1:]) for number in range(2)),
        ends=[make_end(sent.handle + number, MAX_TOKENS, len(ids)) for number in range(2)],
    )
    answer = await task
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream")
    *pieces, last = answer.pieces
    for number in range(2):
        choices = [piece["choices"][0] for piece in pieces if piece["choices"][0]["index"] == number]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "jumps over"
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert {piece["id"] for piece in pieces} == {last["id"]} == {f"chatcmpl-{sent.request_id}"}
    assert all(piece["usage"] is None for piece in pieces)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 2 * len(ids))
    assert set(last) >= {"system_fingerprint", "lockstep"}


async def test_without_usage_the_last_piece_tells_how_the_answer_came_about(http: HttpService) -> None:
    answer = await http.answer(CHAT, chat(stream=True, seed=7), [70, 71])
    *pieces, last = answer.pieces
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["lockstep"] == {"seed": 7, "resume_count": 0, "resume_exact": True}
    assert all("usage" not in piece and "lockstep" not in piece for piece in pieces)


async def test_without_max_tokens_a_chat_may_fill_the_room(http: HttpService) -> None:
    task, [sent] = await http.begin(CHAT, chat())
    assert sent.max_tokens == NUM_POOL_TOKENS - len(read_column(sent.prompt_token_ids))
    http.send(sent, [70])
    assert (await task).value["choices"][0]["finish_reason"] == "length"


async def test_a_prompt_beyond_the_context_is_a_status_even_of_a_stream(http: HttpService) -> None:
    answer = await http.post(CHAT, chat(stream=True, messages=[{"role": "user", "content": "x " * CONTEXT_LENGTH}]))
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    # Clients and proxies know the error by these words: litellm by the first, LangChain by the last.
    words = f"This model's maximum context length is {CONTEXT_LENGTH} tokens, the prompt is too long: "
    assert answer.error["message"].startswith(words)
    assert answer.error["param"] == "messages"


async def test_more_max_tokens_than_the_context_tell_its_length_in_the_same_words(http: HttpService) -> None:
    answer = await http.post(CHAT, chat(max_tokens=CONTEXT_LENGTH))
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert answer.error["message"].startswith(f"This model's maximum context length is {CONTEXT_LENGTH} tokens: ")


async def test_an_abort_by_another_call_is_a_status(http: HttpService) -> None:
    task, [sent] = await http.begin(CHAT, chat())
    http.service.peer.send(ends=[make_error_end(sent.handle, AbortedByCallError("aborted"))])
    answer = await task
    assert (answer.status, answer.error["code"]) == (499, "aborted_by_call")


async def test_a_large_body_is_read_too(http: HttpService) -> None:
    answer = await http.post(CHAT, chat(messages=[{"role": "user", "content": "x" * 200_000}], user="me"))
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


async def test_http_and_grpc_give_the_same_answer(http: HttpService, tokenizer: Tokenizer) -> None:
    """The same request, streamed and not, by both doors."""
    message = tokenizer_pb2.GenerateRequest(
        chat={"messages": [{"role": tokenizer_pb2.ROLE_USER, "content": "hi"}]},
        sampling={"seed": 3, "max_tokens": 20, "temperature": 0.5},
        stop=["lazy"],
    )
    body = chat(seed=3, max_tokens=20, temperature=0.5, stop="lazy", return_token_ids=True)
    ids = tokenizer.encode("over the lazy dog").ids

    def reply(sent: exchange_pb2.Submit) -> exchange_pb2.Submit:
        for index, token_id in enumerate(ids):
            http.service.peer.send(Row(sent.handle, index, [token_id]))
        return sent

    call = http.service.stub.Generate(message)
    submits = [reply(await http.service.peer.submits.get())]
    [expected] = (await read_answer(call)).choices.values()
    whole, [sent] = await http.begin(CHAT, body)
    submits.append(reply(sent))
    streamed, [sent] = await http.begin(CHAT, {**body, "stream": True})
    submits.append(reply(sent))
    for submit in submits:
        submit.ClearField("age")
        submit.ClearField("request_id")
        submit.ClearField("handle")
    assert submits[0] == submits[1] == submits[2]
    [choice] = (await whole).value["choices"]
    pieces = [piece["choices"][0] for piece in (await streamed).pieces]
    text = "".join(piece["delta"].get("content", "") for piece in pieces)
    assert choice["message"]["content"] == text == expected.text
    streamed_ids = [token_id for piece in pieces for token_id in piece.get("token_ids", [])]
    assert choice["token_ids"] == streamed_ids == expected.token_ids
    assert choice["stop_reason"] == pieces[-1]["stop_reason"] == "lazy"


async def test_every_piece_may_have_the_usage_so_far(http: HttpService) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    task, [sent] = await http.begin(CHAT, chat(stream=True, stream_options=options))
    http.service.peer.send(Row(sent.handle, 0, [70]))
    http.service.peer.send(Row(sent.handle, 1, [71, 72]), ends=[make_end(sent.handle, MAX_TOKENS, 3)])
    pieces = (await task).pieces
    counts = [piece["usage"]["completion_tokens"] for piece in pieces]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    assert len({piece["usage"]["prompt_tokens"] for piece in pieces}) == 1


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_resumes_are_told(http: HttpService, *, is_streamed: bool) -> None:
    task, [sent] = await http.begin(CHAT, chat(stream=is_streamed))
    http.service.peer.send(Row(sent.handle, 0, [70]), ends=[make_end(sent.handle, MAX_TOKENS, 1, num_resumes=2)])
    answer = await task
    last = answer.pieces[-1] if is_streamed else answer.value
    assert (last["lockstep"]["resume_count"], last["lockstep"]["resume_exact"]) == (2, False)


async def test_the_last_message_is_continued_only_if_asked_to(http: HttpService, tokenizer: Tokenizer) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "The quick"}]
    prompts = []
    for continues in (False, True):
        [prompt] = (await http.post(f"{CHAT}/render", chat(messages=messages, continue_final_message=continues))).value[
            "prompts"
        ]
        prompts.append(prompt["prompt"])
    assert prompts[0].endswith("<|im_start|>assistant\n")
    assert prompts[1].endswith("The quick")


async def test_a_reply_is_begun_unless_asked_not_to(http: HttpService) -> None:
    for options, end in (({}, "<|im_start|>assistant\n"), ({"add_generation_prompt": False}, "hi<|im_end|>\n")):
        [prompt] = (await http.post(f"{CHAT}/render", chat(**options))).value["prompts"]
        assert prompt["prompt"].endswith(end)


async def test_client_ids_are_logged_and_texts_are_not(http: HttpService, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    body = chat(messages=[{"role": "user", "content": "SECRET"}], user="SECRET")
    task, [sent] = await http.begin(CHAT, body, headers={"X-Request-Id": "mine"})
    http.send(sent, [70])
    await task
    bad = await http.post(CHAT, chat(SECRET=1, n="SECRET"), headers={"X-Request-Id": "two words\tSECRET"})
    assert (bad.status, "SECRET" in bad.headers["X-Request-Id"]) == (400, False)
    [record] = [record for record in caplog.records if record.getMessage() == "request ended"]
    assert vars(record)["client_request_id"] == "mine"
    ours = [record for record in caplog.records if not record.name.startswith("aiohttp.client")]
    assert all("SECRET" not in str(vars(record)) for record in ours)
