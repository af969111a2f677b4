"""What the routes of the HTTP API do."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
from aiohttp import web
from google.protobuf.json_format import MessageToJson
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from lockstep.v1 import scheduler_pb2
from services.tokenizer.exchange.cell_state import CellState
from services.tokenizer.http.anthropic.errors import is_anthropics
from services.tokenizer.http.backend import Backend
from services.tokenizer.http.calls import JSON, AnswerForm, ApiCall
from services.tokenizer.http.connections.access import Access
from services.tokenizer.http.connections.bodies import read_body
from services.tokenizer.http.connections.boundary import REQUEST_ID, log_facts
from services.tokenizer.http.connections.clients import CLIENT
from services.tokenizer.http.embeddings.requests import EmbeddingRequest
from services.tokenizer.http.errors import any_error
from services.tokenizer.http.fields.api_request import ApiRequest
from services.tokenizer.http.fields.fields import ignored_header
from services.tokenizer.http.openai.token_requests import DetokenizeRequest, EncodingRequest
from services.tokenizer.http.page.files import Page
from services.tokenizer.http.refusals import HttpError, invalid_field
from services.tokenizer.http.scores.requests import RatingRequest
from services.tokenizer.json.json_values import JsonObject
from services.tokenizer.request.large_messages import checked
from services.tokenizer.server.embed import EmbedCall
from services.tokenizer.server.generate import CallTerms
from services.tokenizer.server.score import ScoreCall
from services.tokenizer.tracing.request_trace import traced
from shared.errors import DeadlinePassedError, ServiceError
from shared.release import find_release
from shared.request.limits import check_token_ids
from shared.request.request_fields import read_time_left

ReadT_co = TypeVar("ReadT_co", covariant=True)


class Reader(Protocol):
    """Reads a route's requests."""

    def __call__(self, value: JsonObject, request_id: str, *, is_lenient: bool) -> ApiRequest:
        """Read a request, which the cell knows by `request_id`; raises `HttpError`. See `read_request`."""


class ItemsReader(Protocol):
    """Reads the requests of a route whose answer is one for each item: scores, ranks or vectors."""

    def __call__(self, value: JsonObject, request_id: str, *, is_lenient: bool) -> RatingRequest | EmbeddingRequest:
        """Read a request, which the cell knows by `request_id`; raises `HttpError`. See `read_request`."""


class ValueOf(Protocol):
    """Makes the JSON of an answer."""

    def __call__(self, asked: Any, response: Any, model: str, /) -> Any:
        """The answer to `asked`; `model` is the name that answers have."""


class TokensReader(Protocol[ReadT_co]):
    """Reads the requests of a route that the cell does not know of."""

    def __call__(self, value: JsonObject, *, is_lenient: bool) -> ReadT_co:
        """Read a request; raises `HttpError`. See `read_request`."""


class Describe(Protocol):
    """Describes the API."""

    def __call__(self, *, needs_keys: bool, has_state: bool) -> JsonObject:
        """The description; see `make_openapi`."""


class Handlers:
    """The handlers of all routes; the table of routes says which route has which, and what reads its body."""

    def __init__(self, backend: Backend, access: Access, registry: CollectorRegistry, describe: Describe) -> None:
        self._backend = backend
        self._access = access
        self._registry = registry
        self._describe = describe
        self._page = Page(needs_key=backend.client_keys is not None, has_state=self.has_state)
        self._cell_state = CellState(backend.scheduler.channel)
        self._created = int(time.time())

    async def answer(self, request: web.Request, *, form: AnswerForm, read: Reader) -> web.StreamResponse:
        """Continue the prompts of a request."""
        with traced(self._backend.tracer, form.operation, partial(_values_of, request)) as trace:
            try:
                api = await self._read(request, read)
            except HttpError as error:
                self._backend.totals.count_failure(error.code.upper())
                if trace is not None:
                    trace.failure = error.code.upper()
                raise
            try:
                call = ApiCall(self._backend, form, request, api, facts=log_facts(request), trace=trace)
                return await call.serve()
            except Exception as error:  # noqa: BLE001 - this is the HTTP boundary
                # Here the fields have the names of this API.
                raise any_error(error, api.names) from None

    async def items(
        self, request: web.Request, *, read: ItemsReader, make_call: type[ScoreCall | EmbedCall], value_of: ValueOf
    ) -> web.StreamResponse:
        """Have the cell compute many items, each alone."""
        backend = self._backend
        try:
            asked = await read_body(
                request, partial(read, request_id=request[REQUEST_ID], is_lenient=backend.is_lenient)
            )
            backend.check_model(asked.model)
        except (HttpError, ServiceError) as error:
            reason = error.code.upper() if isinstance(error, HttpError) else error.reason
            backend.totals.count_failure(reason)
            raise
        terms = CallTerms(read_time_left(asked.timeout_s), facts=log_facts(request), client=request[CLIENT])
        call: Any = make_call(backend.model, backend.scheduler, backend.live, totals=backend.totals)
        try:
            async with asyncio.timeout(asked.timeout_s):
                response = await call.serve(asked.message, terms)
                make = partial(value_of, asked, response, backend.model_names[0])
                value = await checked(backend.model.checking, response, make)
        except TimeoutError:
            raise DeadlinePassedError("the request took longer than timeout_s") from None
        except Exception as error:  # noqa: BLE001 - this is the HTTP boundary
            raise any_error(error, asked.names) from None
        answer = _json(value)
        answer.headers.update(ignored_header(asked.ignored))
        return answer

    async def _read(self, request: web.Request, read: Reader) -> ApiRequest:
        """Read a request's body; raises as `read_body`."""
        is_lenient = self._backend.is_lenient
        return await read_body(request, partial(read, request_id=request[REQUEST_ID], is_lenient=is_lenient))

    async def render(self, request: web.Request, *, read: Reader) -> web.StreamResponse:
        """Show the prompts as the model reads them."""
        rendered = await self._render(await self._read(request, read))
        prompts = [{"prompt": text, "prompt_token_ids": token_ids} for text, token_ids in rendered]
        return _json({"model": self._backend.model_names[0], "prompts": prompts})

    async def count_tokens(self, request: web.Request, *, read: Reader) -> web.StreamResponse:
        """Count the tokens of the prompt that a message would have."""
        [(_, token_ids)] = await self._render(await self._read(request, read))
        return _json({"input_tokens": len(token_ids)})

    async def count_input_tokens(self, request: web.Request, *, read: Reader) -> web.StreamResponse:
        """Count the tokens of the prompt that a response would have."""
        [(_, token_ids)] = await self._render(await self._read(request, read))
        return _json({"object": "response.input_tokens", "input_tokens": len(token_ids)})

    async def _render(self, api: ApiRequest) -> list[tuple[str, list[int]]]:
        """The texts and the token ids of the prompts of a request."""
        try:
            self._backend.check_model(api.model)
            return [await self._backend.render(prompt) for prompt in api.prompts]
        except Exception as error:  # noqa: BLE001 - this is the HTTP boundary
            raise any_error(error, api.names) from None

    async def tokenize(self, request: web.Request, *, read: TokensReader[EncodingRequest]) -> web.StreamResponse:
        """Encode a text or a chat."""
        asked = await read_body(request, partial(read, is_lenient=self._backend.is_lenient))
        cell = self._backend.cell()
        self._backend.check_model(asked.model)
        try:
            _, token_ids = await self._backend.render(asked.prompt, add_special_tokens=asked.add_special_tokens)
        except Exception as error:  # noqa: BLE001 - this is the HTTP boundary
            raise any_error(error, asked.names) from None
        strings = [self._backend.token_text(token_id) for token_id in token_ids]
        return _json(
            {
                "count": len(token_ids),
                "max_model_len": cell.limits.context_length,
                "tokens": token_ids,
                "token_strs": strings if asked.has_strings else None,
            }
        )

    async def detokenize(self, request: web.Request, *, read: TokensReader[DetokenizeRequest]) -> web.StreamResponse:
        """Decode token ids."""
        fields = await read_body(request, partial(read, is_lenient=self._backend.is_lenient))
        limits = self._backend.cell().limits
        self._backend.check_model(fields.model)
        token_ids = np.frombuffer(fields.token_ids, np.uint32)
        if token_ids.size > limits.context_length:
            raise invalid_field("tokens", f"must have at most {limits.context_length} (the context length)")
        check_token_ids(token_ids, limits.logits_width, field="tokens")
        return _json({"prompt": await self._backend.model.prompts.decode(token_ids)})

    async def models(self, request: web.Request) -> web.StreamResponse:
        """List the model, once by each of its names."""
        if is_anthropics(request):
            names = self._backend.model_names
            models = [self._anthropic_model(name) for name in names]
            return _json({"data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]})
        return _json({"object": "list", "data": [self._model(name) for name in self._backend.model_names]})

    async def model(self, request: web.Request) -> web.StreamResponse:
        """Describe the model."""
        name = request.match_info["id"]
        self._backend.check_model(name)
        return _json(self._anthropic_model(name) if is_anthropics(request) else self._model(name))

    async def health(self, _request: web.Request) -> web.StreamResponse:
        """Say whether a request would be computed now."""
        self._backend.check_health()
        return web.Response()

    async def ready(self, _request: web.Request) -> web.StreamResponse:
        """Say whether a balancer should send clients here, as on the management port."""
        self._backend.check_ready()
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

    def has_state(self, request: web.Request) -> bool:
        """Whether the state is served: by keys to operators, else to this machine alone."""
        return self._backend.client_keys is not None or self._access.is_local(request)

    async def state(self, request: web.Request) -> web.StreamResponse:
        """Tell the cell's state, in protobuf's JSON form, with fields that are 0.

        Without keys it names no tenants: those of a scheduler that has keys are not everybody's to know.
        """
        if not self.has_state(request):
            raise web.HTTPNotFound
        state = await self._cell_state.read()
        if self._backend.client_keys is None:
            public = scheduler_pb2.GetStateResponse()
            public.CopyFrom(state)
            public.ClearField("tenants")
            state = public
        return web.Response(text=MessageToJson(state, always_print_fields_with_no_presence=True), content_type=JSON)

    async def openapi(self, request: web.Request) -> web.StreamResponse:
        """Describe this API."""
        needs_keys, has_state = self._backend.client_keys is not None, self.has_state(request)
        return _json(self._describe(needs_keys=needs_keys, has_state=has_state))

    async def page(self, request: web.Request) -> web.StreamResponse:
        """Show the page."""
        return self._page.html(request)

    async def page_file(self, request: web.Request) -> web.StreamResponse:
        """Give the page one of its files."""
        return self._page.file(request.path)

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "lockstep",
            "root": self._backend.model.name,
            "parent": None,
            "max_model_len": self._backend.cell().limits.context_length,
            "implementation": self._backend.cell().implementation,
        }

    def _anthropic_model(self, name: str) -> dict[str, Any]:
        context_length = self._backend.cell().limits.context_length
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._created, UTC).isoformat().replace("+00:00", "Z"),
            "lifecycle": "active",
            "max_input_tokens": context_length,
            "max_tokens": context_length,
        }


def _values_of(request: web.Request, header: str) -> list[str]:
    return request.headers.getall(header, [])


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type=JSON)
