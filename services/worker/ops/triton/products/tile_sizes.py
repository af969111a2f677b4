"""How large a program's share of a product is, and how it is compiled.

A product with few rows waits for weights. A GPU reads as fast as it can only while its bandwidth times the latency of
a read is on its way: about 2.5 MB for an H100's 3.35 TB/s and an assumed 0.75 us. A program has one or two tiles of
weights on their way, 4 to 16 KiB, so that takes hundreds of programs, but a matrix of 1024 rows in tiles of 32 has only
32. So where tiles are fewer than multiprocessors, several programs share the sum of each; that costs a launch, and a
pass over the partial sums. The sizes here follow from this arithmetic. None has been measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# A launch has about as many programs as a large GPU has multiprocessors, if the product is wide enough.
_WANTED_PROGRAMS = 128
_FEW_ROWS, _SOME_ROWS, _MANY_ROWS = 16, 64, 128
# Splits: most programs of a launch that has any, most for a tile, and the fewest tiles of weights that each reads.
_MOST_PROGRAMS = 4 * _WANTED_PROGRAMS
_MOST_SPLITS = 8
_FEWEST_STEPS = 4

EXACT_NUM_ROWS = _SOME_ROWS
"""What exact products count as their number of rows, whatever it is: so a row is always computed in the same way."""


@dataclass(frozen=True, slots=True)
class TileSizes:
    """The size of a program's work, and how it is compiled."""

    rows: int
    """See `Tile`, as are `columns` and `depth`."""
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    """Stages of Triton's software pipeline."""


def choose_rows(num_rows: int, dtype: torch.dtype) -> int:
    """Rows of a tile for products of `num_rows` rows. There are few choices, as each is compiled."""
    if num_rows <= _FEW_ROWS or dtype == torch.float32:
        # NVIDIA has no matrix instructions for float32, so products need many more registers.
        return _FEW_ROWS
    return _SOME_ROWS if num_rows <= _SOME_ROWS else _MANY_ROWS


def choose_sizes(num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> TileSizes:
    """For `num_rows` rows by a matrix [`num_outputs`, `num_inputs`]; `dtype` is what is multiplied."""
    rows, is_amd = choose_rows(num_rows, dtype), torch.version.hip is not None
    num_stages = 2 if is_amd else 3
    if dtype == torch.float32:
        return TileSizes(rows, 32, 32, num_warps=4, num_stages=num_stages)
    if rows == _FEW_ROWS:
        depth = 128
        # The masks of a last tile that is not whole need registers too.
        is_wide = num_outputs >= 64 * _WANTED_PROGRAMS and num_inputs % depth == 0
        return TileSizes(rows, 64 if is_wide else 32, depth, num_warps=4, num_stages=num_stages)
    columns, num_warps = 128, 8 if rows == _MANY_ROWS else 4
    if dtype.itemsize > 1:
        return TileSizes(rows, columns, 64, num_warps, num_stages)
    if rows == _MANY_ROWS and not is_amd:
        # A group's sums take as many registers as those that they are added to, and wider ones would spill.
        columns = 64
    return TileSizes(rows, columns, 128, num_warps, num_stages)


def choose_splits(num_programs: int, num_steps: int) -> int:
    """How many programs share the sum of a tile; 1 if there are enough tiles.

    Args:
        num_programs: Tiles of the result, at least 1.
        num_steps: Tiles of weights that the sum is over.
    """
    if num_programs >= _WANTED_PROGRAMS:
        return 1
    return max(min(_MOST_PROGRAMS // num_programs, num_steps // _FEWEST_STEPS, _MOST_SPLITS), 1)
