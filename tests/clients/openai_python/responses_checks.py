"""OpenAI's Responses with its library for Python: every answer and every event is, strictly, of the library's types."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import openai
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.clients.checking import error_of
from tests.clients.openai_python.asking import QUESTION, connect
from tests.clients.openai_python.strict_types import problems_of
from tests.clients.openai_python.type_checks import SCHEMA, ask, read_blocks

FORMAT: dict[str, Any] = {
    "type": "json_schema",
    "name": "ok",
    "schema": SCHEMA,
    "strict": True,
}
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "get_weather", "description": "Get the weather", "parameters": CITY}
NUMBER = {
    "type": "custom",
    "name": "number",
    "format": {"type": "grammar", "syntax": "regex", "definition": r'"[0-9]{2}"\n'},
}
MAPS = {"type": "namespace", "name": "maps", "description": "Maps", "tools": [{**WEATHER, "strict": False}, NUMBER]}

# Beside a model and an input.
BODIES: list[dict[str, Any]] = [
    {},
    {
        "instructions": "Be brief.",
        "temperature": 0.5,
        "top_p": 0.9,
        "metadata": {"a": "b"},
        "user": "me",
        "store": True,
    },
    {"text": {"format": FORMAT}, "max_output_tokens": 60},
    {"text": {"format": {"type": "json_object"}}},
    {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    {"reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"]},
    {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 3},
    {"tools": [WEATHER, NUMBER], "tool_choice": {"type": "custom", "name": "number"}, "parallel_tool_calls": False},
    {"tools": [WEATHER, NUMBER], "tool_choice": "none"},
    {"tools": [MAPS, {"type": "web_search"}], "tool_choice": "required", "parallel_tool_calls": False},
    {"input": []},
]


def bodies(cell: Any) -> list[dict[str, Any]]:
    """Bodies of requests, whose answers do not vary."""
    base = {"model": cell.model, "input": QUESTION, "temperature": 0, "max_output_tokens": 40, "seed": 1}
    return [base | body for body in BODIES]


def check_responses(cell: Any) -> None:
    """Whole answers; a stream has the same output, and so do its deltas."""
    for body in bodies(cell):
        whole = ask(cell, "responses", body)
        assert not problems_of(Response, whole), (body, whole, problems_of(Response, whole))
        events = read_events(cell, body)
        final = events[-1]["response"]
        assert [told(item) for item in final["output"]] == [told(item) for item in whole["output"]]
        assert final["status"] == whole["status"]
        for index, item in enumerate(final["output"]):
            of_item = [event for event in events if event.get("output_index") == index]
            deltas = [event["delta"] for event in of_item if event["type"].endswith(".delta")]
            assert "".join(deltas) in told(item)


def read_events(cell: Any, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, each of which must be of its type."""
    adapter: TypeAdapter[BaseModel] = TypeAdapter(ResponseStreamEvent)
    events: list[Any] = []
    for name, data in read_blocks(cell, "responses", body | {"stream": True}):
        event = json.loads(data)
        kind = type(adapter.validate_python(event))
        assert not problems_of(kind, event), (event, problems_of(kind, event))
        assert (event["type"], event["sequence_number"]) == (name, len(events))
        events.append(event)
    return events


def told(item: Any) -> tuple[str, ...]:
    """What of an item does not change from answer to answer."""
    texts = [part["text"] for part in item.get("content", [])]
    return (item["type"], item.get("name", ""), *texts, item.get("arguments", ""), item.get("input", ""))


def check_forced_calls(cell: Any) -> None:
    """A function's arguments match its schema, and a custom tool's input its regular expression."""
    client = connect(cell)
    for tool, choice in ((WEATHER, "required"), (NUMBER, {"type": "custom", "name": "number"})):
        options = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
        [call] = client.responses.create(model=cell.model, input=QUESTION, **options).output
        assert call.call_id.startswith("call_")
        if call.type == "function_call":
            assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
        else:
            assert (call.input[0], call.input[1:3].isdigit(), call.input[3:]) == ('"', True, '"\n')


def check_the_librarys_stream(cell: Any) -> None:
    """The library's own helper assembles a stream, also into a parsed text."""
    text = {"format": FORMAT}
    with connect(cell).responses.stream(model=cell.model, input=QUESTION, text=text, max_output_tokens=60) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert isinstance(json.loads(response.output_text)["ok"], bool)


def check_a_conversation(cell: Any) -> None:
    """Items go back as the library holds them, with a result, and the cache knows them."""
    client = connect(cell)
    options = {"model": cell.model, "tools": [WEATHER], "temperature": 0}
    items: list[Any] = [{"role": "user", "content": "The weather in Paris?"}]
    answer = client.responses.create(input=items, tool_choice="required", parallel_tool_calls=False, **options)
    [call] = answer.output
    items += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"}]
    second = client.responses.create(input=items, tool_choice="none", max_output_tokens=8, **options)
    assert second.output_text
    third = client.responses.create(input=items, tool_choice="none", max_output_tokens=8, **options)
    # All but what is left of the last block.
    assert third.usage.input_tokens_details.cached_tokens >= third.usage.input_tokens - 32


def check_refusals(cell: Any) -> None:
    """What cannot be honoured is a 400 with its name, and a late error an event."""
    client = connect(cell)
    for name, value in (("previous_response_id", "resp_1"), ("background", True), ("conversation", "conv_1")):
        create = partial(client.responses.create, model=cell.model, input="x", **{name: value})
        assert error_of(openai.BadRequestError, create).param == name
    endless = {"max_output_tokens": 4000, "ignore_eos": True, "timeout_s": 2}
    *_, told_error, failed = read_events(cell, {"model": cell.model, "input": "x", **endless})
    assert (told_error["type"], told_error["code"]) == ("error", "deadline_passed")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
