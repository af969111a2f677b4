"""Rotary position embeddings: the tables, and how a configuration scales their frequencies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.worker.ops import Ops, RopeRows
from shared.model_dir import ModelDirectoryError


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Stretches long wavelengths by `factor`, keeps short ones, and blends between.

    Source: Llama 3.1's reference code, `apply_scaling` in models/llama3/reference_impl/model.py.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def apply(self, frequencies: Tensor) -> Tensor:
        """The scaled frequencies, as a new tensor."""
        wavelengths = 2 * math.pi / frequencies
        blend = (self.original_max_positions / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (1 - blend) * frequencies / self.factor + blend * frequencies
        is_long = wavelengths > self.original_max_positions / self.low_freq_factor
        is_short = wavelengths < self.original_max_positions / self.high_freq_factor
        return torch.where(is_long, frequencies / self.factor, torch.where(is_short, frequencies, blended))


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Divides every frequency by `factor`. Source: arXiv:2306.15595, equation 4."""

    factor: float

    def apply(self, frequencies: Tensor) -> Tensor:
        """The scaled frequencies, as a new tensor."""
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The base of the frequencies and their scaling, None for none."""

    theta: float
    scaling: Llama3Scaling | LinearScaling | None

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Read `rope_parameters`, or `rope_theta` and `rope_scaling` as older configurations have them.

        Raises:
            ModelDirectoryError: the type is unknown or lacks a parameter. Guessing would give wrong positions.
        """
        values = {
            "rope_theta": config.get("rope_theta", 10000.0),
            **(config.get("rope_scaling") or {}),
            **(config.get("rope_parameters") or {}),
        }
        kind = values.get("rope_type", values.get("type", "default"))
        try:
            return cls(float(values["rope_theta"]), _scaling(kind, values))
        except (KeyError, TypeError, ValueError) as error:
            raise ModelDirectoryError(f"config.json: rope type {kind!r}: {error!r}") from error


class Rotary:
    """The rotation of query and key heads by position."""

    def __init__(self, ops: Ops, config: RopeConfig, head_dim: int, max_positions: int) -> None:
        frequencies = 1.0 / (config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
        if config.scaling is not None:
            frequencies = config.scaling.apply(frequencies)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        self._ops = ops
        self._tables = ops.prepare_rope(angles.cos(), angles.sin())

    def select(self, positions: Tensor) -> RopeRows:
        """What `Ops.rope` needs in every layer of a step with these `positions` [T] int64."""
        return self._ops.select_rope(self._tables, positions)


def _scaling(kind: object, values: Mapping[str, Any]) -> Llama3Scaling | LinearScaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=float(values["factor"]))
    if kind == "llama3":
        return Llama3Scaling(
            factor=float(values["factor"]),
            low_freq_factor=float(values["low_freq_factor"]),
            high_freq_factor=float(values["high_freq_factor"]),
            original_max_positions=int(values["original_max_position_embeddings"]),
        )
    raise ValueError("not supported")
