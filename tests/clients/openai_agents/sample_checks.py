"""The first sample with a tool in the documentation of OpenAI's Agents SDK."""

from __future__ import annotations

from typing import Any

from agents import Agent, ModelSettings, OpenAIResponsesModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI


async def check_the_sample_runs(demo: Any) -> None:
    """The tool is called, by force, and the model then answers as it likes."""
    asked = []

    def get_weather(city: str) -> str:
        """Returns weather info for the specified city."""
        asked.append(city)
        return f"The weather in {city} is sunny"

    client = AsyncOpenAI(base_url=demo.base_url, api_key="none", max_retries=0)
    agent = Agent(
        name="Haiku agent",
        instructions="Always respond in haiku form",
        model=OpenAIResponsesModel(model=demo.model, openai_client=client),
        model_settings=ModelSettings(tool_choice="required", max_tokens=80),
        tools=[function_tool(get_weather)],
    )
    result = await Runner.run(agent, "What's the weather in Tokyo?", run_config=RunConfig(tracing_disabled=True))
    assert asked
    assert result.final_output
