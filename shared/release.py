"""The release of Lockstep that this process runs."""

from __future__ import annotations

from functools import cache
from importlib import metadata

DISTRIBUTION = "lockstep-llm"
CLIENT_DISTRIBUTION = "lockstep-llm-client"
"""The public stubs alone."""


@cache
def find_release() -> str:
    """Its version, or words that say that there is none."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "(running from a checkout that is not installed)"


def has_client_stubs() -> bool:
    """Whether the distribution of the stubs alone is installed too, whose `lockstep/v1` may be another release's."""
    return any(metadata.distributions(name=CLIENT_DISTRIBUTION))
