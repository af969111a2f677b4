"""The error that a client of the HTTP API sees. Needs no gRPC and no server: forked processes raise it, too."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

import msgspec

FieldNaming = Callable[[str], str]
"""Turns the name of a message's field into the one that it has in the request's JSON."""

_TYPES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


class HttpError(Exception):
    """An error as a client of the HTTP API sees it; the message may name fields, but quotes no text of the client.

    The one exception is the name of a model that is not served: see `ModelNotFoundError`.
    """

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = int(status)
        self.code = code
        self.message = message
        self.param = param
        self.headers = headers or {}

    def body(self) -> bytes:
        """The answer's body, in OpenAI's form."""
        other = "server_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, other),
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})


def invalid_field(param: str | None, description: str) -> HttpError:
    """A field of the request's JSON that is wrong."""
    message = description if param is None else f"{param}: {description}"
    return HttpError(HTTPStatus.BAD_REQUEST, "invalid_request", message, param=param)
