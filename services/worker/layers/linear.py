"""Matrix products with weights, prepared once at load."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.worker.ops import Ops
from services.worker.weights import ModelWeights


class Linear:
    """`x @ weight.T + bias`."""

    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor | None = None) -> None:
        """Prepare `weight` [out_features, in_features] and `bias` [out_features]; neither is kept as it is."""
        self._kernel = ops.prepare_linear(weight, None if bias is None else bias.clone())

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_features] to a new [T, out_features]."""
        return self._kernel(x)

    @classmethod
    def load(
        cls,
        ops: Ops,
        weights: ModelWeights,
        names: Sequence[str],
        out_features: Sequence[int],
        *,
        in_features: int,
        has_bias: bool,
    ) -> Linear:
        """One layer made of the weights `names`, stacked: their outputs stand side by side, one call computes all.

        Args:
            ops: The backend.
            weights: Where they are read, in whatever format each is kept, and `{name}.bias` with them.
            names: The layers' names; several make a fused one.
            out_features: Of each.
            in_features: Of all.
            has_bias: Whether they have one.

        Raises:
            ModelDirectoryError: see `ModelWeights`.
        """
        layers = list(zip(names, out_features, strict=True))
        weight = weights.empty((sum(out_features), in_features))
        for (name, size), rows in zip(layers, torch.split(weight, list(out_features)), strict=True):
            weights.linear(name, (size, in_features), out=rows)
        bias = torch.cat([weights.read(f"{name}.bias", (size,)) for name, size in layers]) if has_bias else None
        return cls(ops, weight, bias)
