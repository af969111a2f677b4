"""What an application built on LangChain does, through `langchain-openai`."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

from langchain_core.exceptions import ContextOverflowError, ModelNotFoundError, ModelTimeoutError
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from langchain_openai.chat_models.base import OpenAIInvalidRequestError
from pydantic import BaseModel, Field

from tests.clients.checking import error_of, wait_until_running

QUESTION = "What is the capital of France?"
WEATHER = "What is the weather in Paris?"
COUNTS = ("input_tokens", "output_tokens", "total_tokens")
ENDLESS = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=99)


def weather(city: str) -> dict[str, Any]:
    """The weather in a city."""
    return {"city": city, "degrees": 21}


TOOL = tool(weather)


def connect(cell: Any, **settings: Any) -> ChatOpenAI:
    """A chat model, greedy and without retries unless asked."""
    defaults = {"temperature": 0, "max_tokens": 24, "max_retries": 0, "stream_usage": True}
    return ChatOpenAI(base_url=cell.base_url, api_key="none", **{"model": cell.model} | defaults | settings)


def check_chat(cell: Any) -> None:
    """A chat has its text, usage and facts."""
    answer = connect(cell).invoke([SystemMessage("You are helpful."), HumanMessage(QUESTION)])
    assert "Paris" in answer.content, answer.content
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert min(usage["input_tokens"], usage["output_tokens"]) > 0
    facts = answer.response_metadata
    assert (facts["model_name"], facts["finish_reason"]) == (cell.model, "stop"), facts
    assert facts["id"].startswith("chatcmpl-")
    assert facts["system_fingerprint"]


def check_stream_equals_chat(cell: Any) -> None:
    """The chunks of a stream add up to the answer that is not streamed."""
    whole = connect(cell).invoke(QUESTION)
    chunks = list(connect(cell).stream(QUESTION))
    assert len([chunk for chunk in chunks if chunk.content]) > 1, "the text came in one piece"
    answer = sum(chunks[1:], chunks[0])
    assert answer.content == whole.content
    assert [answer.usage_metadata[key] for key in COUNTS] == [whole.usage_metadata[key] for key in COUNTS]
    assert answer.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]


def check_batches_and_async_streams(cell: Any) -> None:
    """Several chats at once, and one that is read by asyncio."""

    async def read() -> str:
        return "".join([chunk.content async for chunk in connect(cell).astream(QUESTION)])

    first, second = connect(cell).batch([QUESTION, "What is the capital of Italy?"])
    assert asyncio.run(read()) == first.content
    assert second.content != first.content


def check_several_choices(cell: Any) -> None:
    """`n` answers of one chat, told apart by their seed."""
    result = connect(cell, n=3, temperature=1, seed=5).generate([[HumanMessage("Tell me a story.")]])
    again = connect(cell, n=3, temperature=1, seed=5).generate([[HumanMessage("Tell me a story.")]])
    texts = [generation.text for generation in result.generations[0]]
    assert len(set(texts)) == 3
    assert texts == [generation.text for generation in again.generations[0]]


def check_a_tool_is_called_and_its_result_read(cell: Any) -> None:
    """A call is parsed, and its result is part of the next prompt."""
    model = connect(cell, max_tokens=80)
    question = HumanMessage(WEATHER)
    call = model.bind_tools([TOOL], tool_choice="any", parallel_tool_calls=False).invoke([question])
    assert call.response_metadata["finish_reason"] == "tool_calls"
    assert not call.invalid_tool_calls
    [asked] = call.tool_calls
    assert asked["name"] == "weather"
    assert asked["id"]
    result = TOOL.invoke(asked)
    answer = model.bind_tools([TOOL]).invoke([question, call, result])
    assert answer.content or answer.tool_calls
    assert answer.usage_metadata["input_tokens"] > call.usage_metadata["input_tokens"]


def check_a_named_tool_is_called_in_a_stream(cell: Any) -> None:
    """The parts of a call's arguments add up."""
    model = connect(cell, max_tokens=80).bind_tools([TOOL, Person], tool_choice="weather")
    chunks: list[Any] = list(model.stream(WEATHER))
    parts = [part for chunk in chunks for part in chunk.tool_call_chunks]
    assert len(parts) > 1, "the call came in one piece"
    answer = sum(chunks[1:], chunks[0])
    assert isinstance(answer, AIMessageChunk)
    assert answer.tool_calls
    assert {call["name"] for call in answer.tool_calls} == {"weather"}
    assert all(isinstance(call["args"]["city"], str) for call in answer.tool_calls)


def check_structured_output(cell: Any) -> None:
    """Each way of asking for an object gives one."""
    for method in ("json_schema", "function_calling"):
        model = connect(cell, max_tokens=80).with_structured_output(Person, method=method)
        assert isinstance(model.invoke("Invent a person."), Person), method
    asked = connect(cell, max_tokens=80).with_structured_output(Person, method="json_schema", include_raw=True)
    assert asked.invoke("Invent a person.")["parsing_error"] is None


def check_logprobs(cell: Any) -> None:
    """Log-probabilities come with the tokens of the text."""
    answer = connect(cell, logprobs=True, top_logprobs=2).invoke(QUESTION)
    content = answer.response_metadata["logprobs"]["content"]
    assert bytes(byte for position in content for byte in position["bytes"]).decode().startswith(answer.content)
    assert all(len(position["top_logprobs"]) == 2 for position in content)
    assert all(a["logprob"] >= b["logprob"] for position in content for a, b in pairwise(position["top_logprobs"]))


def check_stop_strings(cell: Any) -> None:
    """A stop string ends the text before itself."""
    answer = connect(cell).invoke(QUESTION, stop=["Paris"])
    assert "Paris" not in answer.content
    assert answer.response_metadata["finish_reason"] == "stop"


def check_completions(cell: Any) -> None:
    """The older interface, streamed and not, for one prompt and for several."""
    model = OpenAI(
        model=cell.model, base_url=cell.base_url, api_key="none", temperature=0, max_tokens=12, max_retries=0
    )
    text = model.invoke("1, 2, 3, 4,")
    assert "5, 6" in text
    assert "".join(model.stream("1, 2, 3, 4,")) == text
    result = model.generate(["1, 2, 3, 4,", "a, b, c, d,"])
    assert [len(generations) for generations in result.generations] == [1, 1]
    assert result.generations[0][0].text == text
    assert result.llm_output["token_usage"]["completion_tokens"] == 24


def check_errors_have_their_types(cell: Any) -> None:
    """Errors are those that LangChain's own code tells apart."""
    invalid = error_of(OpenAIInvalidRequestError, lambda: connect(cell, temperature=-1).invoke(QUESTION))
    assert invalid.param == "temperature"
    missing = error_of(ModelNotFoundError, lambda: connect(cell, model="another").invoke(QUESTION))
    assert missing.code == "model_not_found"
    error_of(ContextOverflowError, lambda: connect(cell).invoke("a b c " * 20000))
    error_of(ContextOverflowError, lambda: list(connect(cell).stream("a b c " * 20000)))


def check_a_timeout_ends_a_request(cell: Any) -> None:
    """The client's timeout is an error of its own, and frees the cell."""
    error_of(ModelTimeoutError, lambda: connect(cell, timeout=1, **ENDLESS).invoke("Count."))
    wait_until_running(cell, 0)


def check_a_stream_may_be_left(cell: Any) -> None:
    """A stream that is not read to its end frees the cell."""
    chunks = connect(cell, **ENDLESS).stream("Count.")
    assert next(chunks) is not None
    chunks.close()
    wait_until_running(cell, 0)
