"""The routes of the HTTP API, and what every answer has in common."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol

import msgspec
import numpy as np
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from services.tokenizer.http.access import Access
from services.tokenizer.http.bodies import read_body
from services.tokenizer.http.calls import JSON, ApiCall, Backend, Route
from services.tokenizer.http.chat_request import read_chat_request
from services.tokenizer.http.completion_request import read_completion_request
from services.tokenizer.http.connection import SERVER, Connection, error_response
from services.tokenizer.http.errors import HttpError, any_error, invalid_field
from services.tokenizer.http.field_names import FieldNames
from services.tokenizer.http.fields import read_fields
from services.tokenizer.http.openapi import make_openapi
from services.tokenizer.http.pieces import ChatChoiceForm, CompletionChoiceForm
from services.tokenizer.http.requests import ApiRequest
from services.tokenizer.http.token_requests import DetokenizeFields, read_tokenize_request
from services.tokenizer.http.whole_answers import chat_answer, completion_answer
from services.tokenizer.json.json_values import JsonObject
from shared.limits import check_token_ids
from shared.release import find_release

CHAT = Route("chatcmpl-", ChatChoiceForm.kind, chat_answer)
COMPLETION = Route("cmpl-", CompletionChoiceForm.kind, completion_answer)

# Other parts of OpenAI's and vLLM's APIs, which are refused by name.
NOT_SUPPORTED = (
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v1/responses",
    "/v1/messages",
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/moderations",
    "/v1/files",
    "/v1/batches",
    "/v1/fine_tuning/jobs",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
)


class Reader(Protocol):
    """Reads a route's requests."""

    def __call__(self, value: JsonObject, request_id: str) -> ApiRequest:
        """Read a request, which the cell knows by `request_id`; raises `HttpError`."""


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# What of a client's own id may be echoed and logged.
_CLIENT_ID = re.compile(r"[!-~]{1,128}")
_REQUEST_ID = web.RequestKey("request_id", str)


def make_app(backend: Backend, access: Access, registry: CollectorRegistry) -> web.Application:
    """The routes; `registry` is what `/metrics` shows."""
    routes = _Routes(backend, registry)
    app = web.Application(middlewares=[_make_boundary(access)])
    app.on_response_prepare.append(_make_signer(access))
    app.add_routes(
        [
            web.post("/v1/chat/completions", routes.answer(CHAT, read_chat_request)),
            web.post("/v1/completions", routes.answer(COMPLETION, read_completion_request)),
            web.post("/v1/chat/completions/render", routes.render(read_chat_request)),
            web.post("/v1/completions/render", routes.render(read_completion_request)),
            web.post("/tokenize", routes.tokenize),
            web.post("/detokenize", routes.detokenize),
            web.get("/v1/models", routes.models),
            web.get("/v1/models/{id:.+}", routes.model),
            web.get("/health", routes.health),
            web.get("/ping", routes.ping),
            web.get("/version", routes.version),
            web.get("/metrics", routes.metrics),
            web.get("/openapi.json", routes.openapi),
            *(web.route("*", path, _refuse_route) for path in NOT_SUPPORTED),
        ]
    )
    return app


class _Routes:
    def __init__(self, backend: Backend, registry: CollectorRegistry) -> None:
        self._backend = backend
        self._registry = registry
        self._created = int(time.time())

    def answer(self, route: Route, read: Reader) -> Handler:
        """Continue the prompts of a request."""

        async def handle(request: web.Request) -> web.StreamResponse:
            api = await read_body(request, partial(read, request_id=request[_REQUEST_ID]))
            try:
                return await ApiCall(self._backend, route, request, api, _log_facts(request)).serve()
            except Exception as error:  # noqa: BLE001 - this is the HTTP boundary
                # Here the fields have the names of this API.
                raise any_error(error, api.names) from None

        return handle

    def render(self, read: Reader) -> Handler:
        """Show the prompts as the model reads them."""

        async def handle(request: web.Request) -> web.StreamResponse:
            api = await read_body(request, partial(read, request_id=request[_REQUEST_ID]))
            try:
                model = self._backend.check_model(api.model)
                rendered = [await self._backend.render(prompt) for prompt in api.prompts]
            except Exception as error:  # noqa: BLE001 - this is the HTTP boundary
                raise any_error(error, api.names) from None
            prompts = [{"prompt": text, "prompt_token_ids": token_ids} for text, token_ids in rendered]
            return _json({"model": model, "prompts": prompts})

        return handle

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        """Encode a text or a chat."""
        prompt, model, has_strings = await read_body(request, read_tokenize_request)
        cell = self._backend.cell()
        self._backend.check_model(model)
        try:
            _, token_ids = await self._backend.render(prompt)
        except Exception as error:  # noqa: BLE001 - this is the HTTP boundary
            raise any_error(error, FieldNames(is_chat=prompt.HasField("chat"), given={})) from None
        strings = [self._backend.model.texts.bytes_of(token_id).decode(errors="replace") for token_id in token_ids]
        return _json(
            {
                "count": len(token_ids),
                "max_model_len": cell.limits.context_length,
                "tokens": token_ids,
                "token_strs": strings if has_strings else None,
            }
        )

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        """Decode token ids."""
        fields = await read_body(request, partial(read_fields, DetokenizeFields))
        limits = self._backend.cell().limits
        self._backend.check_model(fields.model)
        if len(fields.tokens) > limits.context_length:
            raise invalid_field("tokens", f"must have at most {limits.context_length} (the context length)")
        token_ids = np.array(fields.tokens, np.uint32)
        check_token_ids(token_ids, limits.logits_width, field="tokens")
        return _json({"prompt": await self._backend.model.prompts.decode(token_ids)})

    async def models(self, _request: web.Request) -> web.StreamResponse:
        """List the model, once by each of its names."""
        return _json({"object": "list", "data": [self._model(name) for name in self._backend.model_names]})

    async def model(self, request: web.Request) -> web.StreamResponse:
        """Describe the model."""
        return _json(self._model(self._backend.check_model(request.match_info["id"])))

    async def health(self, _request: web.Request) -> web.StreamResponse:
        """Say whether requests can be served."""
        self._backend.cell()
        return web.Response()

    async def ping(self, _request: web.Request) -> web.StreamResponse:
        """Say that the process is alive."""
        return web.Response()

    async def version(self, _request: web.Request) -> web.StreamResponse:
        """Tell the release."""
        return _json({"version": find_release()})

    async def metrics(self, _request: web.Request) -> web.StreamResponse:
        """Show the metrics of the management port."""
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def openapi(self, _request: web.Request) -> web.StreamResponse:
        """Describe this API."""
        return _json(make_openapi(find_release()))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "lockstep",
            "root": self._backend.model.name,
            "parent": None,
            "max_model_len": self._backend.cell().limits.context_length,
        }


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type=JSON)


async def _refuse_route(request: web.Request) -> web.StreamResponse:
    message = f"{request.path} is not supported"
    raise HttpError(HTTPStatus.NOT_IMPLEMENTED, "not_supported", message, headers={"x-should-retry": "false"})


def _log_facts(request: web.Request) -> dict[str, str]:
    client_id = _client_id(request)
    return {} if client_id is None else {"client_request_id": client_id}


def _client_id(request: web.BaseRequest) -> str | None:
    """The id that the client gave, if it can be echoed."""
    given = request.headers.get("X-Request-Id", "")
    return given if _CLIENT_ID.fullmatch(given) else None


def _make_boundary(access: Access) -> Any:
    """The middleware that checks hosts, and turns every error into an answer."""

    @web.middleware
    async def boundary(request: web.Request, handler: Handler) -> web.StreamResponse:
        if isinstance(request.protocol, Connection):
            request.protocol.note_head()
        request[_REQUEST_ID] = secrets.token_hex(16)
        try:
            access.check_host(request)
            return access.preflight(request) or await handler(request)
        except web.HTTPException as error:
            return error_response(_routing_error(error))
        except ConnectionError:
            # The client is gone.
            raise
        except Exception as error:  # noqa: BLE001 - this is the HTTP boundary
            return error_response(any_error(error, str))

    return boundary


def _make_signer(access: Access) -> Any:
    """The signal that adds the headers of every answer."""

    async def sign(request: web.Request, response: web.StreamResponse) -> None:
        own = request.get(_REQUEST_ID)
        if (request_id := _client_id(request) or own) is not None:
            response.headers["x-request-id"] = request_id
        response.headers["Server"] = SERVER
        access.permit(request, response.headers)

    return sign


def _routing_error(error: web.HTTPException) -> HttpError:
    if error.status == HTTPStatus.METHOD_NOT_ALLOWED:
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return HttpError(error.status, "method_not_allowed", "the path does not take this method", headers=allow)
    if error.status == HTTPStatus.NOT_FOUND:
        return HttpError(error.status, "not_found", "there is no such path")
    return HttpError(error.status, "invalid_request", HTTPStatus(error.status).phrase)
