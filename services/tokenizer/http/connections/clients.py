"""Which client sends a request, by its key."""

from __future__ import annotations

from enum import Enum

from aiohttp import web

from shared.errors import PermissionDeniedError, TenantLimitError
from shared.tenants.client_keys import ANY_CLIENT, Client, ClientKeys
from shared.tenants.fair_room import FairRoom

CLIENT = web.RequestKey("client", Client)
"""Who sends the request."""

_RETRY_DELAY_S = 1.0


class Audience(Enum):
    """Which clients a route is for."""

    CLIENTS = "clients"
    """All clients; those with a key, where clients have keys."""
    EVERYBODY = "everybody"
    """All clients, with a key or without: probes, and a browser, which cannot send one for a page."""
    OPERATORS = "operators"
    """Keys of operators, since it tells of all tenants; where clients have none, only this machine."""
    ALL_OR_NONE = "all or none"
    """All clients where they have no keys, otherwise none, since it tells of all tenants."""

    def is_served(self, *, has_keys: bool) -> bool:
        """Whether there is such a route at all."""
        return not (self is Audience.ALL_OR_NONE and has_keys)


def find_client(client_keys: ClientKeys | None, audience: Audience, request: web.Request) -> Client:
    """The client of a request: any for a route for everybody, and for all if there are no keys.

    Args:
        client_keys: The keys; None if clients have none.
        audience: That of the route. Paths that are no routes need a key too, so that only clients can tell which are.
        request: The request.

    Raises:
        UnauthenticatedError: the request has no key that is known, or more than one.
        PermissionDeniedError: the route is for operators, and the key is none of theirs.
    """
    if client_keys is None or audience is Audience.EVERYBODY:
        return ANY_CLIENT
    headers = request.headers
    client = client_keys.identify(headers.getall("Authorization", []), headers.getall("X-Api-Key", []))
    if audience is Audience.OPERATORS and not client.is_operator:
        raise PermissionDeniedError("the route needs the key of an operator", route=request.path)
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
