"""Latent attention of decodes by AITER's assembly kernel; our Triton kernels have the rest of a step.

The kernel sees the cache as pages of one token. Its list of pages is made once for each step, by a kernel of ours.
AITER splits contexts, and compiles the kernel that joins the splits anew for each number of rows.

Source: AITER, aiter/mla.py and csrc/py_itfs_cu/asm_mla.cu.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from aiter.mla import get_meta_param, mla_decode_fwd
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata, AttentionPlan
from services.worker.forward.kv_cache import KvCache
from services.worker.ops.aiter_ops.asm_attention import AsmPlan, no_kernel
from services.worker.ops.triton.attention import plan as triton_attention
from services.worker.ops.triton.attention.context_slots import write_slots
from services.worker.ops.triton.attention.plan import TritonPlan, select_sequences
from services.worker.ops.triton.attention.tile import PagedSequences
from services.worker.ops.triton.state import TritonState

_NUM_HEADS = (16, 128)
_LATENT_DIM, _ROTATED_DIM = 512, 64


class AsmLatentPlan(TritonPlan):
    """A step's sequences by kernel: first those with one new token, then those of `TritonPlan`."""

    __slots__ = ("rows",)

    def __init__(self, metadata: AttentionMetadata, kv_cache: KvCache) -> None:
        super().__init__(metadata)
        num_decodes = 0 if self.decodes is None else self.decodes.num_seqs
        lens = metadata.query_lens[:num_decodes]
        num_rows = next((seq for seq, length in enumerate(lens) if length > 1), num_decodes)
        single = select_sequences(metadata, slice(0, num_rows))
        self.decodes = select_sequences(metadata, slice(num_rows, num_decodes))
        self.rows = None
        if single is not None:
            # No context is longer than the cache.
            longest = kv_cache.num_blocks * kv_cache.block_size
            num_slots = sum(min(length, longest) for length in metadata.context_lens_host[:num_rows])
            self.rows = LatentRows.of_decodes(single, num_slots, kv_cache.block_size)


@dataclass(frozen=True, slots=True)
class LatentRows:
    """The first tokens of a step, one of each sequence, as AITER wants them. All tensors are int32."""

    query_starts: Tensor
    """[num_rows + 1]: 0, 1, 2, ..."""
    context_starts: Tensor
    """[num_rows + 1]: where each row's slots begin."""
    slots: Tensor
    """[at least all rows' contexts]."""
    last_page_lens: Tensor
    """[num_rows]: 1."""

    @classmethod
    def of_decodes(cls, sequences: PagedSequences, num_slots: int, block_size: int) -> LatentRows:
        """Rows of sequences with one new token.

        Args:
            num_slots: At least the sum of the contexts' lengths.
        """
        lens = sequences.context_lens
        starts = torch.zeros(len(lens) + 1, dtype=torch.int32, device=lens.device)
        torch.cumsum(lens, 0, dtype=torch.int32, out=starts[1:])
        # What follows the contexts are slots too: AITER does not say that it never reads ahead.
        slots = torch.zeros(num_slots, dtype=torch.int32, device=lens.device)
        write_slots(sequences, starts, slots, block_size=block_size)
        return cls(sequences.cu_seqlens_q, starts, slots, torch.ones_like(lens))


class AsmState(TritonState):
    """What captured graphs need besides."""

    def __init__(self) -> None:
        super().__init__()
        self.captured_splits: dict[tuple[int, int], Tensor] = {}
        """What captured graphs read, by the numbers of rows and slots of their step."""


def check_latent_attention(
    num_heads: int, latent_dim: int, rotated_dim: int, dtype: torch.dtype, *, is_sparse: bool
) -> None:
    """Check a layer's sizes against the kernel's; see `Ops.check_latent_attention`.

    Raises:
        DeviceError: there is no kernel for them.
    """
    if num_heads not in _NUM_HEADS:
        raise no_kernel(f"{' or '.join(map(str, _NUM_HEADS))} heads of latent attention on a rank, not {num_heads}")
    if (latent_dim, rotated_dim) != (_LATENT_DIM, _ROTATED_DIM):
        sizes = f"{_LATENT_DIM} and {_ROTATED_DIM} columns, not of {latent_dim} and {rotated_dim}"
        raise no_kernel(f"latents and rotated keys of {sizes}")
    if dtype != torch.bfloat16:
        raise no_kernel(f"bfloat16 for latent attention, not {str(dtype).removeprefix('torch.')}")
    if is_sparse:
        raise no_kernel("no sparse attention")


def plan_attention(metadata: AttentionMetadata, kv_cache: KvCache) -> AttentionPlan:
    """Plan for the kernel that the cache is for."""
    has_latents = len(kv_cache.spec.first_tensor.shape) == 1
    return AsmLatentPlan(metadata, kv_cache) if has_latents else AsmPlan(metadata)


def mla_attention(
    state: AsmState,
    query: Tensor,
    latent_cache: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    value_dim: int,
    selected: Tensor | None = None,
) -> Tensor:
    """Attend with our kernels, then with AITER's from the first tokens."""
    assert isinstance(plan, AsmLatentPlan)
    assert selected is None
    output = triton_attention.mla_attention(query, latent_cache, plan, scale=scale, value_dim=value_dim)
    if plan.rows is not None:
        if query.is_cuda and torch.cuda.is_current_stream_capturing():
            size = len(plan.rows.last_page_lens), len(plan.rows.slots)
            state.captured_splits[size] = splits_in_use(plan.rows, query.shape[1], query.dtype)
        decode_latents(query, latent_cache, output, plan.rows, scale)
    return output


def decode_latents(query: Tensor, latent_cache: Tensor, output: Tensor, rows: LatentRows, scale: float) -> None:
    """Attention of the step's first tokens; see `Ops.mla_attention`.

    Args:
        query: [T, H, 576].
        latent_cache: [num_blocks, block_size, 576], contiguous.
        output: [T, H, 512], contiguous; the rows' are written.
    """
    num_rows = len(rows.last_page_lens)
    mla_decode_fwd(
        query[:num_rows].contiguous(),
        latent_cache.view(-1, 1, 1, latent_cache.shape[2]),
        output[:num_rows],
        rows.query_starts,
        rows.context_starts,
        rows.slots,
        rows.last_page_lens,
        1,
        sm_scale=scale,
    )


def splits_in_use(rows: LatentRows, num_heads: int, dtype: torch.dtype) -> Tensor:
    """The tensor that `decode_latents` will read for these rows besides its arguments.

    AITER makes it, and keeps only the one of its last call: whoever captures that call must keep it too.
    """
    kept: Tensor = get_meta_param(None, len(rows.last_page_lens), len(rows.slots), num_heads, 1, dtype)[-1]
    return kept
