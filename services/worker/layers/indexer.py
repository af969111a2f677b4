"""DeepSeek-V3.2's lightning indexer: a small attention that chooses which tokens the large one attends to.

Source: DeepSeek-V3.2-Exp, "Boosting Long-Context Efficiency with DeepSeek Sparse Attention", section 2.1; transformers'
`DeepseekV32Indexer`. DeepSeek's own code turns queries and keys by a Hadamard matrix and rounds them to FP8: the
former leaves products as they are, the latter is left out, as transformers does.
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
    """The weights of a layer's indexer."""

    # From the attention's query latent to the heads; the rotated columns come first in each.
    query: Linear
    # From the hidden state to the key, which all heads share, and its norm before it is rotated.
    key: Linear
    key_norm: LayerNorm
    # From the hidden state to the weights of the heads, in float32.
    head_weights: Linear


class Indexer:
    """Projects, rotates, writes this step's index keys into the cache, chooses."""

    def __init__(self, ops: Ops, projections: IndexerProjections, *, num_heads: int, num_selected: int) -> None:
        """Wire one layer's.

        Args:
            ops: The backend.
            projections: Its weights.
            num_heads: Index heads.
            num_selected: Tokens that are chosen, at most.
        """
        self._ops = ops
        self._projections = projections
        self._num_heads = num_heads
        self._num_selected = num_selected

    def __call__(self, x: Tensor, query_source: Tensor, rope: RopeRows, cache: Tensor) -> Tensor | None:
        """The positions that each token attends to, as `Ops.select_context` gives them; writes `cache`.

        Args:
            x: [T, hidden].
            query_source: [T, query_latent_dim].
            rope: The step's rotations.
            cache: The layer's index keys.
        """
        ops, projections, plan = self._ops, self._projections, get_forward_context().plan
        query = projections.query(query_source).view(x.shape[0], self._num_heads, -1)
        key = projections.key_norm(projections.key(x))
        ops.rope(query, rope)
        ops.rope(key.unsqueeze(1), rope)
        ops.write_cache(key, cache, plan)
        # Both scales are positive: behind the scores' rectifier they may as well be in the weights.
        scale = (self._num_heads * query.shape[-1]) ** -0.5
        head_weights = projections.head_weights(x.float()) * scale
        return ops.select_context(query, head_weights, cache, plan, num_selected=self._num_selected)
