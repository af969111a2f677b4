"""Stands in for AITER's assembly kernel of latent attention. Source: AITER, csrc/py_itfs_cu/asm_mla.cu."""

from __future__ import annotations

import torch
from torch import Tensor


def mla_decode_stage1_asm_fwd(
    Q: Tensor,
    KV: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_page_indices: Tensor,
    kv_last_page_lens: Tensor,
    num_kv_splits_indptr: Tensor | None,
    work_metadata: Tensor | None,
    work_indptr: Tensor | None,
    work_info_set: Tensor | None,
    max_seqlen_q: int,
    softmax_scale: float,
    splitData: Tensor,
    splitLse: Tensor,
    output: Tensor,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
) -> None:
    """mla_decode_stage1_asm_fwd(Q: torch.Tensor, KV: torch.Tensor, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_page_indices: torch.Tensor, kv_last_page_lens: torch.Tensor, num_kv_splits_indptr: torch.Tensor | None, work_meta_data: torch.Tensor | None, work_indptr: torch.Tensor | None, work_info_set: torch.Tensor | None, max_seqlen_q: typing.SupportsInt, softmax_scale: typing.SupportsFloat, splitData: torch.Tensor, splitLse: torch.Tensor, output: torch.Tensor, q_scale: torch.Tensor | None = None, kv_scale: torch.Tensor | None = None) -> None"""
    if max_seqlen_q != 1 or num_kv_splits_indptr is None:
        raise RuntimeError("there is a stand-in only for one query in each row, without persistent metadata")
    _check(Q, KV)
    for each in (qo_indptr, kv_indptr, kv_page_indices, kv_last_page_lens, num_kv_splits_indptr):
        if each.dtype != torch.int32 or not each.is_contiguous():
            raise RuntimeError(f"indices are int32 and contiguous, not {each.dtype} {each.stride()}")
    if (kv_last_page_lens != 1).any():
        raise RuntimeError("a page of one token that is not full")
    num_splits, value_dim = splitData.shape[1], splitData.shape[3]
    if Q.shape[1] == 128 and num_splits == 1:
        raise RuntimeError("there is no stand-in for the kernel that writes whole rows")
    for row in range(len(Q)):
        pages = kv_page_indices[int(kv_indptr[row]) : int(kv_indptr[row + 1])].long()
        keys = KV[pages, 0, 0].float()
        scores = Q[row].float() @ keys.T * softmax_scale
        # AITER joins at most as many splits as a context has tiles.
        tile = 64 if Q.shape[1] == 16 else 16
        num_used = min(num_splits, -(-len(pages) // tile))
        for split in range(num_used):
            part = slice(split * len(pages) // num_used, (split + 1) * len(pages) // num_used)
            attended = scores[:, part].softmax(dim=-1) @ keys[part, :value_dim]
            splitLse[row, split, :, 0] = scores[:, part].logsumexp(dim=-1)
            splitData[row, split] = attended


def _check(query: Tensor, cache: Tensor) -> None:
    if not query.is_contiguous():
        raise RuntimeError("mla_decode_stage1_asm_fwd:only support Q.is_contiguous() for now")
    if cache.shape[2] != 1:
        raise RuntimeError("mla_decode_stage1_asm_fwd:only support num_kv_heads==1 for now")
    if query.shape[2] != cache.shape[3]:
        raise RuntimeError("mla_decode_stage1_asm_fwd:only support head_size == KV.size(3) for now")
    if query.dtype != torch.bfloat16 or cache.dtype != torch.bfloat16 or query.shape[1] not in (16, 128):
        raise RuntimeError("mla_decode_stage1_asm_fwd: unsupport current data type or shape")
    # Nothing in AITER checks these two.
    if cache.shape[1] != 1:
        raise RuntimeError(f"pages are of one token, not {cache.shape[1]}")
    if query.shape[2] != 576:
        raise RuntimeError(f"the kernel is assembled for latents of 512 and 64 columns, not {query.shape[2]}")
