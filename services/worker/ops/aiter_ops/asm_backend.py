"""The `aiter` backend with AITER's assembly kernels for decodes, for the models that these fit."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata, AttentionPlan
from services.worker.forward.kv_cache import KvCache
from services.worker.ops.aiter_ops.asm_attention import (
    AsmPlan,
    attend_packed,
    check_asm_block_size,
    check_attention,
    write_packed,
)
from services.worker.ops.aiter_ops.asm_latent import (
    AsmLatentPlan,
    check_latent_attention,
    decode_latents,
    splits_in_use,
)
from services.worker.ops.aiter_ops.backend import AiterOps
from services.worker.ops.arguments import AttentionParams


class AiterAsmOps(AiterOps):
    """See `Ops` for what each method computes."""

    def __init__(self) -> None:
        super().__init__()
        # What captured graphs read, by the numbers of rows and slots of their step.
        self._captured_splits: dict[tuple[int, int], Tensor] = {}

    def numerics(self) -> str:
        return f"{super().numerics()} asm"

    def check_block_size(self, block_size: int) -> None:
        check_asm_block_size(block_size)

    def check_attention(self, num_heads: int, num_kv_heads: int, head_dim: int, params: AttentionParams) -> None:
        check_attention(num_heads, num_kv_heads, head_dim, params)

    def check_latent_attention(
        self, num_heads: int, latent_dim: int, rotated_dim: int, dtype: torch.dtype, *, is_sparse: bool
    ) -> None:
        check_latent_attention(num_heads, latent_dim, rotated_dim, dtype, is_sparse=is_sparse)

    def plan_attention(self, metadata: AttentionMetadata, kv_cache: KvCache) -> AttentionPlan:
        has_latents = len(kv_cache.spec.layers[0][0].shape) == 1
        return AsmLatentPlan(metadata, kv_cache) if has_latents else AsmPlan(metadata)

    def write_kv(self, key: Tensor, value: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan) -> None:
        write_packed(key, value, cache, plan.metadata.slot_mapping)

    def decode_attention(
        self, query: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan, params: AttentionParams
    ) -> Tensor:
        assert isinstance(plan, AsmPlan)
        return attend_packed(query, cache, plan, params)

    def mla_attention(
        self,
        query: Tensor,
        latent_cache: Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        value_dim: int,
        selected: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(plan, AsmLatentPlan)
        assert selected is None
        output = super().mla_attention(query, latent_cache, plan, scale=scale, value_dim=value_dim)
        if plan.rows is not None:
            if query.is_cuda and torch.cuda.is_current_stream_capturing():
                size = len(plan.rows.last_page_lens), len(plan.rows.slots)
                self._captured_splits[size] = splits_in_use(plan.rows, query.shape[1], query.dtype)
            decode_latents(query, latent_cache, output, plan.rows, scale)
        return output
