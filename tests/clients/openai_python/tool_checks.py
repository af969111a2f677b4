"""Calls of tools with OpenAI's library for Python."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
from pydantic import BaseModel

from tests.clients.openai_python.asking import TIME, WEATHER, asks_for_weather, connect, say

NAMED = {"type": "function", "function": {"name": "get_weather"}}
WEATHER_MODES = ["auto", "required", NAMED]


class Forecast(BaseModel):
    """A tool's arguments."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2]


def ask(cell: Any, **options: Any) -> Any:
    """Let the model call tools, greedily."""
    return connect(cell).chat.completions.create(
        **{
            "model": cell.model,
            "messages": asks_for_weather(),
            "tools": [WEATHER],
            "parallel_tool_calls": False,
            "temperature": 0,
            "max_completion_tokens": 60,
            **options,
        }
    )


def check_calls(cell: Any) -> None:
    """The model calls by itself, because it must, and because it must call this one."""
    for choice in WEATHER_MODES:
        answer = ask(cell, tool_choice=choice).choices[0]
        [call] = answer.message.tool_calls
        assert call.type == "function"
        assert call.id.startswith("call_")
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content is None


def check_streamed_calls(cell: Any) -> None:
    """The library's own helper assembles a streamed call, in each mode."""
    for choice in WEATHER_MODES:
        with connect(cell).chat.completions.stream(
            model=cell.model,
            messages=asks_for_weather(),
            tools=[WEATHER],
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
            max_completion_tokens=60,
        ) as stream:
            events = list(stream)
            final = stream.get_final_completion().choices[0]
        [done] = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        assert (done.name, json.loads(done.arguments)) == ("get_weather", {"city": "Paris"})
        deltas = [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]
        assert "".join(deltas) == done.arguments
        assert len([delta for delta in deltas if delta]) > 1
        [call] = final.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("get_weather", done.arguments)
        assert final.finish_reason == "tool_calls"


def check_pieces_of_a_call(cell: Any) -> None:
    """The first piece of a call has its type, id and name; the others have arguments alone."""
    pieces = [piece.choices[0] for piece in ask(cell, tool_choice="required", stream=True)]
    first, *others = [call for piece in pieces for call in piece.delta.tool_calls or []]
    assert (first.index, first.type, first.function.name) == (0, "function", "get_weather")
    assert first.id.startswith("call_")
    assert {(call.index, call.id, call.type, call.function.name) for call in others} == {(0, None, None, None)}
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["tool_calls"]


def check_no_call(cell: Any) -> None:
    """With "none" there is a text and no call."""
    message = ask(cell, tool_choice="none", max_completion_tokens=8).choices[0].message
    assert message.content
    assert message.tool_calls is None


def check_allowed_tools(cell: Any) -> None:
    """Only allowed tools are called."""
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    [call] = ask(cell, tools=[WEATHER, TIME], tool_choice=choice).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_time", {})


def check_several_calls(cell: Any) -> None:
    """Calls of one answer have indexes and ids of their own."""
    options = {"tool_choice": "required", "parallel_tool_calls": True, "max_completion_tokens": 80}
    messages = say("What is the weather in Paris?")
    calls = ask(cell, messages=messages, **options).choices[0].message.tool_calls
    assert len(calls) > 1
    assert len({call.id for call in calls}) == len(calls)
    arguments: dict[int, str] = {}
    for piece in ask(cell, messages=messages, **options, stream=True):
        for call in piece.choices[0].delta.tool_calls or []:
            arguments[call.index] = arguments.get(call.index, "") + call.function.arguments
    assert [arguments[index] for index in range(len(calls))] == [call.function.arguments for call in calls]


def check_parsed_arguments(cell: Any) -> None:
    """Arguments in the form of a pydantic model are parsed into it, whole and streamed."""
    options = {
        "model": cell.model,
        "messages": say("The weather in Rome for the next 2 days?"),
        "tools": [openai.pydantic_function_tool(Forecast)],
        "tool_choice": {"type": "function", "function": {"name": "Forecast"}},
        "temperature": 0,
    }
    completions = connect(cell).chat.completions
    [call] = completions.parse(**options).choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Forecast)
    with completions.stream(**options) as stream:
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.parsed_arguments == call.function.parsed_arguments


def check_results(cell: Any) -> None:
    """A call goes back as the library holds it, with its result, and a text follows."""
    message = ask(cell, tool_choice="required").choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny, 20 degrees"}
    answer = ask(cell, messages=[*asks_for_weather(), message, result], tool_choice="none", max_completion_tokens=8)
    assert answer.choices[0].message.content


def check_arguments_that_are_no_json(cell: Any) -> None:
    """A call in the history that some model wrote badly is no error."""
    call = {"id": "call_x", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": '}}
    messages = [
        *say("The weather?"),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_x", "content": "what?"},
    ]
    assert ask(cell, messages=messages, tool_choice="none", max_completion_tokens=2).usage.completion_tokens == 2
