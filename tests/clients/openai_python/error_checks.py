"""Errors as OpenAI's library for Python raises them, and which of them it retries."""

from __future__ import annotations

import subprocess
from functools import partial
from typing import Any

import openai

from tests.clients.openai_python.asking import QUESTION, connect, error_of, say
from tests.clients.openai_python.load import begin_endless, wait_until_idle

RETRIES = 3


class Attempts:
    """Counts the answers that a client gets."""

    def __init__(self) -> None:
        self.statuses: list[int] = []

    def client(self, cell: Any) -> openai.OpenAI:
        """A client that retries."""
        http_client = openai.DefaultHttpxClient(event_hooks={"response": [self.note]})
        return connect(cell, max_retries=RETRIES, http_client=http_client)

    def note(self, response: Any) -> None:
        """See httpx."""
        self.statuses.append(response.status_code)


def refused(kind: type[openai.APIStatusError], cell: Any, **options: Any) -> Any:
    """The error of a chat that is not retried, though the client would."""
    attempts = Attempts()
    client = attempts.client(cell)
    ask = partial(client.chat.completions.create, **{"model": cell.model, "messages": say(QUESTION), **options})
    error = error_of(kind, ask)
    assert attempts.statuses == [error.status_code]
    return error


def check_bad_request(cell: Any) -> None:
    """A wrong field is a BadRequestError with its name."""
    for options, param in (
        ({"temperature": -1}, "temperature"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
        ({"n": 10**6}, "n"),
        ({"stop": [""]}, "stop"),
        ({"extra_body": {"best_of": 3}}, "best_of"),
        ({"extra_body": {"suffix": "x"}}, "suffix"),
        ({"messages": []}, "messages"),
        ({"tool_choice": "required"}, "tool_choice"),
    ):
        error = refused(openai.BadRequestError, cell, **options)
        assert (error.type, error.code) == ("invalid_request_error", "invalid_request"), options
        assert error.param.startswith(param), error.param
        assert param in error.message


def check_image(cell: Any) -> None:
    """An image is a BadRequestError that names the part."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [{"type": "text", "text": "What is this?"}, image]
    error = refused(openai.BadRequestError, cell, messages=[{"role": "user", "content": content}])
    assert error.param == "messages[0].content[1]"


def check_context_length(cell: Any) -> None:
    """A prompt that is too long has OpenAI's code and words, by which proxies know it."""
    for options in ({"messages": say("word " * 9000)}, {"max_completion_tokens": 8192}):
        error = refused(openai.BadRequestError, cell, **options)
        assert error.code == "context_length_exceeded", error
        assert "maximum context length" in error.message


def check_precondition(narrow: Any) -> None:
    """What this cell cannot give is a BadRequestError with the reason."""
    error = refused(openai.BadRequestError, narrow, extra_body={"determinism": "exact"})
    assert error.code == "exact_unavailable"


def check_not_found(cell: Any) -> None:
    """Another model and another path are a NotFoundError; another method is 405."""
    error = refused(openai.NotFoundError, cell, model="other")
    assert (error.code, error.param) == ("model_not_found", "model")
    client = connect(cell)
    assert error_of(openai.NotFoundError, lambda: client.get("/nothing", cast_to=object)).code == "not_found"
    method = error_of(openai.APIStatusError, lambda: client.get("/chat/completions", cast_to=object))
    assert (method.status_code, method.code) == (405, "method_not_allowed")


def check_too_large(cell: Any) -> None:
    """A body above 4 MiB is 413, though the client has not sent all of it."""
    error = refused(openai.APIStatusError, cell, messages=say("x" * (5 << 20)))
    assert (error.status_code, error.code) == (413, "request_too_large")


def check_heads(cell: Any) -> None:
    """Another content type is 415, a long header line 431, a Host that is not ours a PermissionDeniedError."""
    for name, value, status in (
        ("Content-Type", "text/plain", 415),
        ("X-Long", "x" * 9000, 431),
        ("Host", "example.org", 403),
    ):
        error = refused(openai.APIStatusError, cell, extra_headers={name: value})
        assert error.status_code == status
        assert isinstance(error, openai.PermissionDeniedError) == (status == 403)


def check_not_supported(cell: Any) -> None:
    """Other APIs are 501, by name and without a retry."""
    for path, call in (
        ("/v1/images/generations", lambda client: client.images.generate(prompt="x")),
        ("/v1/moderations", lambda client: client.moderations.create(input="x")),
    ):
        attempts = Attempts()
        error = error_of(openai.InternalServerError, partial(call, attempts.client(cell)))
        assert (error.status_code, error.code) == (501, "not_supported")
        assert path in error.message
        assert attempts.statuses == [501]


def check_server_timeout(narrow: Any) -> None:
    """A request that takes longer than its timeout_s is 504, without a retry; as a stream it ends with the error."""
    endless = {"ignore_eos": True, "timeout_s": 0.4}
    error = refused(openai.InternalServerError, narrow, extra_body=endless)
    assert (error.status_code, error.code) == (504, "deadline_passed")
    stream = begin_endless(narrow, timeout_s=1.5)
    assert error_of(openai.APIError, lambda: list(stream)).code == "deadline_passed"
    wait_until_idle(narrow)


def check_abort(narrow: Any) -> None:
    """A stream of a request that an operator aborts ends with the error."""
    stream = begin_endless(narrow)
    first = next(iter(stream))
    subprocess.run([*narrow.abort, first.id.removeprefix("chatcmpl-")], check=True, cwd=narrow.root)
    assert error_of(openai.APIError, lambda: list(stream)).code == "aborted_by_call"
    wait_until_idle(narrow)


def check_full_queue(narrow: Any) -> None:
    """A full queue is a RateLimitError that says when to come again."""
    running, waiting = begin_endless(narrow), begin_endless(narrow)
    ask = partial(connect(narrow).chat.completions.create, model=narrow.model, messages=say(QUESTION))
    for options in ({}, {"stream": True}):
        error = error_of(openai.RateLimitError, partial(ask, **options))
        assert (error.code, error.type) == ("server_overloaded", "rate_limit_error")
        headers = error.response.headers
        assert int(headers["retry-after"]) >= 1
        assert 1 <= int(headers["retry-after-ms"]) <= 1000 * int(headers["retry-after"])
    running.close()
    waiting.close()
    wait_until_idle(narrow)


def check_retry_of_a_full_queue(narrow: Any) -> None:
    """The library tries again after a full queue, and succeeds when there is room."""
    streams = [begin_endless(narrow), begin_endless(narrow)]

    def make_room(response: Any) -> None:
        statuses.append(response.status_code)
        while streams:
            streams.pop().close()

    statuses: list[int] = []
    http_client = openai.DefaultHttpxClient(event_hooks={"response": [make_room]})
    client = connect(narrow, max_retries=100, http_client=http_client)
    answer = client.chat.completions.create(model=narrow.model, messages=say(QUESTION), max_completion_tokens=2)
    assert answer.usage.completion_tokens == 2
    assert (statuses[0], statuses[-1], set(statuses[:-1])) == (429, 200, {429})
    wait_until_idle(narrow)
