"""Makes the HTTP API's app of the table of routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from http import HTTPStatus

from aiohttp import web
from prometheus_client import CollectorRegistry

from services.tokenizer.http.backend import Backend
from services.tokenizer.http.connections.access import Access
from services.tokenizer.http.connections.bodies import (
    BODY_READERS,
    BODY_S,
    CALL_TURNS,
    LARGE_BODIES,
    check_expectation,
)
from services.tokenizer.http.connections.boundary import make_boundary, make_signer
from services.tokenizer.http.connections.clients import Audience, check_room, find_client
from services.tokenizer.http.handlers import Handlers
from services.tokenizer.http.openapi import make_openapi
from services.tokenizer.http.reading.body_readers import BodyReaders
from services.tokenizer.http.refusals import HttpError
from services.tokenizer.http.route_table import NOT_SUPPORTED, ROUTES, Route
from shared.errors import TenantLimitError, UnauthenticatedError
from shared.network.turns import CallTurns, Slots
from shared.release import find_release
from shared.tenants.client_keys import Client
from shared.tenants.fair_room import FairRoom

# Parsed at the same time.
_MAX_LARGE_BODIES = 2
# A cell has started by then, from which the process that reads them would take half a second of CPU time.
_WARM_UP_AFTER_S = 10.0
_AUDIENCES = {route.path: route.audience for route in ROUTES}
_COUNTED = frozenset(route.path for route in ROUTES if route.is_counted)


def make_app(
    backend: Backend, access: Access, registry: CollectorRegistry, *, body_s: float, max_requests: int
) -> web.Application:
    """The app that serves `ROUTES`.

    Args:
        backend: The service.
        access: The hosts and web pages that may use it.
        registry: What `/metrics` shows; with clients' keys there is no such route, as it tells of all tenants.
        body_s: How long a body may take to arrive.
        max_requests: The most at once, one a connection; where clients have keys, no tenant may have all of them.
    """
    handlers = Handlers(backend, access, registry, partial(make_openapi, find_release()))
    app = web.Application(middlewares=[make_boundary(access, partial(_admit, backend), max_requests)])
    app[BODY_S] = body_s
    app[BODY_READERS] = BodyReaders()
    app.cleanup_ctx.append(_run_readers)
    app[CALL_TURNS] = CallTurns()
    app[LARGE_BODIES] = Slots(_MAX_LARGE_BODIES)
    app.on_response_prepare.append(make_signer(access))
    has_keys = backend.client_keys is not None
    app.add_routes(_definition(route, handlers) for route in ROUTES if route.audience.is_served(has_keys=has_keys))
    app.add_routes(web.route("*", path, _refuse_route) for path in NOT_SUPPORTED)
    return app


def _definition(route: Route, handlers: Handlers) -> web.RouteDef:
    # aiohttp's own `{name}` ends at a slash.
    path = route.path.replace("}", ":.+}")
    handle = partial(route.handle, handlers)
    if route.read is not None:
        handle = partial(handle, read=route.read)
    if route.method == "POST":
        return web.post(path, handle, expect_handler=check_expectation)
    return web.get(path, handle)


def _admit(backend: Backend, request: web.Request, open_requests: FairRoom) -> Client:
    """Who sends a request; see `find_client` and `check_room`. A refused request for the cell is counted."""
    resource = request.match_info.route.resource
    audience = _AUDIENCES.get(resource.canonical, Audience.CLIENTS) if resource is not None else Audience.CLIENTS
    try:
        client = find_client(backend.client_keys, audience, request)
        check_room(client, open_requests)
        return client
    except (UnauthenticatedError, TenantLimitError) as error:
        if request.path in _COUNTED:
            backend.totals.count_failure(error.reason)
        raise


async def _run_readers(app: web.Application) -> AsyncIterator[None]:
    readers = app[BODY_READERS]
    warm_up = asyncio.get_running_loop().call_later(_WARM_UP_AFTER_S, readers.warm_up)
    yield
    warm_up.cancel()
    readers.close()


async def _refuse_route(request: web.Request) -> web.StreamResponse:
    message = f"{request.path} is not supported; OpenAI's API is below /v1, and /openapi.json has all that is served"
    raise HttpError(HTTPStatus.NOT_IMPLEMENTED, "not_supported", message, headers={"x-should-retry": "false"})
