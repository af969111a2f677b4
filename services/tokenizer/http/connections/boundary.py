"""What every answer of the HTTP API has in common: checks before its route, errors, and headers."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from services.tokenizer.http.anthropic.errors import error_value, is_anthropics
from services.tokenizer.http.connections.access import Access
from services.tokenizer.http.connections.clients import CLIENT
from services.tokenizer.http.connections.connection import SERVER, error_response
from services.tokenizer.http.errors import any_error
from services.tokenizer.http.refusals import HttpError
from shared.network.turns import set_party
from shared.tenants.client_keys import ANY_CLIENT, Client
from shared.tenants.fair_room import FairRoom

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID = web.RequestKey("request_id", str)
"""The id that the cell knows a request by."""

# Ollama's API, whose clients read an error's text alone.
_OLLAMAS = "/api/"
# What of a client's own id may be echoed and logged.
_CLIENT_ID = re.compile(r"[!-~]{1,128}")


def log_facts(request: web.Request) -> dict[str, str]:
    """The fields that the log line of a request has of its head."""
    client_id = _client_id(request)
    return {} if client_id is None else {"client_request_id": client_id}


def _client_id(request: web.BaseRequest) -> str | None:
    """The id that the client gave, if it can be echoed."""
    given = request.headers.get("X-Request-Id", "")
    return given if _CLIENT_ID.fullmatch(given) else None


def make_boundary(access: Access, admit: Callable[[web.Request, FairRoom], Client], max_requests: int) -> Any:
    """The middleware that checks hosts and clients, and turns every error into an answer.

    With clients' keys no tenant has all of `max_requests`, which may be open at once.
    """
    open_requests = FairRoom(max_requests, capacity=max_requests)

    @web.middleware
    async def boundary(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = secrets.token_hex(16)
        try:
            _check_codings(request)
            access.check_host(request)
            # A browser asks without a key.
            if (answer := access.preflight(request)) is not None:
                return answer
            client = request[CLIENT] = admit(request, open_requests)
            party = (request.remote or "unix") if client is ANY_CLIENT else client.tenant.name
            set_party(party)
            with open_requests.enter(party):
                return await handler(request)
        except web.HTTPException as error:
            return _answer(request, _routing_error(error))
        except ConnectionError:
            # The client is gone.
            raise
        except Exception as error:  # noqa: BLE001 - this is the HTTP boundary
            return _answer(request, any_error(error, str))

    return boundary


def make_signer(access: Access) -> Any:
    """The signal that adds the headers of every answer."""

    async def sign(request: web.Request, response: web.StreamResponse) -> None:
        own = request.get(REQUEST_ID)
        if (request_id := _client_id(request) or own) is not None:
            response.headers["x-request-id"] = request_id
        if own is not None and is_anthropics(request):
            response.headers["request-id"] = own
        response.headers["Server"] = SERVER
        access.permit(request, response.headers)

    return sign


def _check_codings(request: web.Request) -> None:
    """Check what the body's transfer is coded by (RFC 9112, section 6.1): chunks alone are understood.

    Raises:
        HttpError: it is coded by something else, too.
    """
    codings = ",".join(request.headers.getall("Transfer-Encoding", [])).split(",")
    if any(coding.strip(" \t").lower() not in ("", "chunked") for coding in codings):
        message = "the transfer encoding is not supported: chunked alone is"
        headers = {"Connection": "close", "x-should-retry": "false"}
        raise HttpError(HTTPStatus.NOT_IMPLEMENTED, "not_supported", message, headers=headers)


def _answer(request: web.Request, error: HttpError) -> web.Response:
    """The answer to a request that failed, in the form of the API that it is of."""
    if request.path.startswith(_OLLAMAS):
        return error_response(error, body=msgspec.json.encode({"error": error.message}))
    if not is_anthropics(request):
        return error_response(error)
    return error_response(error, body=msgspec.json.encode(error_value(error, request[REQUEST_ID])))


def _routing_error(error: web.HTTPException) -> HttpError:
    if error.status == HTTPStatus.METHOD_NOT_ALLOWED:
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return HttpError(error.status, "method_not_allowed", "the path does not take this method", headers=allow)
    if error.status == HTTPStatus.NOT_FOUND:
        return HttpError(error.status, "not_found", "there is no such path")
    return HttpError(error.status, "invalid_request", HTTPStatus(error.status).phrase)
