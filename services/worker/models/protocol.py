"""What the worker asks of a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from services.worker.kv_cache import KvCacheSpec


class CausalLM(Protocol):
    """A model that predicts next tokens."""

    # What its layers need in the KV cache.
    kv_cache_spec: KvCacheSpec
    # Tokens of one sequence, at most.
    context_length: int
    # Columns of the logits; token ids are below it.
    logits_width: int

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states behind the last norm, [num_tokens, hidden]. Runs inside a `forward_context`.

        Writes this step's keys and values into the context's KV cache.

        Args:
            token_ids: [num_tokens], int64.
            positions: [num_tokens], int64; each token's place in its sequence, from 0.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [num_rows, logits_width], float32, of hidden states [num_rows, hidden]."""
