"""The inputs of decode steps, made by a plain loop over sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.ops import DecodeRows, SlotColumns


@dataclass(frozen=True)
class DecodeBatch:
    """Sequences of random lengths in some slots, some of which the step decodes."""

    num_slots: int
    slots: list[int]
    block_size: int
    max_length: int
    seed: int = 0

    @property
    def num_blocks(self) -> int:
        """The most blocks of a sequence."""
        return -(-self.max_length // self.block_size)

    def slot_column(self) -> Tensor:
        """The decoded sequences' slots."""
        return torch.tensor(self.slots, dtype=torch.int64)

    def columns(self) -> SlotColumns:
        """The columns before the step; tables have room for more blocks."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.num_slots, self.num_blocks + 3)
        return SlotColumns(
            last_token=torch.randint(0, 2**40, (self.num_slots,), generator=generator),
            position=torch.randint(0, self.max_length, (self.num_slots,), generator=generator),
            block_tables=torch.randint(0, 2**31 - 1, shape, generator=generator, dtype=torch.int32),
        )

    def spoilt_rows(self, num_rows: int) -> DecodeRows:
        """Rows that an earlier step left."""
        rows = DecodeRows.empty(num_rows, self.num_blocks + 2, torch.device("cpu"))
        for values in (rows.token_ids, rows.positions, rows.draw_positions, rows.slot_mapping, rows.context_lens):
            values.fill_(77)
        rows.block_tables.fill_(9)
        return rows

    def check(self, before: SlotColumns, after: SlotColumns, rows: DecodeRows) -> None:
        """Compare what the step made of `before` with the plain loop."""
        expected = before.position.clone()
        for row, slot in enumerate(self.slots):
            position, table = int(before.position[slot]), before.block_tables[slot].tolist()
            block_id = table[position // self.block_size]
            assert rows.token_ids[row] == before.last_token[slot]
            assert rows.positions[row] == position
            assert rows.draw_positions[row] == position + 1
            assert rows.slot_mapping[row] == block_id * self.block_size + position % self.block_size
            assert rows.context_lens[row] == position + 1
            assert rows.block_tables[row].tolist() == [*table[: self.num_blocks], 9, 9]
            expected[slot] += 1
        assert torch.equal(after.position, expected)
        for row in range(len(self.slots), len(rows.token_ids)):
            made = rows.token_ids[row], rows.positions[row], rows.draw_positions[row], rows.slot_mapping[row]
            assert [int(value) for value in made] == [0, 0, 0, -1]
            assert rows.context_lens[row] == 1
            assert rows.block_tables[row, 0] == 0
