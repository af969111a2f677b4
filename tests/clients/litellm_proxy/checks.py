"""What a product behind LiteLLM's proxy does: by OpenAI's library, and by the APIs that the proxy translates."""

from __future__ import annotations

import json
import urllib.request
from functools import partial
from typing import Any

import openai

from tests.clients.checking import error_of, wait_until_running

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
ENDLESS: Any = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}


def connect(proxy: Any) -> openai.OpenAI:
    """A client of the proxy, without retries."""
    return openai.OpenAI(base_url=proxy.base_url, api_key=proxy.key, max_retries=0)


def ask(proxy: Any, messages: Any = QUESTION, **fields: Any) -> Any:
    """A chat, greedy unless asked."""
    settings = {"model": proxy.model, "temperature": 0, "max_tokens": 24} | fields
    return connect(proxy).chat.completions.create(messages=messages, **settings)


def check_the_model_is_listed(litellm_proxy: Any) -> None:
    """The proxy names the model."""
    assert [model.id for model in connect(litellm_proxy).models.list()] == [litellm_proxy.model]


def check_stream_equals_chat(litellm_proxy: Any) -> None:
    """A stream through the proxy has the text and the usage of a whole answer."""
    whole = ask(litellm_proxy)
    pieces = list(ask(litellm_proxy, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for piece in pieces for choice in piece.choices)
    assert "Paris" in text
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens


def check_a_tool_is_called(litellm_proxy: Any) -> None:
    """A call reaches the client, whole and in pieces."""
    asking: Any = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 80}
    [call, *_] = ask(litellm_proxy, WEATHER, **asking).choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    pieces = ask(litellm_proxy, WEATHER, stream=True, **asking)
    deltas = [delta for piece in pieces for choice in piece.choices for delta in choice.delta.tool_calls or []]
    first = "".join(delta.function.arguments or "" for delta in deltas if delta.index == 0)
    assert json.loads(first) == json.loads(call.function.arguments)


def check_an_object_matches_its_schema(litellm_proxy: Any) -> None:
    """A form is handed on."""
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": CITY}}
    answer = ask(litellm_proxy, response_format=form, max_tokens=80)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Paris", "Rome")


def check_responses(litellm_proxy: Any) -> None:
    """The proxy makes chats of Responses; a stream has the text of the whole answer."""
    asking: Any = {
        "model": litellm_proxy.model, "input": QUESTION[0]["content"], "temperature": 0, "max_output_tokens": 24,
    }  # fmt: skip
    whole = connect(litellm_proxy).responses.create(**asking).output_text
    events = connect(litellm_proxy).responses.create(stream=True, **asking)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole


def check_messages(litellm_proxy: Any) -> None:
    """Anthropic's API, which the proxy translates."""
    body = {"model": litellm_proxy.model, "max_tokens": 24, "temperature": 0, "messages": QUESTION}
    headers = {"Content-Type": "application/json", "x-api-key": litellm_proxy.key}
    request = urllib.request.Request(f"{litellm_proxy.url}/v1/messages", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        answer = json.loads(response.read())
    assert answer["content"][0]["text"] == ask(litellm_proxy).choices[0].message.content
    assert answer["usage"]["output_tokens"] > 0


def check_errors_keep_their_statuses(litellm_proxy: Any) -> None:
    """What the cell refuses is refused by the proxy with the cell's words, which name the field."""
    error = error_of(openai.BadRequestError, partial(ask, litellm_proxy, temperature=-1))
    assert "temperature: must be between 0 and 2" in error.message
    error = error_of(openai.BadRequestError, partial(ask, litellm_proxy, max_tokens=9000))
    assert "ContextWindowExceededError" in error.message


def check_a_client_that_leaves_frees_the_cell(litellm_proxy: Any) -> None:
    """The proxy hands the end of a stream on to the cell."""
    stream = ask(litellm_proxy, stream=True, **ENDLESS)
    next(iter(stream))
    stream.close()
    wait_until_running(type(litellm_proxy)(**vars(litellm_proxy) | {"url": litellm_proxy.cell_url}), 0)
