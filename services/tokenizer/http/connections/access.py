"""Which web pages and hosts may use the HTTP API.

A web page can reach a port on its visitor's loopback, by a name of its own that resolves to it; so a loopback listener
answers only to its own names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus

from aiohttp import web
from multidict import CIMultiDict

from services.tokenizer.http.refusals import HttpError
from shared.network.addresses import LOOPBACK_HOSTS, split_address, strip_brackets

_METHODS = "GET, POST, OPTIONS"
_HEADER_NAMES = re.compile(r"[\w!#$%&'*+.^`|~, -]{1,1024}", re.ASCII)
# Headers that proxies, balancers, tunnels and content networks add: the standard's, what most share, and their own.
_OF_PROXIES = re.compile(
    r"forwarded(-.*)?|via|cdn-loop"
    r"|x-(forwarded|original|remote|proxy|proxied|envoy|amzn|azure|appengine|arr|vercel|nf|ngrok|cloud-trace)-.*"
    r"|x-(real-ip|client-ip|cluster-client-ip|proxyuser-ip|forwarded|forward-for|scheme|request-start)"
    r"|(cf|fly|fastly|cloudfront|tailscale|ngrok)-.*|(true-|proxy-|wl-proxy-)?client-ip",
    re.ASCII | re.IGNORECASE,
)
_EXPOSED = "x-request-id, request-id, x-lockstep-ignored, x-should-retry, retry-after, retry-after-ms"


class Access:
    """Checks hosts, and permits other origins' pages."""

    def __init__(self, address: str, allowed_hosts: Sequence[str], origins: Sequence[str]) -> None:
        """`address` is the listener's."""
        is_loopback = not address.startswith("unix:") and split_address(address)[0] in LOOPBACK_HOSTS
        self._own_hosts = LOOPBACK_HOSTS if is_loopback else frozenset[str]()
        # Empty means any.
        self._hosts = self._own_hosts | {strip_brackets(host).lower() for host in allowed_hosts}
        self._origins = frozenset(origins)

    def check_host(self, request: web.Request) -> None:
        """Refuse a request to a host that is not ours.

        Raises:
            HttpError: it is not.
        """
        if self._hosts and _host_of(request) not in self._hosts:
            message = (
                "the host in the request is not this server's: --http-allowed-hosts "
                "(of `lockstep serve`: --tokenizer.http-allowed-hosts) adds hosts"
            )
            raise HttpError(HTTPStatus.FORBIDDEN, "host_not_allowed", message)

    def is_local(self, request: web.Request) -> bool:
        """Whether the request comes from this machine, by all that can be seen.

        The listener is on a loopback address, the host is one of its own names, and no proxy says that it is in front.
        """
        return _host_of(request) in self._own_hosts and not any(map(_OF_PROXIES.fullmatch, request.headers))

    def preflight(self, request: web.Request) -> web.Response | None:
        """The answer to a browser that asks whether a page may send a request; None if it may not."""
        if request.method != "OPTIONS" or request.headers.get("Origin") not in self._origins:
            return None
        headers = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": "600"}
        wanted = request.headers.get("Access-Control-Request-Headers", "")
        if _HEADER_NAMES.fullmatch(wanted):
            headers["Access-Control-Allow-Headers"] = wanted
        return web.Response(status=HTTPStatus.NO_CONTENT, headers=headers)

    def permit(self, request: web.BaseRequest, headers: CIMultiDict[str]) -> None:
        """Let the page that asked read the answer, if its origin may."""
        if self._origins:
            headers["Vary"] = "Origin"
        if (origin := request.headers.get("Origin")) in self._origins and origin is not None:
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = _EXPOSED


def _host_of(request: web.Request) -> str:
    """Without the port."""
    if request.raw_path.startswith(("/", "*")):
        host = request.headers.get("Host", "")
        name, colon, port = host.rpartition(":")
        if colon and (not port or port.isdecimal()):
            host = name
    else:
        # The target is a whole URL, whose host is the request's (RFC 9112, section 3.2.2).
        host = request.host
    # A last dot says that the name is complete.
    return strip_brackets(host).lower().removesuffix(".")
