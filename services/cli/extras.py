"""The extras of the distribution: what a command needs beyond the base, and what to install where it is missing.

Nothing is imported to find out, since some of it takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from shared.release import install_advice

EXTRA_TO_MODULES = {
    "tokenizer": ("transformers", "llguidance", "numpy"),
    "http": ("aiohttp", "msgspec", "pydantic"),
    "scheduler": ("numpy", "xxhash", "kubernetes"),
    "worker-cpu": ("safetensors", "llguidance", "numpy", "torch"),
    "config": ("yaml",),
    "pull": ("huggingface_hub", "httpx2"),
    "chat": ("prompt_toolkit", "shtab"),
    "import": ("safetensors", "llguidance", "numpy", "torch", "transformers", "gguf"),
}
"""The top-level modules of what each extra requires, as pyproject.toml says.

The tokenizer's has `pull` too, which the service itself does not import, and `http`, which it needs for that API; the
scheduler's has `config`, for its launcher.
"""

ROLE_TO_EXTRA = {"tokenizer": "tokenizer", "scheduler": "scheduler", "worker": "worker-cpu"}
"""The extra of each service."""


def missing_packages(command: str, extras: Iterable[str]) -> str | None:
    """What a command lacks and how to install it, as one sentence; None if nothing is missing.

    Args:
        extras: Those that the command needs.
    """
    lacking = {extra: [name for name in EXTRA_TO_MODULES[extra] if find_spec(name) is None] for extra in extras}
    needed = sorted(extra for extra, names in lacking.items() if names)
    if not needed:
        return None
    names = sorted({name for names in lacking.values() for name in names})
    advice = f"`lockstep {command}` needs {', '.join(names)}: {install_advice(needed)}"
    if "worker-cpu" in needed:
        advice += ", with worker-cuda or worker-rocm in place of worker-cpu for a GPU"
    return advice
