"""Attention by AITER's assembly kernel for decodes, and over unpacked contexts for longer chunks.

The kernel reads keys and values in a layout of its own, here x = 8 elements of 16 bits, in the memory of the others:

    keys      [num_blocks, 16, K, D]    ->    [num_blocks, K, D / x, 16, x]
    values    [num_blocks, 16, K, D]    ->    [num_blocks, K, 16 / x, D, x]

It has one query per row; a draft is a row of its own, with the context up to itself. Longer chunks attend to copies of
their contexts' blocks in the other layout, by the kernel of the backend without assembly.

No op waits for the device. Lengths on the host are upper bounds.

Source: AITER, csrc/py_itfs_cu/asm_pa.cu, hsa/gfx942/pa/pa_asm.csv and hsa/gfx950/pa/pa_asm.csv.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from aiter import pa_fwd_asm, reshape_and_cache
from torch import Tensor

from services.worker.device import DeviceError
from services.worker.forward.forward_context import AttentionMetadata, AttentionPlan
from services.worker.ops.aiter_ops.attention import AiterPlan, attend
from services.worker.ops.arguments import AttentionParams
from services.worker.ops.triton.attention.plan import TritonPlan
from services.worker.ops.triton.attention.tile import PagedSequences
from shared.errors import InvalidRequestError, Violation

_BLOCK_SIZE = 16
_HEAD_DIM = 128
# Kernels have 8 or 16 rows, one for each query head that shares a key.
_MAX_GROUP = 16


class AsmPlan(TritonPlan):
    """A step's sequences by kernel: rows of one query each, then chunks."""

    __slots__ = ("contexts", "rows")

    def __init__(self, metadata: AttentionMetadata) -> None:
        super().__init__(metadata)
        self.rows = None if self.decodes is None else _Rows.of_tokens(self.decodes)
        self.contexts = None if self.chunks is None else _Contexts.of_chunks(metadata, self.chunks)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The first tokens of a step, each with the context up to itself."""

    block_tables: Tensor
    """[num_rows, max_blocks] int32, contiguous in the last dimension."""
    context_lens: Tensor
    """[num_rows] int32."""

    @classmethod
    def of_tokens(cls, sequences: PagedSequences) -> _Rows:
        """A row for each new token of the first sequences of a step."""
        tables, lens = sequences.block_tables, sequences.context_lens
        if sequences.max_query_len == 1:
            return cls(tables, lens)
        ends = sequences.cu_seqlens_q[1:]
        tokens = torch.arange(sequences.num_tokens, dtype=torch.int32, device=ends.device)
        seqs = torch.searchsorted(ends, tokens, right=True)
        return cls(tables[seqs], lens[seqs] - (ends[seqs] - 1 - tokens))


@dataclass(frozen=True, slots=True)
class _Contexts:
    """The last sequences of a step, whose contexts are unpacked in each layer."""

    blocks: Tensor
    """[num_blocks] int32: their blocks, sequence by sequence."""
    plan: AiterPlan
    """Its block tables count these blocks."""

    @classmethod
    def of_chunks(cls, metadata: AttentionMetadata, chunks: PagedSequences) -> _Contexts:
        """Plan for the last sequences of the step."""
        seqs = slice(len(metadata.query_lens) - chunks.num_seqs, None)
        counts_host = [-(-length // _BLOCK_SIZE) for length in metadata.context_lens_host[seqs]]
        num_blocks, device = sum(counts_host), chunks.block_tables.device
        counts = (chunks.context_lens + _BLOCK_SIZE - 1) // _BLOCK_SIZE
        ends = counts.cumsum(0, dtype=torch.int32)
        starts = ends - counts
        entries = torch.arange(num_blocks, dtype=torch.int32, device=device)
        # Where lengths on the host are larger, there are entries after the last context, which nothing attends to.
        owners = torch.searchsorted(ends, entries, right=True).clamp_(max=chunks.num_seqs - 1)
        places = (entries - starts[owners]).clamp_(max=chunks.block_tables.shape[1] - 1)
        columns = torch.arange(max(counts_host), dtype=torch.int32, device=device)
        unpacked = AttentionMetadata(
            is_prefill=True,
            slot_mapping=metadata.slot_mapping[-chunks.num_tokens :],
            block_tables=(starts[:, None] + columns).clamp_(max=num_blocks - 1),
            context_lens=chunks.context_lens,
            cu_seqlens_q=chunks.cu_seqlens_q - chunks.cu_seqlens_q[0],
            query_lens=metadata.query_lens[seqs],
            context_lens_host=metadata.context_lens_host[seqs],
            max_query_len=chunks.max_query_len,
            max_context_len=chunks.max_context_len,
        )
        return cls(chunks.block_tables[owners, places], AiterPlan(unpacked, _BLOCK_SIZE))


def check_attention(num_heads: int, num_kv_heads: int, head_dim: int, params: AttentionParams) -> None:
    """Check a layer's sizes against the kernel's; see `Ops.check_attention`.

    Raises:
        DeviceError: there is no kernel for them.
    """
    group = num_heads // num_kv_heads
    if head_dim != _HEAD_DIM:
        raise no_kernel(f"heads of {_HEAD_DIM} columns, not of {head_dim}")
    if group > _MAX_GROUP:
        raise no_kernel(f"at most {_MAX_GROUP} query heads per key head, not {group}")
    if params.window is not None:
        raise no_kernel(f"no sliding window, here of {params.window} tokens")
    if params.sinks is not None:
        raise no_kernel("no attention sinks")
    if not math.isclose(params.scale, head_dim**-0.5, rel_tol=1e-6):
        raise no_kernel(f"the scale {head_dim**-0.5:.4f}, not {params.scale:.4f}")


def no_kernel(what: str) -> DeviceError:
    """The error that names what the assembly kernels have instead of what a layer needs."""
    return DeviceError(f"--aiter-decode asm: AITER's assembly kernels have {what}; use --aiter-decode triton")


def check_asm_block_size(block_size: int) -> None:
    """Check what the kernel is assembled for.

    Raises:
        InvalidRequestError: it is another size.
    """
    if block_size != _BLOCK_SIZE:
        text = f"must be {_BLOCK_SIZE} with --aiter-decode asm"
        raise InvalidRequestError.from_violations([Violation("block_size", "OUT_OF_RANGE", text)])


def write_kv(key: Tensor, value: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan) -> None:
    """Write both in one launch, in the kernel's layout; each token's heads must be contiguous."""
    slot_mapping = plan.metadata.slot_mapping
    keys, values = _packed(cache)
    reshape_and_cache(key, value, keys, values, slot_mapping, kv_cache_dtype="auto", asm_layout=True)


def decode_attention(query: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan, params: AttentionParams) -> Tensor:
    """Attend with the assembly kernel, and from chunks with `attend`."""
    assert isinstance(plan, AsmPlan)
    attended = None
    num_rows = 0 if plan.rows is None else len(plan.rows.context_lens)
    if plan.contexts is not None:
        contexts = _unpack(cache, plan.contexts.blocks)
        attended = attend(query[num_rows:], contexts, plan.contexts.plan, params)
        if plan.rows is None:
            return attended
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if plan.rows is not None:
        (keys, values), tables = _packed(cache), plan.rows.block_tables
        # The kernel multiplies by 1 / sqrt(D) itself, and reads whole rows of heads after each other.
        pa_fwd_asm(
            query[:num_rows].contiguous(),
            keys,
            values,
            tables,
            plan.rows.context_lens,
            tables.stride(0),
            out_=output[:num_rows],
        )
    if attended is not None:
        output[num_rows:] = attended.view(-1, *query.shape[1:])
    return output.flatten(1)


def _packed(cache: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The keys and values of `cache` in the kernel's layout, in the same memory."""
    num_blocks, block_size, num_heads, head_dim = cache[0].shape
    x = 16 // cache[0].element_size()
    keys = cache[0].view(num_blocks, num_heads, head_dim // x, block_size, x)
    return keys, cache[1].view(num_blocks, num_heads, block_size // x, head_dim, x)


def _unpack(cache: tuple[Tensor, ...], blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of the keys and values of `blocks`, each [num_blocks, block_size, K, D]."""
    keys, values = (each.index_select(0, blocks) for each in _packed(cache))
    shape = (len(blocks), *cache[0].shape[1:])
    return keys.permute(0, 3, 1, 2, 4).reshape(shape), values.permute(0, 2, 4, 1, 3).reshape(shape)
