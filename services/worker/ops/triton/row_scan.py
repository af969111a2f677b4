"""The first pass of sampling: reads each row of logits once, in parts that run side by side.

    row kind     written for each part
    greedy       the largest logit and its column
    free         the same, and the winner of the draw: no filter removes tokens
    filtered     the same, and the largest logit of each group of 32 columns

The winner of a free row is decided in float64, among the few columns whose float32 score is near the tile's best.

Why none is missed: let M be the tile's largest logit, T the temperature, R[j] = x[j] / T + g[j] the score that numpy
computes in float64, and a[j] the float32 estimate of R[j] - M / T. Gumbel variates lie between -3.7 and 37.5, so both
the column with the best R and the one with the best a have (M - x[j]) / T < 42 (plus roundings). Then a[j] differs from
the true value by at most 42 * 2**-21 (a subtraction, and a division of 2 ulp) + 2**-14 (`rough_gumbel`) + 80 * 2**-24
(the sum) < 9e-5, and R[j] by at most 2**-51 * (|M| / T + 42) + 1e-13. The winner's a is therefore less than
1.8e-4 + 2**-50 * (|M| / T + 43) below the best a. `_margin` is larger.

Source: the Gumbel-max trick, arXiv:1411.0030, section 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.worker.ops.triton.ordering import NO_RANK, ranked
from services.worker.ops.triton.philox import gumbel, in_column_order, noise_of_blocks, rough_gumbel, word_of_column

TILE = 2048
GROUP = 32

# A kernel must not be compiled again because these have other values, or begin at other addresses.
PER_BATCH = ("num_parts", "tiles_per_part")
PER_ROW = ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "position")

_GREEDY = tl.constexpr(0)
FREE = tl.constexpr(1)
FILTERED = tl.constexpr(2)


@triton.jit
def row_kind(temperature, top_k, top_p, min_p, row, num_columns):
    """How a row is drawn; see the module."""
    k = tl.load(top_k + row)
    has_filter = ((k > 0) & (k < num_columns)) | (tl.load(top_p + row) < 1.0) | (tl.load(min_p + row) > 0.0)
    # Triton rounds constants to float32, and that of `draw.GREEDY_TEMPERATURE` is below it.
    is_greedy = tl.load(temperature + row) <= 1e-5
    return tl.where(is_greedy, _GREEDY, tl.where(has_filter, FILTERED, FREE))


@triton.jit
def _margin(largest, temperature):
    return 2.0**-10 + tl.abs(largest) / temperature * 2.0**-47


@triton.jit
def _draw_from_tile(x, columns, logits_row, temperature, noise, best_score, best_column, TILE: tl.constexpr):
    """The better one of the tile's winner and the best so far, whose column is lower."""
    seed, choice, position = noise
    is_possible = x > float("-inf")
    largest = tl.max(tl.where(is_possible & (x < float("inf")), x, float("-inf")))
    largest = tl.where(largest > float("-inf"), largest, 0.0)
    blocks = tl.min(columns) // 4 + tl.arange(0, TILE // 4)
    word0, word1, word2, word3 = noise_of_blocks(seed, choice, position, blocks)
    scores = (x - largest) / temperature + rough_gumbel(in_column_order(word0, word1, word2, word3))
    scores = tl.where(is_possible, scores, float("-inf"))
    is_near = is_possible & (scores >= tl.max(scores) - _margin(largest, temperature))
    # Nearly always one column.
    while tl.max(is_near.to(tl.int32)) > 0:
        column = tl.min(tl.where(is_near, columns, 0x7FFFFFFF))
        scaled = tl.load(logits_row + column).to(tl.float64) / temperature.to(tl.float64)
        score = scaled + gumbel(word_of_column(seed, choice, position, column))
        best_column = tl.where(score > best_score, column, best_column)
        best_score = tl.where(score > best_score, score, best_score)
        is_near = is_near & (columns != column)
    return best_score, best_column


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=PER_ROW)
def scan_kernel(
    logits,
    row_stride,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    choice,
    position,
    peaks,
    best_scores,
    best_columns,
    group_maxima,
    num_columns,
    num_groups,
    tiles_per_part,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Scan one part of one row; see the module."""
    row, part = tl.program_id(0), tl.program_id(1)
    logits_row = logits + row.to(tl.int64) * row_stride
    kind = row_kind(temperature, top_k, top_p, min_p, row, num_columns)
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
                x, columns, logits_row, tl.load(temperature + row), noise, best_score, best_column, TILE
            )
        if kind == FILTERED:
            groups = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
            maxima = tl.max(tl.reshape(x, [TILE // GROUP, GROUP]), axis=1)
            tl.store(group_maxima + row * num_groups + groups, maxima, mask=groups < num_groups)
    place = row * tl.num_programs(1) + part
    tl.store(peaks + place, peak)
    tl.store(best_scores + place, best_score)
    tl.store(best_columns + place, best_column)
