"""Tool calls, reasoning and history of chats whose replies are parsed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from lockstep.v1 import common_pb2
from tests.support.models.tiny_tokenizer import IM_END_ID, write_tiny_tokenizer
from tests.support.tokenizer.exchange_peer import Row, make_end
from tests.support.tokenizer.http_client import MESSAGES, HttpService, run_http_service

CHAT = "/v1/chat/completions"
EOS = common_pb2.FINISH_REASON_EOS
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
REPLY = 'So:<tool_call>{"name": "look", "arguments": {"a": "b"}}</tool_call>'
# Shows calls in the history.
CALLS_CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}\
{% for call in message.tool_calls or [] %}{{ '[' ~ call.function.name ~ call.function.arguments ~ ']' }}{% endfor %}\
{{ '<|im_end|>\n' }}{% endfor %}"""


@pytest.fixture
async def http(tools_model_dir: Path, tmp_path: Path) -> AsyncIterator[HttpService]:
    async with run_http_service(tools_model_dir, tmp_path, reply_parser="hermes") as running:
        yield running


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "tools": [TOOL], **fields}


async def test_a_whole_answer_has_calls(http: HttpService, tokenizer: Tokenizer) -> None:
    answer = await http.answer(CHAT, chat(), [*tokenizer.encode(REPLY).ids, IM_END_ID], reason=EOS)
    [choice] = answer.value["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("So:", "tool_calls")
    assert (call["type"], call["function"]) == ("function", {"name": "look", "arguments": '{"a": "b"}'})
    assert call["id"]


async def test_a_streamed_call_begins_with_its_id_and_name(http: HttpService, tokenizer: Tokenizer) -> None:
    task, [sent] = await http.begin(CHAT, chat(stream=True))
    ids = [*tokenizer.encode(REPLY).ids, IM_END_ID]
    for index, token_id in enumerate(ids):
        ends = [make_end(sent.handle, EOS, len(ids))] if index == len(ids) - 1 else []
        http.service.peer.send(Row(sent.handle, index, [token_id]), ends=ends)
    choices = [piece["choices"][0] for piece in (await task).pieces]
    deltas = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    first, *rest = deltas
    assert (first["index"], first["type"], first["function"]["name"]) == (0, "function", "look")
    assert first["id"]
    assert all("id" not in delta and "name" not in delta["function"] for delta in rest)
    assert "".join(delta["function"]["arguments"] for delta in deltas) == '{"a": "b"}'
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "So:"
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]


async def test_reasoning_has_both_its_names_and_is_counted(http: HttpService, tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("<think>why</think>so").ids, IM_END_ID]
    value = (await http.answer(CHAT, chat(), ids, reason=EOS)).value
    message = value["choices"][0]["message"]
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == ("so", "why", "why")
    num_reasoning = value["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < num_reasoning < len(ids)
    pieces = (await http.answer(CHAT, chat(stream=True), ids, reason=EOS)).pieces
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "why"
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    value = (await http.answer(CHAT, chat(include_reasoning=False), ids, reason=EOS)).value
    assert "reasoning" not in value["choices"][0]["message"]


@pytest.mark.parametrize("arguments", ['{"a": 1}', '{"a": ', "[1]"])
async def test_arguments_that_are_no_object_are_shown_as_they_are(tmp_path: Path, arguments: str) -> None:
    directory = tmp_path / "tiny"
    directory.mkdir()
    write_tiny_tokenizer(directory, chat_template=CALLS_CHATML)
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c", "content": "x"}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, result]
    async with run_http_service(directory, tmp_path) as http:
        answer = await http.post(f"{CHAT}/render", {"messages": messages})
        assert answer.status == 200, answer.body
        [prompt] = answer.value["prompts"]
        assert f"[look{arguments}]" in prompt["prompt"]
