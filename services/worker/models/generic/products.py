"""Matrix products of modelling code, computed by the backend.

Until a module has its kernel it computes shapes only, for a dry run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface
from typing_extensions import override

from services.worker.layers.moe import Experts
from services.worker.models.generic.attention import IMPLEMENTATION

# The attribute of transformers' modules of experts that has ours.
_KERNEL = "lockstep_experts"


class Product(nn.Module):
    """In the place of an `nn.Linear`: a rank's part of it, or all."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        """Sizes of the part computed here; a sum over the ranks has the same."""
        super().__init__()
        self.in_features = num_inputs
        self.out_features = num_outputs
        self.kernel: Callable[[Tensor], Tensor] | None = None
        """[T, in_features] to a new [T, out_features]."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"a product of {self.in_features} inputs is given {x.shape[-1]}")
        shape = (*x.shape[:-1], self.out_features)
        if self.kernel is None:
            return x.new_empty(shape)
        return self.kernel(x.reshape(-1, self.in_features)).view(shape)


class Vectors(nn.Module):
    """In the place of the `nn.Embedding` of tokens."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._size = size
        self._dtype = dtype
        self.kernel: Callable[[Tensor], Tensor] | None = None
        """[T] int64 to a new [T, size]."""

    @override
    def forward(self, token_ids: Tensor) -> Tensor:
        """[...] int64 to [..., size]."""
        shape = (*token_ids.shape, self._size)
        if self.kernel is None:
            return torch.empty(shape, dtype=self._dtype, device=token_ids.device)
        return self.kernel(token_ids.reshape(-1)).view(shape)


def register() -> None:
    """Make `use_experts`' function known to transformers; repeated calls change nothing."""
    ExpertsInterface.register(IMPLEMENTATION, _experts)


def use_experts(module: nn.Module, experts: Experts) -> None:
    """Let a module of experts compute with `experts`."""
    module.__dict__[_KERNEL] = experts


def _experts(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *_: Any, **__: Any
) -> Tensor:
    experts: Experts | None = self.__dict__.get(_KERNEL)
    if experts is None:
        return torch.empty_like(hidden_states)
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    num_rows = rows.shape[0]
    chosen, weights = top_k_index.reshape(num_rows, -1).int(), top_k_weights.reshape(num_rows, -1).float()
    return experts(rows, chosen.contiguous(), weights.contiguous()).view(hidden_states.shape)
