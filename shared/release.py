"""The release of Lockstep that this process runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import metadata

DISTRIBUTION = "lockstep-llm"
CLIENT_DISTRIBUTION = "lockstep-llm-client"
"""The public stubs alone."""

# torch for a CPU: the one on PyPI brings gigabytes for CUDA.
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_WITH_TORCH_FOR_CPU = frozenset({"worker-cpu", "import"})


def install_advice(extras: Sequence[str]) -> str:
    """How to install extras of the distribution: from a checkout, until PyPI has a release."""
    index = f" --extra-index-url {_CPU_INDEX}" if _WITH_TORCH_FOR_CPU.intersection(extras) else ""
    return f"pip install{index} '.[{','.join(extras)}]' in a checkout of Lockstep"


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
