"""The last pass of sampling: one program per row names the token.

Greedy and free rows combine what `row_scan` found in their parts. A filtered row reads its chosen groups a few times:
to find where top-k ends, then top-p, then to draw among what is left. All in float64, operation by operation as
`draw.py`; only the order of summation differs.

Top-k and top-p are one search. Entries are ordered by a key, the logit or its weight, and each has a gain, 1 or its
weight. They keep entries in descending order until the gains reach a target, k or top_p times the total; of the
entries with the last key, those with the lowest columns.

Source: arXiv:1904.09751, section 3.1 (top-p); arXiv:2407.01082, section 3 (min-p).
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.worker.ops.triton.group_choice import row_peak, weights_of
from services.worker.ops.triton.ordering import LAST_COLUMN, NO_KEY, column_of, ordered_keys, value_of
from services.worker.ops.triton.philox import gumbel, in_column_order, noise_of_blocks
from services.worker.ops.triton.row_scan import FILTERED, row_kind

_MAX_KEY = tl.constexpr(2**63 - 1)


@triton.jit
def _chunk(entries, start, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """The columns and logits of CHUNK groups from the list, ascending: [CHUNK * GROUP]; -Inf past the end."""
    logits_row, groups, num_chosen, num_columns = entries
    places = start + tl.arange(0, CHUNK)
    group = tl.load(groups + places, mask=places < num_chosen, other=0)
    columns = tl.reshape(group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], [CHUNK * GROUP])
    is_listed = tl.reshape((places < num_chosen)[:, None] & (tl.arange(0, GROUP) >= 0)[None, :], [CHUNK * GROUP])
    is_entry = is_listed & (columns < num_columns)
    return columns, tl.load(logits_row + columns, mask=is_entry, other=float("-inf")), is_entry


@triton.jit
def _weights(x, columns, is_entry, draw):
    """The float64 weights of entries that top-k and min-p keep; -1 for others."""
    largest, scale, least, edge, last = draw
    keys = ordered_keys(x)
    is_kept = is_entry & ((keys > edge) | ((keys == edge) & (columns <= last)))
    weights = tl.exp(x.to(tl.float64) / scale - largest.to(tl.float64) / scale)
    return tl.where(is_kept & (weights >= least), weights, -1.0)


@triton.jit
def _keys_and_gains(entries, start, draw, BY_WEIGHT: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """Columns, int64 keys and float64 gains of one chunk; `NO_KEY` and 0 for entries that do not take part."""
    columns, x, is_entry = _chunk(entries, start, CHUNK, GROUP)
    if BY_WEIGHT:
        weights = _weights(x, columns, is_entry, draw)
        # Positive floats are in the order of their bits. Tokens without weight cannot be among the likeliest.
        keys = tl.where(weights > 0.0, weights.to(tl.int64, bitcast=True), NO_KEY)
        gains = tl.where(weights > 0.0, weights, 0.0)
    else:
        keys = tl.where(is_entry, ordered_keys(x), NO_KEY)
        gains = tl.where(is_entry, 1.0, 0.0).to(tl.float64)
    return columns, keys, gains


@triton.jit
def _range(entries, draw, BY_WEIGHT: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """The smallest key, the largest, and the sum of all gains."""
    low = tl.full([], _MAX_KEY, tl.int64)
    high = tl.full([], NO_KEY, tl.int64)
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, entries[2], CHUNK):
        _, keys, gains = _keys_and_gains(entries, start, draw, BY_WEIGHT, CHUNK, GROUP)
        low = tl.minimum(low, tl.min(tl.where(keys > NO_KEY, keys, _MAX_KEY)))
        high = tl.maximum(high, tl.max(keys))
        total += tl.sum(gains)
    return low, high, total


@triton.jit
def _find_edge(entries, draw, low, high, target, BY_WEIGHT: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """The largest key whose entries and those above it gain `target`, and the last column kept of those with this key.

    Throughout, the key looked for is between `low` and `high`, which are keys of entries.
    """
    while low < high:
        middle = low + (high - low + 1) // 2
        mass = tl.full([], 0.0, tl.float64)
        next_above = tl.full([], _MAX_KEY, tl.int64)
        next_below = tl.full([], NO_KEY, tl.int64)
        for start in range(0, entries[2], CHUNK):
            _, keys, gains = _keys_and_gains(entries, start, draw, BY_WEIGHT, CHUNK, GROUP)
            mass += tl.sum(tl.where(keys >= middle, gains, 0.0))
            next_above = tl.minimum(next_above, tl.min(tl.where(keys >= middle, keys, _MAX_KEY)))
            next_below = tl.maximum(next_below, tl.max(tl.where(keys < middle, keys, NO_KEY)))
        low = tl.where(mass >= target, next_above, low)
        high = tl.where(mass >= target, high, next_below)
    above = tl.full([], 0.0, tl.float64)
    num_equal = tl.full([], 0, tl.int32)
    for start in range(0, entries[2], CHUNK):
        _, keys, gains = _keys_and_gains(entries, start, draw, BY_WEIGHT, CHUNK, GROUP)
        above += tl.sum(tl.where(keys > low, gains, 0.0))
        num_equal += tl.sum((keys == low).to(tl.int32))
    gain = low.to(tl.float64, bitcast=True) if BY_WEIGHT else 1.0
    room = tl.ceil((target - above) / gain)
    first_last, last = tl.full([], 0, tl.int32), entries[3] - 1
    while (first_last < last) & (room < num_equal):
        middle_column = (first_last + last) // 2
        count = tl.full([], 0, tl.int32)
        for start in range(0, entries[2], CHUNK):
            columns, keys, _ = _keys_and_gains(entries, start, draw, BY_WEIGHT, CHUNK, GROUP)
            count += tl.sum(((keys == low) & (columns <= middle_column)).to(tl.int32))
        last = tl.where(count >= room, middle_column, last)
        first_last = tl.where(count >= room, tl.where(count == room, middle_column, first_last), middle_column + 1)
    return low, last


@triton.jit
def _draw(entries, draw, noise, edge, last, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """The kept column with the best score."""
    seed, choice, position = noise
    best_score = tl.full([], float("-inf"), tl.float64)
    best_column = tl.full([], 0, tl.int32)
    for start in range(0, entries[2], CHUNK):
        columns, x, is_entry = _chunk(entries, start, CHUNK, GROUP)
        weights = _weights(x, columns, is_entry, draw)
        keys = weights.to(tl.int64, bitcast=True)
        is_kept = (weights >= 0.0) & ((keys > edge) | ((keys == edge) & (columns <= last)))
        if tl.max(is_kept.to(tl.int32)) > 0:
            blocks = tl.min(tl.reshape(columns, [CHUNK * GROUP // 4, 4]), axis=1) // 4
            word0, word1, word2, word3 = noise_of_blocks(seed, choice, position, blocks)
            variates = gumbel(in_column_order(word0, word1, word2, word3))
            scores = tl.where(is_kept, x.to(tl.float64) / draw[1] + variates, float("-inf"))
            score = tl.max(scores)
            column = tl.min(tl.where(scores == score, columns, LAST_COLUMN))
            best_column = tl.where(score > best_score, column, best_column)
            best_score = tl.where(score > best_score, score, best_score)
    return best_column


@triton.jit
def _draw_filtered(entries, draw, noise, k, share, total, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """The token of a filtered row. `total` is the mass of all tokens that min-p keeps, for a row without top-k."""
    has_top_k = (k > 0) & (k < entries[3])
    edge, last = tl.full([], NO_KEY, tl.int64), entries[3] - 1
    if has_top_k:
        low, high, _ = _range(entries, draw, False, CHUNK, GROUP)
        edge, last = _find_edge(entries, draw, low, high, k.to(tl.float64), False, CHUNK, GROUP)
    largest, scale, least, _, _ = draw
    left = largest, scale, least, edge, last
    edge, last = tl.full([], NO_KEY, tl.int64), entries[3] - 1
    if share < 1.0:
        low, high, listed = _range(entries, left, True, CHUNK, GROUP)
        target = share * tl.where(has_top_k, listed, total)
        edge, last = _find_edge(entries, left, low, high, target, True, CHUNK, GROUP)
    return _draw(entries, left, noise, edge, last, CHUNK, GROUP)


@triton.jit
def _best_part(best_scores, best_columns, row, NUM_PARTS: tl.constexpr, PARTS: tl.constexpr):
    parts = tl.arange(0, PARTS)
    is_part = parts < NUM_PARTS
    scores = tl.load(best_scores + row * NUM_PARTS + parts, mask=is_part, other=float("-inf"))
    columns = tl.load(best_columns + row * NUM_PARTS + parts, mask=is_part, other=LAST_COLUMN)
    return tl.min(tl.where(scores == tl.max(scores), columns, LAST_COLUMN))


@triton.jit
def _decide_kernel(
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
    groups,
    group_counts,
    row_totals,
    token_ids,
    is_finite,
    num_columns,
    num_groups,
    NUM_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0)
    kind = row_kind(temperature, top_k, top_p, min_p, row, num_columns)
    peak = row_peak(peaks, row, NUM_PARTS, PARTS)
    largest = value_of(peak)
    token = column_of(peak)
    if kind == 1:
        token = _best_part(best_scores, best_columns, row, NUM_PARTS, PARTS)
    if kind == FILTERED:
        entries = (
            logits + row.to(tl.int64) * row_stride,
            groups + row * num_groups,
            tl.load(group_counts + row),
            num_columns,
        )
        scale, least = tl.load(temperature + row).to(tl.float64), tl.load(min_p + row).to(tl.float64)
        draw = largest, scale, least, tl.full([], NO_KEY, tl.int64), num_columns - 1
        noise = tl.load(seed + row), tl.load(choice + row), tl.load(position + row)
        share = tl.load(top_p + row).to(tl.float64)
        token = _draw_filtered(
            entries, draw, noise, tl.load(top_k + row), share, tl.load(row_totals + row), CHUNK, GROUP
        )
    # A row that is not finite gets some token, which must be one.
    tl.store(token_ids + row, tl.minimum(token, num_columns - 1).to(tl.int64))
    tl.store(is_finite + row, (tl.abs(largest) < float("inf")).to(tl.int8))
