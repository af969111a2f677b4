"""Products with plain and with packed weights, and experts, for the tune stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import prod

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from services.worker.ops import ExpertWeights, RouterScore, RoutingRule
from services.worker.ops.matrices import Fp8Matrix, IntMatrix
from services.worker.ops.routing import route
from services.worker.ops.triton.products.experts import ExpertSizes, TritonExperts
from services.worker.ops.triton.products.fp8_rows import OCP, Fp8Encoding
from services.worker.ops.triton.products.linear import PackedLinear
from services.worker.ops.triton.products.tile_sizes import TileSizes, choose_rows, choose_sizes, choose_splits
from tests.bench.gpu.floors import Work, expected_touched
from tests.bench.gpu.kernels.sizes import PUBLISHED, TINY, Sizes
from tests.bench.gpu.tuning.subjects import Launches, Place, Subject, Variant, num_copies

# Rows, columns, depth, warps, stages; by the rows of the product. Groups of 128 columns need a depth of 128.
_ONE_ROW = (
    *((16, 16, 128, 4, 4), (16, 32, 128, 2, 4), (16, 32, 128, 4, 3), (16, 32, 128, 4, 5), (16, 32, 256, 4, 3)),
    *((16, 64, 128, 4, 3), (16, 64, 128, 4, 5), (16, 64, 128, 8, 4), (16, 64, 256, 4, 3), (16, 128, 128, 4, 3)),
    *((16, 128, 128, 8, 4), (16, 32, 256, 4, 4)),
)
_SOME_ROWS = (
    *((16, 64, 128, 4, 4), (32, 32, 128, 4, 4), (32, 64, 128, 4, 3), (32, 64, 128, 4, 4), (32, 128, 128, 4, 3)),
    *((32, 128, 128, 8, 3), (64, 64, 64, 4, 4), (64, 64, 128, 4, 3), (64, 64, 128, 4, 4), (64, 128, 64, 4, 3)),
    *((64, 128, 64, 4, 4), (64, 128, 128, 4, 3), (64, 128, 128, 8, 3)),
)
_MANY_ROWS = (
    *((64, 128, 64, 4, 3), (64, 128, 64, 4, 4), (64, 128, 128, 4, 3), (64, 256, 64, 8, 3), (128, 64, 128, 4, 3)),
    *((128, 64, 128, 8, 3), (128, 64, 128, 8, 4), (128, 128, 64, 4, 3), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4)),
    *((128, 128, 128, 8, 3), (128, 256, 64, 8, 3), (256, 128, 64, 8, 3)),
)
_NUM_SPLITS = (1, 2, 4, 8, 16)
_SPLIT_ROWS = 32
"""Sums of products with more rows are not split."""

_GROUP_SIZE = 128
# Which of torch's libraries multiplies.
_LIBRARIES = ("cublas", "cublaslt")
_FEW_ROWS = (1, 8, 32)


def dense_subjects(*, is_tiny: bool) -> Iterator[Subject]:
    """Products of a few rows with a model's projections as they are: by torch, and by the kernel of packed weights."""
    sizes, most = (TINY, 1) if is_tiny else (PUBLISHED, None)
    for num_rows in (3,) if is_tiny else _FEW_ROWS:
        ours = [TileSizes(*each) for each in _tried(num_rows)][:most]
        variants: tuple[Variant, ...] = (
            *({"library": library} for library in _LIBRARIES),
            *({"sizes": each} for each in ours),
        )
        for shape in _projections(sizes)[:most]:
            name = f"linear plain {num_rows} x {shape[1]} x {shape[0]}"
            yield Subject(name, partial(_dense, shape, num_rows), (variants,))


def product_subjects(*, is_tiny: bool) -> Iterator[Subject]:
    """A model's projections in FP8, with rows in FP8 and as they are, and in int4; the narrowest and widest first."""
    sizes, most = (TINY, 1) if is_tiny else (PUBLISHED, None)
    shapes = _projections(sizes)
    all_rows = (1,) if is_tiny else (1, 32, 256, 4096)
    for num_rows in all_rows:
        for shape in shapes[:2]:
            yield from _projection(shape, num_rows, most)
    for num_rows in () if is_tiny else all_rows[:2]:
        for shape in shapes[2:]:
            yield from _projection(shape, num_rows, most)


def expert_subjects(*, is_tiny: bool) -> Iterator[Subject]:
    """Plain experts."""
    sizes, most = (TINY, 1) if is_tiny else (PUBLISHED, None)
    for num_rows in (3,) if is_tiny else (1, 32, 256, 4096):
        per_expert = -(-num_rows * sizes.num_chosen // sizes.num_experts)
        name = f"experts {num_rows} x {sizes.num_chosen} of {sizes.num_experts}"
        tried = [TileSizes(*each) for each in _tried(per_expert)][:most]
        yield Subject(name, partial(_experts, sizes, num_rows), (tuple({"sizes": _both(each)} for each in tried),))


def _projections(sizes: Sizes) -> list[tuple[int, int]]:
    """The shapes of a layer's matrices: gate and up, output, query-key-value, down."""
    queries, kv = sizes.num_heads * sizes.head_dim, 2 * sizes.num_kv_heads * sizes.head_dim
    gate_up, output = (2 * sizes.inner, sizes.hidden), (sizes.hidden, queries)
    return [gate_up, output, (queries + kv, sizes.hidden), (sizes.hidden, sizes.inner)]


def _projection(shape: tuple[int, int], num_rows: int, most: int | None) -> Iterator[Subject]:
    splits: tuple[Variant, ...] = tuple({"num_splits": splits} for splits in _NUM_SPLITS)[:most]
    for kind, (make, encoding) in _KINDS.items():
        tried = [TileSizes(*sizes) for sizes in _tried(num_rows) if encoding is None or sizes[2] == _GROUP_SIZE]
        sizes: tuple[Variant, ...] = tuple({"sizes": each} for each in tried)[:most]
        name = f"linear {kind} {num_rows} x {shape[1]} x {shape[0]}"
        rounds = (sizes, splits) if num_rows <= _SPLIT_ROWS else (sizes,)
        yield Subject(name, partial(_linear, make, encoding, shape, num_rows), rounds)


def _tried(num_rows: int) -> tuple[tuple[int, int, int, int, int], ...]:
    if num_rows <= 16:
        return _ONE_ROW
    return _SOME_ROWS if num_rows <= 64 else _MANY_ROWS


def _dense(shape: tuple[int, int], num_rows: int, place: Place) -> Launches:
    num_bytes = prod(shape) * place.dtype.itemsize
    matrices = [place.random(*shape) for _ in range(num_copies(num_bytes))]
    kernels = [PackedLinear(matrix, None, place.dtype) for matrix in matrices]
    x = place.random(num_rows, shape[1])

    def launch(turn: int, *, library: str = "default", sizes: TileSizes | None = None) -> Tensor:
        if sizes is not None:
            return kernels[turn % len(kernels)](x, sizes=sizes)
        if place.device.type == "cuda":
            torch.backends.cuda.preferred_blas_library(library)
        return F.linear(x, matrices[turn % len(matrices)])

    return Launches(launch, {"library": "default"}, Work(num_bytes, 2 * num_rows * prod(shape)))


def _linear(
    make: Callable[[Place, tuple[int, int]], Fp8Matrix | IntMatrix],
    encoding: Fp8Encoding | None,
    shape: tuple[int, int],
    num_rows: int,
    place: Place,
) -> Launches:
    first = make(place, shape)
    num_bytes = first.codes.nbytes + first.scales.nbytes
    matrices = [first, *(make(place, shape) for _ in range(num_copies(num_bytes) - 1))]
    kernels = [PackedLinear(matrix, None, place.dtype, encoding=encoding) for matrix in matrices]
    x = place.random(num_rows, shape[1])

    def launch(turn: int, **variant: object) -> Tensor:
        return kernels[turn % len(kernels)](x, **variant)  # type: ignore[arg-type]

    sizes = choose_sizes(num_rows, *shape, x.dtype if encoding is None else encoding.dtype)
    num_tiles = triton.cdiv(num_rows, sizes.rows) * triton.cdiv(shape[0], sizes.columns)
    default: Variant = {"sizes": sizes, "num_splits": choose_splits(num_tiles, triton.cdiv(shape[1], sizes.depth))}
    return Launches(launch, default, Work(num_bytes, 2 * num_rows * prod(shape)))


def _experts(sizes: Sizes, num_rows: int, place: Place) -> Launches:
    hidden, inner, num_experts = sizes.expert_hidden, sizes.expert_inner, sizes.num_experts
    gate_up, down = place.random(num_experts, 2 * inner, hidden), place.random(num_experts, hidden, inner)
    weights = (ExpertWeights(*pair) for pair in zip(gate_up, down, strict=True))
    kernel = TritonExperts(weights, None, place.dtype)
    rule = RoutingRule(sizes.num_chosen, RouterScore.SOFTMAX, renormalizes=True)
    num_touched = expected_touched(num_experts, sizes.num_chosen, num_rows)
    expert_bytes = 3 * inner * hidden * place.dtype.itemsize
    copies = num_copies(num_touched * expert_bytes)
    chosen = [route(place.random(num_rows, num_experts, dtype=torch.float32), rule) for _ in range(copies)]
    x = place.random(num_rows, hidden)

    def launch(turn: int, **variant: object) -> Tensor:
        return kernel(x, *chosen[turn % copies], **variant)  # type: ignore[arg-type]

    rows = choose_rows(triton.cdiv(num_rows * sizes.num_chosen, num_experts), x.dtype)
    default = ExpertSizes(
        choose_sizes(rows, num_experts * 2 * inner, hidden, x.dtype),
        choose_sizes(rows, num_experts * hidden, inner, x.dtype),
    )
    work = Work(num_touched * expert_bytes, 6 * inner * hidden * num_rows * sizes.num_chosen)
    return Launches(launch, {"sizes": default}, work)


def _both(sizes: TileSizes) -> ExpertSizes:
    return ExpertSizes(sizes, sizes)


def _fp8(place: Place, shape: tuple[int, int]) -> Fp8Matrix:
    # No code is NaN.
    codes = torch.randint(0, 0x7F, shape, dtype=torch.uint8, device=place.device)
    return Fp8Matrix(codes, _scales(place, shape), _GROUP_SIZE)


def _int4(place: Place, shape: tuple[int, int]) -> IntMatrix:
    codes = torch.randint(0, 0x100, (shape[0], shape[1] // 2), dtype=torch.uint8, device=place.device)
    return IntMatrix(4, codes, _scales(place, shape), _GROUP_SIZE)


def _scales(place: Place, shape: tuple[int, int]) -> Tensor:
    return place.random(shape[0], -(-shape[1] // _GROUP_SIZE), dtype=torch.float32).abs()


_KINDS: dict[str, tuple[Callable[[Place, tuple[int, int]], Fp8Matrix | IntMatrix], Fp8Encoding | None]] = {
    "fp8, rows in fp8,": (_fp8, OCP),
    "fp8": (_fp8, None),
    "int4": (_int4, None),
}
