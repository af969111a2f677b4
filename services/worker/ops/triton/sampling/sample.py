"""Draws one token per row on the device: the tokens that `services.worker.drawing.token_draw` draws.

    scan      every row once, in parts        largest logit, winner of free rows, maxima of groups of columns
    mass      rows with top-p but no top-k    sums of weights; a second read of the row
    choose    filtered rows                   a cut below which no token is kept, and the groups that reach it
    gather    filtered rows                   the columns that reach it
    decide    every row                       the token

A kernel that a row does not need leaves at once, on device data: the host never looks. Tiles have a fixed size and
their sums are added up in a fixed order, so a token does not depend on the rest of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from services.worker.ops.arguments import DrawRows
from services.worker.ops.triton.sampling.candidates import GROUP_SHIFT, gather_kernel
from services.worker.ops.triton.sampling.group_choice import NUM_LEVELS, choose_kernel, mass_kernel
from services.worker.ops.triton.sampling.row_decision import decide_kernel
from services.worker.ops.triton.sampling.row_scan import GROUP, TILE, scan_kernel

# About two waves of programs on the largest GPUs; fewer, longer parts beyond that.
_WANTED_PROGRAMS = 2048
_MAX_TILES_PER_PART = 8
# Groups that `gather` reads at once, candidates that `decide` reads at once, and how many a dense list holds.
_GATHER_CHUNK = 32
_CHUNK = 256
_CAPACITY = 8192


@dataclass(frozen=True, slots=True)
class _Scratch:
    """What the kernels hand to each other; `decide` of a row without filters reads only the first four."""

    kinds: Tensor  # [B] int32, see `row_scan`
    peaks: Tensor  # [B, parts] int64
    best_scores: Tensor  # [B, parts] float64
    best_columns: Tensor  # [B, parts] int32
    group_maxima: Tensor  # [B, groups] float32
    totals: Tensor  # [B, tiles] float64
    level_masses: Tensor  # [B, tiles, levels] float32
    cut_keys: Tensor  # [B] int32
    groups: Tensor  # [B, groups] int32
    group_counts: Tensor  # [B] int32
    row_totals: Tensor  # [B] float64
    columns_listed: Tensor  # [B, capacity] int32
    candidate_counts: Tensor  # [B] int32
    shifts: Tensor  # [B] int32

    @classmethod
    def allocate(cls, num_rows: int, num_columns: int, num_parts: int, device: torch.device) -> _Scratch:
        num_tiles, num_groups = triton.cdiv(num_columns, TILE), triton.cdiv(num_columns, GROUP)

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(num_rows, *shape, dtype=dtype, device=device)

        return cls(
            kinds=empty(dtype=torch.int32),
            peaks=empty(num_parts, dtype=torch.int64),
            best_scores=empty(num_parts, dtype=torch.float64),
            best_columns=empty(num_parts, dtype=torch.int32),
            group_maxima=empty(num_groups, dtype=torch.float32),
            totals=empty(num_tiles, dtype=torch.float64),
            level_masses=empty(num_tiles, NUM_LEVELS, dtype=torch.float32),
            cut_keys=empty(dtype=torch.int32),
            groups=empty(num_groups, dtype=torch.int32),
            group_counts=empty(dtype=torch.int32),
            row_totals=empty(dtype=torch.float64),
            columns_listed=empty(min(_CAPACITY, num_columns), dtype=torch.int32),
            candidate_counts=empty(dtype=torch.int32),
            shifts=empty(dtype=torch.int32),
        )


def sample(logits: Tensor, rows: DrawRows, *, tiles_per_part: int | None = None) -> tuple[Tensor, Tensor]:
    """Draw a token from each row of logits.

    Args:
        logits: [B, vocabulary] float32, rows contiguous; not written. Entries may be -Inf.
        rows: [B].
        tiles_per_part: Tiles of a row that one program of the first pass reads; None means as many as
            `choose_tiles_per_part` says. It changes no token.

    Returns:
        (token ids [B] int64, whether the row's largest logit is finite [B] bool). In a row with NaN, +Inf or nothing
        above -Inf the token is meaningless, but one of the vocabulary.
    """
    launches = _Launches(logits, rows, tiles_per_part)
    launches.scan()
    launches.measure_mass()
    launches.choose()
    launches.gather()
    return launches.decide()


class _Launches:
    """The launches of one call, in the order of the module's docstring."""

    def __init__(self, logits: Tensor, rows: DrawRows, tiles_per_part: int | None) -> None:
        self._logits = logits
        self._num_rows, self._num_columns = logits.shape
        self._num_tiles, self._num_groups = triton.cdiv(self._num_columns, TILE), triton.cdiv(self._num_columns, GROUP)
        self._tiles_per_part = tiles_per_part or choose_tiles_per_part(self._num_rows, self._num_tiles)
        num_parts = triton.cdiv(self._num_tiles, self._tiles_per_part)
        self._by_part = self._num_rows, num_parts
        self._parts = {"num_parts": num_parts, "PARTS": triton.next_power_of_2(self._num_tiles)}
        self._scratch = _Scratch.allocate(self._num_rows, self._num_columns, num_parts, logits.device)
        self._rows = rows

    def _columns_of(self, kernel: JITFunction[Any]) -> list[Tensor]:
        """The columns of the rows that a kernel's parameters name, side by side and in the order of the parameters."""
        columns = self._rows.columns
        return [columns[name] for name in kernel.arg_names if name in columns]

    def scan(self) -> None:
        """Read every row once."""
        scratch = self._scratch
        scan_kernel[self._by_part](
            self._logits,
            self._logits.stride(0),
            scratch.kinds,
            scratch.peaks,
            scratch.best_scores,
            scratch.best_columns,
            scratch.group_maxima,
            self._num_columns,
            self._num_groups,
            *self._columns_of(scan_kernel),
            tiles_per_part=self._tiles_per_part,
            TILE=TILE,
            GROUP=GROUP,
            num_warps=4,
        )

    def measure_mass(self) -> None:
        """Sum the weights of rows with top-p but no top-k."""
        mass_kernel[self._by_part](
            self._logits,
            self._logits.stride(0),
            self._scratch.kinds,
            self._scratch.peaks,
            self._scratch.totals,
            self._scratch.level_masses,
            self._num_columns,
            self._num_tiles,
            *self._columns_of(mass_kernel),
            **self._parts,
            tiles_per_part=self._tiles_per_part,
            TILE=TILE,
            NUM_LEVELS=NUM_LEVELS,
            num_warps=8,
            enable_fp_fusion=False,
        )

    def choose(self) -> None:
        """Find the cut of filtered rows, and the groups that reach it."""
        scratch = self._scratch
        choose_kernel[(self._num_rows,)](
            scratch.kinds,
            scratch.peaks,
            scratch.group_maxima,
            scratch.totals,
            scratch.level_masses,
            scratch.cut_keys,
            scratch.groups,
            scratch.group_counts,
            scratch.row_totals,
            self._num_columns,
            self._num_groups,
            self._num_tiles,
            *self._columns_of(choose_kernel),
            **self._parts,
            GROUPS=triton.next_power_of_2(self._num_groups),
            TILES=triton.next_power_of_2(self._num_tiles),
            NUM_LEVELS=NUM_LEVELS,
            num_warps=8,
            enable_fp_fusion=False,
        )

    def gather(self) -> None:
        """List the columns that reach the cut."""
        scratch = self._scratch
        gather_kernel[(self._num_rows,)](
            self._logits,
            self._logits.stride(0),
            scratch.kinds,
            scratch.cut_keys,
            scratch.groups,
            scratch.group_counts,
            scratch.columns_listed,
            scratch.candidate_counts,
            scratch.shifts,
            self._num_columns,
            self._num_groups,
            CAPACITY=scratch.columns_listed.shape[1],
            CHUNK=_GATHER_CHUNK,
            GROUP_SHIFT=GROUP_SHIFT,
            num_warps=4,
        )

    def decide(self) -> tuple[Tensor, Tensor]:
        """Each row's token, and whether its largest logit is finite."""
        scratch, device = self._scratch, self._logits.device
        token_ids = torch.empty(self._num_rows, dtype=torch.int64, device=device)
        is_finite = torch.empty(self._num_rows, dtype=torch.bool, device=device)
        decide_kernel[(self._num_rows,)](
            self._logits,
            self._logits.stride(0),
            scratch.kinds,
            scratch.peaks,
            scratch.best_scores,
            scratch.best_columns,
            scratch.groups,
            scratch.columns_listed,
            scratch.candidate_counts,
            scratch.shifts,
            scratch.row_totals,
            token_ids,
            is_finite,
            self._num_columns,
            self._num_groups,
            *self._columns_of(decide_kernel),
            **self._parts,
            CAPACITY=scratch.columns_listed.shape[1],
            CHUNK=_CHUNK,
            num_warps=4,
            enable_fp_fusion=False,
        )
        return token_ids, is_finite


def choose_tiles_per_part(num_rows: int, num_tiles: int) -> int:
    """Tiles that one program of the first pass reads."""
    return min(max(num_rows * num_tiles // _WANTED_PROGRAMS, 1), _MAX_TILES_PER_PART)
