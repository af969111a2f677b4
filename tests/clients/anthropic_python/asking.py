"""What the checks ask."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import anthropic

WEATHER: Any = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def connect(cell: Any, **options: Any) -> anthropic.Anthropic:
    """A client that does not retry, unless the options say so."""
    return anthropic.Anthropic(**{"base_url": cell.url, "api_key": "none", "max_retries": 0, **options})


def request(cell: Any, **fields: Any) -> dict[str, Any]:
    """A request, greedy unless asked."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    return {"model": cell.model, "max_tokens": 24, "messages": messages, "temperature": 0, **fields}


def arguments(cell: Any, **fields: Any) -> dict[str, Any]:
    """The same for the library, which knows no temperature any more."""
    body = request(cell, **fields)
    temperature = body.pop("temperature")
    return {**body, "extra_body": {"temperature": temperature}}


def post(cell: Any, path: str, body: dict[str, Any]) -> bytes:
    """The body of an answer, as it is on the wire."""
    headers = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
    asked = urllib.request.Request(cell.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked) as answer:
        data: bytes = answer.read()
        return data


def events_of(stream: bytes) -> list[Any]:
    """The events of a stream, without pings."""
    blocks = [block.split("\n", 1) for block in stream.decode().split("\n\n") if block]
    values = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {value['type']}" for value in values]
    return [value for value in values if value["type"] != "ping"]
