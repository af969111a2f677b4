"""What the checks ask."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import openai

QUESTION = "What is the capital of France?"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}

ErrorT = TypeVar("ErrorT", bound=Exception)


def error_of(kind: type[ErrorT], call: Callable[[], object]) -> ErrorT:
    """The error of this kind that a call must raise."""
    try:
        result = call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}, but {result!r}")


def connect(cell: Any, **options: Any) -> openai.OpenAI:
    """A client that does not retry, unless the options say so."""
    return openai.OpenAI(**{"base_url": cell.base_url, "api_key": "none", "max_retries": 0, **options})


def say(text: str) -> list[dict[str, Any]]:
    """A chat with one message."""
    return [{"role": "user", "content": text}]


def asks_for_weather() -> list[dict[str, Any]]:
    """A chat that makes the small model call `get_weather` for Paris."""
    messages = []
    for index, city in enumerate(("Rome", "Oslo", "Bern")):
        function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
        call = {"id": f"call_{index}", "type": "function", "function": function}
        messages += [*say(f"What is the weather in {city}?"), {"role": "assistant", "tool_calls": [call]}]
    return messages + say("What is the weather in Paris?")
