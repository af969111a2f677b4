"""Finds where top-k or top-p ends among a row's candidates.

Both are one search. Candidates are ordered by a key, and each has a gain:

            key                       gain          target
    top-k   `ordered_keys`            1             k
    top-p   bits of the weight        the weight    top_p times the sum of the gains

The filter keeps candidates in descending order of their keys until the gains reach the target, and of those with the
last key, the edge, the ones in the lowest columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.worker.ops.triton.sampling.candidates import load_candidates
from services.worker.ops.triton.sampling.ordering import ordered_keys

_NO_KEY = tl.constexpr(-(2**63))
_MAX_KEY = tl.constexpr(2**63 - 1)


@triton.jit
def weights_of_kept(chunk, draw):
    """The float64 weights of candidates that top-k and min-p keep; -1 for others.

    `draw` is the row's largest logit, temperature, min-p, and the edge and last column of top-k.
    """
    columns, x, is_candidate = chunk
    largest, scale, least, edge, last = draw
    keys = ordered_keys(x)
    is_kept = is_candidate & ((keys > edge) | ((keys == edge) & (columns <= last)))
    weights = tl.exp(x.to(tl.float64) / scale - largest.to(tl.float64) / scale)
    return tl.where(is_kept & (weights >= least), weights, -1.0)


@triton.jit
def keys_and_gains(chunk, draw, BY_WEIGHT: tl.constexpr):
    """Columns, int64 keys and float64 gains; `_NO_KEY` and 0 for candidates that do not take part."""
    columns, x, is_candidate = chunk
    if BY_WEIGHT:
        weights = weights_of_kept(chunk, draw)
        # Positive floats are in the order of their bits. Tokens without weight cannot be among the likeliest.
        keys = tl.where(weights > 0.0, weights.to(tl.int64, bitcast=True), _NO_KEY)
        gains = tl.where(weights > 0.0, weights, 0.0)
    else:
        keys = tl.where(is_candidate, ordered_keys(x).to(tl.int64), _NO_KEY)
        gains = tl.where(is_candidate, 1.0, 0.0).to(tl.float64)
    return columns, keys, gains


@triton.jit
def _load_known(candidates, draw, start, BY_WEIGHT: tl.constexpr, CHUNK: tl.constexpr):
    return keys_and_gains(load_candidates(candidates, start, CHUNK), draw, BY_WEIGHT)


@triton.jit
def _range(known):
    _, keys, gains = known
    return tl.min(tl.where(keys > _NO_KEY, keys, _MAX_KEY)), tl.max(keys), tl.sum(gains)


@triton.jit
def range_of(candidates, draw, known, BY_WEIGHT: tl.constexpr, CHUNK: tl.constexpr):
    """The smallest key, the largest, and the sum of all gains. `known` is the first chunk's `keys_and_gains`."""
    low, high, total = _range(known)
    for start in range(CHUNK, candidates[3], CHUNK):
        other_low, other_high, other_total = _range(_load_known(candidates, draw, start, BY_WEIGHT, CHUNK))
        low, high, total = tl.minimum(low, other_low), tl.maximum(high, other_high), total + other_total
    return low, high, total


@triton.jit
def _split(known, middle):
    """The gains from `middle` on, the lowest key there, and the highest key below."""
    _, keys, gains = known
    reaches = keys >= middle
    mass = tl.sum(tl.where(reaches, gains, 0.0))
    return mass, tl.min(tl.where(reaches, keys, _MAX_KEY)), tl.max(tl.where(reaches, _NO_KEY, keys))


@triton.jit
def _at_edge(known, edge):
    """The gains above the edge, and the number of candidates at it."""
    _, keys, gains = known
    return tl.sum(tl.where(keys > edge, gains, 0.0)), tl.sum((keys == edge).to(tl.int32))


@triton.jit
def _count_up_to(known, edge, column):
    columns, keys, _ = known
    return tl.sum(((keys == edge) & (columns <= column)).to(tl.int32))


@triton.jit
def _last_column(candidates, draw, known, edge, room, BY_WEIGHT: tl.constexpr, CHUNK: tl.constexpr):
    """The lowest column up to which `room` candidates are at the edge."""
    low, high = tl.full([], 0, tl.int32), candidates[5] - 1
    while low < high:
        middle = (low + high) // 2
        count = _count_up_to(known, edge, middle)
        for start in range(CHUNK, candidates[3], CHUNK):
            count += _count_up_to(_load_known(candidates, draw, start, BY_WEIGHT, CHUNK), edge, middle)
        # Any column with the right count will do.
        high = tl.where(count >= room, middle, high)
        low = tl.where(count > room, low, tl.where(count == room, middle, middle + 1))
    return high


@triton.jit
def find_edge(candidates, draw, known, low, high, target, BY_WEIGHT: tl.constexpr, CHUNK: tl.constexpr):
    """The edge, and the last column that is kept at the edge.

    Throughout, the edge is between `low` and `high`, which are keys of candidates: at first the lowest and the highest.
    If all gains together do not reach the target, everything is kept.
    """
    while low < high:
        middle = low + (high - low + 1) // 2
        mass, next_above, next_below = _split(known, middle)
        for start in range(CHUNK, candidates[3], CHUNK):
            other, above, below = _split(_load_known(candidates, draw, start, BY_WEIGHT, CHUNK), middle)
            mass, next_above, next_below = mass + other, tl.minimum(next_above, above), tl.maximum(next_below, below)
        low = tl.where(mass >= target, next_above, low)
        high = tl.where(mass > target, high, tl.where(mass == target, next_above, next_below))
    mass_above, num_equal = _at_edge(known, low)
    for start in range(CHUNK, candidates[3], CHUNK):
        other, count = _at_edge(_load_known(candidates, draw, start, BY_WEIGHT, CHUNK), low)
        mass_above, num_equal = mass_above + other, num_equal + count
    gain = 1.0
    if BY_WEIGHT:
        gain = low.to(tl.float64, bitcast=True)
    room = tl.ceil((target - mass_above) / gain)
    last = candidates[5] - 1
    if room < num_equal:
        last = _last_column(candidates, draw, known, low, room, BY_WEIGHT, CHUNK)
    return low, last
