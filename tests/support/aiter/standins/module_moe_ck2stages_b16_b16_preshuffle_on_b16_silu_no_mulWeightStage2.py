"""Stands in for AITER's two stages of fused experts in bfloat16 with SiLU, whose second stage weights.

Source: AITER, csrc/ck_gemm_moe_2stages_codegen/gemm_moe_ck2stages.cu.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor


def ck_moe_stage1(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    sorted_token_ids: Tensor,
    sorted_expert_ids: Tensor,
    num_valid_ids: Tensor,
    out: Tensor,
    topk: int,
    kernelName: str | None = None,
    w1_scale: Tensor | None = None,
    a1_scale: Tensor | None = None,
    block_m: int | None = 32,
    sorted_weights: Tensor | None = None,
    quant_type: int = 0,
    activation: int = 0,
) -> None:
    """ck_moe_stage1(hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, sorted_token_ids: torch.Tensor, sorted_expert_ids: torch.Tensor, num_valid_ids: torch.Tensor, out: torch.Tensor, topk: typing.SupportsInt, kernelName: str | None = None, w1_scale: torch.Tensor | None = None, a1_scale: torch.Tensor | None = None, block_m: typing.SupportsInt | None = 32, sorted_weights: torch.Tensor | None = None, quant_type: typing.SupportsInt = 0, activation: typing.SupportsInt = 0) -> None"""
    _check(w1, hidden_states)
    for expert, rows, _ in _tiles(sorted_token_ids, sorted_expert_ids, num_valid_ids, block_m, None):
        tokens, choices = rows & 0xFFFFFF, rows >> 24
        gate, up = (hidden_states[tokens].float() @ _plain(w1[expert]).T).chunk(2, dim=-1)
        out[tokens, choices] = (F.silu(gate) * up).to(out.dtype)


def ck_moe_stage2(
    inter_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    sorted_token_ids: Tensor,
    sorted_expert_ids: Tensor,
    num_valid_ids: Tensor,
    out: Tensor,
    topk: int,
    kernelName: str | None = None,
    w2_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    block_m: int | None = 32,
    sorted_weights: Tensor | None = None,
    quant_type: int = 0,
    activation: int = 0,
) -> None:
    """ck_moe_stage2(inter_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, sorted_token_ids: torch.Tensor, sorted_expert_ids: torch.Tensor, num_valid_ids: torch.Tensor, out: torch.Tensor, topk: typing.SupportsInt, kernelName: str | None = None, w2_scale: torch.Tensor | None = None, a2_scale: torch.Tensor | None = None, block_m: typing.SupportsInt | None = 32, sorted_weights: torch.Tensor | None = None, quant_type: typing.SupportsInt = 0, activation: typing.SupportsInt = 0) -> None"""
    _check(w2, inter_states)
    for expert, rows, weights in _tiles(sorted_token_ids, sorted_expert_ids, num_valid_ids, block_m, sorted_weights):
        tokens, choices = rows & 0xFFFFFF, rows >> 24
        product = inter_states[tokens, choices].float() @ _plain(w2[expert]).T
        out.index_add_(0, tokens, (product * weights.unsqueeze(1)).to(out.dtype))


def _check(weight: Tensor, x: Tensor) -> None:
    if weight.dtype != x.dtype or x.dtype != torch.bfloat16:
        raise RuntimeError(f"this module has bfloat16, not {x.dtype} with {weight.dtype}")
    if weight.shape[-1] % 128 or weight.shape[-2] % 128:
        raise RuntimeError(f"no kernel's tiles divide {tuple(weight.shape)}")


def _tiles(
    sorted_token_ids: Tensor,
    sorted_expert_ids: Tensor,
    num_valid_ids: Tensor,
    block_m: int | None,
    sorted_weights: Tensor | None,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each tile's expert, and the rows in it that are not padding, with their weights."""
    assert block_m is not None
    weights = torch.ones(len(sorted_token_ids)) if sorted_weights is None else sorted_weights
    num_rows, num_tokens = num_valid_ids.tolist()
    for start in range(0, num_rows, block_m):
        tile = slice(start, start + block_m)
        rows = sorted_token_ids[tile].long()
        is_token = rows & 0xFFFFFF < num_tokens
        yield int(sorted_expert_ids[start // block_m]), rows[is_token], weights[tile][is_token]


def _plain(shuffled: Tensor) -> Tensor:
    """The matrix [N, K], of which the kernel loads tiles of 16 rows and 32 columns in the order of its lanes."""
    num_rows, num_columns = shuffled.shape
    tiles = shuffled.view(num_rows // 16, num_columns // 32, 4, 16, 8)
    return tiles.permute(0, 3, 1, 2, 4).reshape(num_rows, num_columns).float()
