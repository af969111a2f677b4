"""Responses over real HTTP, with the scheduler played by the test."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from lockstep.v1 import common_pb2
from shared.errors import NumericError
from tests.support.models.tiny_tokenizer import CONTEXT_LENGTH, IM_END_ID
from tests.support.tokenizer.exchange_peer import Position, Row, make_end, make_error_end, read_column
from tests.support.tokenizer.http_client import MESSAGES, Answer, HttpService, named_events_of, run_http_service

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
EOS = common_pb2.FINISH_REASON_EOS
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
CUSTOM = {"type": "custom", "name": "sh"}
REPLY = (
    'So:<tool_call>{"name": "look", "arguments": {"a": "b"}}</tool_call>\n'
    '<tool_call>{"name": "sh", "arguments": {"input": "ls\\n"}}</tool_call>'
)


@pytest.fixture
async def http(brief_model_dir: Path, tmp_path: Path) -> AsyncIterator[HttpService]:
    async with run_http_service(brief_model_dir, tmp_path, reply_parser="hermes") as running:
        yield running


async def prompt_of(http: HttpService, path: str, body: dict[str, Any]) -> list[int]:
    """The prompt that the scheduler gets."""
    task, [sent] = await http.begin(path, body)
    http.send(sent, [70])
    assert (await task).status == 200
    return list(read_column(sent.prompt_token_ids))


async def test_a_stream_has_the_items_of_the_whole_answer(http: HttpService, tokenizer: Tokenizer) -> None:
    body = {"input": "hi", "tools": [LOOK, CUSTOM]}
    ids = [*tokenizer.encode(REPLY).ids, IM_END_ID]
    task, [sent] = await http.begin(RESPONSES, body | {"stream": True})
    for index, token_id in enumerate(ids):
        ends = [make_end(sent.handle, EOS, len(ids))] if index == len(ids) - 1 else []
        http.service.peer.send(Row(sent.handle, index, [token_id]), ends=ends)
    *events, last = named_events_of((await task).body)
    assert [events[0]["type"], last["type"]] == ["response.created", "response.completed"]
    assert last["response"]["id"] == f"resp_{sent.request_id}"
    whole = (await http.answer(RESPONSES, body, ids, reason=EOS)).value
    assert (whole["object"], whole["status"], whole["model"]) == ("response", "completed", "tiny")
    for answer in (last["response"], whole):
        text, call, custom = answer["output"]
        assert text["content"][0]["text"] == "So:"
        assert (call["type"], call["name"], call["arguments"]) == ("function_call", "look", '{"a": "b"}')
        assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "sh", "ls\n")
        assert call["call_id"] != custom["call_id"]
        assert answer["usage"]["output_tokens"] == len(ids)
    assert len([event for event in events if event["type"] == "response.function_call_arguments.delta"]) > 1


async def test_an_answer_that_is_cut_is_incomplete(http: HttpService) -> None:
    value = (await http.answer(RESPONSES, {"input": "hi", "max_output_tokens": 1}, [70])).value
    assert (value["status"], value["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (value["output"][0]["status"], value["max_output_tokens"]) == ("incomplete", 1)


async def test_items_are_the_messages_of_a_chat(http: HttpService) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be brief\n\nMore\n\nStill more"},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "So", "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "name": "look", "content": "done\nwell"},
        {"role": "system", "content": "late"},
        {"role": "user", "content": "hi"},
    ]
    items = [
        {"role": "developer", "content": "More"},
        {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "Still more"}]},
        {"role": "user", "content": [{"type": "input_text", "text": text} for text in ("one", "two")]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "So", "annotations": []}], "phase": "x"},
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}", "status": "completed"},
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": [{"type": "input_text", "text": text} for text in ("done", "well")],
        },
        {"role": "developer", "content": "late"},
        {"role": "user", "content": "hi"},
    ]
    function = {"name": "look", "parameters": {"type": "object"}}
    chat = {"messages": messages, "tools": [{"type": "function", "function": function}]}
    asked = {"instructions": "Be brief", "input": items, "tools": [LOOK]}
    assert await prompt_of(http, RESPONSES, asked) == await prompt_of(http, CHAT, chat)
    plain = await prompt_of(http, RESPONSES, {"input": "hi"})
    assert plain == await prompt_of(http, CHAT, {"messages": MESSAGES})


async def test_what_agents_send_is_taken_and_what_has_no_effect_is_told(
    http: HttpService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    functions = {"type": "namespace", "name": "functions", "description": "", "tools": [CUSTOM]}
    body = {
        "input": [
            {"type": "additional_tools", "role": "developer", "tools": [functions]},
            {"role": "user", "content": "hi"},
        ],
        "tools": [
            {**LOOK, "strict": True},
            {"type": "web_search", "external_web_access": True},
            {"type": "SECRET"},
            {"type": "namespace", "name": "maps", "description": "Maps", "tools": [LOOK, {"type": "mcp"}]},
            {"type": "custom", "name": "re", "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}},
        ],
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low"},
        "store": False,
        "prompt_cache_key": "key",
        "safety_identifier": "me",
        "metadata": {"a": "b"},
        "client_metadata": {"x": "SECRET"},
        "service_tier": "auto",
        "truncation": "disabled",
        "parallel_tool_calls": True,
    }
    task, [sent] = await http.begin(RESPONSES, body)
    http.send(sent, [70])
    answer = await task
    ignored = answer.headers["x-lockstep-ignored"].split(", ")
    told = [
        "tools[1]",
        "tools[2]",
        "tools[3].tools[1]",
        "tools[0].strict",
        "tools[4].format",
        "reasoning.summary",
        "text.verbosity",
        "prompt_cache_key",
        "safety_identifier",
        "metadata",
        "client_metadata",
        "service_tier",
        # The template of this model knows no effort.
        "reasoning.effort",
    ]
    assert ignored == told
    [record] = [record for record in caplog.records if record.getMessage() == "request ended"]
    assert vars(record)["skipped_tools"] == "mcp,other,web_search"
    assert all("SECRET" not in str(vars(record)) for record in caplog.records if record.name.startswith("services"))
    value = answer.value
    assert [tool["type"] for tool in value["tools"]] == ["function", "namespace", "custom", "namespace"]
    assert (value["metadata"], value["prompt_cache_key"], value["safety_identifier"]) == ({"a": "b"}, "key", "me")


async def test_a_tool_of_a_namespace_comes_back_with_it(http: HttpService, tokenizer: Tokenizer) -> None:
    reply = '<tool_call>{"name": "maps__look", "arguments": {}}</tool_call>'
    body = {"input": "hi", "tools": [{"type": "namespace", "name": "maps", "description": "", "tools": [LOOK]}]}
    answer = await http.answer(RESPONSES, body, [*tokenizer.encode(reply).ids, IM_END_ID], reason=EOS)
    [call] = answer.value["output"]
    assert (call["namespace"], call["name"]) == ("maps", "look")
    returned = {"input": [*answer.value["output"], {"role": "user", "content": "hi"}], "tools": body["tools"]}
    assert (await http.answer(RESPONSES, returned, [70])).status == 200


async def test_a_tool_of_an_item_takes_the_place_of_another(http: HttpService) -> None:
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [LOOK]},
        {"role": "user", "content": "hi"},
        {"type": "additional_tools", "role": "developer", "tools": [{**LOOK, "strict": True}]},
    ]
    task, [sent] = await http.begin(RESPONSES, {"input": items, "tools": [LOOK, CUSTOM]})
    http.send(sent, [70])
    answer = await task
    assert (answer.status, answer.headers["x-lockstep-ignored"]) == (200, "input[2].tools[0].strict")
    twice = await http.post(RESPONSES, {"input": "hi", "tools": [LOOK, LOOK]})
    assert (twice.status, twice.error["param"]) == (400, "tools[1].name")


@pytest.mark.parametrize(
    ("syntax", "definition", "is_held"),
    [
        ("regex", "[ab]+c", True),
        ("lark", 'start: /[ab]+/ "c"', True),
        ("lark", 'start: "a" start?', False),
        ("lark", "start: /(?=a)/", False),
    ],
)
async def test_a_custom_tool_that_must_be_called_has_its_form_if_it_is_a_regular_expression(
    http: HttpService, syntax: str, definition: str, is_held: bool
) -> None:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    body = {"input": "hi", "tools": [{**CUSTOM, "format": form}], "tool_choice": {"type": "custom", "name": "sh"}}
    task, [sent] = await http.begin(RESPONSES, body)
    http.send(sent, [70])
    assert (await task).headers.get("x-lockstep-ignored") == (None if is_held else "tools[0].format")
    assert ("[ab]" in sent.options.grammar) == is_held


@pytest.mark.parametrize("body", [{"input": []}, {"input": ""}, {}, {"input": "hi", "generate": False}])
async def test_an_empty_probe_is_answered(http: HttpService, body: dict[str, Any]) -> None:
    whole = await http.post(RESPONSES, body)
    assert (whole.status, whole.value["status"], whole.value["output"]) == (200, "completed", [])
    streamed = await http.post(RESPONSES, body | {"stream": True})
    kinds = [event["type"] for event in named_events_of(streamed.body)]
    assert kinds == ["response.created", "response.in_progress", "response.completed"]
    assert http.service.peer.submits.empty()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["nothing"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a"),
        ({"metadata": {str(index): "" for index in range(17)}}, "metadata"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [LOOK, {**LOOK, "name": "a b"}]}, "tools[1].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{**LOOK, "name": "a b"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"max_output_tokens": CONTEXT_LENGTH}, "input"),
        ({"temperature": -1}, "temperature"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": "hologram", "id": "ws_1"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "call_id": "1", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
        (
            {"input": [{"type": "function_call_output", "call_id": "1", "output": [{"type": "hologram"}]}]},
            "input[0].output[0]",
        ),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "lockstep-plain-1:?"}]},
            "input[0].encrypted_content",
        ),
        (
            {"input": [*[{"role": "user", "content": "x"}] * 3, {"role": "user", "content": "x" * 600_000}]},
            "input[3]",
        ),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    http: HttpService, fields: dict[str, Any], param: str
) -> None:
    answer = await http.post(RESPONSES, {"input": "hi", **fields})
    assert (answer.status, answer.error["param"]) == (400, param), answer.error


async def test_an_error_after_the_beginning_fails_the_response(http: HttpService) -> None:
    task, [sent] = await http.begin(RESPONSES, {"input": "hi", "stream": True})
    http.service.peer.send(Row(sent.handle, 0, [70]))
    http.service.peer.send(ends=[make_error_end(sent.handle, NumericError("not finite"))])
    *events, error, failed = named_events_of((await task).body)
    assert (error["type"], error["code"], error["message"]) == ("error", "numeric_error", "not finite")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "server_error", "message": "not finite"}
    assert failed["sequence_number"] == len(events) + 1
    [item] = failed["response"]["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "d")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_log_probabilities_belong_to_their_text(http: HttpService, *, is_streamed: bool) -> None:
    body = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 1, "stream": is_streamed}
    task, [sent] = await http.begin(RESPONSES, body)
    for index in range(2):
        row = Row(sent.handle, index, [70 + index], logprobs=[Position(1, [(70 + index, -0.5)] * 2)])
        http.service.peer.send(row, ends=[make_end(sent.handle, EOS, 3)] if index == 2 else [])
    http.service.peer.send(
        Row(sent.handle, 2, [IM_END_ID], logprobs=[Position(1, [(0, -1.0)] * 2)]), ends=[make_end(sent.handle, EOS, 3)]
    )
    final, deltas = final_and_deltas(await task)
    logprobs = final["output"][0]["content"][0]["logprobs"]
    assert [(entry["token"], entry["logprob"], entry["bytes"]) for entry in logprobs] == [
        ("d", -0.5, [100]),
        ("e", -0.5, [101]),
    ]
    if is_streamed:
        assert [entry["token"] for delta in deltas for entry in delta["logprobs"]] == ["d", "e"]
        assert all("bytes" not in entry for delta in deltas for entry in delta["logprobs"])


def final_and_deltas(answer: Answer) -> tuple[Any, list[Any]]:
    """The response, and the events of its text if it was streamed."""
    if answer.headers["Content-Type"] == "application/json":
        return json.loads(answer.body), []
    events = named_events_of(answer.body)
    return events[-1]["response"], [event for event in events if event["type"] == "response.output_text.delta"]
