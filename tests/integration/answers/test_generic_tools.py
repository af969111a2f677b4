"""Tools for the real model, whose template takes none: by all doors, whole and streamed, forced and in a history."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lockstep.v1 import tokenizer_pb2
from tests.support.cells.cell import FLOAT32, Cell, start_cell
from tests.support.clients.client import connect
from tests.support.system.ports import free_port

QUESTION = "What is the weather in Paris?"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
}
FUNCTION = {"name": "get_weather", "description": "Tells the weather.", "parameters": SCHEMA}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": QUESTION}],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "temperature": 0,
    "max_tokens": 100,
}
RESPONSE: dict[str, Any] = {
    "input": QUESTION,
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "temperature": 0,
    "max_output_tokens": 100,
    "store": False,
}
MESSAGE: dict[str, Any] = {
    "messages": [{"role": "user", "content": QUESTION}],
    "tools": [{"name": "get_weather", "description": "Tells the weather.", "input_schema": SCHEMA}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "temperature": 0,
    "max_tokens": 100,
}


@pytest.fixture(scope="module")
def cell(float32_model: Path) -> Iterator[Cell]:
    """A cell of the real model that has tools."""
    with start_cell(float32_model, *FLOAT32, "--generic-tools", f"--http-listen=127.0.0.1:{free_port()}") as cell:
        yield cell


async def post(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> Any:
    async with session.post(path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def events(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of a stream's events."""
    async with session.post(path, json={**body, "stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        lines = (await answer.text()).splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def check(arguments: str) -> None:
    """Check the arguments of a forced call."""
    made = json.loads(arguments)
    assert made.keys() == {"city", "days"}
    assert made["city"] in ("Paris", "Rome")
    assert 0 <= made["days"] <= 9


@pytest.mark.slow
async def test_a_forced_call_is_the_same_by_every_door(cell: Cell) -> None:
    async with connect(cell) as client, cell.http_session() as session:
        info = await client.tokenizer.GetModelInfo(tokenizer_pb2.GetModelInfoRequest())
        assert info.tool_parser == "generic"
        chat = tokenizer_pb2.Chat(
            messages=[{"role": tokenizer_pb2.ROLE_USER, "content": QUESTION}],
            tools=[{**FUNCTION, "parameters": json.dumps(SCHEMA)}],
            tool_mode=tokenizer_pb2.TOOL_MODE_REQUIRED,
            single_tool_call=True,
        )
        sampling = {"max_tokens": 100, "temperature": 0.0}
        answer = await client.generate(tokenizer_pb2.GenerateRequest(chat=chat, sampling=sampling))
        found = {call.arguments for call in answer.tool_calls}

        message = (await post(session, "/v1/chat/completions", CHAT))["choices"][0]["message"]
        found |= {call["function"]["arguments"] for call in message["tool_calls"]}
        deltas = [
            call["function"].get("arguments", "")
            for event in await events(session, "/v1/chat/completions", CHAT)
            for call in event["choices"][0]["delta"].get("tool_calls") or []
        ]
        found.add("".join(deltas))

        response = await post(session, "/v1/responses", RESPONSE)
        found |= {item["arguments"] for item in response["output"] if item["type"] == "function_call"}
        streamed = await events(session, "/v1/responses", RESPONSE)
        found |= {event["arguments"] for event in streamed if event["type"] == "response.function_call_arguments.done"}

        whole = await post(session, "/v1/messages", MESSAGE)
        parts = [each["input"] for each in whole["content"] if each["type"] == "tool_use"]
        streamed = await events(session, "/v1/messages", MESSAGE)
        deltas = [
            event["delta"]["partial_json"]
            for event in streamed
            if event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta"
        ]
    assert len(found) == 1, found
    (arguments,) = found
    check(arguments)
    assert parts == [json.loads(arguments)]
    assert "".join(deltas) == arguments


@pytest.mark.slow
async def test_a_call_and_its_result_are_gone_on_with(cell: Cell) -> None:
    async with cell.http_session() as session:
        first = await post(session, "/v1/chat/completions", CHAT)
        message = first["choices"][0]["message"]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in message["tool_calls"]]
        further = {**CHAT, "messages": [*CHAT["messages"], message, *results], "tool_choice": "none", "max_tokens": 8}
        answer = await post(session, "/v1/chat/completions", further)
        also = await post(session, "/v1/chat/completions", {**further, "tool_choice": "auto"})
    assert answer["choices"][0]["message"]["content"]
    # The tools are listed too.
    assert also["usage"]["prompt_tokens"] > answer["usage"]["prompt_tokens"] > 0
    assert also["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]
