"""Bodies that are no JSON, or have fields of the wrong kind: each is refused by name, and nothing of it is logged."""

from __future__ import annotations

import logging

import pytest

from tests.support.tokenizer.http_client import MESSAGES, Answer, HttpService
from tests.support.tokenizer.malformed_json import SECRET, huge_chats, malformed_chats, shows_secret
from tests.unit.tokenizer.http.connections.test_hostile_heads import texts_of

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
# The other ones than the first are those of values that have the right type.
CODES = {"invalid_request", "model_not_found", "context_length_exceeded", "request_too_large"}


def check(answer: Answer) -> None:
    """The answer is a refusal, in OpenAI's form, without the client's text unless it names a model."""
    assert 400 <= answer.status < 500
    assert answer.headers["Content-Type"].startswith("application/json")
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["code"] in CODES
    assert not shows_secret(answer.error)


def test_there_are_two_hundred_bodies() -> None:
    assert len(malformed_chats()) >= 200


async def test_malformed_bodies_are_refused_by_name_while_a_stream_goes_on(
    http: HttpService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    task, [sent] = await http.begin(CHAT, {"messages": MESSAGES, "stream": True})
    for name, body in malformed_chats().items():
        answer = await http.ask("POST", CHAT, data=body, headers=JSON)
        try:
            check(answer)
            field = name.partition(" as ")[2]
            assert (answer.error["param"] or "").startswith(field) or field in answer.error["message"]
        except AssertionError as error:
            raise AssertionError(f"{name}: {answer.status} {answer.body!r}") from error
    assert SECRET not in texts_of(caplog)
    http.send(sent, [70])
    assert (await task).pieces


@pytest.mark.parametrize("name", huge_chats())
async def test_a_huge_body_is_refused(http: HttpService, caplog: pytest.LogCaptureFixture, name: str) -> None:
    caplog.set_level(logging.INFO)
    check(await http.ask("POST", CHAT, data=huge_chats()[name](), headers=JSON))
    assert SECRET not in texts_of(caplog)
