"""The lightning indexer of DeepSeek-V3.2 and GLM-5: a small attention that selects what the main one attends to.

Source: DeepSeek-V3.2-Exp, "Boosting Long-Context Efficiency with DeepSeek Sparse Attention", section 2.1; transformers'
`DeepseekV32Indexer` and `GlmMoeDsaIndexer`. As there, nothing is rounded to FP8, nor multiplied by DeepSeek's Hadamard
matrix, which leaves products unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from services.worker.forward.forward_context import get_forward_context
from services.worker.layers.linear import Linear
from services.worker.layers.norm import LayerNorm
from services.worker.ops import Ops, RopeRows


@dataclass(frozen=True, slots=True)
class IndexerProjections:
    """A layer's weights."""

    query: Linear
    """Projection from the attention's query latent; rotated columns come first in each head."""
    key: Linear
    """Projection from the hidden state, for all heads."""
    key_norm: LayerNorm
    """Applied before the rotation."""
    head_weights: Linear
    """Projection from the hidden state, in float32."""


class Indexer:
    """Projects, rotates, writes the step's index keys and selects positions."""

    def __init__(self, ops: Ops, projections: IndexerProjections, *, num_heads: int, num_selected: int) -> None:
        """A token attends to at most `num_selected` tokens."""
        self._ops = ops
        self._projections = projections
        self._num_heads = num_heads
        self._num_selected = num_selected

    def __call__(self, x: Tensor, query_source: Tensor, rope: RopeRows, cache: Tensor) -> Tensor | None:
        """The positions that each token attends to; see `Ops.select_context`. Writes `cache`.

        Args:
            x: [T, hidden].
            query_source: [T, query_latent_dim].
            cache: [num_blocks, block_size, head_dim].
        """
        ops, projections, plan = self._ops, self._projections, get_forward_context().plan
        query = projections.query(query_source).view(x.shape[0], self._num_heads, -1)
        key = projections.key_norm(projections.key(x))
        ops.rope(query, rope)
        ops.rope(key.unsqueeze(1), rope)
        ops.write_cache(key, cache, plan)
        # Both scales are positive, so they can be moved past the scores' ReLU into the weights.
        scale = (self._num_heads * query.shape[-1]) ** -0.5
        head_weights = projections.head_weights(x.float()) * scale
        return ops.select_context(query, head_weights, cache, plan, num_selected=self._num_selected)
