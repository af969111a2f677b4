"""RoPE scaling: how rotary position embeddings are extended beyond the original training length.

Angles are computed in float32 and in the order of transformers' operations (`modeling_rope_utils`), because an angle's
error grows with the position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

_LARGEST = torch.finfo(torch.float32).max


class RopeScaling(Protocol):
    """One way of scaling."""

    @property
    def attention_factor(self) -> float:
        """Multiplies cosines and sines."""

    @property
    def num_pairs(self) -> int | None:
        """The pairs of columns that it has factors for, which must be those that are rotated; None if any."""
        return None

    def for_context(self, num_tokens: int) -> RopeScaling:  # noqa: ARG002 - for scalings that depend on it
        """The scaling of all sequences where they have at most `num_tokens`; without this call, that of short ones."""
        return self

    def angles(self, theta: float, rotary_dim: int, positions: Tensor) -> Tensor:
        """[num_positions, rotary_dim / 2], float32, for `positions` [num_positions] float32 and the base `theta`."""


@dataclass(frozen=True, slots=True)
class PlainRope(RopeScaling):
    """No scaling. Source: arXiv:2104.09864, section 3.2.2."""

    @override
    @property
    def attention_factor(self) -> float:
        return 1.0

    @override
    def angles(self, theta: float, rotary_dim: int, positions: Tensor) -> Tensor:
        return torch.outer(positions, 1.0 / theta ** _exponents(rotary_dim))


@dataclass(frozen=True, slots=True)
class LinearScaling(RopeScaling):
    """Divides every frequency by `factor`. Source: arXiv:2306.15595, equation 4."""

    factor: float

    @override
    @property
    def attention_factor(self) -> float:
        return 1.0

    @override
    def angles(self, theta: float, rotary_dim: int, positions: Tensor) -> Tensor:
        return torch.outer(positions, 1.0 / theta ** _exponents(rotary_dim) / self.factor)


@dataclass(frozen=True, slots=True)
class DynamicNtkScaling(RopeScaling):
    """Increases the base with the length: a token beyond `original_max_positions` is rotated as if it were the last.

    So rotations depend only on the position, and cached keys stay valid. transformers gives the same if a sequence
    grows token by token, but rotates a longer prompt with the base for its full length.

    Source: transformers, `_compute_dynamic_ntk_parameters`; arXiv:2309.00071, section 3.1 and appendix B.1.
    """

    factor: float
    original_max_positions: int

    @override
    @property
    def attention_factor(self) -> float:
        return 1.0

    @override
    def angles(self, theta: float, rotary_dim: int, positions: Tensor) -> Tensor:
        lengths = (positions + 1).clamp(min=self.original_max_positions)
        stretch = self.factor * lengths / self.original_max_positions - (self.factor - 1)
        bases = theta * stretch ** (rotary_dim / (rotary_dim - 2))
        return positions[:, None] * (1.0 / bases[:, None] ** _exponents(rotary_dim))


@dataclass(frozen=True, slots=True)
class Llama3Scaling(RopeScaling):
    """Stretches long wavelengths by `factor`, keeps short ones, and blends in between.

    Source: Llama 3.1's reference code, `apply_scaling` in models/llama3/reference_impl/model.py.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    @override
    @property
    def attention_factor(self) -> float:
        return 1.0

    @override
    def angles(self, theta: float, rotary_dim: int, positions: Tensor) -> Tensor:
        return torch.outer(positions, self._scaled(1.0 / theta ** _exponents(rotary_dim)))

    def _scaled(self, frequencies: Tensor) -> Tensor:
        wavelengths = 2 * math.pi / frequencies
        blend = (self.original_max_positions / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (1 - blend) * frequencies / self.factor + blend * frequencies
        is_long = wavelengths > self.original_max_positions / self.low_freq_factor
        is_short = wavelengths < self.original_max_positions / self.high_freq_factor
        return torch.where(is_long, frequencies / self.factor, torch.where(is_short, frequencies, blended))


@dataclass(frozen=True, slots=True)
class YarnScaling(RopeScaling):
    """Interpolates pairs that rotate fewer than `beta_slow` times within the original length, keeps those above
    `beta_fast`, blends in between, and scales cosines and sines.

    Source: arXiv:2309.00071, section 3.2 (equations 18 to 23) and 3.3.
    """

    factor: float
    original_max_positions: int
    given_attention_factor: float | None = None
    """None means that it is computed; see `attention_factor`."""
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    """DeepSeek's temperature parameter, as is `mscale_all_dim`; 0 if absent."""
    mscale_all_dim: float = 0.0
    is_truncated: bool = True
    """Whether the blend begins and ends at whole pairs; not in gpt-oss."""

    @property
    def attention_factor(self) -> float:
        """See `RopeScaling`.

        `attn_factor` multiplies the computed factor, as in vLLM's YaRN; a configured `attention_factor` is the whole
        factor, as in transformers and in vLLM's pull request 46280.
        """
        if self.given_attention_factor is not None:
            return self.given_attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.attn_factor * self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self.attn_factor * self._temperature(1.0)

    @property
    def score_factor(self) -> float:
        """Multiplies the softmax scale in multi-head latent attention. Source: transformers' DeepSeek-V3."""
        return self._temperature(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    @override
    def angles(self, theta: float, rotary_dim: int, positions: Tensor) -> Tensor:
        wavelengths = theta ** _exponents(rotary_dim)
        first, last = self._blended_pairs(theta, rotary_dim)
        ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
        kept = 1 - ramp
        return torch.outer(positions, 1.0 / (self.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept)

    def _temperature(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    def _blended_pairs(self, theta: float, rotary_dim: int) -> tuple[float, float]:
        """First and last pair of the blend; the last is larger."""

        def pair_with_turns(num_turns: float) -> float:
            turned = self.original_max_positions / (num_turns * 2 * math.pi)
            return rotary_dim * math.log(turned) / (2 * math.log(theta))

        first, last = pair_with_turns(self.beta_fast), pair_with_turns(self.beta_slow)
        if self.is_truncated:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotary_dim - 1)
        return first, last if last != first else last + 0.001


@dataclass(frozen=True, slots=True)
class LongRopeScaling(RopeScaling):
    """Divides each pair's frequency by a factor of its own, which is another one for long sequences.

    transformers takes the long factors once a sequence is longer than the original length, which would leave the keys
    before that with the short ones. Here, as in vLLM, sequences may be that long or not, and all have the same factors.

    Source: arXiv:2402.13753, section 3; transformers, `_compute_longrope_parameters`.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int
    factor: float
    """How much longer the model's own context is than the original one."""
    given_attention_factor: float | None = None
    """None means that it is computed of `factor`, whatever the context."""
    is_long: bool = False
    """Whether the long factors apply."""

    @property
    def attention_factor(self) -> float:
        """See `RopeScaling`."""
        if self.given_attention_factor is not None:
            return self.given_attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_positions))

    @override
    @property
    def num_pairs(self) -> int:
        return len(self.short_factors)

    @override
    def for_context(self, num_tokens: int) -> LongRopeScaling:
        return replace(self, is_long=num_tokens > self.original_max_positions)

    @override
    def angles(self, theta: float, rotary_dim: int, positions: Tensor) -> Tensor:
        factors = torch.tensor(self.long_factors if self.is_long else self.short_factors, dtype=torch.float32)
        return torch.outer(positions, 1.0 / (factors * theta ** _exponents(rotary_dim)))


def read_scaling(kind: object, values: Mapping[str, Any], max_positions: int | None) -> RopeScaling:
    """Parse the scaling of rope type `kind`; `max_positions` is `max_position_embeddings`.

    Raises:
        KeyError, TypeError, ValueError: the type is unknown, or a parameter is missing or malformed.
    """
    if kind == "default":
        return PlainRope()
    if kind != "yarn" and values.get("mscale_all_dim"):
        # In transformers it changes latent attention's softmax scale.
        raise ValueError(f"mscale_all_dim is {values['mscale_all_dim']!r}, which only yarn supports")
    if kind == "linear":
        return LinearScaling(factor=read_number(values, "factor"))
    if kind == "dynamic":
        if max_positions is None:
            raise KeyError("max_position_embeddings")
        return DynamicNtkScaling(factor=read_number(values, "factor"), original_max_positions=max_positions)
    if kind == "llama3":
        return Llama3Scaling(
            factor=read_number(values, "factor"),
            low_freq_factor=read_number(values, "low_freq_factor"),
            high_freq_factor=read_number(values, "high_freq_factor"),
            original_max_positions=_original_max_positions(values, max_positions),
        )
    if kind == "yarn":
        return _read_yarn(values, max_positions)
    if kind == "longrope":
        return _read_longrope(values, max_positions)
    raise ValueError("not supported")


def read_number(values: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A parameter; where it is absent or null `default`, if there is one.

    Raises:
        KeyError, TypeError: it is missing, or no number.
    """
    value = values.get(name)
    if value is None:
        value = values[name] if default is None else default
    if type(value) not in (int, float):
        raise TypeError(f"{name} is {value!r}, not a number")
    return float(value)


def _read_yarn(values: Mapping[str, Any], max_positions: int | None) -> YarnScaling:
    original = _original_max_positions(values, max_positions)
    # An explicit null, as transformers reads it; a factor that is absent is an error.
    implied = None if max_positions is None or "factor" not in values else max_positions / original
    for name, value in _UNCHANGING.items():
        if values.get(name, value) not in (None, value):
            raise ValueError(f"{name} is {values[name]!r}, only {value!r} is supported")
    return YarnScaling(
        factor=read_number(values, "factor", implied),
        original_max_positions=original,
        given_attention_factor=None
        if values.get("attention_factor") is None
        else read_number(values, "attention_factor"),
        attn_factor=read_number(values, "attn_factor", 1.0),
        # A 0 counts as absent, as in transformers.
        beta_fast=read_number(values, "beta_fast", 32.0) or 32.0,
        beta_slow=read_number(values, "beta_slow", 1.0) or 1.0,
        mscale=read_number(values, "mscale", 0.0),
        mscale_all_dim=read_number(values, "mscale_all_dim", 0.0),
        is_truncated=bool(values.get("truncate", True)),
    )


def _read_longrope(values: Mapping[str, Any], max_positions: int | None) -> LongRopeScaling:
    original = _original_max_positions(values, max_positions)
    for name in _MSCALES:
        if values.get(name) is not None:
            raise ValueError(f"{name} is {values[name]!r}, which is not supported; attention_factor is")
    short, long = _read_factors(values, "short_factor"), _read_factors(values, "long_factor")
    if len(short) != len(long):
        raise ValueError(f"short_factor has {len(short)} numbers, long_factor {len(long)}")
    implied = None if max_positions is None else max_positions / original
    given = values.get("attention_factor")
    return LongRopeScaling(
        short,
        long,
        original,
        factor=read_number(values, "factor", implied),
        given_attention_factor=None if given is None else read_number(values, "attention_factor"),
    )


# Factors of Phi-3-small's own code, of which transformers reads none.
_MSCALES = ("short_mscale", "long_mscale")


def _read_factors(values: Mapping[str, Any], name: str) -> tuple[float, ...]:
    factors = values[name]
    if not isinstance(factors, list) or not factors:
        raise TypeError(f"{name} is not a list of numbers")
    for place, factor in enumerate(factors):
        # Above float32's largest number too, which they become.
        if type(factor) not in (int, float) or not 0 < factor <= _LARGEST:
            raise ValueError(f"{name}[{place}] is {factor!r}, not a finite number above 0")
    return tuple(map(float, factors))


# Unsupported parameters of vLLM's YaRN, and the values at which they have no effect.
_UNCHANGING: Mapping[str, object] = {"extrapolation_factor": 1, "apply_yarn_scaling": True}


def _original_max_positions(values: Mapping[str, Any], max_positions: int | None) -> int:
    name = "original_max_position_embeddings"
    if name not in values and max_positions is not None:
        return max_positions
    original = int(read_number(values, name))
    if original < 1:
        raise ValueError(f"{name} is {original}, must be at least 1")
    return original


def _exponents(rotary_dim: int) -> Tensor:
    return torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
