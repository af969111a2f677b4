"""What the worker asks of a model."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from services.worker.forward.kv_cache import KvCacheSpec


class MtpLayers(Protocol):
    """Layers that a checkpoint brings to draft tokens with (multi-token prediction). Source: arXiv:2412.19437, 2.2.

    Their KV layers stand behind the model's own in its `kv_cache_spec`.
    """

    num_layers: int

    def forward(self, hidden: Tensor, token_ids: Tensor, positions: Tensor, layer: int) -> Tensor:
        """Hidden states [T, hidden], of which `compute_logits` and the next use take. Runs in a `forward_context`.

        Args:
            hidden: [T, hidden], what `CausalLM.forward` or the use before returned for these positions; not written.
            token_ids: [T] int64, the tokens that follow: those at `positions` + 1.
            positions: [T] int64; the KV goes to their slots.
            layer: Which layer computes, from 0.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [num_rows, logits_width], float32, of the tokens at `positions` + 2."""


class CausalLM(Protocol):
    """A model that predicts next tokens."""

    # What it computes in.
    dtype: torch.dtype
    # What its layers need in the KV cache.
    kv_cache_spec: KvCacheSpec
    # Tokens of one sequence, at most.
    context_length: int
    # Columns of the logits; token ids are below it.
    logits_width: int
    # None where the checkpoint has none, or they were not asked for.
    mtp: MtpLayers | None
    # Whether any layer has experts, so that expert parallelism has something to spread.
    has_experts: bool

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states behind the last norm, [num_tokens, hidden]. Runs inside a `forward_context`.

        Writes this step's keys and values into the context's KV cache.

        Args:
            token_ids: [num_tokens], int64.
            positions: [num_tokens], int64; each token's place in its sequence, from 0.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [num_rows, logits_width], float32, of hidden states [num_rows, hidden]."""
