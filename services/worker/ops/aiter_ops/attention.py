"""Attention over the paged cache by AITER's `unified_attention`: prompts, chunks, prefixes and decodes alike."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from aiter import reshape_and_cache_flash
from aiter.ops.triton.unified_attention import unified_attention
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata, AttentionPlan
from services.worker.forward.kv_cache import KvCache
from services.worker.ops import composed
from services.worker.ops.arguments import AttentionParams, HeadNorms, RopeRows
from services.worker.ops.protocol import Ops
from services.worker.ops.triton.attention.plan import TritonPlan
from shared.errors import InvalidRequestError, Violation

# AITER reads this many tokens at a time where a sequence has several new ones, and a block where it has one.
_TILE_TOKENS = 64
_LEAST_BLOCK_SIZE = 16
# A window that no context fills.
_ENDLESS = 1 << 30


class AiterPlan(TritonPlan):
    """A step's arguments that AITER wants in a form of its own, and those of our kernels for latent attention."""

    __slots__ = ("block_tables", "unit_scale")

    def __init__(self, metadata: AttentionMetadata, block_size: int) -> None:
        super().__init__(metadata)
        self.block_tables = _whole_tiles(metadata, block_size)
        # Multiplies what is read from a quantised cache; kernels take it for any cache.
        self.unit_scale = torch.ones(1, dtype=torch.float32, device=metadata.slot_mapping.device)


def check_block_size(block_size: int) -> None:
    """Check what the kernel's tiles are made of.

    Raises:
        InvalidRequestError: AITER has no kernel for it.
    """
    if block_size < _LEAST_BLOCK_SIZE or block_size & (block_size - 1):
        text = f"must be a power of two and at least {_LEAST_BLOCK_SIZE} with the backend aiter"
        raise InvalidRequestError.from_violations([Violation("block_size", "OUT_OF_RANGE", text)])


def plan_attention(metadata: AttentionMetadata, kv_cache: KvCache) -> AttentionPlan:
    """Make AITER's arguments, and the plan of our kernels."""
    return AiterPlan(metadata, kv_cache.block_size)


def write_kv(key: Tensor, value: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan) -> None:
    """Write both in one launch; each token's heads must be contiguous."""
    assert isinstance(plan, AiterPlan)
    slot_mapping, unit_scale = plan.metadata.slot_mapping, plan.unit_scale
    reshape_and_cache_flash(
        key, value, cache[0], cache[1], slot_mapping, kv_cache_dtype="auto", k_scale=unit_scale, v_scale=unit_scale
    )


def norm_rope_write(
    ops: Ops,
    qkv: Tensor,
    norms: HeadNorms | None,
    rows: RopeRows,
    *,
    num_heads: int,
    cache: tuple[Tensor, ...],
    plan: AttentionPlan,
) -> None:
    """Make keys and values finite, then call the three ops."""
    # A decode multiplies by 0 what another sequence has left after a context's end, and NaN would remain NaN. The
    # sequence itself still has it in its hidden state.
    qkv[:, num_heads:].nan_to_num_(0.0, 0.0, 0.0)
    composed.norm_rope_write(ops, qkv, norms, rows, num_heads=num_heads, cache=cache, plan=plan)


def decode_attention(query: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan, params: AttentionParams) -> Tensor:
    """Attend with one kernel, whatever the numbers of new tokens."""
    assert isinstance(plan, AiterPlan)
    return attend(query, cache, plan, params)


def attend(query: Tensor, cache: tuple[Tensor, ...], plan: AiterPlan, params: AttentionParams) -> Tensor:
    """Causal attention of a step's new tokens, see `Ops.prefill_attention`.

    Args:
        query: [T, H, D], contiguous in the last dimension. Not written.
        cache: Keys and values, each [num_blocks, block_size, K, D], of the dtype of `query`; they include the new
            tokens.

    Returns:
        [T, H * D], contiguous.
    """
    metadata = plan.metadata
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    unified_attention(
        query,
        cache[0],
        cache[1],
        output,
        cu_seqlens_q=metadata.cu_seqlens_q,
        max_seqlen_q=metadata.max_query_len,
        seqused_k=metadata.context_lens,
        max_seqlen_k=metadata.max_context_len,
        softmax_scale=params.scale,
        causal=True,
        window_size=_window_size(params, query.shape[2]),
        block_table=plan.block_tables,
        softcap=0.0,
        q_descale=None,
        k_descale=plan.unit_scale,
        v_descale=plan.unit_scale,
        sinks=params.sinks,
    )
    return output.flatten(1)


def _window_size(params: AttentionParams, head_dim: int) -> tuple[int, int]:
    """How many tokens before and after its own one a query sees; -1 means all."""
    if params.window is not None:
        return params.window - 1, 0
    # Without a window, few long contexts are split over programs; the kernel that then joins the parts cannot be
    # compiled for heads of another width than a power of two.
    return (-1, -1) if head_dim & (head_dim - 1) == 0 else (_ENDLESS - 1, 0)


def _whole_tiles(metadata: AttentionMetadata, block_size: int) -> Tensor:
    """The block tables, wide enough for the last tile of each row: AITER reads table entries without a mask."""
    tables = metadata.block_tables
    blocks_per_tile = _TILE_TOKENS // block_size
    if metadata.max_query_len == 1 or blocks_per_tile <= 1:
        return tables
    return F.pad(tables, (0, -tables.shape[1] % blocks_per_tile))
