"""A model that is not served is named, as it was asked for, to the client that asked for it alone."""

from __future__ import annotations

import json
import logging

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.http.route_table import NOT_SUPPORTED, ROUTES
from shared.errors import MAX_QUOTED_CHARACTERS, quote_name
from tests.support.tokenizer.http_client import MESSAGES, HttpService

ASKED = "gpt-\u202e4\n\x1b[31m'\"é" + "z" * 200
BODY = {"model": ASKED, "messages": MESSAGES, "input": "x", "prompt": "x", "max_tokens": 5, "tokens": [1]}
BODY |= {"text_1": "x", "text_2": "y", "query": "x", "documents": ["y"]}
FIELDS = {
    "/v1/chat/completions": ("messages",),
    "/v1/completions": ("prompt",),
    "/v1/messages": ("messages", "max_tokens"),
    "/v1/messages/count_tokens": ("messages",),
    "/v1/responses": ("input",),
    "/v1/responses/input_tokens": ("input",),
    "/v1/chat/completions/render": ("messages",),
    "/v1/completions/render": ("prompt",),
    "/tokenize": ("prompt",),
    "/detokenize": ("tokens",),
    "/v1/embeddings": ("input",),
    **dict.fromkeys(("/v1/score", "/score"), ("text_1", "text_2")),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), ("query", "documents")),
}


@given(st.text(max_size=3 * MAX_QUOTED_CHARACTERS))
def test_a_name_is_quoted_in_few_printable_characters_of_ascii(name: str) -> None:
    quoted = quote_name(name)
    shown = json.loads(quoted)
    assert quoted.isascii()
    assert quoted.isprintable()
    assert len(shown) <= MAX_QUOTED_CHARACTERS + len("...")
    if name.isprintable() and len(name) <= MAX_QUOTED_CHARACTERS:
        assert shown == name


def test_every_route_with_a_body_is_tried() -> None:
    assert {route.path for route in ROUTES if route.method == "POST"} == FIELDS.keys()


@pytest.mark.parametrize("path", FIELDS)
async def test_a_route_names_the_model_and_those_served_and_no_log_does(
    http: HttpService, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    answer = await http.post(path, {name: BODY[name] for name in ("model", *FIELDS[path])})
    assert answer.status == 404
    message = answer.error["message"]
    assert message == f'the model {quote_name(ASKED)} is not served here; served: "tiny"'
    assert "gpt-" in message
    assert "zzzz" not in caplog.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_stream_is_refused_alike(http: HttpService, path: str) -> None:
    answer = await http.post(path, {name: BODY[name] for name in ("model", *FIELDS[path])} | {"stream": True})
    assert (answer.status, "gpt-" in answer.error["message"]) == (404, True)


async def test_the_model_in_a_path_is_named_too(http: HttpService) -> None:
    answer = await http.get("/v1/models/llama/3")
    assert answer.error["message"] == 'the model "llama/3" is not served here; served: "tiny"'


@pytest.mark.parametrize("method", ["Complete", "Score"])
async def test_grpc_says_the_same(http: HttpService, method: str) -> None:
    request = tokenizer_pb2.GenerateRequest(text="x", model=ASKED)
    pairs = tokenizer_pb2.ScorePairs(queries=["x"], documents=["y"])
    messages = {
        "Complete": tokenizer_pb2.CompleteRequest(request=request),
        "Score": tokenizer_pb2.ScoreRequest(pairs=pairs, model=ASKED),
    }
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(http.service.stub, method)(messages[method])
    assert caught.value.details() == f'the model {quote_name(ASKED)} is not served here; served: "tiny"'


async def test_a_prompt_of_a_response_is_counted(http: HttpService) -> None:
    answer = await http.post("/v1/responses/input_tokens", {"input": "hi", "model": "tiny"})
    chat = await http.post("/v1/messages/count_tokens", {"messages": MESSAGES, "model": "tiny"})
    assert answer.status == chat.status == 200
    assert answer.value["object"] == "response.input_tokens"
    assert answer.value["input_tokens"] > 0


@pytest.mark.parametrize("path", NOT_SUPPORTED)
async def test_what_is_of_another_api_is_refused_by_name_and_says_where_ours_is(http: HttpService, path: str) -> None:
    answer = await http.post(path, {})
    assert answer.status == 501
    error = answer.value["error"]
    # Ollama's clients read a text.
    message = error if path.startswith("/api/") else error["message"]
    assert message.startswith(f"{path} is not supported; OpenAI's API is below /v1")
