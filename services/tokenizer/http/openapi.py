"""Describes the HTTP API as OpenAPI 3.1, from the table of routes and the fields that they read."""

from __future__ import annotations

import re
from functools import cache
from http import HTTPStatus
from typing import Any

from pydantic.json_schema import models_json_schema

from services.tokenizer.http.answer_schemas import ANSWERS, STATE, error_statuses
from services.tokenizer.http.anthropic.errors import is_anthropics_path
from services.tokenizer.http.connections.clients import Audience
from services.tokenizer.http.errors import CLIENT_CLOSED_REQUEST
from services.tokenizer.http.reading.readers import FIELDS
from services.tokenizer.http.route_table import ROUTES, STREAM, Route

# A status of nginx, which Python does not know.
_PHRASES = {CLIENT_CLOSED_REQUEST: "Aborted"}
_BODY_ERRORS = (408, 413, 415)


_REFS = "#/components/schemas/{model}"
_PARAMETER = re.compile(r"{(\w+)}")
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
    routes = [
        route
        for route in ROUTES
        if route.is_described
        and route.audience.is_served(has_keys=needs_keys)
        and (has_state or route.audience is not Audience.OPERATORS)
    ]
    schemas: dict[str, Any] = {**_body_schemas(), **ANSWERS}
    if has_state:
        schemas["State"] = STATE
    description: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Lockstep", "version": release},
        "paths": {route.path: {route.method.lower(): _operation(route)} for route in routes},
        "components": {"schemas": schemas},
    }
    if needs_keys:
        description["components"]["securitySchemes"] = _SCHEMES
        description["security"] = [{name: []} for name in _SCHEMES]
        for route in routes:
            if route.audience is Audience.EVERYBODY:
                description["paths"][route.path][route.method.lower()]["security"] = []
    return description


def _body_schemas() -> dict[str, Any]:
    kinds = {kind for kinds in FIELDS.values() for kind in kinds}
    models = [(kind, "validation") for kind in sorted(kinds, key=lambda kind: kind.__name__)]
    _, definitions = models_json_schema(models, ref_template=_REFS)  # type: ignore[arg-type]
    schemas: dict[str, Any] = definitions["$defs"]
    return schemas


def _operation(route: Route) -> dict[str, Any]:
    described: dict[str, Any] = {"summary": route.summary}
    errors = route.errors
    if route.read is not None:
        schemas = [_reference(kind.__name__) for kind in FIELDS[route.read]]
        content = _json(schemas[0] if len(schemas) == 1 else {"anyOf": schemas})
        described["requestBody"] = {"required": True, "content": content}
        errors = (*errors, *_BODY_ERRORS)
    described["responses"] = _responses(route, error_statuses(errors))
    if names := _PARAMETER.findall(route.path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return described


def _responses(route: Route, errors: list[int]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": "The answer"}
    content = {} if route.answer is None else _json(_reference(route.answer))
    for media_type in route.media_types:
        # OpenAPI 3.1 cannot describe a stream: its schema would be that of each event.
        content[media_type] = {} if media_type == STREAM else {"schema": {"type": "string"}}
    if content:
        answer["content"] = content
    # A head that cannot be read is of no route, and its error has OpenAI's form.
    own = "MessageError" if is_anthropics_path(route.path) else "Error"
    schemas = [_reference(name) for name in dict.fromkeys((own, "Error"))]
    content = _json(schemas[0] if len(schemas) == 1 else {"anyOf": schemas})
    phrases = {str(status): _PHRASES.get(status) or HTTPStatus(status).phrase for status in errors}
    phrases["default"] = "An error"
    return {"200": answer, **{name: {"description": text, "content": content} for name, text in phrases.items()}}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _reference(name: str) -> dict[str, Any]:
    return {"$ref": _REFS.format(model=name)}
