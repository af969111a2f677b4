"""Launches that find the places of runs of tokens, on the meta device."""

from __future__ import annotations

import torch

from services.worker.ops.arguments import RunRows
from services.worker.ops.triton.run_places import place_runs

_BLOCK_SIZE = 16


def launch_run_places(num_rows: int, num_tokens: int, *, num_passes: int, num_blocks: int, offset: int = 0) -> None:
    """One launch; its columns begin at `offset` in longer ones."""

    def column(length: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(offset + length, dtype=dtype, device="meta")[offset:]

    runs = RunRows(
        firsts=column(num_rows),
        starts=column(num_rows + 1, torch.int32),
        stored_from=column(num_rows),
        ends=column(num_rows),
        block_tables=column(num_rows * num_blocks, torch.int32).view(num_rows, num_blocks),
    )
    place_runs(runs, num_tokens, block_size=_BLOCK_SIZE, num_passes=num_passes)
