"""Matrix products with weights, prepared once at load, of which a rank may have a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from services.worker.layers.shard import Part, Shard
from services.worker.ops import Ops
from services.worker.parallel.communicator import Communicator


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
        cls, shard: Shard, names: Sequence[str], outputs: Sequence[Part], *, inputs: Part, has_bias: bool = False
    ) -> Linear:
        """One layer made of the weights `names`, stacked: their outputs stand side by side, one call computes all.

        Args:
            shard: Where they are read, in whatever format each is kept, and `{name}.bias` with them.
            names: The layers' names; several make a fused one.
            outputs: Of each, the part that is computed here.
            inputs: Of all, the part that they are computed from here. The sum over all parts is the whole product; the
                bias comes with the first part.
            has_bias: Whether they have one.

        Raises:
            ModelDirectoryError: see `ModelWeights`.
        """
        weights, layers = shard.weights, list(zip(names, outputs, strict=True))
        weight = weights.empty((sum(map(len, outputs)), len(inputs)))
        for (name, output), rows in zip(layers, torch.split(weight, [len(part) for part in outputs]), strict=True):
            shape = output.total, inputs.total
            weights.linear(name, shape, rows=output.run, columns=inputs.run, out=rows)
        if not has_bias:
            return cls(shard.ops, weight)
        biases = [weights.read(f"{name}.bias", (output.total,), rows=output.run) for name, output in layers]
        return cls(shard.ops, weight, None if inputs.start else torch.cat(biases))


def sum_over_ranks(layer: Callable[[Tensor], Tensor], tp: Communicator) -> Callable[[Tensor], Tensor]:
    """The sum of what a layer gives on each rank of `tp`, where each has it for a part of the inputs.

    Args:
        layer: Maps [T, n] to a new tensor, which may be written.
        tp: All ranks that have a part.
    """
    return layer if tp.size == 1 else lambda x: tp.all_reduce(layer(x))
