"""Chooses the groups of columns that may hold tokens which a row's filters keep.

A row's cut is a logit below which no token is kept; groups whose largest logit reaches it are listed, ascending. All
later work reads only these. Let m be the row's largest logit and T its temperature. The cut is the largest of:

    top-k   the value that at least k groups' maxima reach, so at least k logits do
    min-p   m + T log(min_p)
    top-p   without top-k: the highest of a few levels m - T d, such that the logits that reach it hold top_p

`_slack` lowers the last two by 2**-20 (|m| + T |d|). The float64 roundings of a scaled logit are 2**-50 of that, and so
is the distance of two logits whose float64 weights are equal: no kept token is below the cut. The levels' masses are
float32 sums within each tile, at most 2**-12 wrong, hence the surcharge `_SURCHARGE`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.worker.ops.triton.sampling.ordering import LOWEST_KEY, ordered_keys, value_of
from services.worker.ops.triton.sampling.row_scan import FILTERED, PER_BATCH, PER_ROW

NUM_LEVELS = 8
_SURCHARGE = tl.constexpr(1 + 2.0**-11)
# The distance of neighbouring levels, in units of the temperature.
_LEVEL_STEP = tl.constexpr(1.5)


@triton.jit
def row_peak(peaks, row, num_parts, PARTS: tl.constexpr):
    """The `ranked` of the row's first entry: the largest of its parts'."""
    parts = tl.arange(0, PARTS)
    return tl.max(tl.load(peaks + row * num_parts + parts, mask=parts < num_parts, other=-(2**63)))


@triton.jit
def weights_of(x, largest, temperature, min_p):
    """The float64 weight of each logit beside the largest; 0 where min-p removes it. As `token_draw` computes them."""
    weights = tl.exp(x.to(tl.float64) / temperature - largest.to(tl.float64) / temperature)
    return tl.where(weights >= min_p, weights, 0.0)


@triton.jit
def _needs_masses(top_k, top_p, row, num_columns):
    k = tl.load(top_k + row)
    return (tl.load(top_p + row) < 1.0) & ((k <= 0) | (k >= num_columns))


@triton.jit
def _slack(largest, drop):
    return (tl.abs(largest) + drop) * 2.0**-20


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=PER_ROW)
def mass_kernel(
    logits,
    row_stride,
    kinds,
    peaks,
    totals,
    level_masses,
    num_columns,
    num_tiles,
    temperature,
    top_k,
    top_p,
    min_p,
    num_parts,
    PARTS: tl.constexpr,
    tiles_per_part,
    TILE: tl.constexpr,
    NUM_LEVELS: tl.constexpr,
):
    """Sum up the weights of each tile, and of what reaches each level in it; see the module."""
    row, part = tl.program_id(0), tl.program_id(1)
    if tl.load(kinds + row) != FILTERED:
        return
    if not _needs_masses(top_k, top_p, row, num_columns):
        return
    scale, least = tl.load(temperature + row).to(tl.float64), tl.load(min_p + row).to(tl.float64)
    largest = value_of(row_peak(peaks, row, num_parts, PARTS))
    for tile in range(part * tiles_per_part, tl.minimum((part + 1) * tiles_per_part, num_tiles)):
        columns = tile * TILE + tl.arange(0, TILE)
        x = tl.load(logits + row.to(tl.int64) * row_stride + columns, mask=columns < num_columns, other=float("-inf"))
        weights = weights_of(x, largest, scale, least)
        place = row * num_tiles + tile
        tl.store(totals + place, tl.sum(weights))
        rough = weights.to(tl.float32)
        for level in tl.static_range(NUM_LEVELS):
            reaches = x >= (largest.to(tl.float64) - scale * (_LEVEL_STEP * (level + 1))).to(tl.float32)
            tl.store(level_masses + place * NUM_LEVELS + level, tl.sum(tl.where(reaches, rough, 0.0)))


@triton.jit
def group_keys(group_maxima, row, num_groups, GROUPS: tl.constexpr):
    """The `ordered_keys` of a row's group maxima, [GROUPS]; the lowest there is past the last."""
    group = tl.arange(0, GROUPS)
    maxima = tl.load(group_maxima + row * num_groups + group, mask=group < num_groups, other=float("-inf"))
    return tl.where(group < num_groups, ordered_keys(maxima), LOWEST_KEY)


@triton.jit
def cut_of_top_k(keys, k):
    """A key that at least `k` and normally at most 3/2 k of the `keys` reach; `LOWEST_KEY` if there are too few."""
    # The difference of two keys may have 33 bits.
    low, high = tl.min(keys).to(tl.int64), tl.max(keys).to(tl.int64)
    num_reaching = tl.sum((keys > LOWEST_KEY).to(tl.int32))
    low = tl.where(num_reaching >= k, low, high)
    while (low < high) & (num_reaching > k + k // 2):
        middle = low + (high - low + 1) // 2
        count = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32))
        num_reaching = tl.where(count >= k, count, num_reaching)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count >= k, high, middle - 1)
    return tl.where(num_reaching >= k, low.to(tl.int32), LOWEST_KEY)


@triton.jit
def list_groups(keys, cut_key, num_groups, groups, group_count, GROUPS: tl.constexpr):
    """Write the groups whose key reaches the cut, ascending, and their number."""
    group = tl.arange(0, GROUPS)
    is_chosen = (keys >= cut_key) & (group < num_groups)
    places = tl.cumsum(is_chosen.to(tl.int32)) - 1
    tl.store(groups + places, group, mask=is_chosen)
    tl.store(group_count, tl.sum(is_chosen.to(tl.int32)))


@triton.jit
def _cut_of_top_p(totals, level_masses, row, largest, scale, share, num_tiles, TILES, NUM_LEVELS):
    """The cut, and the mass of all tokens that min-p keeps."""
    tiles, levels = tl.arange(0, TILES), tl.arange(0, NUM_LEVELS)
    places = row * num_tiles + tiles
    total = tl.sum(tl.load(totals + places, mask=tiles < num_tiles, other=0.0))
    in_tiles = places[:, None] * NUM_LEVELS + levels[None, :]
    masses = tl.load(level_masses + in_tiles, mask=(tiles < num_tiles)[:, None], other=0.0).to(tl.float64)
    is_enough = tl.sum(masses, axis=0) >= share * total * _SURCHARGE
    level = tl.min(tl.where(is_enough, levels, NUM_LEVELS))
    drop = scale * (_LEVEL_STEP * (level + 1).to(tl.float64))
    cut = largest - drop - _slack(largest, drop)
    return tl.where(level < NUM_LEVELS, cut, float("-inf")), total


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=PER_ROW)
def choose_kernel(
    kinds,
    peaks,
    group_maxima,
    totals,
    level_masses,
    cut_keys,
    groups,
    group_counts,
    row_totals,
    num_columns,
    num_groups,
    num_tiles,
    temperature,
    top_k,
    top_p,
    min_p,
    num_parts,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    NUM_LEVELS: tl.constexpr,
):
    """Write a row's cut, its chosen groups, and the mass of all its tokens where top-p needs it."""
    row = tl.program_id(0)
    if tl.load(kinds + row) != FILTERED:
        return
    scale, least = tl.load(temperature + row).to(tl.float64), tl.load(min_p + row).to(tl.float64)
    largest = value_of(row_peak(peaks, row, num_parts, PARTS)).to(tl.float64)
    cut = tl.full([], float("-inf"), tl.float64)
    if least > 0.0:
        drop = scale * -(tl.log(least) - 1e-6)
        cut = tl.maximum(cut, largest - drop - _slack(largest, drop))
    if _needs_masses(top_k, top_p, row, num_columns):
        share = tl.load(top_p + row).to(tl.float64)
        top_p_cut, total = _cut_of_top_p(totals, level_masses, row, largest, scale, share, num_tiles, TILES, NUM_LEVELS)
        cut = tl.maximum(cut, top_p_cut)
        tl.store(row_totals + row, total)
    keys = group_keys(group_maxima, row, num_groups, GROUPS)
    # One less, since the cut may have been rounded up.
    cut_key = ordered_keys(cut.to(tl.float32)) - 1
    k = tl.load(top_k + row)
    if (k > 0) & (k < num_columns):
        cut_key = tl.maximum(cut_key, cut_of_top_k(keys, k))
    tl.store(cut_keys + row, cut_key)
    list_groups(keys, cut_key, num_groups, groups + row * num_groups, group_counts + row, GROUPS)
