"""The last pass of sampling: one program per row names the token.

Greedy and free rows combine what `row_scan` found in their parts. A filtered row goes through its candidates a few
times: to find where top-k ends, then top-p, then to draw among what is left. The first candidates, normally all, are
kept in registers.

Everything is in float64, operation by operation as in `token_draw`; only the order of summation differs.

Source: arXiv:1904.09751, section 3.1 (top-p); arXiv:2407.01082, section 3 (min-p).
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.worker.ops.triton.sampling.candidates import load_candidates
from services.worker.ops.triton.sampling.edge_search import find_edge, keys_and_gains, range_of, weights_of_kept
from services.worker.ops.triton.sampling.group_choice import row_peak
from services.worker.ops.triton.sampling.ordering import LAST_COLUMN, LOWEST_KEY, column_of, value_of
from services.worker.ops.triton.sampling.philox import gumbel, word_of_column
from services.worker.ops.triton.sampling.row_scan import FILTERED, FREE, PER_BATCH, PER_ROW


@triton.jit
def _scores_of_kept(chunk, draw, noise, edge, last):
    """The float64 score of each candidate that all filters keep; -Inf for others."""
    columns, x, _ = chunk
    seed, choice, position = noise
    weights = weights_of_kept(chunk, draw)
    keys = weights.to(tl.int64, bitcast=True)
    is_kept = (weights >= 0.0) & ((keys > edge) | ((keys == edge) & (columns <= last)))
    variates = gumbel(word_of_column(seed, choice, position, columns))
    return tl.where(is_kept, x.to(tl.float64) / draw[1] + variates, float("-inf"))


@triton.jit
def _draw_kept(candidates, first, draw, noise, edge, last, CHUNK: tl.constexpr):
    """The column with the best score, the lowest among equals."""
    best_columns, _, _ = first
    best_scores = _scores_of_kept(first, draw, noise, edge, last)
    for start in range(CHUNK, candidates[3], CHUNK):
        chunk = load_candidates(candidates, start, CHUNK)
        scores = _scores_of_kept(chunk, draw, noise, edge, last)
        # Columns ascend.
        best_columns = tl.where(scores > best_scores, chunk[0], best_columns)
        best_scores = tl.maximum(best_scores, scores)
    return tl.min(tl.where(best_scores == tl.max(best_scores), best_columns, LAST_COLUMN))


@triton.jit
def _draw_filtered(candidates, largest, scale, least, k, share, total, noise, CHUNK: tl.constexpr):
    """The token of a filtered row. `total` is the mass of all tokens that min-p keeps, for a row without top-k."""
    num_columns = candidates[5]
    first = load_candidates(candidates, 0, CHUNK)
    has_top_k = (k > 0) & (k < num_columns)
    lowest, end = tl.full([], LOWEST_KEY, tl.int64), num_columns - 1
    draw = largest, scale, least, lowest, end
    edge, last = lowest, end
    if has_top_k:
        known = keys_and_gains(first, draw, False)
        low, high, _ = range_of(candidates, draw, known, False, CHUNK)
        edge, last = find_edge(candidates, draw, known, low, high, k.to(tl.float64), False, CHUNK)
    draw = largest, scale, least, edge, last
    edge, last = tl.full([], -1, tl.int64), end
    if share < 1.0:
        known = keys_and_gains(first, draw, True)
        low, high, listed = range_of(candidates, draw, known, True, CHUNK)
        edge, last = find_edge(
            candidates, draw, known, low, high, share * tl.where(has_top_k, listed, total), True, CHUNK
        )
    return _draw_kept(candidates, first, draw, noise, edge, last, CHUNK)


@triton.jit
def _best_part(best_scores, best_columns, row, num_parts, PARTS: tl.constexpr):
    parts = tl.arange(0, PARTS)
    is_part = parts < num_parts
    scores = tl.load(best_scores + row * num_parts + parts, mask=is_part, other=float("-inf"))
    columns = tl.load(best_columns + row * num_parts + parts, mask=is_part, other=LAST_COLUMN)
    return tl.min(tl.where(scores == tl.max(scores), columns, LAST_COLUMN))


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=PER_ROW)
def decide_kernel(
    logits,
    row_stride,
    kinds,
    peaks,
    best_scores,
    best_columns,
    groups,
    columns_listed,
    candidate_counts,
    shifts,
    row_totals,
    token_ids,
    is_finite,
    num_columns,
    num_groups,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    choice,
    position,
    num_parts,
    PARTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write each row's token and whether its largest logit is finite."""
    row = tl.program_id(0)
    kind = tl.load(kinds + row)
    peak = row_peak(peaks, row, num_parts, PARTS)
    largest = value_of(peak)
    token = column_of(peak)
    if kind == FREE:
        token = _best_part(best_scores, best_columns, row, num_parts, PARTS)
    if kind == FILTERED:
        candidates = (
            logits + row.to(tl.int64) * row_stride,
            groups + row * num_groups,
            columns_listed + row * CAPACITY,
            tl.load(candidate_counts + row),
            tl.load(shifts + row),
            num_columns,
        )
        scale, least = tl.load(temperature + row).to(tl.float64), tl.load(min_p + row).to(tl.float64)
        noise = tl.load(seed + row), tl.load(choice + row), tl.load(position + row)
        k, share, total = tl.load(top_k + row), tl.load(top_p + row).to(tl.float64), tl.load(row_totals + row)
        token = _draw_filtered(candidates, largest, scale, least, k, share, total, noise, CHUNK)
    # A row that is not finite gets some token, which must be one.
    tl.store(token_ids + row, tl.minimum(token, num_columns - 1).to(tl.int64))
    tl.store(is_finite + row, (tl.abs(largest) < float("inf")).to(tl.int8))
