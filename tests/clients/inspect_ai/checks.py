"""Evaluations with Inspect, through its providers for servers that speak OpenAI's API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import inspect_ai
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import (
    ChatMessageTool,
    ChatMessageUser,
    GenerateConfig,
    Model,
    ModelOutput,
    ResponseSchema,
    execute_tools,
    get_model,
)
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, system_message
from inspect_ai.tool import Tool, ToolFunction, tool
from inspect_ai.util import JSONSchema

GREEDY = GenerateConfig(temperature=0, max_tokens=24, max_retries=0, max_connections=4)
WEATHER = "What is the weather in Paris?"
SAMPLES = [
    Sample(input="What is the capital of France?", target="Paris"),
    Sample(input="What is the capital of Italy?", target="Rome"),
    Sample(input="What is the capital of Atlantis?", target="none of these"),
]


def weather() -> Tool:
    """The weather, as a tool."""

    async def execute(city: str) -> str:
        """Tell the weather in a city.

        Args:
            city: The city's name.
        """
        return f"It is 21 degrees in {city}."

    return tool(lambda: execute, name="weather")()


def connect(cell: Any, provider: str = "openai-api") -> Model:
    """The cell's model by one of Inspect's providers."""
    return get_model(
        f"{provider}/lockstep/{cell.model}", base_url=cell.base_url, api_key="none", config=GREEDY, memoize=False
    )


def ask(cell: Any, *args: Any, **settings: Any) -> ModelOutput:
    """Generate one answer."""
    config = GenerateConfig(**settings)
    return asyncio.run(connect(cell).generate(*args, config=config))


def run(cell: Any, task: Task, provider: str = "openai-api", **settings: Any) -> EvalLog:
    """Run an evaluation, with its logs in the client's own home."""
    [log] = inspect_ai.eval(
        task, model=connect(cell, provider), log_dir="logs", display="none", log_level="error", score=True, **settings
    )
    return log


def check_an_evaluation(cell: Any) -> None:
    """All samples are answered and scored, with their usage."""
    log = run(cell, Task(dataset=SAMPLES, solver=[system_message("Answer."), generate()], scorer=includes()))
    assert log.status == "success", log.error
    assert log.results is not None
    assert (log.results.total_samples, log.results.completed_samples) == (3, 3)
    scores = [sample.scores["includes"].value for sample in log.samples or []]
    assert (scores[0], scores[2]) == ("C", "I"), scores
    [usage] = log.stats.model_usage.values()
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 0


def check_an_evaluation_by_completions(cell: Any) -> None:
    """The provider that sends prompts without a chat template."""
    samples = [Sample(input="The capital of France is", target="Paris")]
    log = run(cell, Task(dataset=samples, solver=generate(), scorer=includes()), "openai-api-completions")
    assert log.status == "success", log.error
    [sample] = log.samples or []
    assert sample.scores["includes"].value == "C", sample.output.completion


def check_a_tool_is_called_and_its_result_read(cell: Any) -> None:
    """A call is parsed, and its result is part of the next prompt."""

    async def talk() -> tuple[ModelOutput, list[Any], ModelOutput]:
        model, tools = connect(cell), [weather()]
        chat: list[Any] = [ChatMessageUser(content=WEATHER)]
        config = GenerateConfig(max_tokens=80)
        asked = await model.generate(chat, tools=tools, tool_choice=ToolFunction(name="weather"), config=config)
        results, _ = await execute_tools([*chat, asked.message], tools)
        told = await model.generate([*chat, asked.message, *results], tools=tools, tool_choice="none")
        return asked, results, told

    asked, results, told = asyncio.run(talk())
    assert asked.stop_reason == "tool_calls"
    calls = asked.message.tool_calls
    assert calls
    assert {call.function for call in calls} == {"weather"}
    assert not any(call.parse_error for call in calls)
    assert all(isinstance(result, ChatMessageTool) and "21 degrees" in result.text for result in results)
    assert told.completion


def check_structured_output(cell: Any) -> None:
    """An answer matches its schema."""
    string, integer = JSONSchema(type="string", enum=["Ada", "Bob"]), JSONSchema(type="integer", enum=[1, 2])
    properties = {"name": string, "age": integer}
    schema = JSONSchema(type="object", properties=properties, required=["name", "age"], additionalProperties=False)
    output = ask(cell, "Invent.", max_tokens=60, response_schema=ResponseSchema(name="person", json_schema=schema))
    person = json.loads(output.completion)
    assert (person["name"], person["age"]) in [(name, age) for name in ("Ada", "Bob") for age in (1, 2)]


def check_sampling_settings(cell: Any) -> None:
    """Settings are accepted; choices differ and a seed repeats them."""
    settings = {
        "temperature": 1.0,
        "top_p": 0.9,
        "seed": 3,
        "num_choices": 2,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "stop_seqs": ["\n\n\n"],
        "logit_bias": {100: -100},
        "extra_body": {"top_k": 50, "min_tokens": 4},
    }
    first, second = (ask(cell, "Tell me a story.", **settings) for _ in range(2))
    texts = [choice.message.text for choice in first.choices]
    assert len(set(texts)) == 2
    assert texts == [choice.message.text for choice in second.choices]


def check_logprobs(cell: Any) -> None:
    """Log-probabilities come with each token."""
    output = ask(cell, "What is the capital of France?", logprobs=True, top_logprobs=2)
    logprobs = output.choices[0].logprobs
    assert logprobs is not None
    assert output.usage is not None
    assert len(logprobs.content) == output.usage.output_tokens
    assert all(len(position.top_logprobs or []) == 2 for position in logprobs.content)


def check_stop_reasons(cell: Any) -> None:
    """Inspect tells why an answer ended."""
    assert ask(cell, "What is the capital of France?").stop_reason == "stop"
    assert ask(cell, "What is the capital of France?", max_tokens=2).stop_reason == "max_tokens"
    assert ask(cell, "a b c " * 20000).stop_reason == "model_length"


def check_an_evaluation_with_wrong_settings_fails(cell: Any) -> None:
    """What the cell refuses ends the evaluation with its words, and is not retried."""
    task = Task(dataset=SAMPLES[:1], solver=generate(temperature=-1), scorer=includes())
    log = run(cell, task)
    assert log.status == "error"
    assert log.error is not None
    assert "temperature: " in log.error.message


def check_streams(cell: Any) -> None:
    """The provider reads streams, too, and finds the same."""
    whole = ask(cell, "What is the capital of France?")
    model = get_model(
        f"openai-api/lockstep/{cell.model}",
        base_url=cell.base_url,
        api_key="none",
        config=GREEDY,
        memoize=False,
        stream=True,
    )
    streamed = asyncio.run(model.generate("What is the capital of France?"))
    assert streamed.completion == whole.completion
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage is not None
    assert whole.usage is not None
    assert streamed.usage.output_tokens == whole.usage.output_tokens
