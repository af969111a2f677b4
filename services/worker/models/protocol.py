"""What the worker calls of a model."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from services.worker.forward.kv_cache import KvCacheSpec
from services.worker.forward.state_cache import StateSpec
from shared.model_files.implementations import Implementation


class MtpLayers(Protocol):
    """Layers for multi-token prediction, which draft tokens. Source: arXiv:2412.19437, section 2.2.

    Their KV layers come after the model's own in its `kv_cache_spec`.
    """

    num_layers: int
    num_shared_positions: int
    """The most positions that the first draft attends to where the later ones attend to the same; otherwise 0."""

    def forward(self, hidden: Tensor, token_ids: Tensor, positions: Tensor, layer: int) -> Tensor:
        """Hidden states [T, hidden], the input of `compute_logits` and of the next call. Runs in a `forward_context`.

        Args:
            hidden: [T, hidden], from `CausalLM.forward` or the previous call at these positions; not written.
            token_ids: [T] int64, the tokens at `positions` + 1.
            positions: [T] int64. The KV is written to their slots.
            layer: From 0.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [num_rows, logits_width], float32, of the tokens at `positions` + 2."""


class CausalLM(Protocol):
    """A model that predicts next tokens."""

    implementation: Implementation
    """Whose code computes it."""
    code: str
    """What identifies that code; empty for our own, which the release does."""
    dtype: torch.dtype
    kv_cache_spec: KvCacheSpec
    state_spec: StateSpec
    """Empty if no layer has a recurrent state."""
    context_length: int
    """The context served: the most tokens in a sequence."""
    has_long_factors: bool
    """Whether its positions have LongRoPE's factors for long contexts, which change its answers."""
    logits_width: int
    """Token ids are below it."""
    mtp: MtpLayers | None
    """None if there are no such layers, or they were not loaded."""

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states after the final norm, [num_tokens, hidden]. Runs in a `forward_context`.

        Writes the step's keys and values into the context's KV cache.

        Args:
            token_ids: [num_tokens], int64.
            positions: [num_tokens], int64; in each token's sequence, from 0.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [num_rows, logits_width], float32, of hidden states [num_rows, hidden].

        Without a head [num_rows, 1]: finite where the hidden states are.
        """
