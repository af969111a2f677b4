"""Causal self-attention over the paged KV cache."""

from __future__ import annotations

from torch import Tensor

from services.worker.forward_context import get_forward_context
from services.worker.layers.linear import Linear
from services.worker.ops import Ops, RopeRows


class Attention:
    """Projects, rotates, writes this step's keys and values into the cache, attends, projects back.

    Query heads share key/value heads in equal groups (arXiv:2305.13245).
    """

    def __init__(self, ops: Ops, layer: int, *, qkv: Linear, output: Linear, num_heads: int, num_kv_heads: int) -> None:
        """Wire one layer.

        Args:
            ops: The backend.
            layer: Its index: which of the cache's tensors are its own.
            qkv: Query, key and value projections, fused in this order.
            output: The projection back.
            num_heads: Query heads.
            num_kv_heads: Key/value heads; divides `num_heads`.
        """
        self._ops = ops
        self._layer = layer
        self._qkv = qkv
        self._output = output
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads

    def __call__(self, x: Tensor, rope: RopeRows) -> Tensor:
        """[T, hidden] to a new [T, hidden]; writes the cache."""
        ops = self._ops
        context = get_forward_context()
        key_cache, value_cache = context.kv_cache.layers[self._layer]
        first_value = self._num_heads + self._num_kv_heads
        heads = self._qkv(x).view(x.shape[0], first_value + self._num_kv_heads, -1)
        ops.rope(heads[:, :first_value], rope)
        query, key, value = heads[:, : self._num_heads], heads[:, self._num_heads : first_value], heads[:, first_value:]
        ops.write_kv(key, value, key_cache, value_cache, context.plan)
        if context.attention.is_prefill:
            attended = ops.prefill_attention(query, key, value, key_cache, value_cache, context.plan)
        else:
            attended = ops.decode_attention(query, key_cache, value_cache, context.plan)
        return self._output(attended)
