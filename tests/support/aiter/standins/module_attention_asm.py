"""Stands in for AITER's assembly kernel of attention. Source: AITER, csrc/py_itfs_cu/asm_pa.cu, hsa/*/pa/pa_asm.csv."""

from __future__ import annotations

import torch
from torch import Tensor


def pa_fwd_asm(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    block_tables_stride0: int,
    max_qlen: int = 1,
    K_QScale: Tensor | None = None,
    V_QScale: Tensor | None = None,
    out_: Tensor | None = None,
    qo_indptr: Tensor | None = None,
    high_precision: int | None = 1,
    kernelName: str | None = None,
) -> Tensor:
    """pa_fwd_asm(Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor, block_tables_stride0: typing.SupportsInt, max_qlen: typing.SupportsInt = 1, K_QScale: torch.Tensor | None = None, V_QScale: torch.Tensor | None = None, out_: torch.Tensor | None = None, qo_indptr: torch.Tensor | None = None, high_precision: typing.SupportsInt | None = 1, kernelName: str | None = None) -> torch.Tensor"""
    _check(Q, K, V)
    if max_qlen != 1 or qo_indptr is not None or K_QScale is not None or V_QScale is not None:
        raise RuntimeError("there is a stand-in only for one query in each row, and for caches that are not quantised")
    for each in (block_tables, context_lens):
        if each.dtype != torch.int32:
            raise RuntimeError(f"block tables and lengths are int32, not {each.dtype}")
    # The stride is all that the kernel knows of the tables.
    if block_tables.stride() != (block_tables_stride0, 1) and len(block_tables) > 1:
        raise RuntimeError(f"the stride of the block tables is {block_tables.stride()}")
    num_rows, group = context_lens.shape[0], Q.shape[1] // K.shape[1]
    output = torch.empty_like(Q) if out_ is None else out_
    for row in range(num_rows):
        slots = torch.arange(int(context_lens[row]))
        blocks, places = block_tables[row].long()[slots // 16], slots % 16
        x = K.shape[4]
        keys = K[blocks, :, :, places].flatten(2).float().repeat_interleave(group, dim=1)
        values = V[blocks, :, places // x, :, places % x].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,khd->hk", Q[row].float(), keys) / Q.shape[2] ** 0.5
        output[row] = torch.einsum("hk,khd->hd", scores.softmax(dim=-1), values)
    return output


def _check(query: Tensor, keys: Tensor, values: Tensor) -> None:
    if query.dtype not in (torch.float16, torch.bfloat16) or keys.dtype != query.dtype or values.dtype != query.dtype:
        raise RuntimeError(f"get_heuristic_kernel: cannot get heuristic kernel! {query.dtype} with {keys.dtype}")
    if keys.dim() != 5 or keys.shape[3] != 16:
        raise RuntimeError(f"get_heuristic_kernel: cannot get heuristic kernel! cache {tuple(keys.shape)}")
    num_blocks, num_heads, _, block_size, x = keys.shape
    head_dim = query.shape[2]
    if x != 8 or keys.shape[2] * x != head_dim or values.shape != (num_blocks, num_heads, block_size // x, head_dim, x):
        raise RuntimeError(f"not in the kernel's layout: {tuple(keys.shape)} {tuple(values.shape)}")
    if not keys.is_contiguous() or not values.is_contiguous():
        raise RuntimeError("the cache is not contiguous")
    # Nothing in AITER checks these two; its tests say so of the first, and later versions of the second.
    if not query.is_contiguous():
        raise RuntimeError("this kernel needs a contiguous query")
    if head_dim != 128:
        raise RuntimeError(f"the kernel is assembled for heads of 128, not {head_dim}")
    if query.shape[1] // num_heads > 16:
        raise RuntimeError(f"get_heuristic_kernel: cannot get heuristic kernel! gqa {query.shape[1] // num_heads}")
