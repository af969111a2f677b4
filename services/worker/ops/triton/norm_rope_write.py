"""What a layer does between its query-key-value projection and its attention, in one launch.

A program has a few heads of one token: of its query, of its key, or of its value.

    heads of a row of qkv       query 0 .. H-1          key 0 .. K-1            value 0 .. K-1
    done with them              norm, rotation          norm, rotation
    written to                  their place in qkv      the key cache           the value cache

The key's place in qkv is not written: attention reads keys from the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from services.worker.forward.kv_cache import split_scales
from services.worker.ops.arguments import HeadNorms, RopeRows
from services.worker.ops.triton.kv_write import store_cached
from services.worker.ops.triton.rope import load_rotation

TILE_SIZE, ELEMENTS_PER_WARP = 512, 256
"""Elements of a program, and of one of its warps: each thread then holds 8 of them at most."""


@triton.jit
def _load_columns(places, columns, mask):
    return tl.load(places + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _scale(values, inverse_root, weight, columns, mask, dtype: tl.constexpr):
    scales = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    # Rounded as a norm on its own would round its result.
    return (values * inverse_root * scales[None, :]).to(dtype).to(tl.float32)


@triton.jit
def _norm_rope_heads(
    source,
    target,
    target_scale,
    weight,
    cosines,
    sines,
    has_row,
    eps,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    # Every element is stored by the thread that loaded it, or after all loads of its pair: `target` may be `source`.
    pairs = tl.arange(0, PAIRS)
    has_pair = pairs < HALF
    first_columns = 2 * pairs if IS_INTERLEAVED else pairs
    second_columns = first_columns + (1 if IS_INTERLEAVED else HALF)
    mask = has_row[:, None] & has_pair[None, :]
    first = _load_columns(source, first_columns, mask)
    second = _load_columns(source, second_columns, mask)
    dtype: tl.constexpr = source.dtype.element_ty
    if REST > 0:
        rest_columns = 2 * HALF + tl.arange(0, REST)
        has_rest = rest_columns < HEAD_DIM
        rest_mask = has_row[:, None] & has_rest[None, :]
        rest = _load_columns(source, rest_columns, rest_mask)
    if HAS_NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if REST > 0:
            squares += tl.sum(rest * rest, axis=1)
        inverse_root = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first = _scale(first, inverse_root, weight, first_columns, has_pair, dtype)
        second = _scale(second, inverse_root, weight, second_columns, has_pair, dtype)
        if REST > 0:
            rest = _scale(rest, inverse_root, weight, rest_columns, has_rest, dtype)
    rotated_first = first * cosines[None, :] - second * sines[None, :]
    rotated_second = second * cosines[None, :] + first * sines[None, :]
    store_cached(target + first_columns[None, :], rotated_first.to(dtype), mask, target_scale)
    store_cached(target + second_columns[None, :], rotated_second.to(dtype), mask, target_scale)
    if REST > 0:
        store_cached(target + rest_columns[None, :], rest.to(dtype), rest_mask, target_scale)


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _norm_rope_write_kernel(
    qkv,
    query_weight,
    key_weight,
    cos,
    sin,
    positions,
    key_cache,
    value_cache,
    key_scale,
    value_scale,
    slot_mapping,
    row_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    row = qkv + token * row_stride
    query_tiles: tl.constexpr = (NUM_HEADS + ROWS - 1) // ROWS
    kv_tiles: tl.constexpr = (NUM_KV_HEADS + ROWS - 1) // ROWS
    if tile < query_tiles:
        cosines, sines = load_rotation(cos, sin, positions, token, HALF, PAIRS)
        heads = tile * ROWS + rows
        source = row + heads[:, None] * HEAD_DIM
        _norm_rope_heads(
            source,
            source,
            None,
            query_weight,
            cosines,
            sines,
            heads < NUM_HEADS,
            eps,
            HEAD_DIM,
            HALF,
            PAIRS,
            REST,
            HAS_NORM,
            IS_INTERLEAVED,
        )
    else:
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            if tile < query_tiles + kv_tiles:
                cosines, sines = load_rotation(cos, sin, positions, token, HALF, PAIRS)
                heads = (tile - query_tiles) * ROWS + rows
                _norm_rope_heads(
                    row + (NUM_HEADS + heads)[:, None] * HEAD_DIM,
                    key_cache + slot * NUM_KV_HEADS * HEAD_DIM + heads[:, None] * HEAD_DIM,
                    key_scale,
                    key_weight,
                    cosines,
                    sines,
                    heads < NUM_KV_HEADS,
                    eps,
                    HEAD_DIM,
                    HALF,
                    PAIRS,
                    REST,
                    HAS_NORM,
                    IS_INTERLEAVED,
                )
            else:
                heads = (tile - query_tiles - kv_tiles) * ROWS + rows
                columns = tl.arange(0, COLUMNS)
                mask = (heads < NUM_KV_HEADS)[:, None] & (columns < HEAD_DIM)[None, :]
                places = heads[:, None] * HEAD_DIM + columns[None, :]
                values = tl.load(row + (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM + places, mask=mask, other=0.0)
                store_cached(value_cache + slot * NUM_KV_HEADS * HEAD_DIM + places, values, mask, value_scale)


def norm_rope_write(
    qkv: Tensor,
    norms: HeadNorms | None,
    rope: RopeRows,
    *,
    num_heads: int,
    cache: tuple[Tensor, ...],
    slot_mapping: Tensor,
    tile_size: int = TILE_SIZE,
    elements_per_warp: int = ELEMENTS_PER_WARP,
) -> None:
    """`Ops.rms_norm` of query and key heads, `Ops.rope` and `Ops.write_kv`, without writing the key's place in `qkv`.

    Args:
        qkv: [T, (H + 2 K) * D], rows contiguous: query | key | value. The query is written in place.
        norms: None means that heads are not normalised.
        rope: Whole tables [max_positions, rotary_dim / 2] float32, contiguous, and `positions` [T] int64, each below
            max_positions.
        num_heads: H.
        cache: Keys and values, each [num_blocks, block_size, K, D], contiguous, of the dtype of `qkv`, or in
            float8_e4m3fn with their scales [1] float32. Both are written in place.
        slot_mapping: [T] int64, no repeats; a token with slot -1 is not written to the cache.
        tile_size: A power of two, as is `elements_per_warp`.

    Source: arXiv:1910.07467, equation 4; arXiv:2104.09864, equation 34; arXiv:2309.06180, section 4.1.
    """
    num_kv_heads, head_dim = cache[0].shape[2:]
    half = rope.cos.shape[1]
    columns, pairs = triton.next_power_of_2(head_dim), triton.next_power_of_2(half)
    # Heads per program: as many as fill a tile, but no more than a token has of one kind.
    num_rows = min(triton.next_power_of_2(max(num_heads, num_kv_heads)), max(tile_size // columns, 1))
    num_tiles = triton.cdiv(num_heads, num_rows) + 2 * triton.cdiv(num_kv_heads, num_rows)
    _norm_rope_write_kernel[(len(qkv), num_tiles)](
        qkv,
        None if norms is None else norms.query,
        None if norms is None else norms.key,
        rope.cos,
        rope.sin,
        rope.positions,
        *split_scales(cache),
        slot_mapping,
        qkv.stride(0),
        0.0 if norms is None else norms.eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        PAIRS=pairs,
        REST=triton.next_power_of_2(head_dim - 2 * half) if head_dim > 2 * half else 0,
        COLUMNS=columns,
        ROWS=num_rows,
        HAS_NORM=norms is not None,
        IS_INTERLEAVED=rope.is_interleaved,
        num_warps=max(num_rows * columns // elements_per_warp, 1),
    )
