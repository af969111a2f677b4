"""Lists the cache slots of contexts, for kernels that see pages of one token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.triton.attention.tile import PagedSequences

_TILE = 1024
# A program for each tile of the longest context would leave most of them idle in a captured step.
_MAX_PROGRAMS = 16


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["starts", "block_tables"])
def _write_slots_kernel(slots, starts, block_tables, table_stride, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    seq = tl.program_id(0)
    start = tl.load(starts + seq)
    length = tl.load(starts + seq + 1) - start
    table = block_tables + table_stride.to(tl.int64) * seq
    for first in range(tl.program_id(1) * TILE, length, tl.num_programs(1) * TILE):
        places = first + tl.arange(0, TILE)
        is_used = places < length
        blocks = tl.load(table + places // BLOCK_SIZE, mask=is_used, other=0)
        tl.store(slots + start.to(tl.int64) + places, blocks * BLOCK_SIZE + places % BLOCK_SIZE, mask=is_used)


def write_slots(sequences: PagedSequences, starts: Tensor, slots: Tensor, *, block_size: int) -> None:
    """Write the slots of each sequence's context, one after the other.

    Args:
        starts: [num_seqs + 1] int32: where each context's slots begin, and where the last one's end.
        slots: [at least all contexts] int32; written in place up to the last start.
    """
    num_programs = min(triton.cdiv(sequences.max_context_len, _TILE), _MAX_PROGRAMS)
    _write_slots_kernel[(sequences.num_seqs, num_programs)](
        slots,
        starts,
        sequences.block_tables,
        sequences.block_tables.stride(0),
        BLOCK_SIZE=block_size,
        TILE=_TILE,
        num_warps=4,
    )
