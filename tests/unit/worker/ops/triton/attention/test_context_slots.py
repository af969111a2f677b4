"""The list of slots that contexts have."""

from __future__ import annotations

import pytest
import torch

from services.worker.ops.triton.attention.context_slots import write_slots
from services.worker.ops.triton.attention.tile import PagedSequences


# Shorter than a block, whole blocks, and more tiles than a sequence has programs.
@pytest.mark.parametrize("lengths", [[1], [16, 5, 32], [20000, 3, 1025]])
@pytest.mark.parametrize("block_size", [1, 16])
def test_slots_of_contexts_follow_each_other(lengths: list[int], block_size: int) -> None:
    lens = torch.tensor(lengths, dtype=torch.int32)
    num_blocks = -(-max(lengths) // block_size)
    shuffled = torch.randperm(len(lengths) * num_blocks, generator=torch.Generator().manual_seed(1))
    tables = shuffled.view(len(lengths), -1).int()
    starts = torch.tensor([0, *lens.cumsum(0).tolist()], dtype=torch.int32)
    slots = torch.full((sum(lengths) + 3,), -7, dtype=torch.int32)
    sequences = PagedSequences(tables, lens, starts, len(lengths), 1, max(lengths))
    write_slots(sequences, starts, slots, block_size=block_size)
    places = [torch.arange(length) for length in lengths]
    expected = [
        row[each // block_size] * block_size + each % block_size for row, each in zip(tables, places, strict=True)
    ]
    assert slots.tolist() == [*torch.cat(expected).tolist(), -7, -7, -7]
