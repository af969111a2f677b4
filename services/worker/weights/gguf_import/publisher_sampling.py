"""The sampling parameters that a model's publisher recommends, for a GGUF file, as generation_config.json says them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from services.worker.weights.gguf_import.gguf_file import MalformedGgufError

# GGUF's key -> the name in generation_config.json. Source: gguf-py, constants.py, Keys.General.SAMPLING_*.
_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}

# general.organization and general.basename, in lower case -> what the model card recommends for chats, where the files
# do not say it.
_CARDS: Mapping[tuple[str, str], Mapping[str, float]] = {
    # https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, "How to use"; the cards of 360M and 1.7B say the same.
    ("huggingfacetb", "smollm2"): {"temperature": 0.2, "top_p": 0.9},
}


def publisher_sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Read a file's own recommendation, or else look up its model's card, which is about chats; empty if there is none.

    Args:
        metadata: GGUF's values, by key.

    Raises:
        MalformedGgufError: a value is no number.
    """
    found = {name: _exact(key, metadata[key]) for key, name in _KEYS.items() if key in metadata}
    if not found and "tokenizer.chat_template" in metadata:
        model = (metadata.get(f"general.{key}", "") for key in ("organization", "basename"))
        organization, basename = (str(each).lower() for each in model)
        found = dict(_CARDS.get((organization, basename), {}))
    if not found:
        return {}
    # Other programs use the values only if it says so.
    return {"do_sample": found.get("temperature") != 0.0, **found}


def shortest_decimal(value: float) -> float:
    """The shortest decimal that rounds to `value` as float32: 1e-05 for 9.999999747e-06."""
    return float(str(np.float32(value)))


def _exact(key: str, value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        raise MalformedGgufError(f"{key} is {value!r}, not a number")
    return value if isinstance(value, int) else shortest_decimal(value)  # type: ignore[arg-type]
