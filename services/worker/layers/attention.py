"""Causal self-attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from services.worker.forward.forward_context import get_forward_context
from services.worker.layers.linear import Linear
from services.worker.layers.norm import RmsNorm
from services.worker.ops import AttentionParams, Ops, RopeRows


@dataclass(frozen=True, slots=True)
class Attention:
    """Projects, norms heads where a family does, rotates, writes the cache, attends, projects back.

    Query heads share key/value heads in equal groups (arXiv:2305.13245).
    """

    ops: Ops
    # Its index: which of the cache's tensors are its own.
    layer: int
    _: KW_ONLY
    # Query, key and value projections, fused in this order.
    qkv: Linear
    # The projection back: [T, num_heads * D] to [T, hidden].
    output: Callable[[Tensor], Tensor]
    num_heads: int
    # Divides `num_heads`.
    num_kv_heads: int
    params: AttentionParams
    # Of each head before its rotation; None: there is none.
    query_norm: RmsNorm | None = None
    key_norm: RmsNorm | None = None

    def __call__(self, x: Tensor, rope: RopeRows) -> Tensor:
        """[T, hidden] to a new [T, hidden]; writes the cache."""
        ops = self.ops
        context = get_forward_context()
        cache = context.kv_cache.layers[self.layer]
        query, key, value = self._project(x, rope)
        ops.write_kv(key, value, cache, context.plan)
        if context.attention.is_prefill:
            attended = ops.prefill_attention(query, key, value, cache, context.plan, self.params)
        else:
            attended = ops.decode_attention(query, cache, context.plan, self.params)
        return self.output(attended)

    def _project(self, x: Tensor, rope: RopeRows) -> tuple[Tensor, Tensor, Tensor]:
        """Heads of queries [T, H, D], keys and values [T, K, D], normed and rotated: views of one tensor."""
        first_value = self.num_heads + self.num_kv_heads
        heads = self.qkv(x).view(x.shape[0], first_value + self.num_kv_heads, -1)
        query, key, value = heads[:, : self.num_heads], heads[:, self.num_heads : first_value], heads[:, first_value:]
        if self.query_norm is not None:
            query.copy_(self.query_norm(query))
        if self.key_norm is not None:
            key.copy_(self.key_norm(key))
        self.ops.rope(heads[:, :first_value], rope)
        return query, key, value
