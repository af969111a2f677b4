"""The first sample with tools in Pydantic AI's documentation."""

from __future__ import annotations

from typing import Any

from pydantic_ai import Agent, RunContext
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

INSTRUCTIONS = (
    "You're a dice game, you should roll the die and see if the number you get back matches the user's guess. "
    "If so, tell them they're a winner. Use the player's name in the response."
)


def check_the_sample_runs(demo: Any) -> None:
    """A tool is called, by force, and the model then answers."""
    called = []

    def roll_dice() -> str:
        """Roll a six-sided die and return the result."""
        called.append("roll_dice")
        return "4"

    def get_player_name(context: RunContext[str]) -> str:
        """Get the player's name."""
        called.append("get_player_name")
        return str(context.deps)

    def settings(context: RunContext[str]) -> Any:
        return {"max_tokens": 80, "tool_choice": "required" if context.run_step == 1 else "auto"}

    model = OpenAIChatModel(demo.model, provider=OpenAIProvider(base_url=demo.base_url, api_key="none"))
    agent = Agent(model, deps_type=str, instructions=INSTRUCTIONS, tools=[roll_dice, get_player_name])
    result = agent.run_sync("My guess is 4", deps="Anne", model_settings=settings)
    assert called
    assert result.output
