"""The device's part of the batch: what a step needs of each sequence, by slot, so that it uploads only changes."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from services.worker.batch.enter_checks import BatchLimits
from services.worker.ops import DecodeRows, DrawRows, Ops, SlotColumns


class DeviceBatch:
    """Columns by slot. Only work on the stream reads and writes them, so it sees them as of its own step.

    Invariant: a slot's last token and position are right once its prompt is complete, its other columns from the step
    in which it enters.
    """

    def __init__(
        self, ops: Ops, limits: BatchLimits, device: torch.device, *, decode_draws: DrawRows | None = None
    ) -> None:
        """`decode_draws` has rows for every slot, which a decode's are written into; see `decode_draws`."""
        self._ops = ops
        self._block_size = limits.block_size
        self.num_slots = num_slots = limits.max_num_seqs
        self.columns = SlotColumns(
            last_token=torch.zeros(num_slots, dtype=torch.int64, device=device),
            position=torch.zeros(num_slots, dtype=torch.int64, device=device),
            block_tables=torch.zeros(num_slots, 0, dtype=torch.int32, device=device),
        )
        """What is kept by slot; not to be written outside."""
        # The columns of `DrawRows` that a sequence enters with, by slot.
        draws = DrawRows.greedy(num_slots, device)
        self._draws = {each.name: getattr(draws, each.name) for each in fields(draws) if each.name != "position"}
        self.decode_slots = torch.zeros(0, dtype=torch.int64, device=device)
        """[num_rows] int64, those of the last decode, whose sequences are mostly those of the next one."""
        self._decode_draws = decode_draws or DrawRows.greedy(num_slots, device)
        self._has_decode_draws = False

    def apply(self, changes: dict[str, Tensor], table_width: int) -> None:
        """Write a step's changes, each if it is there.

        Args:
            changes: `entered_slots` [n] int64, with `entered_temperature` and so on for each column of `DrawRows` but
                the position, [n] each and of its dtype; `table_places` [m] int64, slot * `table_width` + column, with
                `table_ids` [m] int32; `decode_slots` [k] int64, for `advance`.
            table_width: Columns of the block tables, at least as many as before.
        """
        if table_width > self.columns.block_tables.shape[1]:
            self._widen(table_width)
        if "table_places" in changes:
            self.columns.block_tables.view(-1).index_copy_(0, changes["table_places"], changes["table_ids"])
        if "entered_slots" in changes:
            slots = changes["entered_slots"]
            for name, column in self._draws.items():
                column.index_copy_(0, slots, changes[f"entered_{name}"])
            self._has_decode_draws = False
        if "decode_slots" in changes:
            self.decode_slots = changes["decode_slots"]
            self._has_decode_draws = False

    def advance(self, rows: DecodeRows, num_blocks: int) -> None:
        """Make a decode's inputs; see `Ops.advance_batch`."""
        self._ops.advance_batch(
            self.columns, self.decode_slots, rows, block_size=self._block_size, num_blocks=num_blocks
        )

    def pad(self, rows: DecodeRows) -> None:
        """Make a decode's inputs without any sequence."""
        none = self.decode_slots[:0]
        self._ops.advance_batch(self.columns, none, rows, block_size=self._block_size, num_blocks=1)

    def decode_draws(self, positions: Tensor) -> DrawRows:
        """How the rows of the last decode are drawn; `positions` [num_rows] int64 are where."""
        rows = self._decode_draws.first(len(positions))
        if not self._has_decode_draws:
            rows.write(self.draws(self.decode_slots, positions))
            self._has_decode_draws = True
        return replace(rows, position=positions)

    def draws(self, slots: Tensor, positions: Tensor) -> DrawRows:
        """How the rows of `slots` [num_rows] int64 are drawn at `positions` [num_rows] int64."""
        columns = {name: column.index_select(0, slots) for name, column in self._draws.items()}
        return DrawRows(**columns, position=positions)

    def last_tokens(self, slots: Tensor) -> Tensor:
        """[len(slots)] int64: the tokens that these slots drew last; `slots` are int64."""
        return self.columns.last_token.index_select(0, slots)

    def record_decoded(self, token_ids: Tensor) -> None:
        """The tokens [num_rows] int64 that the last decode drew, at the positions that `advance` made."""
        self.columns.last_token.index_copy_(0, self.decode_slots, token_ids)

    def record(self, slots: Tensor, token_ids: Tensor, positions: Tensor) -> None:
        """The tokens [num_rows] int64 that `slots` drew last, and their positions [num_rows] int64."""
        self.columns.last_token.index_copy_(0, slots, token_ids)
        self.columns.position.index_copy_(0, slots, positions)

    def _widen(self, table_width: int) -> None:
        tables = self.columns.block_tables
        wider = tables.new_zeros(len(tables), table_width)
        wider[:, : tables.shape[1]] = tables
        self.columns = replace(self.columns, block_tables=wider)
