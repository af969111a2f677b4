"""The first sample in LangChain's documentation: an agent with a tool."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI


def check_the_sample_runs(demo: Any) -> None:
    """A tool is called, by force, and the model then answers."""
    cities = []

    def get_weather(city: str) -> str:
        """Get weather for a given city."""
        cities.append(city)
        return f"It's always sunny in {city}!"

    def force_the_first(request: Any, handler: Any) -> Any:
        has_called = any(isinstance(message, ToolMessage) for message in request.messages)
        return handler(request.override(tool_choice="auto" if has_called else "any"))

    model = ChatOpenAI(model=demo.model, base_url=demo.base_url, api_key="none", max_tokens=80)
    prompt = "You are a helpful assistant"
    middleware = [wrap_model_call(force_the_first)]
    agent = create_agent(model, tools=[get_weather], system_prompt=prompt, middleware=middleware)
    result = agent.invoke({"messages": [{"role": "user", "content": "What's the weather in San Francisco?"}]})
    assert cities
    assert result["messages"][-1].content
