"""Which client sends a request, by its key."""

from __future__ import annotations

from aiohttp import web

from shared.client_keys import ANY_CLIENT, Client, ClientKeys

CLIENT = web.RequestKey("client", Client)
"""Who sends the request."""

KEYLESS_ROUTES = frozenset({"/health", "/ping", "/version"})


def find_client(client_keys: ClientKeys | None, request: web.Request) -> Client:
    """The client of a request: any for the routes of probes, and for all if there are no keys.

    Paths that are no routes need a key too, so that only clients can tell which are.

    Raises:
        UnauthenticatedError: the request has no key that is known, or more than one.
    """
    resource = request.match_info.route.resource
    if client_keys is None or (resource is not None and resource.canonical in KEYLESS_ROUTES):
        return ANY_CLIENT
    return client_keys.identify(request.headers.getall("Authorization", []), request.headers.getall("X-Api-Key", []))
