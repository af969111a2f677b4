"""Anthropic's Messages over real HTTP, with the scheduler played by the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from lockstep.v1 import common_pb2
from services.tokenizer.http.anthropic.events import PING
from services.tokenizer.http.streams import event_stream
from shared.errors import NumericError, QueueFullError
from tests.support.clients.key_files import key_line, write_keys
from tests.support.models.tiny_tokenizer import CONTEXT_LENGTH, IM_END_ID
from tests.support.tokenizer.exchange_peer import Row, make_end, make_error_end, read_column
from tests.support.tokenizer.http_client import MESSAGES, Answer, HttpService, run_http_service
from tests.support.tokenizer.messages import added_up, messages_events
from tests.support.tokenizer.tokenizer_service import NUM_POOL_TOKENS

PATH = "/v1/messages"
EOS = common_pb2.FINISH_REASON_EOS
TOOL = {"name": "look", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "look", "arguments": {"a": "b"}}</tool_call>'


@pytest.fixture
async def http(tools_model_dir: Path, tmp_path: Path) -> AsyncIterator[HttpService]:
    async with run_http_service(tools_model_dir, tmp_path, reply_parser="hermes") as running:
        yield running


def ask(**fields: Any) -> dict[str, Any]:
    return {"max_tokens": 50, "messages": MESSAGES, **fields}


async def answer_of(http: HttpService, ids: list[int], *, run_length: int, **fields: Any) -> Answer:
    """The answer to a request whose reply arrives in runs of tokens and ends by itself."""
    task, [sent] = await http.begin(PATH, ask(**fields))
    for start in range(0, len(ids), run_length):
        end = [make_end(sent.handle, EOS, len(ids))] if start + run_length >= len(ids) else []
        http.service.peer.send(Row(sent.handle, start, ids[start : start + run_length]), ends=end)
    return await task


async def test_a_message_whole_and_streamed_has_the_same_blocks(http: HttpService, tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode(f"<think>why</think>So:{CALL}and{CALL}").ids, IM_END_ID]
    whole = await answer_of(http, ids, run_length=len(ids), tools=[TOOL])
    assert (whole.status, whole.headers["Content-Type"]) == (200, "application/json")
    message = whole.value
    assert message["id"] == f"msg_{whole.headers['request-id']}"
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "tiny-tools")
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "text", "tool_use"]
    thinking, text, call, *_ = message["content"]
    assert (thinking["thinking"], text["text"]) == ("why", "So:")
    assert (call["name"], call["input"]) == ("look", {"a": "b"})
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    usage = message["usage"]
    assert (usage["output_tokens"], usage["cache_read_input_tokens"]) == (len(ids), 0)
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] < len(ids)
    for run_length in (1, 7):
        streamed = await answer_of(http, ids, run_length=run_length, tools=[TOOL], stream=True)
        assert streamed.headers["Content-Type"] == "text/event-stream"
        again = added_up(messages_events(streamed.body))
        assert again["id"] == f"msg_{streamed.headers['request-id']}"
        for blocks in (again["content"], message["content"]):
            for block in blocks:
                block.pop("id", None)
        assert again | {"id": message["id"]} == message


async def test_a_stop_sequence_is_named(http: HttpService, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("over the lazy dog").ids
    message = (await answer_of(http, ids, run_length=1, stop_sequences=["lazy"])).value
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "lazy")
    assert message["content"] == [{"type": "text", "text": "over the "}]


async def test_more_tokens_than_there_is_room_for_are_no_error(http: HttpService) -> None:
    """Claude Code asks for 32,000 whatever the model's context is."""
    for asked, reason in ((50, "max_tokens"), (32_000, "model_context_window_exceeded")):
        task, [sent] = await http.begin(PATH, ask(max_tokens=asked))
        assert sent.max_tokens == min(asked, NUM_POOL_TOKENS - len(read_column(sent.prompt_token_ids)))
        http.send(sent, [70])
        assert (await task).value["stop_reason"] == reason


async def test_counted_tokens_are_those_of_the_prompt(http: HttpService) -> None:
    fields = {"messages": [*MESSAGES, {"role": "assistant", "content": "The"}], "system": "Be brief.", "tools": [TOOL]}
    counted = (await http.post(f"{PATH}/count_tokens", fields)).value
    task, [sent] = await http.begin(PATH, ask(**fields))
    assert counted == {"input_tokens": len(read_column(sent.prompt_token_ids))}
    http.send(sent, [70])
    usage = (await task).value["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"]


async def test_betas_and_versions_are_accepted_and_what_has_no_effect_is_named(http: HttpService) -> None:
    headers = {"anthropic-version": "1999-01-01", "anthropic-beta": "none-such-2030-01-01"}
    fields = {"context_management": {"edits": []}, "cache_control": {"type": "ephemeral"}}
    task, [sent] = await http.begin(f"{PATH}?beta=true", ask(**fields), headers=headers)
    http.send(sent, [70])
    answer = await task
    assert (answer.status, answer.headers["x-lockstep-ignored"]) == (200, "context_management")


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"temperature": -1}, 400, "invalid_request_error"),
        ({"model": "other"}, 404, "not_found_error"),
        ({"messages": [{"role": "user", "content": "x " * CONTEXT_LENGTH}]}, 400, "invalid_request_error"),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_refusals_have_anthropics_form(
    http: HttpService, fields: dict[str, Any], status: int, kind: str, *, is_streamed: bool
) -> None:
    answer = await http.post(PATH, ask(**fields, stream=is_streamed))
    value = answer.value
    assert (answer.status, value["type"], value["error"]["type"]) == (status, "error", kind)
    assert value["request_id"] == answer.headers["request-id"]
    [name] = fields
    # Claude Code shortens the conversation at these words.
    words = "prompt is too long" if name == "messages" else name
    assert words in value["error"]["message"]


async def test_other_errors_have_anthropics_form_too(http: HttpService) -> None:
    for method, path, status, kind in (
        ("GET", PATH, 405, "invalid_request_error"),
        ("POST", f"{PATH}/none-such", 404, "not_found_error"),
        ("POST", f"{PATH}/batches", 501, "api_error"),
    ):
        answer = await http.ask(method, path)
        assert (answer.status, answer.error["type"]) == (status, kind)
    task, [sent] = await http.begin(PATH, ask(stream=True))
    http.service.peer.send(ends=[make_error_end(sent.handle, QueueFullError("full", retry_delay_s=2))])
    answer = await task
    assert (answer.status, answer.error["type"], answer.headers["Retry-After"]) == (429, "rate_limit_error", "2")


async def test_a_late_error_is_the_last_event(http: HttpService) -> None:
    task, [sent] = await http.begin(PATH, ask(stream=True))
    http.service.peer.send(Row(sent.handle, 0, [70]))
    http.service.peer.send(ends=[make_error_end(sent.handle, NumericError("not finite"))])
    *_, last = messages_events((await task).body)
    assert (last["type"], last["error"]) == ("error", {"type": "api_error", "message": "not finite"})


async def test_a_silent_stream_has_pings(http: HttpService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "FIRST_TOKEN_S", 0.01)
    monkeypatch.setattr(event_stream, "COMMENT_S", 0.01)
    async with http.session.post(f"http://localhost{PATH}", json=ask(stream=True)) as response:
        data = b""
        while data.count(PING) < 2:
            data += await response.content.readany()
        sent = await http.service.peer.submits.get()
        http.send(sent, [70])
        data += await response.read()
    assert added_up(messages_events(data))["content"] == [{"type": "text", "text": "d"}]


async def test_a_request_needs_a_key_where_clients_have_some(tools_model_dir: Path, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", key_line("one", "a"))
    async with run_http_service(tools_model_dir, tmp_path, client_keys=keys) as http:
        for headers in ({}, {"x-api-key": "none-such"}):
            answer = await http.post(PATH, ask(), headers=headers)
            assert (answer.status, answer.error["type"]) == (401, "authentication_error")
        task, [sent] = await http.begin(PATH, ask(), headers={"x-api-key": "one"})
        http.send(sent, [70])
        assert (await task).status == 200


async def test_models_have_the_form_of_the_api_that_asks(http: HttpService) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    value = (await http.get("/v1/models", headers=headers)).value
    [model] = value["data"]
    assert (model["type"], model["id"], value["has_more"]) == ("model", "tiny-tools", False)
    assert model == (await http.get("/v1/models/tiny-tools", headers=headers)).value
    assert (await http.get("/v1/models/other", headers=headers)).error["type"] == "not_found_error"
    assert (await http.get("/v1/models")).value["object"] == "list"
