"""The routes of the HTTP API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from http import HTTPStatus

from aiohttp import web
from prometheus_client import CollectorRegistry

from services.tokenizer.http.answers.choice_forms import ChatChoiceForm, CompletionChoiceForm
from services.tokenizer.http.answers.pieces import Pieces
from services.tokenizer.http.answers.whole_answers import MergedAnswer, chat_answer, completion_answer
from services.tokenizer.http.backend import Backend
from services.tokenizer.http.calls import Route
from services.tokenizer.http.connections.access import Access
from services.tokenizer.http.connections.bodies import (
    BODY_READERS,
    BODY_S,
    CALL_TURNS,
    LARGE_BODIES,
    check_expectation,
)
from services.tokenizer.http.connections.boundary import make_boundary, make_signer
from services.tokenizer.http.connections.clients import STATE_ROUTE
from services.tokenizer.http.handlers import CHATS, COMPLETIONS, MESSAGES_PATH, RESPONSES_PATH, Handlers
from services.tokenizer.http.messages.events import ID_PREFIX, PING, MessageAnswer, MessageEvents
from services.tokenizer.http.messages.request import read_messages_request
from services.tokenizer.http.page.files import Page
from services.tokenizer.http.reading.body_readers import BodyReaders
from services.tokenizer.http.refusals import HttpError
from services.tokenizer.http.requests.chat_request import read_chat_request
from services.tokenizer.http.requests.completion_request import read_completion_request
from services.tokenizer.http.responses.events import ResponseEvents, ResponseObject
from services.tokenizer.http.responses.request import read_response_request
from services.tokenizer.tracing.request_trace import TEXT_COMPLETION
from shared.network.turns import CallTurns, Slots

CHAT = Route(
    "chatcmpl-",
    partial(Pieces, kind="chat.completion.chunk", make_form=ChatChoiceForm),
    partial(MergedAnswer, make=chat_answer),
)
COMPLETION = Route(
    "cmpl-",
    partial(Pieces, kind="text_completion", make_form=CompletionChoiceForm),
    partial(MergedAnswer, make=completion_answer),
    operation=TEXT_COMPLETION,
)
MESSAGES = Route(ID_PREFIX, MessageEvents, MessageAnswer, PING)
RESPONSE = Route("resp_", ResponseEvents, ResponseObject)

# Other parts of OpenAI's, Anthropic's and vLLM's APIs, which are refused by name.
NOT_SUPPORTED = (
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v1/messages/batches",
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


# Parsed at the same time.
_MAX_LARGE_BODIES = 2
# By then a cell has started, from which the process that reads them would take half a second of CPU time.
_WARM_UP_AFTER_S = 10.0


def make_app(
    backend: Backend, access: Access, registry: CollectorRegistry, *, body_s: float, max_requests: int
) -> web.Application:
    """The routes.

    Args:
        backend: The service.
        access: The hosts and web pages that may use it.
        registry: What `/metrics` shows; with clients' keys there is no such route, as it tells of all tenants.
        body_s: How long a body may take to arrive.
        max_requests: The most at once, one a connection; where clients have keys, no tenant may have all of them.
    """
    routes = Handlers(backend, access, registry)
    app = web.Application(middlewares=[make_boundary(access, routes.admit, max_requests)])
    app[BODY_S] = body_s
    app[BODY_READERS] = BodyReaders()
    app.cleanup_ctx.append(_run_readers)
    app[CALL_TURNS] = CallTurns()
    app[LARGE_BODIES] = Slots(_MAX_LARGE_BODIES)
    app.on_response_prepare.append(make_signer(access))
    post = partial(web.post, expect_handler=check_expectation)
    app.add_routes(
        [
            post(CHATS, routes.answer(CHAT, read_chat_request)),
            post(COMPLETIONS, routes.answer(COMPLETION, read_completion_request)),
            post(MESSAGES_PATH, routes.answer(MESSAGES, read_messages_request)),
            post(f"{MESSAGES_PATH}/count_tokens", routes.count_tokens),
            post(RESPONSES_PATH, routes.answer(RESPONSE, read_response_request)),
            post("/v1/chat/completions/render", routes.render(read_chat_request)),
            post("/v1/completions/render", routes.render(read_completion_request)),
            post("/tokenize", routes.tokenize),
            post("/detokenize", routes.detokenize),
            web.get("/v1/models", routes.models),
            web.get("/v1/models/{id:.+}", routes.model),
            web.get("/health", routes.health),
            web.get("/readyz", routes.ready),
            web.get("/ping", routes.ping),
            web.get("/version", routes.version),
            # With keys not everybody may see what is every tenant's.
            *([web.get("/metrics", routes.metrics)] if backend.client_keys is None else []),
            web.get(STATE_ROUTE, routes.state),
            web.get("/openapi.json", routes.openapi),
            *Page(needs_key=backend.client_keys is not None, has_state=routes.has_state).routes(),
            *(web.route("*", path, _refuse_route) for path in NOT_SUPPORTED),
        ]
    )
    return app


async def _run_readers(app: web.Application) -> AsyncIterator[None]:
    readers = app[BODY_READERS]
    warm_up = asyncio.get_running_loop().call_later(_WARM_UP_AFTER_S, readers.warm_up)
    yield
    warm_up.cancel()
    readers.close()


async def _refuse_route(request: web.Request) -> web.StreamResponse:
    message = f"{request.path} is not supported"
    raise HttpError(HTTPStatus.NOT_IMPLEMENTED, "not_supported", message, headers={"x-should-retry": "false"})
