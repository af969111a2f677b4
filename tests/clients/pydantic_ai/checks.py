"""What an agent built on Pydantic AI does, through its OpenAI model."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, RunContext, ToolOutput
from pydantic_ai.exceptions import (
    ModelContextWindowExceededError,
    ModelHTTPError,
    ModelNotFoundError,
    ModelRequestTimeout,
)
from pydantic_ai.messages import ModelRequest, ModelResponse, ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.checking import error_of, wait_until_running

QUESTION = "What is the capital of France?"
WEATHER = "What is the weather in Paris?"
GREEDY = {"temperature": 0, "max_tokens": 24, "max_retries": 0}
ENDLESS = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=99)


def weather(city: str) -> dict[str, Any]:
    """Tell the weather in a city."""
    return {"city": city, "degrees": 21}


def connect(cell: Any, model: str = "") -> OpenAIChatModel:
    """The cell's model, or the one of this name."""
    return OpenAIChatModel(model or cell.model, provider=OpenAIProvider(base_url=cell.base_url, api_key="none"))


def ask(cell: Any, prompt: str = QUESTION, **settings: Any) -> Any:
    """Run an agent without tools, greedy unless asked."""
    return Agent(connect(cell), instructions="You are helpful.").run_sync(prompt, model_settings=GREEDY | settings)


def check_chat(cell: Any) -> None:
    """A chat has its text, usage and facts."""
    result = ask(cell)
    assert "Paris" in result.output
    assert min(result.usage.input_tokens, result.usage.output_tokens) > 0
    answer = result.all_messages()[-1]
    assert isinstance(answer, ModelResponse)
    assert (answer.model_name, answer.finish_reason) == (cell.model, "stop")
    assert answer.provider_response_id is not None
    assert answer.provider_response_id.startswith("chatcmpl-")


def check_a_conversation_goes_on(cell: Any) -> None:
    """An earlier run is the history of the next."""
    first = ask(cell)
    agent = Agent(connect(cell), instructions="You are helpful.")
    second = agent.run_sync("And of Italy?", message_history=first.all_messages(), model_settings=GREEDY)
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens


def check_stream_equals_chat(cell: Any) -> None:
    """The parts of a stream add up to the answer that is not streamed."""

    async def read() -> tuple[list[str], Any]:
        agent = Agent(connect(cell), instructions="You are helpful.")
        async with agent.run_stream(QUESTION, model_settings=GREEDY) as result:
            return [delta async for delta in result.stream_text(delta=True, debounce_by=None)], result.usage

    deltas, usage = asyncio.run(read())
    whole = ask(cell)
    assert len(deltas) > 1, "the text came in one piece"
    assert "".join(deltas) == whole.output
    assert usage.input_tokens == whole.usage.input_tokens
    assert usage.output_tokens == whole.usage.output_tokens


def check_a_tool_is_called_and_its_result_read(cell: Any) -> None:
    """An agent calls a tool, and the model goes on with its result."""

    def settings(context: RunContext[Any]) -> Any:
        return GREEDY | {"max_tokens": 80, "tool_choice": "required" if context.run_step == 1 else "none"}

    result = Agent(connect(cell), tools=[weather]).run_sync(WEATHER, model_settings=settings)
    asked, told, answer = result.all_messages()[1:]
    assert isinstance(asked, ModelResponse)
    assert isinstance(told, ModelRequest)
    assert isinstance(answer, ModelResponse)
    calls = [part for part in asked.parts if isinstance(part, ToolCallPart)]
    returns = [part for part in told.parts if isinstance(part, ToolReturnPart)]
    assert calls
    assert {call.tool_name for call in calls} == {"weather"}
    assert [part.tool_call_id for part in returns] == [call.tool_call_id for call in calls]
    assert all(part.content["degrees"] == 21 for part in returns)
    assert result.output
    assert answer.finish_reason in ("stop", "length")


def check_structured_output(cell: Any) -> None:
    """Each way of asking for an object gives one."""
    settings = GREEDY | {"max_tokens": 80}
    for form in (ToolOutput(Person), NativeOutput(Person), NativeOutput(Person, strict=True)):
        person = Agent(connect(cell), output_type=form, retries=0).run_sync("Invent.", model_settings=settings).output
        assert isinstance(person, Person)


def check_structured_output_in_a_stream(cell: Any) -> None:
    """An object grows in a stream until it is the one that is not streamed."""

    async def read(agent: Any) -> Any:
        async with agent.run_stream("Invent.", model_settings=GREEDY | {"max_tokens": 80}) as result:
            *_, last = [person async for person in result.stream_output(debounce_by=None)]
        return last

    for form in (ToolOutput(Person), NativeOutput(Person)):
        agent = Agent(connect(cell), output_type=form, retries=0)
        whole = agent.run_sync("Invent.", model_settings=GREEDY | {"max_tokens": 80}).output
        assert asyncio.run(read(agent)) == whole


def check_sampling_settings(cell: Any) -> None:
    """Settings are accepted, and a seed repeats an answer."""
    settings = {
        "temperature": 1,
        "top_p": 0.9,
        "seed": 3,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "logit_bias": {"100": -100},
        "stop_sequences": ["\n\n\n"],
        "parallel_tool_calls": False,
        "openai_logprobs": True,
        "openai_top_logprobs": 2,
    }
    first, second = (ask(cell, "Tell me a story.", **settings) for _ in range(2))
    assert first.output == second.output
    facts = first.all_messages()[-1].provider_details
    assert len(facts["logprobs"]) == first.usage.output_tokens


def check_errors_have_their_types(cell: Any) -> None:
    """Errors are those that Pydantic AI's own code tells apart."""
    invalid = error_of(ModelHTTPError, lambda: ask(cell, temperature=-1))
    assert (invalid.status_code, invalid.body["param"]) == (400, "temperature")
    unknown = Agent(connect(cell, "another"))
    missing = error_of(ModelNotFoundError, lambda: unknown.run_sync(QUESTION, model_settings=GREEDY))
    assert missing.provider_error_code == "model_not_found"
    error_of(ModelContextWindowExceededError, lambda: ask(cell, "a b c " * 20000))


def check_a_timeout_ends_a_request(cell: Any) -> None:
    """The client's timeout is an error of its own, and frees the cell."""
    error_of(ModelRequestTimeout, lambda: ask(cell, "Count.", request_timeout=1.0, **ENDLESS))
    wait_until_running(cell, 0)


def check_a_stream_may_be_left(cell: Any) -> None:
    """A stream that is not read to its end frees the cell."""

    async def read_some() -> None:
        async with Agent(connect(cell)).run_stream("Count.", model_settings=GREEDY | ENDLESS) as result:
            async for _ in result.stream_text(delta=True, debounce_by=None):
                await result.cancel()
                return

    asyncio.run(read_some())
    wait_until_running(cell, 0)


def check_many_at_once(cell: Any) -> None:
    """Runs at the same time."""

    async def run() -> list[str]:
        agent = Agent(connect(cell))
        results = await asyncio.gather(*(agent.run(QUESTION, model_settings=GREEDY) for _ in range(8)))
        return [result.output for result in results]

    assert len(set(asyncio.run(run()))) == 1
