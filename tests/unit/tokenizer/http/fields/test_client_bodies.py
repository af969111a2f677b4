"""Bodies as the newest releases of clients build them are taken: nothing is refused, and what has no effect is named.

Each is made as the release's own code does it, with the options that its users set by name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.tokenizer.exchange_peer import read_column
from tests.support.tokenizer.http_client import HttpService, run_http_service

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
CALL = {"id": "c", "type": "function", "function": {"name": "find", "arguments": '{"a": "x"}'}}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "ok"}
USER = {"role": "user", "content": "hi"}
SAMPLING = {"temperature": 0.1, "top_p": 0.9, "frequency_penalty": 0, "presence_penalty": 0, "seed": 1, "stop": ["x"]}


def tool(schema: dict[str, Any] = SCHEMA, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "find", "description": "d", "parameters": schema, **fields}}


FORCED = {"type": "function", "function": {"name": "find"}}
FORM = {"name": "output", "schema": SCHEMA}
# llama-index-llms-openai 0.8.3, as llama-index-llms-openai-like 0.8.1 uses it.
LLAMA_INDEX: dict[str, Any] = {
    "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT],
    "temperature": 0.1,
    "max_tokens": 8,
    "tools": [tool(strict=False)],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "stream": False,
    "modalities": ["text"],
}
# haystack-ai 3.4.1, `OpenAIChatGenerator`.
HAYSTACK: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "hi", "name": "n"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": [{"type": "text", "text": "do"}]},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": [{"type": "text", "text": "ok"}], "tool_call_id": "c"},
    ],
    "n": 1,
    "tools": [tool({**SCHEMA, "additionalProperties": False}, strict=True)],
    "stream": True,
    "max_completion_tokens": 8,
    "logit_bias": {"5": -1},
    **SAMPLING,
}
# smolagents 1.26.0: `ToolCallingAgent`, and `CodeAgent` with structured output. Its tools' schemas have `nullable`.
NULLABLE = {"type": "integer", "description": "d", "nullable": True}
SMOLAGENTS: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "s"}]},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ],
    "stop": ["Observation:", "Calling tools:"],
    "tools": [tool({**SCHEMA, "properties": {"a": {"type": "string"}, "b": NULLABLE}})],
    "tool_choice": "required",
    "stream": True,
    "stream_options": {"include_usage": True},
}
SMOLAGENTS_CODE: dict[str, Any] = {
    "messages": SMOLAGENTS["messages"],
    "response_format": {
        "type": "json_schema",
        "json_schema": {"schema": {**SCHEMA, "title": "T", "additionalProperties": False}, "name": "T", "strict": True},
    },
}
# semantic-kernel 1.45.0, `OpenAIChatPromptExecutionSettings`.
SEMANTIC_KERNEL: dict[str, Any] = {
    "messages": [USER, {"role": "assistant", "tool_calls": [CALL], "name": "agent"}, RESULT],
    "n": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "user": "u",
    "store": True,
    "metadata": {"a": "b"},
    "max_completion_tokens": 8,
    "tools": [tool()],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "function_call": "auto",
    "reasoning_effort": "low",
    "logit_bias": {"5": -1},
    **SAMPLING,
}
# instructor 1.17.0 asks anew when an answer does not fit, in its modes for tools, for schemas and for JSON.
INSTRUCTOR_TOOLS: dict[str, Any] = {
    "messages": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {**RESULT, "name": "find", "content": "Validation Error found"},
    ],
    "tools": [tool(strict=True)],
    "tool_choice": FORCED,
}
INSTRUCTOR_SCHEMA: dict[str, Any] = {
    "messages": [USER, {"role": "assistant", "content": ""}, USER],
    "response_format": {"type": "json_schema", "json_schema": FORM},
    "stream": True,
}
INSTRUCTOR_JSON: dict[str, Any] = {"messages": [USER], "response_format": {"type": "json_object"}}
# llm 0.36, `Chat`.
LLM: dict[str, Any] = {
    "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 8,
    "reasoning_effort": "none",
    "verbosity": "low",
    "service_tier": "flex",
    "tools": [{"type": "function", "function": {"name": "find", "description": None, "parameters": SCHEMA}}],
    "logit_bias": {"5": -1},
    **SAMPLING,
}
LLM_SCHEMA: dict[str, Any] = {
    "messages": [USER],
    "response_format": {"type": "json_schema", "json_schema": FORM},
    "stream": False,
}


@pytest.fixture
async def http(brief_model_dir: Path, tmp_path: Path) -> AsyncIterator[HttpService]:
    async with run_http_service(brief_model_dir, tmp_path, reply_parser="hermes") as running:
        yield running


@pytest.mark.parametrize(
    ("body", "ignored"),
    [
        pytest.param(LLAMA_INDEX, None, id="llama-index"),
        pytest.param(HAYSTACK, "tools[0].function.strict", id="haystack"),
        pytest.param(SMOLAGENTS, None, id="smolagents"),
        pytest.param(SMOLAGENTS_CODE, None, id="smolagents-code"),
        pytest.param(SEMANTIC_KERNEL, "user, store, metadata, reasoning_effort", id="semantic-kernel"),
        pytest.param(INSTRUCTOR_TOOLS, None, id="instructor-tools"),
        pytest.param(INSTRUCTOR_SCHEMA, None, id="instructor-schema"),
        pytest.param(INSTRUCTOR_JSON, None, id="instructor-json"),
        pytest.param(LLM, "verbosity, service_tier", id="llm"),
        pytest.param(LLM_SCHEMA, None, id="llm-schema"),
    ],
)
async def test_nothing_is_refused(http: HttpService, body: dict[str, Any], ignored: str | None) -> None:
    task, [sent] = await http.begin("/v1/chat/completions", {"model": "tiny", **body})
    assert len(read_column(sent.prompt_token_ids))
    http.send(sent, [70])
    answer = await task
    assert (answer.status, answer.headers.get("x-lockstep-ignored")) == (200, ignored)
