"""The places of runs of tokens, found by a plain loop over them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st

from services.worker.ops import RunPlaces, RunRows


class Run(NamedTuple):
    """A run of one sequence."""

    first: int
    length: int
    stored_from: int
    end: int


class RunBatch(NamedTuple):
    """Runs of sequences with random blocks."""

    runs: list[Run]
    block_size: int
    num_passes: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all runs together."""
        return sum(run.length for run in self.runs)

    def rows(self) -> RunRows:
        """The runs as the op takes them; tables have room for more blocks than are used."""
        generator = torch.Generator().manual_seed(len(self.runs))
        num_blocks = max(-(-run.end // self.block_size) for run in self.runs) + 2
        shape, lengths = (len(self.runs), num_blocks), torch.tensor([0, *(run.length for run in self.runs)])
        firsts, stored_from, ends = torch.tensor([(run.first, run.stored_from, run.end) for run in self.runs]).T
        return RunRows(
            firsts=firsts.contiguous(),
            starts=lengths.cumsum(0).int(),
            stored_from=stored_from.contiguous(),
            ends=ends.contiguous(),
            block_tables=torch.randint(0, 2**31 - 1, shape, generator=generator, dtype=torch.int32),
        )

    def check(self, rows: RunRows, places: RunPlaces) -> None:
        """Compare what was found with the plain loop."""
        assert [each.dtype for each in (places.positions, places.slot_mapping)] == [torch.int64] * 2
        assert places.context_lens.dtype == torch.int32
        assert places.positions.shape == places.slot_mapping.shape == (self.num_passes, self.num_tokens)
        assert places.context_lens.shape == (self.num_passes, len(self.runs))
        tables = rows.block_tables.tolist()
        for number in range(self.num_passes):
            positions, slots, lens = [], [], []
            for run, table in zip(self.runs, tables, strict=True):
                for wanted in range(run.first + number, run.first + number + run.length):
                    positions.append(min(wanted, run.end - 1))
                    slot = table[positions[-1] // self.block_size] * self.block_size + wanted % self.block_size
                    slots.append(slot if run.stored_from <= wanted < run.end else -1)
                lens.append(positions[-1] + 1)
            assert places.positions[number].tolist() == positions
            assert places.slot_mapping[number].tolist() == slots
            assert places.context_lens[number].tolist() == lens


@st.composite
def run_batches(draw: st.DrawFn, most_tokens: int) -> RunBatch:
    """Some runs, which may begin or end after their sequences' room."""
    runs = st.builds(
        Run,
        first=st.integers(0, 40),
        length=st.one_of(st.just(1), st.integers(1, most_tokens)),
        stored_from=st.one_of(st.just(0), st.integers(0, 50)),
        end=st.integers(1, 60),
    )
    are_single = draw(st.booleans())
    found = draw(st.lists(runs, min_size=1, max_size=6))
    return RunBatch(
        [run._replace(length=1) for run in found] if are_single else found,
        block_size=draw(st.sampled_from([1, 4, 16])),
        num_passes=draw(st.integers(0, 3)),
    )
