"""Every answer and every piece is, strictly, of the types of OpenAI's library for Python."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from copy import deepcopy
from typing import Any

from openai.types import Completion, ErrorObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.clients.openai_python.asking import QUESTION, TIME, WEATHER, asks_for_weather, say
from tests.clients.openai_python.strict_types import problems_of

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}

# Beside a model and a prompt.
COMMON: list[dict[str, Any]] = [
    {},
    {"n": 2, "seed": 1, "temperature": 1},
    {"stop": [" is"]},
    {"logprobs": 1},
    {"return_token_ids": True},
    {"logprobs": 1, "return_tokens_as_token_ids": True},
    {"logprobs": 1, "logprob_token_ids": [1, 2]},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"stop_token_ids": [1000], "logit_bias": {"1000": 100}},
]
CHATS: list[dict[str, Any]] = [
    {"logprobs": True, "top_logprobs": 2, "n": 2},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "ok", "schema": SCHEMA, "strict": True}}},
    {"messages": asks_for_weather(), "tools": [WEATHER], "max_completion_tokens": 40},
    {"tools": [TIME], "tool_choice": "required", "max_completion_tokens": 50, "logprobs": True},
    {"tools": [TIME], "tool_choice": "required", "max_completion_tokens": 3},
    {"tools": [WEATHER, TIME], "tool_choice": "none"},
]
COMPLETIONS: list[dict[str, Any]] = [
    {"echo": True},
    {"logprobs": 0},
    {"echo": True, "logprobs": 2},
    {"echo": True, "logprobs": 2, "max_tokens": 0},
    {"prompt": ["Once upon a time", "One two"], "n": 2},
    {"prompt": [[100, 200, 300], [400]], "logprobs": 1, "echo": True, "return_token_ids": True},
]
NOT_STREAMED: list[dict[str, Any]] = [{"prompt_logprobs": 1}, {"prompt_logprobs": 0, "n": 2}]
STREAM_OPTIONS = [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]


def chats(cell: Any) -> list[dict[str, Any]]:
    """Bodies of chats."""
    common = [body | ({"logprobs": True} if "logprobs" in body else {}) for body in COMMON]
    base = {"model": cell.model, "messages": say(QUESTION), "temperature": 0, "max_completion_tokens": 6}
    return [base | body for body in [*common, *CHATS]]


def completions(cell: Any) -> list[dict[str, Any]]:
    """Bodies of completions."""
    base = {"model": cell.model, "prompt": "The capital of France", "temperature": 0, "max_tokens": 6}
    return [base | body for body in [*COMMON, *COMPLETIONS]]


def check_chats(cell: Any) -> None:
    """Chats."""
    for body in [*chats(cell), *({**chats(cell)[0], **body} for body in NOT_STREAMED)]:
        expect_type(ChatCompletion, ask(cell, "chat/completions", body), body)


def check_streamed_chats(cell: Any) -> None:
    """Pieces of chats."""
    for index, body in enumerate(chats(cell)):
        expect_pieces(cell, "chat/completions", body | streamed(index), ChatCompletionChunk)


def check_completions(cell: Any) -> None:
    """Completions."""
    for body in [*completions(cell), *({**completions(cell)[0], **body} for body in NOT_STREAMED)]:
        expect_type(Completion, ask(cell, "completions", body), body)


def check_streamed_completions(cell: Any) -> None:
    """Pieces of completions."""
    for index, body in enumerate(completions(cell)):
        expect_pieces(cell, "completions", body | streamed(index), Completion)


def check_spoilt_answers(cell: Any) -> None:
    """The validation itself notices what is wrong, at each depth."""
    body = chats(cell)[0] | {"logprobs": True, "top_logprobs": 1, "max_completion_tokens": 1}
    answer = ask(cell, "chat/completions", body)
    expect_type(ChatCompletion, answer, body)
    for path, name, value in (
        ((), "surprise", 1),
        ((), "created", "1"),
        ((), "object", "chat.completion.chunk"),
        (("choices", 0), "surprise", None),
        (("choices", 0), "finish_reason", None),
        (("choices", 0), "finish_reason", "eos"),
        (("choices", 0), "index", 0.5),
        (("choices", 0, "message"), "role", "model"),
        (("choices", 0, "message"), "content", ["text"]),
        (("choices", 0, "logprobs", "content", 0, "top_logprobs", 0), "logprob", None),
        (("usage",), "total_tokens", None),
        (("usage", "prompt_tokens_details"), "surprise", 0),
    ):
        spoilt = deepcopy(answer)
        place = spoilt
        for step in path:
            place = place[step]
        place[name] = value
        assert problems_of(ChatCompletion, spoilt), (path, name, value)


def check_models(cell: Any) -> None:
    """The list of models, and one of them."""
    listed = ask(cell, "models")
    assert (set(listed), listed["object"]) == ({"object", "data"}, "list")
    for model in listed["data"]:
        expect_type(Model, model, "models")
        assert ask(cell, f"models/{model['id']}") == model


def check_errors(cell: Any) -> None:
    """Errors, also one at the end of a stream."""
    base = chats(cell)[0]
    for path, body in (
        ("chat/completions", {**base, "temperature": -1}),
        ("chat/completions", {**base, "messages": None}),
        ("chat/completions", {**base, "model": "other"}),
        ("chat/completions", {**base, "max_completion_tokens": 10**6}),
        ("chat/completions", {**base, "timeout_s": 1e-6}),
        ("embeddings", {}),
        ("nothing", {}),
        ("models/other", None),
    ):
        answer = ask(cell, path, body)
        assert set(answer) == {"error"}, (body, answer)
        expect_type(ErrorObject, answer["error"], path)
        assert set(answer["error"]) == {"message", "type", "param", "code"}
    endless = {"max_completion_tokens": 4000, "ignore_eos": True, "timeout_s": 2}
    *pieces, last = read_stream(cell, "chat/completions", {**base, **endless, "stream": True})
    assert pieces
    expect_type(ErrorObject, json.loads(last)["error"], "late")


def streamed(index: int) -> dict[str, Any]:
    """The fields that make a request a streamed one, with each of the options in turn."""
    options = STREAM_OPTIONS[index % len(STREAM_OPTIONS)]
    return {"stream": True} | ({} if options is None else {"stream_options": options})


def expect_pieces(cell: Any, path: str, body: dict[str, Any], kind: Any) -> None:
    """Check all pieces of a stream, and that its head stays the same."""
    *events, done = read_stream(cell, path, body)
    assert done == "[DONE]"
    pieces = [json.loads(event) for event in events]
    for piece in pieces:
        expect_type(kind, piece, body)
    assert len({(piece["id"], piece["created"], piece["model"], piece["object"]) for piece in pieces}) == 1
    finished = [choice["index"] for piece in pieces for choice in piece["choices"] if choice["finish_reason"]]
    prompts = body.get("prompt")
    num_prompts = len(prompts) if isinstance(prompts, list) else 1
    assert sorted(finished) == list(range(num_prompts * body.get("n", 1)))
    options = body.get("stream_options", {})
    usages = [piece.get("usage") for piece in pieces]
    assert [usage is not None for usage in usages[:-1]] == [bool(options.get("continuous_usage_stats"))] * (
        len(pieces) - 1
    )
    assert (pieces[-1]["choices"] == []) == bool(options) == (usages[-1] is not None)
    assert all(piece["choices"] for piece in pieces[:-1])


def expect_type(kind: Any, value: Any, request: Any) -> None:
    """Check one value."""
    problems = problems_of(kind, value)
    assert not problems, (request, value, problems)


def ask(cell: Any, path: str, body: Any = None) -> Any:
    """The JSON of an answer, of whatever status."""
    try:
        with urllib.request.urlopen(_request(cell, path, body)) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)


def read_stream(cell: Any, path: str, body: Any) -> list[str]:
    """The data of a stream's events."""
    with urllib.request.urlopen(_request(cell, path, body)) as answer:
        *blocks, end = answer.read().decode().split("\n\n")
    assert end == ""
    return [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]


def read_blocks(cell: Any, path: str, body: Any) -> list[tuple[str, str]]:
    """The names and the data of a stream's events."""
    with urllib.request.urlopen(_request(cell, path, body)) as answer:
        *blocks, end = answer.read().decode().split("\n\n")
    assert end == ""
    named = [block.partition("\ndata: ") for block in blocks if not block.startswith(":")]
    return [(name.removeprefix("event: "), data) for name, _, data in named]


def _request(cell: Any, path: str, body: Any) -> urllib.request.Request:
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.Request(f"{cell.base_url}/{path}", data, {"Content-Type": "application/json"})
