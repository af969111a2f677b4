"""OpenAI's Agents SDK, whose models are asked by Responses."""

from __future__ import annotations

from typing import Any, Literal

from agents import Agent, ModelSettings, OpenAIResponsesModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI
from pydantic import BaseModel

QUESTION = "What is the weather in Paris?"
UNTRACED = RunConfig(tracing_disabled=True)


class Forecast(BaseModel):
    """An answer's form."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2]


def make_agent(cell: Any, *, settings: ModelSettings | None = None, **options: Any) -> Agent[None]:
    """An agent whose answers do not vary."""
    client = AsyncOpenAI(base_url=cell.base_url, api_key="none", max_retries=0)
    model = OpenAIResponsesModel(model=cell.model, openai_client=client)
    common = ModelSettings(temperature=0, max_tokens=40, parallel_tool_calls=False)
    return Agent(
        name="weather", instructions="Be brief.", model=model, model_settings=common.resolve(settings), **options
    )


async def check_a_run_calls_its_tool(cell: Any) -> None:
    """The tool is called with what its schema takes, and its result is in the input of the next turn."""
    asked = []

    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Get the weather of a city."""
        asked.append(city)
        return f"Sunny in {city}"

    tools: Any = [function_tool(get_weather)]
    required = ModelSettings(tool_choice="required")
    agent = make_agent(cell, settings=required, tools=tools, tool_use_behavior="stop_on_first_tool")
    result = await Runner.run(agent, QUESTION, run_config=UNTRACED)
    [city] = asked
    assert result.final_output == f"Sunny in {city}"
    # The call and its result go back as the library holds them.
    items: list[Any] = [*result.to_input_list(), {"role": "user", "content": "Thanks. And in Rome?"}]
    assert [item.get("type") for item in items] == [None, "function_call", "function_call_output", None]
    forecaster = make_agent(cell, settings=ModelSettings(tool_choice="none"), tools=tools, output_type=Forecast)
    second = await Runner.run(forecaster, items, run_config=UNTRACED)
    assert isinstance(second.final_output, Forecast)


async def check_a_streamed_run_is_the_same(cell: Any) -> None:
    """A stream's deltas are the output, which has the form of a pydantic model, and that of a run without a stream."""
    agent = make_agent(cell, output_type=Forecast)
    whole = await Runner.run(agent, QUESTION, run_config=UNTRACED)
    stream = Runner.run_streamed(agent, QUESTION, run_config=UNTRACED)
    events = [event.data async for event in stream.stream_events() if event.type == "raw_response_event"]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert Forecast.model_validate_json("".join(deltas)) == stream.final_output == whole.final_output
