"""Stands in for AITER's sorting of rows by expert. Source: AITER, csrc/py_itfs_ck/moe_sorting_kernels.cu."""

from __future__ import annotations

import torch
from torch import Tensor


def moe_sorting_fwd(
    topk_ids: Tensor,
    topk_weights: Tensor,
    sorted_token_ids: Tensor,
    sorted_weights: Tensor,
    sorted_expert_ids: Tensor,
    num_valid_ids: Tensor,
    moe_buf: Tensor,
    num_experts: int,
    unit_size: int,
    local_expert_mask: Tensor | None = None,
    num_local_tokens: Tensor | None = None,
    dispatch_policy: int = 0,
) -> None:
    """moe_sorting_fwd(topk_ids: torch.Tensor, topk_weights: torch.Tensor, sorted_token_ids: torch.Tensor, sorted_weights: torch.Tensor, sorted_expert_ids: torch.Tensor, num_valid_ids: torch.Tensor, moe_buf: torch.Tensor, num_experts: typing.SupportsInt, unit_size: typing.SupportsInt, local_expert_mask: torch.Tensor | None = None, num_local_tokens: torch.Tensor | None = None, dispatch_policy: typing.SupportsInt = 0) -> None"""
    if topk_ids.dtype != torch.int32 or topk_weights.dtype != torch.float32:
        raise RuntimeError(f"ids are int32 and weights float32, not {topk_ids.dtype} and {topk_weights.dtype}")
    if local_expert_mask is not None and local_expert_mask.dtype != torch.int32:
        raise RuntimeError(f"the mask is int32, not {local_expert_mask.dtype}")
    are_here = torch.ones(num_experts, dtype=torch.int32) if local_expert_mask is None else local_expert_mask
    num_tokens, num_chosen = topk_ids.shape
    # A row is a token and, in the upper byte, the place of the expert among the token's.
    sorted_token_ids.fill_(num_tokens | num_chosen << 24)
    sorted_weights.zero_()
    place = 0
    # Experts that are here are numbered among themselves.
    for number, expert in enumerate(are_here.nonzero().flatten().tolist()):
        tokens, choices = (topk_ids == expert).nonzero(as_tuple=True)
        rows = slice(place, place + len(tokens))
        sorted_token_ids[rows] = (tokens | choices << 24).to(torch.int32)
        sorted_weights[rows] = topk_weights[tokens, choices]
        num_tiles = -(-len(tokens) // unit_size)
        sorted_expert_ids[place // unit_size : place // unit_size + num_tiles] = number
        place += num_tiles * unit_size
    num_valid_ids.copy_(torch.tensor([place, num_tokens]))
    moe_buf.zero_()
