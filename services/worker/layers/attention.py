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
    """Grouped-query attention (arXiv:2305.13245) with its projections."""

    ops: Ops
    layer: int
    """Index in the cache."""
    _: KW_ONLY
    qkv: Linear
    """Query, key and value, fused in this order."""
    output: Callable[[Tensor], Tensor]
    """[T, num_heads * D] to [T, hidden]."""
    num_heads: int
    num_kv_heads: int
    """Divides `num_heads`."""
    params: AttentionParams
    query_norm: RmsNorm | None = None
    """Applied to each head before its rotation, as is `key_norm`."""
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
        """Query [T, H, D], key and value [T, K, D]: views of one tensor, query and key normalised and rotated."""
        first_value = self.num_heads + self.num_kv_heads
        heads = self.qkv(x).view(x.shape[0], first_value + self.num_kv_heads, -1)
        query, key, value = heads[:, : self.num_heads], heads[:, self.num_heads : first_value], heads[:, first_value:]
        if self.query_norm is not None:
            query.copy_(self.query_norm(query))
        if self.key_norm is not None:
            key.copy_(self.key_norm(key))
        self.ops.rope(heads[:, :first_value], rope)
        return query, key, value
