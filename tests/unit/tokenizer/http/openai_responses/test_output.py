"""The events of responses and the objects that they end with, whatever the model writes."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.http.fields.custom_input import CustomInput, input_arguments
from services.tokenizer.http.openai_responses.events import ResponseEvents, ResponseObject
from services.tokenizer.http.openai_responses.items import InputItem, MessageReader
from services.tokenizer.http.openai_responses.request import ResponseOptions
from services.tokenizer.http.openai_responses.tools import ToolKind
from services.tokenizer.http.streams.answer_facts import AnswerFacts
from tests.support.tokenizer.http_client import named_events_of

Response = tokenizer_pb2.GenerateResponse
TOOLS = {
    "look": ToolKind("look", None, is_custom=False),
    "maps__find": ToolKind("find", "maps", is_custom=False),
    "patch": ToolKind("patch", None, is_custom=True),
}
TEXTS = st.text(min_size=1, max_size=8)
REASON = st.sampled_from([common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_MAX_TOKENS])


@st.composite
def replies(draw: st.DrawFn) -> list[Response]:
    """The responses of one call, its texts and arguments in pieces."""
    responses, num_calls = [Response(accepted=tokenizer_pb2.Accepted(num_prompt_tokens=3))], 0
    for kind in draw(st.lists(st.sampled_from(["reasoning", "text", *TOOLS]), max_size=6)):
        if kind == "reasoning":
            responses += [Response(reasoning=text, token_ids=[1]) for text in draw(st.lists(TEXTS, max_size=3))]
            continue
        if kind == "text":
            responses += [Response(text=text, token_ids=[1]) for text in draw(st.lists(TEXTS, max_size=3))]
            continue
        text = draw(st.text(max_size=12))
        arguments = input_arguments(text) if kind == "patch" else json.dumps({"at": text})
        cut = draw(st.integers(0, len(arguments)))
        for index, piece in enumerate((arguments[:cut], arguments[cut:])):
            named = {"id": f"call_{num_calls}", "name": kind} if index == 0 else {}
            delta = tokenizer_pb2.ToolCallDelta(index=num_calls, arguments=piece, **named)
            responses.append(Response(tool_calls=[delta], token_ids=[1]))
        num_calls += 1
    usage = common_pb2.Usage(num_prompt_tokens=3, num_completion_tokens=len(responses), num_cached_tokens=2)
    responses.append(Response(finish=tokenizer_pb2.Finish(reason=draw(REASON), usage=usage), usage=usage))
    return responses


def make_facts(*, is_encrypted: bool = False) -> AnswerFacts:
    options = ResponseOptions(tools=TOOLS, has_encrypted_reasoning=is_encrypted, echoed={"tools": []})
    return AnswerFacts("resp_1", 1, "tiny", "fp_1", options, seed=1, num_choices=1)


def stream(responses: list[Response], facts: AnswerFacts) -> list[Any]:
    events = ResponseEvents(facts)
    return named_events_of(b"".join([*map(events.make, responses), events.end()]))


def whole(responses: list[Response], facts: AnswerFacts) -> Any:
    answer = ResponseObject(facts)
    for response in responses:
        asyncio.run(answer.write(response))
    return answer.value()


@given(replies(), st.booleans())
def test_a_stream_ends_with_the_object_and_its_deltas_are_its_items(
    responses: list[Response],
    is_encrypted: bool,
) -> None:
    facts = make_facts(is_encrypted=is_encrypted)
    events = stream(responses, facts)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1]["response"]
    assert final | {"completed_at": 0} == whole(responses, facts) | {"completed_at": 0}
    assert events[-1]["type"] == f"response.{final['status']}"
    is_cut = responses[-1].finish.reason == common_pb2.FINISH_REASON_MAX_TOKENS
    assert final["status"] == ("incomplete" if is_cut else "completed")
    assert len({item["id"] for item in final["output"]}) == len(final["output"]) > 0
    for index, item in enumerate(final["output"]):
        of_item = [event for event in events if event.get("output_index") == index]
        assert of_item[0]["type"] == "response.output_item.added"
        assert (of_item[-1]["type"], of_item[-1]["item"]) == ("response.output_item.done", item)
        assert {event.get("item_id", item["id"]) for event in of_item} == {of_item[0]["item"]["id"]} == {item["id"]}
        assert "".join(event["delta"] for event in of_item if event["type"].endswith(".delta")) == text_of(item)
        # One item after another.
        assert events[events.index(of_item[0]) :][: len(of_item)] == of_item


def text_of(item: Any) -> Any:
    names = {"function_call": "arguments", "custom_tool_call": "input"}
    return item[names[item["type"]]] if item["type"] in names else "".join(part["text"] for part in item["content"])


@given(replies(), st.booleans())
def test_items_that_come_back_are_what_the_model_wrote(
    responses: list[Response],
    drops_reasoning: bool,
) -> None:
    reader = MessageReader(None)
    for index, item in enumerate(whole(responses, make_facts(is_encrypted=True))["output"]):
        # Some clients keep only what they cannot read.
        value = item | ({"content": None} if item["type"] == "reasoning" and drops_reasoning else {})
        reader.read(InputItem.model_validate(value), f"input[{index}]")
    messages = [*reader.drafts.messages]
    # Reasoning after a text is another message's.
    assert all(message.content and not message.tool_calls for message in messages[:-1])
    assert all(message.reasoning for message in messages[1:])
    assert "".join(message.reasoning for message in messages) == "".join(response.reasoning for response in responses)
    assert "".join(message.content for message in messages) == "".join(response.text for response in responses)
    deltas = [call for response in responses for call in response.tool_calls]
    calls = [call for message in messages for call in message.tool_calls]
    assert [call.name for call in calls] == [call.name for call in deltas if call.id]
    for call in calls:
        [number] = [delta.index for delta in deltas if delta.id == call.id]
        assert call.arguments == "".join(delta.arguments for delta in deltas if delta.index == number)


@given(st.text(), st.booleans(), st.lists(st.integers(0, 60), max_size=5))
def test_the_input_of_a_custom_tool_is_read_from_pieces(
    text: str,
    is_ascii: bool,
    cuts: list[int],
) -> None:
    arguments = json.dumps({"input": text, "more": "}"}, ensure_ascii=is_ascii, indent=1 if len(cuts) > 2 else None)
    reader, pieces = CustomInput(), [0, *sorted(cuts), len(arguments)]
    given_back = [reader.push(arguments[start:end]) for start, end in pairwise(pieces)]
    assert "".join(given_back) == text


@given(st.one_of(st.text(max_size=5), st.just('{"other": "x"}'), st.just("{}")), st.integers(0, 20))
def test_arguments_without_the_input_are_the_input(arguments: str, cut: int) -> None:
    reader = CustomInput()
    given_back = reader.push(arguments[:cut]) + reader.push(arguments[cut:])
    # What may be the beginning of the input is none if nothing comes after it.
    assert given_back == arguments or '{"input":"'.startswith("".join(arguments.split()))
