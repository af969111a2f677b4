"""What a batch's columns say of its steps, in numpy: on columns this short its calls cost a fraction of torch's."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from services.worker.ops import composed
from services.worker.ops.arguments import DecodeRows, RunPlaces, RunRows, SlotColumns


def advance_batch(columns: SlotColumns, slots: Tensor, rows: DecodeRows, *, block_size: int, num_blocks: int) -> None:
    """Advance the batch with numpy, or with torch if there are rows of padding."""
    if len(slots) < len(rows.token_ids):
        composed.advance_batch(columns, slots, rows, block_size=block_size, num_blocks=num_blocks)
        return
    index, tables = slots.numpy(), columns.block_tables.numpy()
    positions = columns.position.numpy()
    now = positions[index]
    positions[index] += 1
    rows.token_ids.numpy()[:] = columns.last_token.numpy()[index]
    rows.positions.numpy()[:] = now
    rows.draw_positions.numpy()[:] = rows.context_lens.numpy()[:] = now + 1
    rows.block_tables.numpy()[:, :num_blocks] = tables[index, :num_blocks]
    rows.slot_mapping.numpy()[:] = tables[index, now // block_size] * np.int64(block_size) + now % block_size


def place_runs(runs: RunRows, num_tokens: int, *, block_size: int, num_passes: int) -> RunPlaces:
    """Find the places with numpy."""
    starts, firsts, ends, stored_from = (
        each.numpy() for each in (runs.starts, runs.firsts, runs.ends, runs.stored_from)
    )
    rows = np.arange(len(firsts))
    if num_tokens > len(firsts):
        rows = np.repeat(rows, np.diff(starts))
        firsts = np.arange(num_tokens) + (firsts - starts[:-1])[rows]
        ends, stored_from = ends[rows], stored_from[rows]
    wanted = firsts + np.arange(num_passes)[:, None]
    positions = np.minimum(wanted, ends - 1)
    slot_mapping = runs.block_tables.numpy()[rows, positions // block_size] * np.int64(block_size)
    slot_mapping += positions % block_size
    slot_mapping[(positions != wanted) | (wanted < stored_from)] = -1
    context_lens = (positions[:, starts[1:] - 1] + 1).astype(np.int32)
    return RunPlaces(*map(torch.from_numpy, (positions, slot_mapping, context_lens)))


def accept(drawn: Tensor, wanted: Tensor, firsts: Tensor) -> tuple[Tensor, Tensor]:
    """Find each run's end with numpy: the first place from its first one on that ends a run."""
    tokens, starts = drawn.numpy(), firsts.numpy()
    is_end = (tokens != wanted.numpy()) | (tokens < 0)
    is_end[:-1] |= tokens[1:] < 0
    places = np.flatnonzero(is_end)
    ends = places[np.searchsorted(places, starts)]
    return torch.from_numpy(ends - starts + 1), torch.from_numpy(tokens[ends])
