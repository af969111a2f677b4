"""Causal self-attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from services.worker.forward.forward_context import get_forward_context
from services.worker.layers.linear import Linear
from services.worker.ops import AttentionParams, HeadNorms, Ops, RopeRows


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
    norms: HeadNorms | None = None
    """None means that heads are not normalised."""
    kv_scales: tuple[Tensor, ...] = ()
    """Scales of keys and of values, [1] float32 each, where the cache holds them in float8_e4m3fn; none otherwise."""
    query_scales: Tensor | None = None
    """[context_length], the model's dtype: what queries are multiplied by, by position; None means by nothing."""
    gate: Linear | None = None
    """[T, hidden] to [T, num_heads * D], whose sigmoid multiplies the attended values; None means that nothing does."""

    def __call__(self, x: Tensor, rope: RopeRows) -> Tensor:
        """[T, hidden] to a new [T, hidden]; writes the cache."""
        ops, context = self.ops, get_forward_context()
        cache = context.kv_cache.layers[self.layer] + self.kv_scales
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv(x).view(x.shape[0], num_heads + 2 * num_kv_heads, -1)
        ops.norm_rope_write(qkv, self.norms, rope, num_heads=num_heads, cache=cache, plan=context.plan)
        if self.query_scales is not None:
            qkv.narrow(1, 0, num_heads).mul_(self.query_scales.index_select(0, rope.positions)[:, None, None])
        if context.plan.metadata.is_prefill:
            query, key, value = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
            attended = ops.prefill_attention(query, key, value, cache, context.plan, self.params)
        else:
            # A view costs microseconds, so a decode makes only the one that it needs.
            attended = ops.decode_attention(qkv.narrow(1, 0, num_heads), cache, context.plan, self.params)
        if self.gate is not None:
            attended = ops.mul_sigmoid(attended, self.gate(x))
        return self.output(attended)
