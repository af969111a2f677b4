"""The release of Lockstep that this process runs."""

from __future__ import annotations

from functools import cache
from importlib import metadata


@cache
def find_release() -> str:
    """Its version, or words that say that there is none."""
    try:
        return metadata.version("lockstep")
    except metadata.PackageNotFoundError:
        return "(running from a checkout that is not installed)"
