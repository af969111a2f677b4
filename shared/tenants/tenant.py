"""Tenants: on whose behalf a request is made, and how much of a cell they may take."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

# The longest salt that a client may send. A tenant's own is longer, so none equals it.
MAX_CACHE_SALT_BYTES = 64

MIN_WEIGHT = 0.001
MAX_WEIGHT = 1000.0


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant and its limits; None means no limit."""

    name: str
    weight: float = 1.0
    """Its share of a cell relative to other tenants', `MIN_WEIGHT` to `MAX_WEIGHT`."""
    max_in_flight: int | None = None
    """The most choices that wait or run at once, at least 1."""
    max_waiting_tokens: int | None = None
    """The most prompt tokens of requests that wait to be admitted, at least 1."""
    max_waiting_requests: int | None = None
    """The most choices that wait to be admitted, at least 1."""


DEFAULT_TENANT = Tenant("default")
"""The tenant of requests without a key: no limits, and no salt."""


def salt_of(tenant: Tenant, client_salt: bytes) -> bytes:
    """The salt under which a tenant's prefixes are cached: its own, which the client's salt can only narrow.

    Returns:
        `client_salt` for the default tenant, else what no other pair of tenant and salt has, and is longer than a
        client's salt may be: none can name another tenant's.
    """
    if tenant.name == DEFAULT_TENANT.name:
        return client_salt
    name = tenant.name.encode()
    digest = hashlib.sha512(len(name).to_bytes(4, "little") + name + client_salt).digest()
    return digest.ljust(MAX_CACHE_SALT_BYTES + 1, b"\0")
