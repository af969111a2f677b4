"""Numbers the tiles of all sequences' new tokens one after the other.

So a launch has hardly any programs without work, however lengths differ:

    tokens of the step          A A A A A A B B C C C C C            4 tokens per tile
    their tiles                 0 0 0 0 1 1 2 2 4 4 4 4 5            tile 3 is empty

Sequence i begins with tile `cu_seqlens_q[i] // 4 + i`, which leaves room for all tiles of the sequences before it.
Tiles of one token need no room.
"""

from __future__ import annotations

import triton
import triton.language as tl


def count_tiles(num_tokens: int, num_seqs: int, tile_tokens: int) -> int:
    """How many numbers the tiles of at most `num_tokens` consecutive tokens take."""
    return num_tokens // tile_tokens + (num_seqs if tile_tokens > 1 else 0)


@triton.jit
def find_tile(cu_seqlens_q, num_seqs, tile, begin, tile_tokens: tl.constexpr):
    """The tokens of tile number `tile`, if numbers begin with the step's token `begin`.

    Args:
        begin: A token of the first sequence in `cu_seqlens_q`, or a later one.

    Returns:
        (the sequence, its first row of the step, its number of tokens, the first of them in the tile). An empty tile
        begins after the sequence's last token.
    """
    room: tl.constexpr = 1 if tile_tokens > 1 else 0
    # The last sequence that begins with the tile or an earlier one.
    low = num_seqs * 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.maximum(tl.load(cu_seqlens_q + middle), begin)
        is_later = (first - begin) // tile_tokens + middle * room > tile
        low = tl.where(is_later, low, middle)
        high = tl.where(is_later, middle, high)
    start = tl.load(cu_seqlens_q + low)
    query_len = tl.load(cu_seqlens_q + low + 1) - start
    first = tl.maximum(start, begin)
    place = tile - low * room - (first - begin) // tile_tokens
    return low, start, query_len, first - start + place * tile_tokens
