"""Rotary position embeddings of a GGUF file, as config.json's `rope_parameters` say them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from services.worker.weights.gguf_import.metadata import Metadata, UnsupportedGgufError

FACTORS = "rope_freqs.weight"
"""The tensor of what every pair's frequency is divided by. llama.cpp's converter writes it for Llama 3.1 and later."""
# llama.cpp's, where a file says nothing.
_THETA = 10000.0
# What published models have: of `low_freq_factor`, of `high_freq_factor`, of the original context.
_LLAMA3 = ((1.0,), (4.0,), tuple(1 << power for power in range(6, 21)))
# Float32's rounding of a factor, and of the steps to it.
_TOLERANCE = 1e-5
_FREQUENCIES = "rope.freq_base"


def rope_parameters(metadata: Metadata, rotary_dim: int, factors: npt.NDArray[np.float32] | None) -> dict[str, Any]:
    """Read theta and the scaling.

    Args:
        rotary_dim: How many of a head's columns are rotated.
        factors: The values of `FACTORS`, [rotary_dim / 2].

    Raises:
        UnsupportedGgufError: the scaling is of another kind, or the factors are no published model's.
    """
    theta = metadata.number(_FREQUENCIES, default=_THETA)
    if not theta > 1:
        raise UnsupportedGgufError(f"has {_FREQUENCIES} {theta}, not a number above 1")
    kind = metadata.text("rope.scaling.type", default="none")
    scaling = _scaling(metadata, kind)
    if factors is not None:
        if scaling["rope_type"] != "default":
            raise UnsupportedGgufError(f"has both {FACTORS} and rope.scaling.type {kind!r}")
        scaling = _llama3(theta, rotary_dim, factors)
    return {"rope_theta": theta, **scaling}


def _scaling(metadata: Metadata, kind: str) -> dict[str, Any]:
    if kind == "none":
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise UnsupportedGgufError(f"has rope.scaling.type {kind!r}, which is not supported; supported: linear, yarn")
    factor = metadata.number("rope.scaling.factor")
    original = metadata.size("rope.scaling.original_context_length", default=metadata.size("context_length"))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        **_yarn(metadata),
    }


def _yarn(metadata: Metadata) -> dict[str, Any]:
    """The other parameters. llama.cpp's defaults are the paper's: arXiv:2309.00071."""
    for name in ("yarn_ext_factor", "yarn_attn_factor"):
        # llama.cpp multiplies the paper's factor by the second one, but its converter writes what replaces that factor.
        if (value := metadata.number(f"rope.scaling.{name}", default=1.0)) not in (1.0, -1.0):
            raise UnsupportedGgufError(f"has rope.scaling.{name} {value}; only 1 is supported")
    found: dict[str, Any] = {
        "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", default=32.0),
        "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", default=1.0),
    }
    # DeepSeek's temperature in place of the paper's; files of its own models have a tenth of it.
    if temperature := metadata.number("rope.scaling.yarn_log_multiplier", default=0.0):
        is_tenth = metadata.architecture == "deepseek2"
        found["mscale"] = found["mscale_all_dim"] = round(temperature * 10, 6) if is_tenth else temperature
    return found


def _llama3(theta: float, rotary_dim: int, factors: npt.NDArray[np.float32]) -> dict[str, Any]:
    """The parameters that give these factors."""
    factor = float(factors.max())
    if factors.shape != (rotary_dim // 2,) or not np.isfinite(factors).all() or factors.min() <= 0:
        raise UnsupportedGgufError(f"has {FACTORS} that are no factors of {rotary_dim // 2} frequencies")
    if (factors == 1).all():
        return {"rope_type": "default"}
    for low, high, original in product(*_LLAMA3):
        expected = list(_llama3_factors(theta, rotary_dim, factor, (low, high, original)))
        if np.allclose(factors, expected, rtol=_TOLERANCE, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise UnsupportedGgufError(f"has {FACTORS} that are not Llama 3's, which are the only ones supported")


def _llama3_factors(theta: float, rotary_dim: int, factor: float, limits: tuple[float, float, int]) -> Iterable[float]:
    """See `Llama3Scaling`."""
    low, high, original = limits
    for pair in range(rotary_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / rotary_dim)
        blend = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        yield 1 / ((1 - blend) / factor + blend)
