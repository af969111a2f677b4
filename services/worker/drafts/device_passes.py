"""Forward passes at positions that only the device knows: those after a step of which the host has no results yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.worker.drafts.token_runs import IntArray, run_metadata
from services.worker.forward.forward_context import ForwardContext, forward_context
from services.worker.forward.kv_cache import KvCache
from services.worker.forward.staging import HostArrays, is_on_host, upload_arrays
from services.worker.ops import Ops
from shared.step.columns import Int32Column


@dataclass(frozen=True, slots=True)
class Sequences:
    """What the host knows of the sequences of some passes."""

    block_tables: Int32Column  # [num_seqs, most blocks of one sequence]
    ends: IntArray
    """[num_seqs], the room of each, at least 1: a token at a later position is computed, but not stored."""

    def arrays(self) -> HostArrays:
        """What `DevicePasses` are uploaded from."""
        num_seqs, width = self.block_tables.shape
        return {
            "block_tables": self.block_tables,
            "table_starts": np.arange(num_seqs) * width,
            "lasts": self.ends.astype(np.int64) - 1,
            "bounds": np.arange(num_seqs + 1, dtype=np.int32),
        }


class DevicePasses:
    """Forward passes over the same sequences, one after another. The host waits for none.

    What is not stored, for want of room, reaches only later tokens of its own sequence in these passes.
    """

    def __init__(self, ops: Ops, kv_cache: KvCache, sequences: Sequences, others: HostArrays) -> None:
        """Upload what the host knows, in one transfer; `others` are named otherwise than `Sequences.arrays`."""
        self._ops = ops
        self._kv_cache = kv_cache
        self._ends = sequences.ends.tolist()
        self.arrays = upload_arrays({**others, **sequences.arrays()}, kv_cache.device)
        """What was uploaded, by name."""
        none = self.arrays["lasts"][:0]
        # Of the passes of `begin`, [num_passes, num_seqs].
        self._positions = self._slot_mapping = self._context_lens = none
        self._host_lens: list[list[int]] | None = None

    def compute_runs(
        self, lengths: IntArray, firsts: Tensor, forward: Callable[[Tensor], Tensor], *, is_stored: Tensor | None = None
    ) -> Tensor:
        """Call `forward` with the positions [num_tokens] int64 of a run of each sequence, in its forward context.

        The arrays that were uploaded include `run_arrays`.

        Args:
            lengths: [num_seqs], as for `run_arrays`.
            firsts: [num_seqs] int64, each run's first position.
            is_stored: [num_tokens] bool, False for tokens that the cache has; None means that it has none.
        """
        arrays, runs = self.arrays, self.arrays["runs"]
        wanted = firsts[runs] + arrays["offsets"]
        positions, slot_mapping = self._place(wanted, arrays["lasts"][runs], arrays["table_starts"][runs])
        if is_stored is not None:
            slot_mapping = slot_mapping.masked_fill(~is_stored, -1)
        context_lens = (positions[arrays["run_lasts"]] + 1).int()
        attention = run_metadata(
            slot_mapping,
            arrays["block_tables"],
            context_lens,
            arrays["run_bounds"],
            query_lens=tuple(lengths.tolist()),
            context_lens_host=tuple(context_lens.tolist() if is_on_host(firsts) else self._ends),
        )
        with forward_context(ForwardContext.for_step(self._ops, attention, self._kv_cache)):
            return forward(positions)

    def begin(self, firsts: Tensor, num_passes: int) -> None:
        """Find the places of passes of one token each, at consecutive positions from `firsts` [num_seqs] int64 on."""
        wanted = firsts + torch.arange(num_passes, device=firsts.device)[:, None]
        lasts, starts = self.arrays["lasts"], self.arrays["table_starts"]
        self._positions, self._slot_mapping = self._place(wanted, lasts, starts)
        self._context_lens = (self._positions + 1).int()
        self._host_lens = self._context_lens.tolist() if is_on_host(firsts) else None

    def compute(self, number: int, num_seqs: int, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Call `forward` with the positions [num_seqs] int64 of the first sequences in a pass, in its forward context.

        `number` counts the passes of `begin`.
        """
        lens = self._ends if self._host_lens is None else self._host_lens[number]
        attention = run_metadata(
            self._slot_mapping[number, :num_seqs],
            self.arrays["block_tables"][:num_seqs],
            self._context_lens[number, :num_seqs],
            self.arrays["bounds"][: num_seqs + 1],
            query_lens=(1,) * num_seqs,
            context_lens_host=tuple(lens[:num_seqs]),
        )
        with forward_context(ForwardContext.for_step(self._ops, attention, self._kv_cache)):
            return forward(self._positions[number, :num_seqs])

    def _place(self, wanted: Tensor, lasts: Tensor, table_starts: Tensor) -> tuple[Tensor, Tensor]:
        """Positions and slots of tokens at the `wanted` positions, of sequences with these last places."""
        block_size = self._kv_cache.block_size
        positions = torch.minimum(wanted, lasts)
        block_ids = self.arrays["block_tables"].take(table_starts + positions // block_size).long()
        return positions, (block_ids * block_size + positions % block_size).masked_fill(wanted > lasts, -1)


def run_arrays(lengths: IntArray) -> HostArrays:
    """What `DevicePasses.compute_runs` needs for runs of these `lengths` [num_seqs], at least 1 each."""
    bounds = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=bounds[1:])
    runs = np.repeat(np.arange(len(lengths)), lengths)
    return {
        "run_bounds": bounds,
        "run_lasts": bounds[1:].astype(np.int64) - 1,
        "runs": runs,
        "offsets": np.arange(bounds[-1]) - bounds[runs],
    }
