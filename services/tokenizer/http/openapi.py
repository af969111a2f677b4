"""Describes the HTTP API as OpenAPI 3.1, from the fields that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from typing import Any

from pydantic.json_schema import models_json_schema

from services.tokenizer.http.answers.answer_schemas import ANSWERS, STATE, error_statuses
from services.tokenizer.http.connections.clients import PROBE_ROUTES, STATE_ROUTE
from services.tokenizer.http.errors import CLIENT_CLOSED_REQUEST
from services.tokenizer.http.messages.request import CountTokensFields, MessagesFields
from services.tokenizer.http.requests.chat_request import ChatFields
from services.tokenizer.http.requests.completion_request import CompletionFields
from services.tokenizer.http.requests.fields import Fields
from services.tokenizer.http.requests.token_requests import DetokenizeFields, TokenizeFields
from services.tokenizer.http.responses.request import ResponseFields

_STREAM = "text/event-stream"
# A status of nginx, which Python does not know.
_PHRASES = {CLIENT_CLOSED_REQUEST: "Aborted"}
_BODY_ERRORS = (408, 413, 415)
_CELL_ERRORS = (404, 429, 499, 501, 503, 504)


@dataclass(frozen=True, slots=True)
class _Operation:
    summary: str
    answer: str | None = None
    """The name of its answer's schema, if that is JSON."""
    bodies: tuple[type[Fields], ...] = ()
    errors: tuple[int, ...] = ()
    media_types: tuple[str, ...] = ()
    """Media types of other answers."""
    error: str = "Error"
    """The name of its errors' schema."""


_POSTS = {
    "/v1/chat/completions": _Operation(
        "Continue a chat", "ChatAnswer", (ChatFields,), _CELL_ERRORS, media_types=(_STREAM,)
    ),
    "/v1/completions": _Operation(
        "Continue prompts", "CompletionAnswer", (CompletionFields,), _CELL_ERRORS, media_types=(_STREAM,)
    ),
    "/v1/messages": _Operation(
        "Answer in Anthropic's form",
        "MessageAnswer",
        (MessagesFields,),
        _CELL_ERRORS,
        media_types=(_STREAM,),
        error="MessageError",
    ),
    "/v1/messages/count_tokens": _Operation(
        "Count a prompt's tokens", "TokenCount", (CountTokensFields,), _CELL_ERRORS, error="MessageError"
    ),
    "/v1/responses": _Operation(
        "Continue a conversation of items", "ResponseAnswer", (ResponseFields,), _CELL_ERRORS, media_types=(_STREAM,)
    ),
    "/v1/chat/completions/render": _Operation(
        "Show a chat as the model reads it", "RenderedPrompts", (ChatFields,), _CELL_ERRORS
    ),
    "/v1/completions/render": _Operation(
        "Show prompts as the model reads them", "RenderedPrompts", (CompletionFields,), _CELL_ERRORS
    ),
    "/tokenize": _Operation("Encode a text or a chat", "Tokens", (TokenizeFields, ChatFields), _CELL_ERRORS),
    "/detokenize": _Operation("Decode token ids", "DecodedTokens", (DetokenizeFields,), _CELL_ERRORS),
}
_GETS = {
    "/v1/models": _Operation("List the model's names", "Models", errors=(503,)),
    "/v1/models/{id}": _Operation("Describe the model", "Model", errors=(404, 503)),
    "/health": _Operation("Whether a request would be computed now", errors=(503,)),
    "/readyz": _Operation("Whether a balancer should send clients here", errors=(503,)),
    "/ping": _Operation("Whether the process is alive"),
    "/version": _Operation("The release", "Release"),
    "/metrics": _Operation("Metrics in Prometheus' text format", media_types=("text/plain",)),
}
_STATE = _Operation("The cell's state, for operators", "State", errors=(403, 404, 503))
_REFS = "#/components/schemas/{model}"
# Either names the client's key.
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


@cache
def make_openapi(release: str, *, needs_keys: bool = False, has_state: bool = False) -> dict[str, Any]:
    """The description; not to be changed.

    Args:
        needs_keys: Whether clients need keys.
        has_state: Whether the cell's state is served.
    """
    description = _describe(release)
    if has_state:
        description["paths"][STATE_ROUTE] = {"get": _get(STATE_ROUTE, _STATE)}
        description["components"]["schemas"]["State"] = STATE
    if needs_keys:
        del description["paths"]["/metrics"]
        description["components"]["securitySchemes"] = _SCHEMES
        description["security"] = [{name: []} for name in _SCHEMES]
        for path in PROBE_ROUTES:
            description["paths"][path]["get"]["security"] = []
    return description


def _describe(release: str) -> dict[str, Any]:
    kinds = {kind for operation in _POSTS.values() for kind in operation.bodies}
    models = [(kind, "validation") for kind in sorted(kinds, key=lambda kind: kind.__name__)]
    _, definitions = models_json_schema(models, ref_template=_REFS)  # type: ignore[arg-type]
    paths: dict[str, Any] = {path: {"post": _post(operation)} for path, operation in _POSTS.items()}
    paths |= {path: {"get": _get(path, operation)} for path, operation in _GETS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Lockstep", "version": release},
        "paths": paths,
        "components": {"schemas": {**definitions["$defs"], **ANSWERS}},
    }


def _post(operation: _Operation) -> dict[str, Any]:
    schemas = [_reference(kind.__name__) for kind in operation.bodies]
    body = {"required": True, "content": _json(schemas[0] if len(schemas) == 1 else {"anyOf": schemas})}
    responses = _responses(operation, error_statuses((*operation.errors, *_BODY_ERRORS)))
    return {"summary": operation.summary, "requestBody": body, "responses": responses}


def _get(path: str, operation: _Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": _responses(operation, error_statuses(operation.errors)),
    }
    if "{id}" in path:
        described["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return described


def _responses(operation: _Operation, errors: list[int]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": "The answer"}
    content = {} if operation.answer is None else _json(_reference(operation.answer))
    for media_type in operation.media_types:
        # OpenAPI 3.1 cannot describe a stream: its schema would be that of each event.
        content[media_type] = {} if media_type == _STREAM else {"schema": {"type": "string"}}
    if content:
        answer["content"] = content
    # A head that cannot be read is of no route, and its error has OpenAI's form.
    schemas = [_reference(name) for name in dict.fromkeys((operation.error, "Error"))]
    content = _json(schemas[0] if len(schemas) == 1 else {"anyOf": schemas})
    phrases = {str(status): _PHRASES.get(status) or HTTPStatus(status).phrase for status in errors}
    phrases["default"] = "An error"
    return {"200": answer, **{name: {"description": text, "content": content} for name, text in phrases.items()}}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _reference(name: str) -> dict[str, Any]:
    return {"$ref": _REFS.format(model=name)}
