"""What an application or a proxy built on litellm does, by its two providers for such a server."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import litellm
import openai
from pydantic import BaseModel, Field

from tests.clients.checking import error_of, wait_until_running

litellm.suppress_debug_info = True

# What the model's name begins with: the second one takes vLLM's own fields.
PROVIDERS = ("openai/", "hosted_vllm/")
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {"role": "user", "content": "What is the weather in Paris?"}
LONG = [{"role": "user", "content": "a b c " * 20000}]
ENDLESS = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}, "messages": [{"role": "user", "content": "Count."}]}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "minLength": 1, "maxLength": 16}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=99)


def request(cell: Any, provider: str = PROVIDERS[0], **fields: Any) -> dict[str, Any]:
    """Arguments of `completion`: the question, greedy and without retries unless asked."""
    return {
        "model": provider + cell.model,
        "api_base": cell.base_url,
        "api_key": "none",
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 24,
        "max_retries": 0,
        **fields,
    }


def check_chat(cell: Any) -> None:
    """A chat has its text, usage and finish."""
    for provider in PROVIDERS:
        answer = litellm.completion(**request(cell, provider))
        [choice] = answer.choices
        assert "Paris" in choice.message.content, choice
        assert choice.finish_reason == "stop"
        usage = answer.usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert answer.id.startswith("chatcmpl-")


def check_stream_equals_chat(cell: Any) -> None:
    """The pieces of a stream, put together by litellm, are the answer that is not streamed."""
    for provider in PROVIDERS:
        whole = litellm.completion(**request(cell, provider))
        pieces = list(
            litellm.completion(**request(cell, provider, stream=True, stream_options={"include_usage": True}))
        )
        texts = [choice.delta.content for piece in pieces for choice in piece.choices if choice.delta.content]
        assert len(texts) > 1, "the text came in one piece"
        answer = litellm.stream_chunk_builder(pieces, messages=QUESTION)
        assert answer.choices[0].message.content == whole.choices[0].message.content
        assert answer.choices[0].finish_reason == whole.choices[0].finish_reason
        assert answer.usage.prompt_tokens == whole.usage.prompt_tokens
        assert answer.usage.completion_tokens == whole.usage.completion_tokens


def check_costs(cell: Any) -> None:
    """A price that the user registers is applied to the usage; one that is missing breaks nothing."""
    assert litellm.completion(**request(cell, max_tokens=4)).usage.completion_tokens == 4
    prices = {"input_cost_per_token": 1e-6, "output_cost_per_token": 2e-6, "litellm_provider": "openai", "mode": "chat"}
    litellm.register_model({f"openai/{cell.model}": prices})
    answer = litellm.completion(**request(cell, max_tokens=4))
    expected = 1e-6 * answer.usage.prompt_tokens + 2e-6 * answer.usage.completion_tokens
    assert abs(litellm.completion_cost(answer) - expected) < 1e-12
    assert abs(answer._hidden_params["response_cost"] - expected) < 1e-12


def check_a_tool_is_called_and_its_result_read(cell: Any) -> None:
    """A call is parsed, and its result is part of the next prompt."""
    for provider in PROVIDERS:
        asking = request(cell, provider, messages=[WEATHER], tools=[TOOL], tool_choice="required", max_tokens=80)
        asked = litellm.completion(**asking)
        [choice] = asked.choices
        assert choice.finish_reason == "tool_calls"
        call = choice.message.tool_calls[0]
        assert call.function.name == "weather"
        assert list(json.loads(call.function.arguments)) == ["city"]
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 21}'}
            for call in choice.message.tool_calls
        ]
        told = litellm.completion(
            **request(cell, provider, messages=[WEATHER, choice.message.model_dump(), *results], tools=[TOOL])
        )
        assert told.usage.prompt_tokens > asked.usage.prompt_tokens


def check_a_call_in_a_stream(cell: Any) -> None:
    """The parts of a call add up to the call that is not streamed."""
    named = {"type": "function", "function": {"name": "weather"}}
    asking = request(cell, messages=[WEATHER], tools=[TOOL], tool_choice=named, max_tokens=80)
    whole = litellm.completion(**asking)
    answer = litellm.stream_chunk_builder(list(litellm.completion(stream=True, **asking)))
    streamed, expected = (message.choices[0].message.tool_calls for message in (answer, whole))
    assert [call.function.arguments for call in streamed] == [call.function.arguments for call in expected]
    assert answer.choices[0].finish_reason == "tool_calls"


def check_structured_output(cell: Any) -> None:
    """A pydantic model is a schema that the answer matches."""
    for provider in PROVIDERS:
        answer = litellm.completion(**request(cell, provider, response_format=Person, max_tokens=80))
        Person.model_validate_json(answer.choices[0].message.content)


def check_fields_of_vllm(cell: Any) -> None:
    """Fields that OpenAI does not have are handed on."""
    answer = litellm.completion(**request(cell, PROVIDERS[1], top_k=1, extra_body={"min_tokens": 20}, temperature=1))
    assert answer.usage.completion_tokens >= 20
    extra = {"structured_outputs": {"choice": ["red", "green"]}}
    assert litellm.completion(**request(cell, extra_body=extra)).choices[0].message.content in ("red", "green")


def check_logprobs(cell: Any) -> None:
    """Log-probabilities come with each token."""
    answer = litellm.completion(**request(cell, logprobs=True, top_logprobs=2))
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(len(position.top_logprobs) == 2 for position in content)


def check_completions(cell: Any) -> None:
    """The older interface, streamed and not."""
    asking = request(cell, "text-completion-openai/", max_tokens=12)
    del asking["messages"]
    whole = litellm.text_completion(prompt="1, 2, 3, 4,", **asking)
    assert "5, 6" in whole.choices[0].text
    pieces = litellm.text_completion(prompt="1, 2, 3, 4,", stream=True, **asking)
    assert "".join(piece.choices[0].text or "" for piece in pieces) == whole.choices[0].text


def check_errors_have_their_types(cell: Any) -> None:
    """Errors are those by which litellm retries, falls back or gives up."""
    for provider in PROVIDERS:
        for fields, kind in (
            ({"temperature": -1}, litellm.BadRequestError),
            ({"model": f"{provider}another"}, litellm.NotFoundError),
            ({"messages": LONG}, litellm.ContextWindowExceededError),
            ({"max_tokens": 9000}, litellm.ContextWindowExceededError),
            ({"messages": LONG, "stream": True}, litellm.ContextWindowExceededError),
        ):
            error = error_of(kind, partial(litellm.completion, **request(cell, provider, **fields)))
            assert type(error) is kind, error


def check_it_falls_back_from_a_prompt_that_is_too_long(cell: Any) -> None:
    """A router sends the same chat to a model with more room."""
    small = request(cell, messages=QUESTION, max_tokens=9000)
    del small["messages"]
    large = {**small, "max_tokens": 4}
    router = litellm.Router(
        [{"model_name": "small", "litellm_params": small}, {"model_name": "large", "litellm_params": large}],
        context_window_fallbacks=[{"small": ["large"]}],
        num_retries=0,
    )
    assert router.completion("small", QUESTION).usage.completion_tokens == 4


def check_refused_requests_are_not_retried(cell: Any) -> None:
    """What is wrong is sent once, whatever retries are asked for."""
    sent: list[Any] = []
    http = openai.DefaultHttpxClient(event_hooks={"request": [sent.append]})
    client = openai.OpenAI(base_url=cell.base_url, api_key="none", http_client=http, max_retries=3)
    asking = request(cell, top_p=7, max_retries=3)
    error_of(litellm.BadRequestError, partial(litellm.completion, client=client, **asking))
    assert len(sent) == 1


def check_a_full_queue_is_a_rate_limit_and_retried(narrow: Any) -> None:
    """Overload has litellm's own type, and retries come through when there is room."""
    busy = openai.OpenAI(base_url=narrow.base_url, api_key="none", max_retries=0)
    # One is computed and one waits: a stream begins at the latest a second after that.
    streams = [busy.chat.completions.create(model=narrow.model, stream=True, **ENDLESS) for _ in range(2)]
    error_of(litellm.RateLimitError, partial(litellm.completion, **request(narrow)))

    def make_room(response: Any) -> None:
        statuses.append(response.status_code)
        while streams:
            streams.pop().close()

    statuses: list[int] = []
    http = openai.DefaultHttpxClient(event_hooks={"response": [make_room]})
    client = openai.OpenAI(base_url=narrow.base_url, api_key="none", http_client=http, max_retries=100)
    answer = litellm.completion(client=client, **request(narrow, max_tokens=2, max_retries=100))
    assert answer.usage.completion_tokens == 2
    assert (statuses[0], statuses[-1]) == (429, 200), statuses
    wait_until_running(narrow, 0)


def check_retries_do_not_change_an_answer(cell: Any) -> None:
    """litellm's own retries call it in another way."""
    answer = litellm.completion(**request(cell, num_retries=2))
    assert answer.choices[0].message.content == litellm.completion(**request(cell)).choices[0].message.content


def check_many_at_once(cell: Any) -> None:
    """Chats at the same time, by asyncio."""

    async def ask() -> list[Any]:
        return await asyncio.gather(*(litellm.acompletion(**request(cell, max_tokens=8)) for _ in range(8)))

    answers = asyncio.run(ask())
    assert len({answer.choices[0].message.content for answer in answers}) == 1


def check_a_timeout_ends_a_request(cell: Any) -> None:
    """The client's timeout is an error of its own, and frees the cell."""
    for provider in PROVIDERS:
        error_of(litellm.Timeout, partial(litellm.completion, **request(cell, provider, timeout=1, **ENDLESS)))
        wait_until_running(cell, 0)


def check_documents_are_ranked(reranker: Any) -> None:
    documents = ["the fox", "x", "the dog"]
    ranks = []
    for provider, path in (("hosted_vllm", ""), ("cohere", "/v2/rerank"), ("jina_ai", "/v1/rerank")):
        answer = litellm.rerank(
            model=f"{provider}/{reranker.model}",
            query="Which animal is quick?",
            documents=documents,
            top_n=2,
            api_base=reranker.url + path,
            api_key="none",
        )
        ranks.append([(each["index"], each["relevance_score"]) for each in answer.results])
        assert [each["document"]["text"] for each in answer.results] == [documents[index] for index, _ in ranks[-1]]
    assert ranks[0] == ranks[1] == ranks[2]
    assert ranks[0][0][1] >= ranks[0][1][1]
