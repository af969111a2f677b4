"""Rotary position embeddings: what a configuration says of them, and their tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.worker.layers.rope_scaling import DynamicNtkScaling, PlainRope, RopeScaling, YarnScaling, read_scaling
from services.worker.ops import Ops, RopeRows
from shared.model_dir import ModelDirectoryError

_PLAIN = PlainRope()


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The base of the frequencies, their scaling, and the part of a head that is turned."""

    theta: float
    scaling: RopeScaling = _PLAIN
    partial_rotary_factor: float = 1.0

    @classmethod
    def from_json(
        cls, config: Mapping[str, Any], *, default_theta: float = 10000.0, default_partial_factor: float = 1.0
    ) -> RopeConfig:
        """Read `rope_parameters`, or `rope_theta` and `rope_scaling` as older configurations have them.

        Args:
            config: The whole config.json.
            default_theta: The family's base where the configuration has none.
            default_partial_factor: The family's `partial_rotary_factor`, likewise.

        Raises:
            ModelDirectoryError: the type is unknown or lacks a parameter. Guessing would give wrong positions.
        """
        values = _parameters(config, default_theta, default_partial_factor)
        kind = values.get("rope_type", values.get("type", "default"))
        try:
            scaling = read_scaling(kind, values, _max_positions(config))
            read = cls(float(values["rope_theta"]), scaling, float(values["partial_rotary_factor"]))
            read._check()
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise ModelDirectoryError(f"config.json: rope type {kind!r}: {error!r}") from error
        return read

    @property
    def score_factor(self) -> float:
        """What multi-head latent attention multiplies its softmax scale by."""
        return self.scaling.score_factor if isinstance(self.scaling, YarnScaling) else 1.0

    def rotary_dim(self, head_dim: int) -> int:
        """How many columns of a head are turned, the first ones.

        Raises:
            ModelDirectoryError: they do not make pairs.
        """
        size = int(head_dim * self.partial_rotary_factor)
        if size < 2 or size % 2:
            raise ModelDirectoryError(f"config.json: {size} of a head's {head_dim} columns are rotated: no pairs")
        return size

    def context_length(self, max_positions: int) -> int:
        """Tokens that a sequence may have where config.json says `max_position_embeddings` = `max_positions`.

        With dynamic NTK that is the length from which on it scales, so a sequence may be `factor` times as long.
        """
        return (
            int(max_positions * self.scaling.factor) if isinstance(self.scaling, DynamicNtkScaling) else max_positions
        )

    def _check(self) -> None:
        """Compute a few angles: parameters that give none finite describe no rotation."""
        angles = self.scaling.angles(self.theta, 8, torch.arange(4, dtype=torch.float32))
        has_factor = 0 < self.scaling.attention_factor < math.inf
        if not (bool(angles.isfinite().all()) and has_factor and 0 < self.partial_rotary_factor <= 1):
            raise ValueError("its parameters give no rotation")


class Rotary:
    """The rotation of query and key heads by position."""

    def __init__(
        self, ops: Ops, config: RopeConfig, rotary_dim: int, max_positions: int, *, is_interleaved: bool = False
    ) -> None:
        """Compute the tables.

        Args:
            ops: The backend.
            config: Base and scaling.
            rotary_dim: Columns of a head that are turned, even; those behind them stay as they are.
            max_positions: Rows of the tables.
            is_interleaved: Whether columns 2 i and 2 i + 1 are a pair, or else i and i + rotary_dim / 2.
        """
        angles = config.scaling.angles(config.theta, rotary_dim, torch.arange(max_positions, dtype=torch.float32))
        factor = config.scaling.attention_factor
        self._ops = ops
        self._tables = ops.prepare_rope(angles.cos() * factor, angles.sin() * factor, is_interleaved=is_interleaved)

    def select(self, positions: Tensor) -> RopeRows:
        """What `Ops.rope` needs in every layer of a step with these `positions` [T] int64."""
        return self._ops.select_rope(self._tables, positions)


def _parameters(config: Mapping[str, Any], default_theta: float, default_partial_factor: float) -> dict[str, Any]:
    """All rope parameters in one flat mapping, whichever of the two spellings the configuration has."""
    values: dict[str, Any] = {"rope_theta": default_theta, "partial_rotary_factor": default_partial_factor}
    values |= {name: config[name] for name in values if config.get(name) is not None}
    for spelling in ("rope_scaling", "rope_parameters"):
        nested = config.get(spelling) or {}
        if not isinstance(nested, Mapping):
            raise ModelDirectoryError(f"config.json: {spelling} is no object")
        if by_layer := [name for name, value in nested.items() if isinstance(value, Mapping)]:
            raise ModelDirectoryError(f"config.json: {spelling} by layer type ({by_layer[0]}) is not supported")
        # A null counts as absent where there is a default.
        values |= {name: value for name, value in nested.items() if value is not None or name not in values}
    # The one parameter of which the outer value counts more, as in transformers.
    if (original := config.get("original_max_position_embeddings")) is not None:
        values["original_max_position_embeddings"] = original
    return values


def _max_positions(config: Mapping[str, Any]) -> int | None:
    value = config.get("max_position_embeddings")
    return None if value is None else int(value)
