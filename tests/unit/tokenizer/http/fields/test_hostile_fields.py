"""Fields of any type: each is read, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.http.anthropic.request import MessagesFields
from services.tokenizer.http.embeddings.requests import EmbeddingFields, read_embedding_request
from services.tokenizer.http.errors import http_error
from services.tokenizer.http.fields.fields import Fields
from services.tokenizer.http.openai.chat_request import ChatFields, read_chat_request
from services.tokenizer.http.openai.completion_request import CompletionFields, read_completion_request
from services.tokenizer.http.openai.token_requests import DetokenizeFields
from services.tokenizer.http.openai_responses.request import ResponseFields, read_response_request
from services.tokenizer.http.refusals import HttpError
from services.tokenizer.http.scores.requests import (
    ItemScoreFields,
    RerankFields,
    ScoreFields,
    TextRerankFields,
    read_rerank_request,
    read_score_request,
)
from services.tokenizer.json.json_values import JsonObject, JsonValue
from services.tokenizer.request.checks import check_request
from services.tokenizer.request.embed_checks import Vectors, check_embed
from services.tokenizer.request.score_checks import check_score
from services.tokenizer.scores.recipe import Scores
from shared.errors import ServiceError
from shared.model_files.sentence_files import VectorRecipe
from shared.request.limits import ModelLimits
from tests.support.tokenizer.http_client import MESSAGES

LIMITS = ModelLimits(context_length=256, logits_width=420, num_pool_tokens=200)
VECTORS = Vectors(VectorRecipe("last", True, {"query": ""}, "", ""), size=8)
WRONG: list[JsonValue] = [-1.5] * 100
VALUES: list[Any] = [
    True, 0, -1, 2**32, -(2**70), 1.5, 1e308, -1e308, "", "x", "\0", "x" * 300, [], [[]], [0], [-1], [2**40], ["x"],
    [None], {}, {"x": 1}, {"1": 1e308}, {"type": "x"}, {"type": "function"}, {"json": {}}, {"type": "json_schema"},
    {"type": "function", "function": {}}, [{"role": "user"}], [{"type": "function", "function": {"name": ""}}],
]  # fmt: skip


@pytest.mark.parametrize("name", [*ChatFields.model_fields, "best_of", "modalities", "documents"])
def test_a_chats_field(name: str) -> None:
    for value in VALUES:
        body = {"messages": MESSAGES, "stream": True, "logprobs": True, name: value}
        check(read_chat_request, body, name)


@pytest.mark.parametrize("name", CompletionFields.model_fields)
def test_a_completions_field(name: str) -> None:
    for value in VALUES:
        check(read_completion_request, {"prompt": "x", name: value}, name)


@pytest.mark.parametrize("name", [*ResponseFields.model_fields, "background", "service_tier"])
def test_a_responses_field(name: str) -> None:
    for value in VALUES:
        body = {"input": "hi", "stream": True, "include": ["message.output_text.logprobs"], name: value}
        check(read_response_request, body, name)


RATINGS: list[tuple[Any, type[Fields], dict[str, Any]]] = [
    (read_score_request, ScoreFields, {"text_1": "a", "text_2": ["b"]}),
    (read_score_request, ItemScoreFields, {"query": "a", "items": ["b"], "label_token_ids": [1, 2]}),
    (read_rerank_request, RerankFields, {"query": "a", "documents": ["b"]}),
    (read_rerank_request, TextRerankFields, {"query": "a", "texts": ["b"]}),
    (read_embedding_request, EmbeddingFields, {"input": "a"}),
]


@pytest.mark.parametrize(
    ("read", "body", "name"), [(read, body, name) for read, kind, body in RATINGS for name in kind.model_fields]
)
def test_a_ratings_field(read: Any, body: dict[str, Any], name: str) -> None:
    for value in VALUES:
        check(read, {**body, name: value}, name)


def check(read: Any, body: dict[str, Any], name: str) -> None:
    try:
        api = read(body, "r")
        if isinstance(api.message, tokenizer_pb2.ScoreRequest):
            check_score(api.message, model_name="tiny", limits=LIMITS, scores=Scores(None, "no recipe"))
        elif isinstance(api.message, tokenizer_pb2.EmbedRequest):
            check_embed(api.message, model_name="tiny", limits=LIMITS, vectors=VECTORS)
        else:
            check_request(api.message, model_name="tiny", limits=LIMITS)
    except HttpError as error:
        refused = error
    except ServiceError as error:
        refused = http_error(error, api.names)
    else:
        return
    assert (refused.status, refused.code) in ((400, "invalid_request"), (404, "model_not_found"))
    assert refused.param is not None
    # Some fields make another one wrong.
    related = {
        "stream": "stream_options",
        "logprobs": "top_logprobs",
        "include": "top_logprobs",
        "n": "best_of",
        "tool_choice": "tools",
        "query": "items[0]",
        "text_2": "text_1",
    }
    # Without a recipe.
    if refused.param in ("text_2", "documents", "texts") and "no recipe" in refused.message:
        return
    assert refused.param.startswith(name) or related.get(name) == refused.param or "messages" in refused.param


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatFields, {"messages": WRONG}),
        (ChatFields, {"messages": [{"role": "user", "content": WRONG}]}),
        (ChatFields, {"messages": [{"role": "assistant", "tool_calls": WRONG}]}),
        (ChatFields, {"messages": MESSAGES, "tools": WRONG}),
        (ChatFields, {"messages": MESSAGES, "tool_choice": {"type": "function", "allowed_tools": {"tools": WRONG}}}),
        (ChatFields, {"messages": MESSAGES, "logit_bias": {str(key): "x" for key in range(2000)}}),
        (CompletionFields, {"prompt": WRONG}),
        (CompletionFields, {"prompt": "x", "structured_outputs": {"choice": WRONG}}),
        *(
            (CompletionFields, {"prompt": "x", name: WRONG})
            for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logprob_token_ids")
        ),
        (MessagesFields, {"messages": WRONG, "max_tokens": 9}),
        (MessagesFields, {"messages": [{"role": "user", "content": WRONG}], "max_tokens": 9}),
        *(
            (MessagesFields, {"messages": [], "max_tokens": 9, name: WRONG})
            for name in ("system", "tools", "stop_sequences")
        ),
        (ScoreFields, {"text_1": "a", "text_2": WRONG}),
        (ItemScoreFields, {"query": WRONG, "items": ["b"], "label_token_ids": [1, 2]}),
        (ItemScoreFields, {"query": "a", "items": WRONG, "label_token_ids": [1, 2]}),
        (ItemScoreFields, {"query": "a", "items": ["b"], "label_token_ids": WRONG}),
        (RerankFields, {"query": "a", "documents": WRONG}),
        (TextRerankFields, {"query": "a", "texts": WRONG}),
        (ResponseFields, {"input": WRONG}),
        (ResponseFields, {"input": [{"role": "user", "content": WRONG}]}),
        (ResponseFields, {"input": [{"type": "function_call_output", "output": WRONG}]}),
        (ResponseFields, {"tools": [{"type": "namespace", "tools": WRONG}]}),
        *((ResponseFields, {name: WRONG}) for name in ("tools", "include", "stop", "bad_words")),
        (ResponseFields, {"metadata": {str(key): 1 for key in range(2000)}}),
        (DetokenizeFields, {"tokens": WRONG}),
    ],
)
def test_a_list_is_refused_at_its_first_wrong_item(kind: type[Fields], body: JsonObject) -> None:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    # A body of 4 MiB has room for two million: 2 GiB of errors, made in 16 s in which nothing else runs.
    assert refused.value.error_count() <= len(body) + 1
