"""Rotary position embeddings: configuration and tables."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.worker.layers.rope_scaling import (
    DynamicNtkScaling,
    LongRopeScaling,
    PlainRope,
    RopeScaling,
    YarnScaling,
    read_number,
    read_scaling,
)
from services.worker.ops import Ops, RopeRows
from services.worker.recorded_config import merged, peek
from shared.model_files.model_dir import ModelDirectoryError

_PLAIN = PlainRope()
_NONE: Mapping[str, Any] = {}
_ORIGINAL = "original_max_position_embeddings"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A model's rotary position embeddings."""

    theta: float
    scaling: RopeScaling = _PLAIN
    partial_rotary_factor: float = 1.0
    """Rotated fraction of a head, in (0, 1]."""

    @classmethod
    def from_json(
        cls,
        config: Mapping[str, Any],
        *,
        default_theta: float = 10000.0,
        default_partial_factor: float = 1.0,
        default_parameters: Mapping[str, Any] = _NONE,
    ) -> RopeConfig:
        """Read what transformers reads: `rope_scaling` if there is one, or else `rope_parameters`.

        So a `rope_scaling` added to a newer configuration, as model cards advise, replaces its `rope_parameters`. What
        it lacks is taken from `rope_theta` and `partial_rotary_factor` beside it, or else the family's defaults:
        never from the `rope_parameters` replaced. Other missing parameters are errors, as a guess could give wrong
        positions.

        Args:
            default_parameters: The family's scaling, for a configuration with neither.

        Raises:
            ModelDirectoryError: the type is unknown, or a parameter is missing or malformed.

        Source: transformers 5, `convert_rope_params_to_dict` in modeling_rope_utils.py.
        """
        values = _parameters(config, default_theta, default_partial_factor, default_parameters)
        kind = values.get("rope_type", values.get("type", "default"))
        try:
            scaling = read_scaling(kind, values, _max_positions(config))
            read = cls(read_number(values, "rope_theta"), scaling, read_number(values, "partial_rotary_factor"))
            read._check()
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise ModelDirectoryError(f"config.json: rope type {kind!r}: {error!r}") from error
        return read

    @property
    def score_factor(self) -> float:
        """What the softmax scale of multi-head latent attention is multiplied by; 1 without YaRN."""
        return self.scaling.score_factor if isinstance(self.scaling, YarnScaling) else 1.0

    def rotary_dim(self, head_dim: int) -> int:
        """How many of a head's first columns are rotated.

        Raises:
            ModelDirectoryError: the number is odd or 0, or the scaling has factors for another number.
        """
        size = int(head_dim * self.partial_rotary_factor)
        if size < 2 or size % 2:
            raise ModelDirectoryError(
                f"config.json: {size} of a head's {head_dim} columns are rotated, not whole pairs"
            )
        self.check_pairs(size)
        return size

    def check_pairs(self, rotary_dim: int) -> None:
        """Check that the scaling has factors for `rotary_dim` columns, if it has any.

        Raises:
            ModelDirectoryError: it has them for another number.
        """
        num_pairs = self.scaling.num_pairs
        if num_pairs not in (None, rotary_dim // 2):
            raise ModelDirectoryError(
                f"config.json: short_factor and long_factor have {num_pairs} numbers, but {rotary_dim // 2} pairs of "
                "a head's columns are rotated"
            )

    def context_length(self, max_positions: int) -> int:
        """The most tokens in a sequence: `max_positions`, or `factor` times as many with dynamic NTK, which scales
        beyond it.
        """
        return (
            int(max_positions * self.scaling.factor) if isinstance(self.scaling, DynamicNtkScaling) else max_positions
        )

    def _check(self) -> None:
        """Raise ValueError unless angles are finite."""
        rotary_dim = 2 * (self.scaling.num_pairs or 4)
        angles = self.scaling.angles(self.theta, rotary_dim, torch.arange(4, dtype=torch.float32))
        has_factor = 0 < self.scaling.attention_factor < math.inf
        if not (bool(angles.isfinite().all()) and has_factor and 0 < self.partial_rotary_factor <= 1):
            raise ValueError(
                f"rope_theta {self.theta}, partial_rotary_factor {self.partial_rotary_factor} and the scaling define "
                "no rotation"
            )


class Rotary:
    """Rotates query and key heads by position."""

    def __init__(
        self,
        ops: Ops,
        config: RopeConfig,
        rotary_dim: int,
        max_positions: int,
        *,
        is_interleaved: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        """Compute the tables.

        Args:
            rotary_dim: Even; a head's other columns are unchanged.
            max_positions: Rows of the tables: the context served, by which LongRoPE chooses its factors.
            is_interleaved: See `Ops.prepare_rope`.
            device: Where heads are rotated. The tables are computed on the host, so they are the same everywhere.

        Raises:
            ModelDirectoryError: see `RopeConfig.check_pairs`.
        """
        config.check_pairs(rotary_dim)
        scaling = config.scaling.for_context(max_positions)
        angles = scaling.angles(config.theta, rotary_dim, torch.arange(max_positions, dtype=torch.float32))
        factor = scaling.attention_factor
        self.has_long_factors: bool = isinstance(scaling, LongRopeScaling) and scaling.is_long
        """Whether it has LongRoPE's factors for long contexts."""
        cos, sin = ((values * factor).to(device) for values in (angles.cos(), angles.sin()))
        self._ops = ops
        self._tables = ops.prepare_rope(cos, sin, is_interleaved=is_interleaved)

    def select(self, positions: Tensor) -> RopeRows:
        """Rotations for `positions` [T] int64, for `Ops.rope` in every layer."""
        return self._ops.select_rope(self._tables, positions)


def _parameters(
    config: Mapping[str, Any],
    default_theta: float,
    default_partial_factor: float,
    default_parameters: Mapping[str, Any],
) -> Mapping[str, Any]:
    defaults: dict[str, Any] = {"rope_theta": default_theta, "partial_rotary_factor": default_partial_factor}
    defaults |= {name: config[name] for name in defaults if config.get(name) is not None}
    scaling, parameters = (_object(config, spelling) for spelling in ("rope_scaling", "rope_parameters"))
    nested = scaling or (default_parameters if parameters is None else parameters)
    # A null counts as absent if there is a default.
    outer = {name: value for name, value in defaults.items() if nested.get(name) is None}
    # The only parameter whose outer value takes precedence, as in transformers.
    if (original := config.get(_ORIGINAL)) is not None:
        outer[_ORIGINAL] = original
    values = merged(nested, outer)
    if scaling and parameters:
        _warn_of_replaced(parameters, values)
    return values


def _warn_of_replaced(parameters: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Name what `rope_parameters` says without effect; the base is what people forget to repeat in `rope_scaling`."""
    used = {name: peek(values, name) for name in values}
    lost = {name: value for name, value in parameters.items() if name not in ("rope_type", "type")}
    lost = {name: value for name, value in lost.items() if used.get(name) != value}
    if lost:
        logger.warning(
            "config.json: rope_scaling replaces rope_parameters, as in transformers",
            extra={"ignored": lost, "used": {name: used.get(name) for name in lost}},
        )


def _object(config: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """None if absent."""
    value = config.get(name)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ModelDirectoryError(f"config.json: {name} is {value!r}, not an object")
    if by_layer := [key for key in value if isinstance(peek(value, key), Mapping)]:
        raise ModelDirectoryError(f"config.json: {name} by layer type ({by_layer[0]}) is not supported")
    return value


def _max_positions(config: Mapping[str, Any]) -> int | None:
    if config.get("max_position_embeddings") is None:
        return None
    return int(read_number(config, "max_position_embeddings"))
