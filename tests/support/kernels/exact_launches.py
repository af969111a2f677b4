"""Launches of the exact backend with the shapes of published models, for checks that only compile its kernels."""

from __future__ import annotations

import torch

from services.worker.ops import ExpertWeights
from services.worker.ops.triton.exact_backend import TritonExactOps
from tests.support.kernels.latent_launches import NUM_HEADS, VALUE_DIM, launch_step
from tests.support.kernels.product_launches import BF16, HIDDEN, INNER, int4, on_meta

# An expert of Qwen3-30B-A3B, and what a head's query of DeepSeek-V3 is multiplied with.
EXPERT_HIDDEN, EXPERT_INNER, NUM_EXPERTS, NUM_CHOSEN = 2048, 768, 128, 8
PLAIN_DIM, QUERY_DIM = 128, 192


def launch_exact_products(num_tokens: int, *, offset: int = 0) -> None:
    """A step's products and experts; the columns of these begin at `offset` in longer ones."""
    ops = TritonExactOps()
    for weight in (on_meta(BF16, 2 * INNER, HIDDEN), int4(2 * INNER, HIDDEN, group_size=128)):
        ops.prepare_linear(weight, None, BF16)(on_meta(BF16, num_tokens, HIDDEN))
    num_heads = NUM_HEADS[-1]
    absorbed = ops.prepare_per_head_linear(on_meta(BF16, num_heads, VALUE_DIM, PLAIN_DIM))
    absorbed(on_meta(BF16, num_tokens, num_heads, QUERY_DIM)[..., :PLAIN_DIM])
    expert = ExpertWeights(on_meta(BF16, 2 * EXPERT_INNER, EXPERT_HIDDEN), on_meta(BF16, EXPERT_HIDDEN, EXPERT_INNER))
    expert_ids = on_meta(torch.int32, num_tokens + offset, NUM_CHOSEN)[offset:]
    expert_weights = on_meta(torch.float32, num_tokens + offset, NUM_CHOSEN)[offset:]
    kernel = ops.prepare_experts([expert] * NUM_EXPERTS, None, BF16)
    kernel(on_meta(BF16, num_tokens, EXPERT_HIDDEN), expert_ids, expert_weights)


def launch_exact_latents(query_lens: tuple[int, ...], *, offset: int = 0) -> None:
    """A step's latent attention, to all tokens and to those selected."""
    launch_step(query_lens, NUM_HEADS[-1], offset=offset, is_exact=True)
