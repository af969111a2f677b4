"""Streams of Anthropic's Messages: reads them, and makes responses of any kind for them."""

from __future__ import annotations

import json
from typing import Any

import pydantic_core
from hypothesis import strategies as st

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.http.fields.api_request import AnswerOptions
from services.tokenizer.http.streams.answer_facts import AnswerFacts

Event = dict[str, Any]
_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
_INPUT = '{"a": "x", "b": [1, {"c": null}]}'
_KINDS = ("reasoning", "text", "call")
_END = common_pb2.FINISH_REASON_MAX_TOKENS


def messages_events(body: bytes) -> list[Event]:
    """The events of a stream, each of which must have its type twice; without pings."""
    *blocks, last = body.decode().split("\n\n")
    assert last == ""
    events = []
    for block in blocks:
        name, _, data = block.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return [event for event in events if event["type"] != "ping"]


def added_up(events: list[Event]) -> Event:
    """The message that events are; they must come in the order that Anthropic's API documents."""
    first, *middle, delta, last = events
    assert (first["type"], delta["type"], last["type"]) == ("message_start", "message_delta", "message_stop")
    message: Event = first["message"]
    pieces: list[str] = []
    is_open = False
    for event in middle:
        content = message["content"]
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(content)
                content.append(dict(event["content_block"]))
                pieces, is_open = [], True
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(content) - 1
                _add(content[-1], event["delta"], pieces)
            case "content_block_stop":
                assert is_open
                assert event["index"] == len(content) - 1
                is_open = False
                _complete(content[-1], "".join(pieces))
            case other:
                raise AssertionError(other)
    assert not is_open
    message["usage"] |= delta["usage"]
    message |= delta["delta"]
    return message


def _add(block: Event, delta: Event, pieces: list[str]) -> None:
    fields = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
    if delta["type"] == "signature_delta":
        assert block["type"] == "thinking"
        block["signature"] += delta["signature"]
        return
    kinds = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
    assert delta["type"] == kinds[block["type"]]
    pieces.append(delta[fields[block["type"]]])


def _complete(block: Event, text: str) -> None:
    if block["type"] == "tool_use":
        block["input"] = pydantic_core.from_json(text or "{}", allow_partial=True)
    else:
        block[block["type"]] = text


def make_facts(**options: Any) -> AnswerFacts:
    """The facts of an answer to a request for 9 tokens."""
    return AnswerFacts("msg_1", 0, "tiny", "fp", AnswerOptions(max_tokens=9, **options), 1, 1)


@st.composite
def any_responses(draw: st.DrawFn) -> list[tokenizer_pb2.GenerateResponse]:
    """One choice's responses: reasoning, texts and calls in any order, cut anywhere; the last call may be cut off."""
    responses = [tokenizer_pb2.GenerateResponse(accepted={"num_prompt_tokens": 7, "max_tokens": 9})]
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from(_KINDS), max_size=6)):
        if kind == "call":
            cut = draw(st.integers(0, len(_INPUT)))
            call = {"index": num_calls, "id": f"call_{num_calls}", "name": "look"}
            num_calls += 1
            responses.append(tokenizer_pb2.GenerateResponse(tool_calls=[{**call, "arguments": _INPUT[:cut]}]))
            rest = {**call, "id": "", "arguments": _INPUT[cut:]}
            responses.append(tokenizer_pb2.GenerateResponse(tool_calls=[rest]))
        else:
            pieces = draw(st.lists(_TEXTS, min_size=1, max_size=3))
            for piece in pieces:
                responses.append(tokenizer_pb2.GenerateResponse())
                setattr(responses[-1], kind, piece)
    is_cut = draw(st.booleans())
    if is_cut and responses[-1].tool_calls:
        del responses[-1]
    usage = common_pb2.Usage(num_prompt_tokens=7, num_cached_tokens=4, num_completion_tokens=9, num_reasoning_tokens=2)
    end = tokenizer_pb2.GenerateResponse(finish={"reason": _END, "usage": usage}, usage=usage)
    responses.append(end)
    return responses
