"""Errors in the form of Anthropic's API, for its routes and its clients."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from aiohttp import web

from services.tokenizer.http.refusals import HttpError

_PATH = "/v1/messages"
_TYPES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


def is_anthropics(request: web.BaseRequest) -> bool:
    """Whether a request is one of Anthropic's API: by its path, or by the header that all its clients send."""
    return is_anthropics_path(request.path) or "Anthropic-Version" in request.headers


def is_anthropics_path(path: str) -> bool:
    """Whether a path is one of Anthropic's API alone."""
    return path == _PATH or path.startswith(f"{_PATH}/")


def error_value(error: HttpError, request_id: str) -> dict[str, Any]:
    """The body of an error; the message begins with the field's name."""
    other = "api_error" if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    detail = {"type": _TYPES.get(error.status, other), "message": error.message}
    return {"type": "error", "error": detail, "request_id": request_id}
