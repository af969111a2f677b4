"""Anthropic's Python library finds what its types and its documentation say."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import anthropic
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from anthropic.types.beta_error_response import BetaErrorResponse
from pydantic import TypeAdapter

from tests.clients.anthropic_python.asking import WEATHER, arguments, connect, events_of, post, request
from tests.clients.anthropic_python.strict_types import problems_of
from tests.clients.checking import error_of

CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
FORM = {"type": "json_schema", "schema": {**CITY, "additionalProperties": False}}


def check_types(cell: Any) -> None:
    """Whole answers and all events have the library's types, strictly."""
    for fields in (
        {},
        {"stop_sequences": ["a", "e"]},
        {"tools": [WEATHER], "tool_choice": {"type": "any"}, "max_tokens": 60},
        {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "get_weather"}, "max_tokens": 3},
        {"output_config": {"format": FORM}},
        {"max_tokens": 1},
    ):
        body = request(cell, **fields)
        whole = json.loads(post(cell, "/v1/messages", body))
        assert problems_of(Message, whole) == []
        events = events_of(post(cell, "/v1/messages", {**body, "stream": True}))
        assert [problem for event in events for problem in problems_of(RawMessageStreamEvent, event)] == []


def check_any_stream(message_streams: list[Any]) -> None:
    """Streams of any blocks have the library's types, strictly, and it adds them up to the whole message."""
    assert len(message_streams) > 50
    read = TypeAdapter(RawMessageStreamEvent).validate_python
    for stream, whole in message_streams:
        assert problems_of(Message, whole) == []
        snapshot: Any = None
        buffers: dict[int, bytes] = {}
        for event in events_of(stream.encode()):
            assert problems_of(RawMessageStreamEvent, event) == []
            snapshot = accumulate_event(event=read(event), current_snapshot=snapshot, json_bufs=buffers)
        assert Message.model_validate(snapshot.to_dict()) == Message.model_validate(whole)


def check_streams(cell: Any) -> None:
    """The library's stream ends with the message that is answered whole."""
    body = arguments(cell)
    whole = connect(cell).messages.create(**body)
    with connect(cell).messages.stream(**body) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(texts) > 1
    assert "".join(texts) == whole.content[0].text
    assert (final.content[0].text, final.stop_reason) == (whole.content[0].text, whole.stop_reason)
    for message in (whole, final):
        assert message.usage.output_tokens == whole.usage.output_tokens
        assert message.usage.input_tokens + message.usage.cache_read_input_tokens == _count(cell, body)


def check_counted_tokens(cell: Any) -> None:
    """A prompt's tokens are counted with its system prompt and its tools."""
    counts = [_count(cell, request(cell, **fields)) for fields in ({}, {"system": "Be brief."}, {"tools": [WEATHER]})]
    assert len(set(counts)) == len(counts)


def _count(cell: Any, body: dict[str, Any]) -> int:
    asked = {name: body[name] for name in ("model", "messages", "system", "tools") if name in body}
    counted = connect(cell).messages.count_tokens(**asked)
    assert problems_of(MessageTokensCount, counted.to_dict()) == []
    return int(counted.input_tokens)


def check_tools(cell: Any) -> None:
    """A call goes back as the library holds it, with its result, and a text follows; streamed calls are the same."""
    body = arguments(cell, tools=[WEATHER], tool_choice={"type": "tool", "name": "get_weather"}, max_tokens=60)
    message = connect(cell).messages.create(**body)
    [call] = message.content
    assert (call.type, call.name, message.stop_reason) == ("tool_use", "get_weather", "tool_use")
    assert isinstance(call.input["city"], str)
    with connect(cell).messages.stream(**body) as stream:
        [streamed] = stream.get_final_message().content
    assert (streamed.name, streamed.input) == (call.name, call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Sunny"}]}
    messages = [
        *body["messages"],
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    none = {"type": "none"}
    answer = connect(cell).messages.create(**{**body, "messages": messages, "tool_choice": none, "max_tokens": 8})
    assert answer.content[0].type == "text"


def check_stop_sequences(cell: Any) -> None:
    """The sequence that ended the text is named and left out of it."""
    text = connect(cell).messages.create(**arguments(cell)).content[0].text
    stop = text[3:6]
    message = connect(cell).messages.create(**arguments(cell, stop_sequences=[stop]))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert all(block.text == text[: text.index(stop)] for block in message.content)


def check_forms(cell: Any) -> None:
    """A JSON schema gives the answer its form."""
    message = connect(cell).messages.create(**arguments(cell, output_config={"format": FORM}))
    assert json.loads(message.content[0].text)["city"] in ("Paris", "Rome")


def check_errors(cell: Any) -> None:
    """Errors are the library's, with the server's own id of the request."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    for kind, fields, words in (
        (anthropic.BadRequestError, {"temperature": -1}, "temperature"),
        (anthropic.BadRequestError, {"messages": [{"role": "user", "content": [image]}]}, "an image"),
        (anthropic.BadRequestError, {"messages": [{"role": "user", "content": "a b " * 20000}]}, "prompt is too long"),
        (anthropic.NotFoundError, {"model": "none-such"}, "model"),
    ):
        for is_streamed in (False, True):
            body = arguments(cell, **fields, stream=is_streamed)
            error = error_of(kind, partial(connect(cell).messages.create, **body))
            assert words in str(error)
            assert problems_of(BetaErrorResponse, error.body) == []
            assert error.request_id == error.body["request_id"]


def check_models(cell: Any) -> None:
    """The model is listed by each of its names."""
    models = list(connect(cell).models.list())
    assert [model.id for model in models] == [cell.model, cell.other_name]
    assert all(problems_of(ModelInfo, json.loads(model.to_json())) == [] for model in models)
    assert connect(cell).models.retrieve(cell.model).id == cell.model
