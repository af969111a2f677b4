"""The gateway `smg` in front of a cell, in its HTTP mode: OpenAI's library finds behind it what it finds without it."""

from __future__ import annotations

import json
from typing import Any

import openai

from tests.clients.checking import error_of, wait_until_running

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]


def connect(address: Any) -> openai.OpenAI:
    """A client without retries, of the gateway or of the cell itself."""
    return openai.OpenAI(base_url=address.base_url, api_key="none", max_retries=0)


def ask(address: Any, messages: Any = QUESTION, **fields: Any) -> Any:
    """A chat, greedy unless asked."""
    settings = {"temperature": 0, "max_tokens": 24, "seed": 1} | fields
    return connect(address).chat.completions.create(model=address.model, messages=messages, **settings)


def text_of(pieces: Any) -> tuple[str, list[str], Any]:
    """The text, finish reasons and usage of a stream."""
    text, reasons, usage = "", [], None
    for piece in pieces:
        usage = piece.usage or usage
        for choice in piece.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    return text, reasons, usage


def check_the_gateway_finds_the_model(gateway: Any) -> None:
    """It lists the model by the name in the cell's answers."""
    assert gateway.model in [model.id for model in connect(gateway).models.list()]


def check_chats_are_the_cells(cell: Any, gateway: Any) -> None:
    """An answer through the gateway is the cell's."""
    through, direct = ask(gateway), ask(cell)
    assert through.choices == direct.choices
    assert (through.model, through.system_fingerprint) == (direct.model, direct.system_fingerprint)
    assert through.usage.total_tokens == direct.usage.total_tokens
    assert through.lockstep == direct.lockstep


def check_streams_are_the_cells(cell: Any, gateway: Any) -> None:
    """A stream through the gateway is the cell's, with its usage."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    pieces = list(ask(gateway, **options))
    text, reasons, usage = text_of(pieces)
    assert len(pieces) > 4, "the text came in one piece"
    assert usage is not None
    expected_text, expected_reasons, expected_usage = text_of(ask(cell, **options))
    assert (text, reasons, usage.total_tokens) == (expected_text, expected_reasons, expected_usage.total_tokens)


def check_tools_and_forms_pass_through(cell: Any, gateway: Any) -> None:
    """Calls, forms, log-probabilities and fields of ours come to the cell."""
    for address in (cell, gateway):
        [choice] = ask(address, WEATHER, tools=TOOLS, tool_choice="required", max_tokens=80).choices
        assert choice.finish_reason == "tool_calls"
        assert all(
            json.loads(call.function.arguments)["city"] in ("Paris", "Rome") for call in choice.message.tool_calls
        )
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    [choice] = ask(gateway, response_format=form).choices
    assert json.loads(choice.message.content)["city"] in ("Paris", "Rome")
    [choice] = ask(gateway, logprobs=True, top_logprobs=2).choices
    assert all(len(position.top_logprobs) == 2 for position in choice.logprobs.content)
    answer = ask(gateway, extra_body={"ignore_eos": True, "min_tokens": 24, "top_k": 1}, temperature=1)
    assert answer.usage.completion_tokens == 24


def check_completions_are_the_cells(cell: Any, gateway: Any) -> None:
    """The older interface."""
    through, direct = (
        connect(address).completions.create(model=address.model, prompt="1, 2, 3, 4,", temperature=0, max_tokens=12)
        for address in (gateway, cell)
    )
    assert through.choices == direct.choices


def check_errors_pass_through(gateway: Any) -> None:
    """The cell's refusals keep their status, code and field."""
    invalid = error_of(openai.BadRequestError, lambda: ask(gateway, extra_body={"best_of": 3}))
    assert (invalid.param, invalid.code) == ("best_of", "invalid_request")
    long = [{"role": "user", "content": "a b c " * 20000}]
    assert error_of(openai.BadRequestError, lambda: ask(gateway, long)).code == "context_length_exceeded"
    assert error_of(openai.BadRequestError, lambda: ask(gateway, long, stream=True)).code == "context_length_exceeded"


def check_a_stream_that_is_left_ends(cell: Any, gateway: Any) -> None:
    """The gateway hands on that its client has gone, and the cell is free."""
    stream = ask(gateway, stream=True, max_tokens=4000, extra_body={"ignore_eos": True})
    assert next(iter(stream)) is not None
    stream.close()
    wait_until_running(cell, 0)
