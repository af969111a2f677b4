"""Which client sends a request, by its key."""

from __future__ import annotations

from aiohttp import web

from shared.client_keys import ANY_CLIENT, Client, ClientKeys
from shared.errors import PermissionDeniedError, TenantLimitError
from shared.fair_room import FairRoom

CLIENT = web.RequestKey("client", Client)
"""Who sends the request."""

PROBE_ROUTES = frozenset({"/health", "/readyz", "/ping", "/version"})
PAGE_ROUTES = frozenset({"/", "/lockstep/page.css", "/lockstep/page.js"})
"""The page that shows the cell, which is the same for everybody: a browser cannot send a key for it."""
KEYLESS_ROUTES = PROBE_ROUTES | PAGE_ROUTES
STATE_ROUTE = "/lockstep/state"
OPERATOR_ROUTES = frozenset({STATE_ROUTE})
"""What tells of all tenants: for keys of operators; where clients have none, only for this machine."""


_RETRY_DELAY_S = 1.0


def find_client(client_keys: ClientKeys | None, request: web.Request) -> Client:
    """The client of a request: any for the routes of probes and of the page, and for all if there are no keys.

    Paths that are no routes need a key too, so that only clients can tell which are.

    Raises:
        UnauthenticatedError: the request has no key that is known, or more than one.
        PermissionDeniedError: the route is for operators, and the key is none of theirs.
    """
    resource = request.match_info.route.resource
    path = None if resource is None else resource.canonical
    if client_keys is None or path in KEYLESS_ROUTES:
        return ANY_CLIENT
    headers = request.headers
    client = client_keys.identify(headers.getall("Authorization", []), headers.getall("X-Api-Key", []))
    if path in OPERATOR_ROUTES and not client.is_operator:
        raise PermissionDeniedError("the route needs the key of an operator", route=path)
    return client


def check_room(client: Client, open_requests: FairRoom) -> None:
    """Check that a client with a key leaves others room for requests.

    Raises:
        TenantLimitError: it has as many open as it may.
    """
    tenant = client.tenant.name
    if client is not ANY_CLIENT and not open_requests.has_room(tenant, 1):
        raise TenantLimitError(
            "too many requests of the tenant are open",
            retry_delay_s=_RETRY_DELAY_S,
            limit="open_requests",
            value=open_requests.size_of(tenant),
        )
