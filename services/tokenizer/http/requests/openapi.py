"""Describes the HTTP API as OpenAPI 3.1, from the fields that it reads."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from services.tokenizer.http.requests.chat_request import ChatFields
from services.tokenizer.http.requests.completion_request import CompletionFields
from services.tokenizer.http.requests.fields import Fields
from services.tokenizer.http.requests.token_requests import DetokenizeFields, TokenizeFields

_POSTS: dict[str, tuple[str, tuple[type[Fields], ...]]] = {
    "/v1/chat/completions": ("Continue a chat", (ChatFields,)),
    "/v1/completions": ("Continue prompts", (CompletionFields,)),
    "/v1/chat/completions/render": ("Show a chat as the model reads it", (ChatFields,)),
    "/v1/completions/render": ("Show prompts as the model reads them", (CompletionFields,)),
    "/tokenize": ("Encode a text or a chat", (TokenizeFields, ChatFields)),
    "/detokenize": ("Decode token ids", (DetokenizeFields,)),
}
_GETS = {
    "/v1/models": "List the model's names",
    "/v1/models/{id}": "Describe the model",
    "/health": "Whether requests can be served",
    "/ping": "Whether the process is alive",
    "/version": "The release",
    "/metrics": "Metrics in Prometheus' text format",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
_REFS = "#/components/schemas/{model}"


@cache
def make_openapi(release: str) -> dict[str, Any]:
    """The description; not to be changed."""
    kinds = {kind for _, bodies in _POSTS.values() for kind in bodies}
    models = [(kind, "validation") for kind in sorted(kinds, key=lambda kind: kind.__name__)]
    _, definitions = models_json_schema(models, ref_template=_REFS)  # type: ignore[arg-type]
    paths: dict[str, Any] = {path: {"post": _post(*facts)} for path, facts in _POSTS.items()}
    paths |= {path: {"get": _get(path, summary)} for path, summary in _GETS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Lockstep", "version": release},
        "paths": paths,
        "components": {"schemas": {**definitions["$defs"], "Error": _ERROR}},
    }


def _post(summary: str, bodies: tuple[type[Fields], ...]) -> dict[str, Any]:
    schemas = [{"$ref": _REFS.format(model=kind.__name__)} for kind in bodies]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"summary": summary, "requestBody": body, "responses": _responses()}


def _get(path: str, summary: str) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": summary, "responses": _responses()}
    if "{id}" in path:
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _responses() -> dict[str, Any]:
    error = {"content": {"application/json": {"schema": {"$ref": _REFS.format(model="Error")}}}}
    return {"200": {"description": "The answer"}, "default": {"description": "An error", **error}}
