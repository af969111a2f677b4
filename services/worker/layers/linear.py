"""Linear layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from services.worker.layers.shard import Part, Shard
from services.worker.ops import Matrix, Ops
from services.worker.ops.matrix_rows import join_rows
from services.worker.parallel.communicator import Communicator


class Linear:
    """`x @ weight.T + bias`."""

    def __init__(self, ops: Ops, weight: Matrix, dtype: torch.dtype, bias: Tensor | None = None) -> None:
        """Prepare `weight` [out_features, in_features] and `bias` [out_features]; the kernel may keep `weight`."""
        self._kernel = ops.prepare_linear(weight, None if bias is None else bias.clone(), dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_features] to a new [T, out_features]."""
        return self._kernel(x)

    @classmethod
    def load(
        cls, shard: Shard, names: Sequence[str], outputs: Sequence[Part], *, inputs: Part, has_bias: bool = False
    ) -> Linear:
        """Load layers as one, with their outputs side by side.

        Args:
            names: In the checkpoint, where each may have its own format: the joined weight is packed if they are alike.
            outputs: The part of each layer's outputs computed here.
            inputs: The part of the inputs used here. Results for all parts add up to the whole product; only the first
                part adds the bias.
            has_bias: Whether there are biases `{name}.bias`.

        Raises:
            ModelDirectoryError: see `ModelWeights`.
        """
        weights, layers = shard.weights, list(zip(names, outputs, strict=True))
        matrices = [
            weights.linear(name, (output.total, inputs.total), rows=output.run, columns=inputs.run)
            for name, output in layers
        ]
        weight = join_rows(matrices, weights.dtype)
        # Freed before the kernel makes another copy.
        del matrices
        if not has_bias:
            return cls(shard.ops, weight, weights.dtype)
        biases = [weights.read(f"{name}.bias", (output.total,), rows=output.run) for name, output in layers]
        return cls(shard.ops, weight, weights.dtype, None if inputs.start else torch.cat(biases))


def sum_over_ranks(layer: Callable[[Tensor], Tensor], tp: Communicator) -> Callable[[Tensor], Tensor]:
    """Sum the results of a layer with inputs split over `tp`. It must return new tensors, which may be written."""
    return layer if tp.size == 1 else lambda x: tp.all_reduce(layer(x))
