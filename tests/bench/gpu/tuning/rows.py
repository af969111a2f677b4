"""Kernels that have a program for each row, or for parts of it, for the tune stage: norms, rotation, sampling."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
from torch import Tensor

from services.worker.ops.arguments import Activation, DrawRows, HeadNorms, RopeRows
from services.worker.ops.triton import activation, norm_rope_write
from services.worker.ops.triton.norm import add_rms_norm, choose_num_warps
from services.worker.ops.triton.sampling import greedy
from services.worker.ops.triton.sampling.row_scan import TILE
from services.worker.ops.triton.sampling.sample import choose_tiles_per_part, sample
from tests.bench.gpu.floors import Work
from tests.bench.gpu.kernels.sizes import PUBLISHED, TINY, Sizes
from tests.bench.gpu.tuning.subjects import Launches, Place, Subject, Variant, grid

_EPS = 1e-6
_NUM_WARPS: tuple[Variant, ...] = tuple({"num_warps": warps} for warps in (2, 4, 8, 16))
_SILU: tuple[Variant, ...] = tuple(
    {"columns": columns, "num_warps": warps} for columns, warps in grid((512, 1024, 2048), (2, 4, 8))
)
_HEADS: tuple[Variant, ...] = tuple(
    {"tile_size": size, "elements_per_warp": per_warp}
    for size, per_warp in grid((128, 256, 512, 1024, 2048), (128, 256, 512))
)
_GREEDY: tuple[Variant, ...] = tuple(
    {"tile": tile, "num_warps": warps} for tile, warps in grid((2048, 4096, 8192, 16384), (4, 8, 16))
)
_PARTS: tuple[Variant, ...] = tuple({"tiles_per_part": tiles} for tiles in (1, 2, 4, 8))


def row_subjects(*, is_tiny: bool) -> Iterator[Subject]:
    """A decode step's kernels of one row, and of many."""
    sizes, most = (TINY, 1) if is_tiny else (PUBLISHED, None)
    for num_rows in (sizes.num_tokens,) if is_tiny else (1, sizes.num_tokens):
        for name, make, variants in (
            (f"add_rms_norm {num_rows} x {sizes.hidden}", _norm, _NUM_WARPS),
            (f"act_and_mul {num_rows} x {sizes.inner}", _silu, _SILU),
            (f"norm_rope_write {num_rows} x {sizes.num_heads} + {sizes.num_kv_heads} heads", _write_heads, _HEADS),
            (f"greedy_sample {num_rows} x {sizes.vocabulary}", _greedy, _GREEDY),
            (f"sample {num_rows} x {sizes.vocabulary}", _sample, _PARTS),
        ):
            yield Subject(name, partial(make, sizes, num_rows), (variants[:most],))


def _norm(sizes: Sizes, num_rows: int, place: Place) -> Launches:
    x, residual = (place.random(num_rows, sizes.hidden) for _ in range(2))
    weight = place.random(sizes.hidden)

    def launch(_: int, **variant: object) -> None:
        add_rms_norm(x, residual, weight, _EPS, **variant)  # type: ignore[arg-type]

    default = {"num_warps": choose_num_warps(triton.next_power_of_2(sizes.hidden))}
    return Launches(launch, default, Work(4 * x.nbytes, 0))


def _silu(sizes: Sizes, num_rows: int, place: Place) -> Launches:
    x = place.random(num_rows, 2 * sizes.inner)

    def launch(_: int, **variant: object) -> Tensor:
        return activation.act_and_mul(x, Activation.SILU, **variant)  # type: ignore[arg-type]

    default = {"columns": activation.COLUMNS, "num_warps": activation.NUM_WARPS}
    return Launches(launch, default, Work(1.5 * x.nbytes, 0))


def _write_heads(sizes: Sizes, num_rows: int, place: Place) -> Launches:
    num_heads, num_kv, width = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    qkv, weight = place.random(num_rows, (num_heads + 2 * num_kv) * width), place.random(width)
    cache = tuple(place.random(num_rows, 1, num_kv, width) for _ in range(2))
    table = place.random(64, width // 2, dtype=torch.float32)
    positions = torch.full((num_rows,), 15, dtype=torch.int64, device=place.device)
    slots = torch.arange(num_rows, device=place.device)
    rows, norms = RopeRows(table, table, positions, is_interleaved=False), HeadNorms(weight, weight, _EPS)

    def launch(_: int, **variant: object) -> None:
        norm_rope_write.norm_rope_write(
            qkv,
            norms,
            rows,
            num_heads=num_heads,
            cache=cache,
            slot_mapping=slots,
            **variant,  # type: ignore[arg-type]
        )

    default = {"tile_size": norm_rope_write.TILE_SIZE, "elements_per_warp": norm_rope_write.ELEMENTS_PER_WARP}
    return Launches(launch, default, Work(2 * qkv.nbytes, 0))


def _greedy(sizes: Sizes, num_rows: int, place: Place) -> Launches:
    logits = place.random(num_rows, sizes.vocabulary, dtype=torch.float32)

    def launch(_: int, **variant: object) -> Tensor:
        return greedy.greedy_sample(logits, **variant)[0]  # type: ignore[arg-type]

    return Launches(launch, {"tile": greedy.TILE, "num_warps": greedy.NUM_WARPS}, Work(logits.nbytes, 0))


def _sample(sizes: Sizes, num_rows: int, place: Place) -> Launches:
    logits = place.random(num_rows, sizes.vocabulary, dtype=torch.float32)

    def full(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=place.device)

    # Qwen3's own defaults.
    rows = DrawRows(
        temperature=full(0.6, torch.float32),
        top_k=full(20, torch.int32),
        top_p=full(0.95, torch.float32),
        min_p=full(0.0, torch.float32),
        seed=torch.arange(num_rows, device=place.device),
        choice=full(0, torch.int64),
        position=full(1000, torch.int64),
    )

    def launch(_: int, **variant: object) -> Tensor:
        return sample(logits, rows, **variant)[0]  # type: ignore[arg-type]

    default = {"tiles_per_part": choose_tiles_per_part(num_rows, triton.cdiv(sizes.vocabulary, TILE))}
    return Launches(launch, default, Work(logits.nbytes, 0))
