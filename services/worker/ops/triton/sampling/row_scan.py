"""The first pass of sampling: reads each row of logits once, in parts that run side by side.

    row kind     written for each part
    greedy       the largest logit and its column
    free         the same, and the winner of the draw: no filter removes tokens
    filtered     the same, and the largest logit of each group of 32 columns

The winner of a free row is decided in float64, among the few columns that may beat the best one so far.

Why none is missed: let M be the tile's largest logit, T the temperature, g[j] the Gumbel variates and
R[j] = x[j] / T + g[j] the scores that numpy computes in float64. A tile's winner has (M - x[j]) / T < 43, since the
variates lie between -3.7 and 37.5. Without rounding, exp(M / T - R[j]) would be exp(-g[j]) * exp((M - x[j]) / T). Its
float32 estimate here is a lower bound but for a factor of 1 + 2**-21 (`least_exponential`), the rounding of an exponent
below 63 (a difference and two products, 2**-21.5 of it: 1 + 1.5e-5) and that of exp2 (2**-22): less than 1 + 1e-4. The
float64 roundings of R[j] are below 2**-51 (|M| / T + 43) + 1e-13 < 6e-4, unless |M| / T > 2**40. So a column that beats
the best score S has an estimate below exp(M / T - S) * (1 + 2**-9). In rows with such extreme quotients, or
temperatures whose inverse is not a normal float32, every column is decided in float64.

Source: the Gumbel-max trick, arXiv:1411.0030, section 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.worker.ops.arguments import DrawRows
from services.worker.ops.triton.sampling.ordering import LAST_COLUMN, NO_RANK, ranked
from services.worker.ops.triton.sampling.philox import (
    gumbel,
    in_column_order,
    least_exponential,
    noise_of_blocks,
    word_of_column,
)

TILE = 2048
GROUP = 32

# A kernel must not be compiled again because these have other values, or begin at other addresses.
PER_BATCH = ("num_parts", "tiles_per_part")
PER_ROW = tuple(DrawRows.dtypes())

_GREEDY = tl.constexpr(0)
FREE = tl.constexpr(1)
FILTERED = tl.constexpr(2)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _row_kind(temperature, top_k, top_p, min_p, row, num_columns):
    """How a row is drawn; see the module."""
    k = tl.load(top_k + row)
    has_filter = ((k > 0) & (k < num_columns)) | (tl.load(top_p + row) < 1.0) | (tl.load(min_p + row) > 0.0)
    # Triton rounds constants to float32, and that of `token_draw.GREEDY_TEMPERATURE` is below it.
    is_greedy = tl.load(temperature + row) <= 1e-5
    return tl.where(is_greedy, _GREEDY, tl.where(has_filter, FILTERED, FREE))


@triton.jit
def _estimates(x, start, largest, temperature, noise, TILE: tl.constexpr):
    """Lower bounds of exp(M / T - R); see the module. +Inf for columns that cannot be drawn."""
    seed, choice, position = noise
    blocks = start // 4 + tl.arange(0, TILE // 4)
    word0, word1, word2, word3 = noise_of_blocks(seed, choice, position, blocks)
    exponentials = least_exponential(in_column_order(word0, word1, word2, word3))
    estimates = exponentials * tl.exp2((largest - x) * (_LOG2_E / temperature))
    is_extreme = (tl.abs(largest) / temperature > 2.0**40) | (temperature > 2.0**100)
    return tl.where(x > float("-inf"), tl.where(is_extreme, 0.0, estimates), float("inf"))


@triton.jit
def _limit(largest, temperature, best_score):
    gap = largest.to(tl.float64) / temperature.to(tl.float64) - best_score
    return tl.exp(gap.to(tl.float32)) * (1 + 2.0**-9)


@triton.jit
def _draw_from_tile(x, start, logits_row, temperature, noise, best_score, best_column, TILE: tl.constexpr):
    """The better one of the tile's winner and the best so far."""
    seed, choice, position = noise
    largest = tl.max(tl.where(tl.abs(x) < float("inf"), x, float("-inf")))
    largest = tl.where(largest > float("-inf"), largest, 0.0)
    columns = start + tl.arange(0, TILE)
    estimates = _estimates(x, start, largest, temperature, noise, TILE)
    least = tl.min(estimates)
    # One or two columns reach the limit in a part's first tile, mostly, and often none later.
    while (least < float("inf")) & (least <= _limit(largest, temperature, best_score)):
        column = tl.min(tl.where(estimates == least, columns, LAST_COLUMN))
        scaled = tl.load(logits_row + column).to(tl.float64) / temperature.to(tl.float64)
        score = scaled + gumbel(word_of_column(seed, choice, position, column))
        is_better = (score > best_score) | ((score == best_score) & (column < best_column))
        best_score = tl.where(is_better, score, best_score)
        best_column = tl.where(is_better, column, best_column)
        estimates = tl.where(columns == column, float("inf"), estimates)
        least = tl.min(estimates)
    return best_score, best_column


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=PER_ROW)
def scan_kernel(
    logits,
    row_stride,
    kinds,
    peaks,
    best_scores,
    best_columns,
    group_maxima,
    num_columns,
    num_groups,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    choice,
    position,
    tiles_per_part,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Scan one part of one row; see the module."""
    row, part = tl.program_id(0), tl.program_id(1)
    logits_row = logits + row.to(tl.int64) * row_stride
    kind = _row_kind(temperature, top_k, top_p, min_p, row, num_columns)
    noise = tl.load(seed + row), tl.load(choice + row), tl.load(position + row)
    peak = tl.full([], NO_RANK, tl.int64)
    best_score = tl.full([], float("-inf"), tl.float64)
    best_column = tl.full([], 0, tl.int32)
    for tile in range(part * tiles_per_part, tl.minimum((part + 1) * tiles_per_part, tl.cdiv(num_columns, TILE))):
        columns = tile * TILE + tl.arange(0, TILE)
        x = tl.load(logits_row + columns, mask=columns < num_columns, other=float("-inf"))
        peak = tl.maximum(peak, tl.max(ranked(x, columns)))
        if kind == FREE:
            best_score, best_column = _draw_from_tile(
                x, tile * TILE, logits_row, tl.load(temperature + row), noise, best_score, best_column, TILE
            )
        if kind == FILTERED:
            groups = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
            maxima = tl.max(tl.reshape(x, [TILE // GROUP, GROUP]), axis=1)
            tl.store(group_maxima + row * num_groups + groups, maxima, mask=groups < num_groups)
    if part == 0:
        tl.store(kinds + row, kind)
    place = row * tl.num_programs(1) + part
    tl.store(peaks + place, peak)
    tl.store(best_scores + place, best_score)
    tl.store(best_columns + place, best_column)
