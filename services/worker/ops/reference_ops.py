"""The `reference` backend: every row alone, in a fixed order. The yardstick, and exact.

Whatever a row's result depends on has the same shape in every batch, at every step, with every block size: one row
of activations, or one row's context copied into fresh memory. So kernels take the same path for it each time, and
decode, prefill, any batch, cached or not give equal bits. It reads all weights for every row: for tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.forward_context import AttentionMetadata, AttentionPlan
from services.worker.kv_cache import KvCache
from services.worker.ops.protocol import LinearKernel, RopeRows


class ReferencePlan(AttentionPlan):
    """The step's sequences, each with the slots of its whole context in order."""

    __slots__ = ("context_slots",)

    def __init__(self, metadata: AttentionMetadata, block_size: int) -> None:
        super().__init__(metadata)
        offsets = torch.arange(block_size)
        self.context_slots = [
            (table[:, None] * block_size + offsets).flatten()[:context_len]
            for table, context_len in zip(metadata.block_tables.long(), metadata.context_lens_host, strict=True)
        ]


class ReferenceOps:
    """See `Ops` for what each method computes."""

    name = "reference"
    is_exact = True

    def numerics(self) -> str:
        capability = torch.backends.cpu.get_cpu_capability()
        return f"reference torch-{torch.__version__} {capability} threads-{torch.get_num_threads()}"

    # -- Weights ------------------------------------------------------------------------------------------

    def prepare_linear(self, weight: Tensor, bias: Tensor | None) -> LinearKernel:
        return partial(_linear, weight=weight.clone(), bias=bias)

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        return F.embedding(token_ids, weight)

    # -- Elementwise and norm -----------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _row_by_row(x, lambda row: F.rms_norm(row, weight.shape, weight, eps))

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual.add_(x)
        return self.rms_norm(residual, weight, eps)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return _row_by_row(x, _silu_and_mul)

    # -- Rotary position embedding ------------------------------------------------------------------------

    def prepare_rope(self, cos: Tensor, sin: Tensor) -> RopeRows:
        return RopeRows(cos, sin, torch.empty(0, dtype=torch.int64))

    def select_rope(self, tables: RopeRows, positions: Tensor) -> RopeRows:
        return RopeRows(tables.cos[positions], tables.sin[positions], positions)

    def rope(self, query_key: Tensor, rows: RopeRows) -> None:
        for heads, cos, sin in zip(query_key, rows.cos, rows.sin, strict=True):
            first, second = heads.clone().chunk(2, dim=-1)
            heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))

    # -- Attention ----------------------------------------------------------------------------------------

    def plan_attention(self, metadata: AttentionMetadata, kv_cache: KvCache) -> ReferencePlan:
        return ReferencePlan(metadata, kv_cache.block_size)

    def write_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan) -> None:
        slots = plan.metadata.slot_mapping
        written = slots >= 0
        key_cache.flatten(0, 1)[slots[written]] = key[written]
        value_cache.flatten(0, 1)[slots[written]] = value[written]

    def prefill_attention(
        self,
        query: Tensor,
        key: Tensor,  # noqa: ARG002
        value: Tensor,  # noqa: ARG002
        key_cache: Tensor,
        value_cache: Tensor,
        plan: AttentionPlan,
    ) -> Tensor:
        # From the cache only: a cached prefix then takes the same path as one that was just computed.
        return self.decode_attention(query, key_cache, value_cache, plan)

    def decode_attention(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan) -> Tensor:
        assert isinstance(plan, ReferencePlan)
        output = query.new_zeros(query.shape[0], query.shape[1] * query.shape[2])
        row = 0
        for num_queries, slots in zip(plan.metadata.query_lens, plan.context_slots, strict=True):
            keys, values = key_cache.flatten(0, 1)[slots], value_cache.flatten(0, 1)[slots]
            for seen in range(len(slots) - num_queries + 1, len(slots) + 1):
                output[row] = _attend(query[row], keys[:seen], values[:seen])
                row += 1
        return output

    # -- Sampling -----------------------------------------------------------------------------------------

    def greedy_sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        largest, token_ids = logits.max(dim=-1)
        return token_ids, largest


def _row_by_row(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    # A copy of each row: its place in `x` decides on its alignment in memory, and that may decide on the kernel.
    return torch.stack([function(row.clone()) for row in x])


def _linear(x: Tensor, *, weight: Tensor, bias: Tensor | None) -> Tensor:
    output = _row_by_row(x, lambda row: torch.mv(weight, row))
    return output if bias is None else output.add_(bias)


def _silu_and_mul(row: Tensor) -> Tensor:
    gate, up = row.chunk(2)
    return F.silu(gate) * up


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One query [H, D] over its context [length, K, D], as [H * D]."""
    num_kv_heads, head_dim = keys.shape[1:]
    grouped = query.reshape(num_kv_heads, -1, head_dim) / math.sqrt(head_dim)
    scores = torch.bmm(grouped, keys.permute(1, 2, 0).contiguous())
    weights = torch.softmax(scores, dim=-1)
    return torch.bmm(weights, values.transpose(0, 1).contiguous()).flatten()
