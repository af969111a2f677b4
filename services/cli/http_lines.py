"""The last lines of a start: where a browser, a client's library and `curl` find the HTTP API."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from services.cli.api_key import API_KEY_VARIABLE
from services.cli.processes.launch_screen import describe_place
from services.cli.serve_settings import ServeSettings
from shared.model_files.model_dir import has_chat_template
from shared.network.addresses import is_any_host, join_address, split_address

_QUESTION = "Why is the sky blue?"


@dataclass(frozen=True, slots=True)
class _Place:
    """How clients on this machine reach the API."""

    url: str
    curl_flags: tuple[str, ...] = ()


def describe_http(settings: ServeSettings) -> list[str]:
    """The page's URL, the base URL for clients, and a command that asks something; empty if HTTP is not served."""
    address = settings.http_address
    if address is None:
        return []
    if not address.startswith("unix:") and split_address(address)[1] == 0:
        return [describe_place("HTTP", f"{address}: the log says which port it is")]
    place = _find_place(settings, address)
    note = ", not encrypted" if settings.insecure_http_bind is not None else ""
    key = "a key" if _needs_key(settings) else "any key"
    lines = [describe_place("page", f"{place.url}/{note}")]
    if address.startswith("unix:"):
        lines = [describe_place("HTTP", address)]
    lines.append(describe_place("base URL", f"{place.url}/v1 with {key}; {place.url} for Anthropic's libraries"))
    return [*lines, describe_place("try", _render_curl(settings, place))]


def _needs_key(settings: ServeSettings) -> bool:
    return settings.client_keys is not None or settings.api_key is not None


def _find_place(settings: ServeSettings, address: str) -> _Place:
    if address.startswith("unix:"):
        return _Place("http://localhost", ("--unix-socket", address.removeprefix("unix:")))
    host, port = split_address(address)
    if is_any_host(host):
        host = "127.0.0.1"
    if settings.certificates is None:
        return _Place(f"http://{join_address(host, port)}")
    # The certificate names the role, not the address.
    flags = ("--cacert", str(settings.tls_ca), "--connect-to", f"::{join_address(host, port)}")
    return _Place(f"https://{settings.role.value}.{settings.trust_domain}:{port}", flags)


def _render_curl(settings: ServeSettings, place: _Place) -> str:
    body: dict[str, object]
    if settings.chat_template is not None or has_chat_template(settings.model_dir):
        route, body = "chat/completions", {"messages": [{"role": "user", "content": _QUESTION}]}
    else:
        route, body = "completions", {"prompt": "The capital of France is"}
    words = [*place.curl_flags, f"{place.url}/v1/{route}", "-H", "Content-Type: application/json"]
    words += ["-d", json.dumps(body)]
    key = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if _needs_key(settings) else ""
    return f"curl {shlex.join(words)}{key}"
