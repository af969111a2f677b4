"""Answers of the HTTP API, whole or streamed, in one form in which they can be compared."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
DONE = "[DONE]"

# A token's text, log-probability and bytes (None where the route has none), and the log-probabilities that are listed
# at its position, by the tokens' texts.
Position = tuple[str, float | None, bytes | None, tuple[tuple[str, float], ...]]


class RefusedError(Exception):
    """An answer that is an error, from the beginning or in the middle of a stream.

    Attributes:
        status: The HTTP status; 200 if a stream had begun.
        headers: Those of the answer.
        error: The error's object.
    """

    def __init__(self, status: int, headers: Any, error: dict[str, Any]) -> None:
        super().__init__(f"{status} {error}")
        self.status = status
        self.headers = headers
        self.error = error

    @property
    def code(self) -> str:
        """The error's code."""
        code: str = self.error["code"]
        return code


@dataclass
class HttpChoice:
    """One choice, joined from its pieces. `logprobs` are None if there are none."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Position] | None = None
    prompt_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class HttpUsage:
    """What an answer consumed, in tokens."""

    prompt: int
    completion: int
    cached: int
    reasoning: int


@dataclass
class HttpAnswer:
    """All choices, by their number, and what is told of the whole.

    Attributes:
        choices: All choices.
        usage: What was consumed.
        prompt_logprobs: vLLM's, by the first choice of each prompt; empty in a stream.
        seed: The seed that was used.
        num_resumes: How often choices were resumed.
        is_exact: Whether the resumes left the bytes as they would have been.
    """

    choices: dict[int, HttpChoice] = field(default_factory=dict)
    usage: HttpUsage | None = None
    prompt_logprobs: dict[int, Any] = field(default_factory=dict)
    seed: int | None = None
    num_resumes: int = 0
    is_exact: bool = True

    def close(self, value: dict[str, Any]) -> None:
        """Take what the last object says."""
        usage, facts = value["usage"], value["lockstep"]
        self.usage = HttpUsage(
            usage["prompt_tokens"],
            usage["completion_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens_details"]["reasoning_tokens"],
        )
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert value["system_fingerprint"].startswith("fp_")
        self.seed, self.num_resumes, self.is_exact = facts["seed"], facts["resume_count"], facts["resume_exact"]


async def post_whole(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> HttpAnswer:
    """Send a request, and read its answer, one JSON object.

    Raises:
        RefusedError: It is an error.
    """
    async with session.post(path, json=body) as response:
        value = await response.json()
        if response.status != 200:
            raise RefusedError(response.status, response.headers, value["error"])
    return _read_whole(path, value)


async def post_streamed(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> HttpAnswer:
    """Send a request, and read its answer, a stream with its usage; see `post_whole`."""
    stream = AnswerStream(path)
    async with open_stream(session, path, body) as response:
        async for piece in read_pieces(response):
            stream.add(piece)
    return stream.complete()


def open_stream(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> Any:
    """Send a request for a stream with its usage; entering the result gives the response."""
    return session.post(path, json=body | {"stream": True, "stream_options": {"include_usage": True}})


async def read_pieces(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream, which must end with [DONE].

    Raises:
        RefusedError: The answer is an error, or ends with one.
        ConnectionError: The stream ended before it was complete.
    """
    if response.status != 200:
        raise RefusedError(response.status, response.headers, (await response.json())["error"])
    assert response.content_type == "text/event-stream"
    is_done, error = False, None
    async for data in read_events(response):
        assert not is_done, "an event after [DONE]"
        assert error is None, "an event after an error"
        is_done = data == DONE
        value = None if is_done else json.loads(data)
        if value is not None and "error" in value:
            error = value["error"]
        elif value is not None:
            yield value
    if error is not None:
        raise RefusedError(response.status, response.headers, error)
    if not is_done:
        raise ConnectionError("the stream ended without [DONE]")


async def collect(response: aiohttp.ClientResponse, pieces: list[dict[str, Any]]) -> None:
    """Append the pieces of a stream to a list, which keeps them if it fails; see `read_pieces`."""
    async for piece in read_pieces(response):
        pieces.append(piece)  # noqa: PERF401 - those before an error count, too


async def read_events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The data of a stream's events, without comments."""
    while line := await response.content.readline():
        text = line.decode().removesuffix("\n")
        if text and not text.startswith(":"):
            assert text.startswith("data: "), "an event has one line of data"
            yield text.removeprefix("data: ")


class AnswerStream:
    """Joins the pieces of a stream, and checks what must hold for each of them."""

    def __init__(self, path: str) -> None:
        self._is_chat = path == CHAT
        self._answer = HttpAnswer()
        self._head: tuple[Any, ...] | None = None

    def add(self, piece: dict[str, Any]) -> None:
        """Add the next piece."""
        head = (piece["id"], piece["object"], piece["created"], piece["model"])
        assert self._head in (None, head), "pieces differ in what all must share"
        assert self._answer.usage is None, "a piece after the usage"
        self._head = head
        if not piece["choices"]:
            self._answer.close(piece)
            return
        assert piece["usage"] is None
        [choice] = piece["choices"]
        is_first = choice["index"] not in self._answer.choices
        joined = self._answer.choices.setdefault(choice["index"], HttpChoice())
        assert joined.finish_reason is None, "a piece after the choice's last one"
        if self._is_chat:
            assert is_first is ("role" in choice["delta"]), "the role comes in the first piece"
            _add_delta(joined, choice["delta"])
        else:
            joined.text += choice["text"]
        _add_common(joined, choice, _chat_positions if self._is_chat else _completion_positions)

    def complete(self) -> HttpAnswer:
        """The whole answer; every choice must have ended, and the usage have come."""
        answer = self._answer
        assert answer.usage is not None, "the stream ended without the usage"
        assert all(choice.finish_reason is not None for choice in answer.choices.values())
        return answer


def _read_whole(path: str, value: dict[str, Any]) -> HttpAnswer:
    answer = HttpAnswer()
    if value.get("prompt_logprobs") is not None:
        answer.prompt_logprobs[0] = value["prompt_logprobs"]
    for choice in value["choices"]:
        joined = answer.choices[choice["index"]] = HttpChoice()
        if choice.get("prompt_logprobs") is not None:
            answer.prompt_logprobs[choice["index"]] = choice["prompt_logprobs"]
        if path == CHAT:
            message = choice["message"]
            assert message["role"] == "assistant"
            assert (message["content"] is None) <= bool(message.get("tool_calls"))
            joined.text, joined.reasoning = message["content"] or "", message.get("reasoning", "")
            assert message.get("reasoning_content", "") == joined.reasoning
            calls = [call["function"] for call in message.get("tool_calls", ())]
            joined.calls = [(call["name"], call["arguments"]) for call in calls]
            joined.prompt_ids = value.get("prompt_token_ids")
        else:
            joined.text = choice["text"]
        _add_common(joined, choice, _chat_positions if path == CHAT else _completion_positions)
    answer.close(value)
    return answer


def _add_delta(joined: HttpChoice, delta: dict[str, Any]) -> None:
    joined.text += delta.get("content") or ""
    joined.reasoning += delta.get("reasoning", "")
    assert delta.get("reasoning_content") == delta.get("reasoning")
    for call in delta.get("tool_calls", ()):
        function = call["function"]
        if call["index"] == len(joined.calls):
            assert (call["type"], bool(call["id"])) == ("function", True)
            joined.calls.append((function["name"], function["arguments"]))
        else:
            assert "name" not in function, "a call's name twice"
            name, arguments = joined.calls[call["index"]]
            joined.calls[call["index"]] = (name, arguments + function["arguments"])


def _add_common(joined: HttpChoice, choice: dict[str, Any], read_positions: Any) -> None:
    joined.token_ids += choice.get("token_ids", ())
    if choice.get("prompt_token_ids") is not None:
        assert joined.prompt_ids is None, "the prompt's ids twice"
        joined.prompt_ids = choice["prompt_token_ids"]
    if choice["logprobs"] is not None:
        joined.logprobs = [*(joined.logprobs or ()), *read_positions(choice["logprobs"])]
    if choice["finish_reason"] is not None:
        joined.finish_reason, joined.stop_reason = choice["finish_reason"], choice["stop_reason"]


def _chat_positions(logprobs: dict[str, Any]) -> list[Position]:
    return [
        (
            entry["token"],
            entry["logprob"],
            bytes(entry["bytes"]),
            listed((item["token"], item["logprob"]) for item in [*entry["top_logprobs"], entry]),
        )
        for entry in logprobs["content"]
    ]


def _completion_positions(logprobs: dict[str, Any]) -> list[Position]:
    fields: Sequence[list[Any]] = [logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs")]
    return [
        (token, logprob, None, tuple(sorted((likeliest or {}).items())))
        for token, logprob, likeliest in zip(*fields, strict=True)
    ]


def listed(entries: Iterable[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    """The listed log-probabilities of a position; of tokens with one text, the first counts."""
    found: dict[str, float] = {}
    for text, logprob in entries:
        found.setdefault(text, logprob)
    return tuple(sorted(found.items()))
