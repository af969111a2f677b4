"""Launches of latent attention with the shapes of DeepSeek-V3 and V3.2, for checks that only compile its kernels."""

from __future__ import annotations

import torch

from services.worker.forward.forward_context import AttentionMetadata
from services.worker.ops.triton.attention.exact_plan import ExactPlan
from services.worker.ops.triton.attention.plan import TritonPlan
from services.worker.ops.triton.backend import TritonOps
from services.worker.ops.triton.exact_backend import TritonExactOps
from tests.support.kernels.sampling_launches import on_meta

# All heads of DeepSeek-V3, as data-parallel ranks have them, and those of one of eight tensor-parallel ranks.
NUM_HEADS = (128, 16)
LATENT_DIM, VALUE_DIM = 576, 512
NUM_INDEX_HEADS, INDEX_DIM, NUM_SELECTED = 64, 128, 2048
# More than 2 GiB of latents, which changes how AMD's compiler addresses them.
NUM_SLOTS = 2**22
CHUNKS = (1, 1, 3, 2048, 700)


def launch_latent_attention() -> None:
    """Decodes of one token and more, of so few sequences that contexts are split and of many, and chunks."""
    for num_heads in NUM_HEADS:
        for query_len in (1, 2, 9):
            for num_seqs in (8, 600):
                launch_step((query_len,) * num_seqs, num_heads)
        launch_step(CHUNKS, num_heads)
        launch_step(CHUNKS, num_heads, block_size=64)
    launch_step(CHUNKS, 16, dtype=torch.float32)


def launch_odd_latent_steps() -> None:
    """Steps of sizes and alignments that the others do not have."""
    for num_heads in NUM_HEADS:
        launch_step((1,) * 777, num_heads, max_context_len=4001, offset=1)
        launch_step((1, 5, 259), num_heads, max_context_len=5007, offset=3)


def launch_step(
    query_lens: tuple[int, ...],
    num_heads: int,
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    max_context_len: int = 32768,
    offset: int = 0,
    is_exact: bool = False,
) -> None:
    """Selection, and attention to all tokens and to those selected; the step begins at `offset` in longer columns."""
    num_tokens, num_seqs = sum(query_lens), len(query_lens)
    metadata = AttentionMetadata(
        is_prefill=max(query_lens) > 9,
        slot_mapping=on_meta(torch.int64, num_tokens),
        block_tables=on_meta(torch.int32, offset + num_seqs, max_context_len // block_size + offset)[offset:],
        context_lens=on_meta(torch.int32, offset + num_seqs)[offset:],
        cu_seqlens_q=on_meta(torch.int32, offset + num_seqs + 1)[offset:],
        query_lens=query_lens,
        context_lens_host=(max_context_len,) * num_seqs,
        max_query_len=max(query_lens),
        max_context_len=max_context_len,
    )
    ops, plan = (TritonExactOps(), ExactPlan(metadata)) if is_exact else (TritonOps(), TritonPlan(metadata))
    num_blocks = NUM_SLOTS // block_size
    selected = ops.select_context(
        on_meta(dtype, num_tokens, NUM_INDEX_HEADS, INDEX_DIM),
        on_meta(torch.float32, num_tokens, NUM_INDEX_HEADS),
        on_meta(dtype, num_blocks, block_size, INDEX_DIM),
        plan,
        num_selected=NUM_SELECTED,
    )
    assert selected is not None
    query, latents = (
        on_meta(dtype, num_tokens, num_heads, LATENT_DIM),
        on_meta(dtype, num_blocks, block_size, LATENT_DIM),
    )
    for seen in (None, selected):
        output = ops.mla_attention(query, latents, plan, scale=1.0, value_dim=VALUE_DIM, selected=seen)
        assert output.shape == (num_tokens, num_heads, VALUE_DIM)
