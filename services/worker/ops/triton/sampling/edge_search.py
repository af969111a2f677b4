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
def range_of(candidates, draw, known, BY_WEIGHT: tl.constexpr, CHUNK: tl.constexpr):
    """The smallest key, the largest, and the sum of all gains. `known` is the first chunk's `keys_and_gains`."""
    _, high, total = known
    low = tl.where(high > _NO_KEY, high, _MAX_KEY)
    for start in range(CHUNK, candidates[3], CHUNK):
        _, keys, gains = _load_known(candidates, draw, start, BY_WEIGHT, CHUNK)
        low = tl.minimum(low, tl.where(keys > _NO_KEY, keys, _MAX_KEY))
        high, total = tl.maximum(high, keys), total + gains
    return tl.min(low), tl.max(high), tl.sum(total)


@triton.jit
def _split(known, middle):
    """For each candidate its gain if its key reaches `middle`; its key if it does, if it does not."""
    _, keys, gains = known
    reaches = keys >= middle
    return tl.where(reaches, gains, 0.0), tl.where(reaches, keys, _MAX_KEY), tl.where(reaches, _NO_KEY, keys)


@triton.jit
def _at_edge(known, edge):
    """For each candidate its gain if it is above the edge, and whether it is at the edge."""
    _, keys, gains = known
    return tl.where(keys > edge, gains, 0.0), (keys == edge).to(tl.int32)


@triton.jit
def _is_up_to(known, edge, column):
    columns, keys, _ = known
    return ((keys == edge) & (columns <= column)).to(tl.int32)


@triton.jit
def _last_column(candidates, draw, known, edge, room, BY_WEIGHT: tl.constexpr, CHUNK: tl.constexpr):
    """The lowest column up to which `room` candidates are at the edge."""
    low, high = tl.full([], 0, tl.int32), candidates[5] - 1
    while low < high:
        middle = (low + high) // 2
        counted = _is_up_to(known, edge, middle)
        for start in range(CHUNK, candidates[3], CHUNK):
            counted += _is_up_to(_load_known(candidates, draw, start, BY_WEIGHT, CHUNK), edge, middle)
        count = tl.sum(counted)
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
        masses, above, below = _split(known, middle)
        # Chunks are added up lane by lane, so that a long list needs no more reductions than a short one.
        for start in range(CHUNK, candidates[3], CHUNK):
            more, keys_above, keys_below = _split(_load_known(candidates, draw, start, BY_WEIGHT, CHUNK), middle)
            masses, above, below = masses + more, tl.minimum(above, keys_above), tl.maximum(below, keys_below)
        mass, next_above, next_below = tl.sum(masses), tl.min(above), tl.max(below)
        low = tl.where(mass >= target, next_above, low)
        high = tl.where(mass > target, high, tl.where(mass == target, next_above, next_below))
    masses, equal = _at_edge(known, low)
    for start in range(CHUNK, candidates[3], CHUNK):
        more, more_equal = _at_edge(_load_known(candidates, draw, start, BY_WEIGHT, CHUNK), low)
        masses, equal = masses + more, equal + more_equal
    gain = 1.0
    if BY_WEIGHT:
        gain = low.to(tl.float64, bitcast=True)
    room = tl.ceil((target - tl.sum(masses)) / gain)
    last = candidates[5] - 1
    if room < tl.sum(equal):
        last = _last_column(candidates, draw, known, low, room, BY_WEIGHT, CHUNK)
    return low, last
