"""Quantises matrices of floats, a few rows at a time, so that they never exist in float32 as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from services.worker.ops.matrices import IntMatrix
from services.worker.ops.matrix_rows import MatrixFormat

_HIGHEST_INT8, _HIGHEST_INT4 = 127, 15
_INT4_GROUP_SIZE = 32
_FLOAT16 = torch.finfo(torch.float16)
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def quantize(blocks: Iterable[Tensor], shape: tuple[int, int], matrix_format: MatrixFormat) -> IntMatrix:
    """Quantise a matrix to INT8 or INT4; the latter only if its number of columns is even, else INT8 too.

    A value that is not finite makes the scale of its group not finite.

    Args:
        blocks: Consecutive rows, [n, K] in any float dtype; not written.
        shape: (N, K) of all blocks together, at least 1.
    """
    assert matrix_format in {MatrixFormat.INT8, MatrixFormat.INT4}, "no other format is made"
    is_int4 = matrix_format is MatrixFormat.INT4 and shape[1] % 2 == 0
    return _quantize_int4(blocks, shape) if is_int4 else _quantize_int8(blocks, shape)


def _quantize_int8(blocks: Iterable[Tensor], shape: tuple[int, int]) -> IntMatrix:
    """A symmetric scale per row."""
    codes, scales = torch.empty(shape, dtype=torch.int8), torch.empty(shape[0], 1)
    for rows, block in _with_rows(blocks):
        values = block.float()
        scale = values.abs().amax(dim=1, keepdim=True).div_(_HIGHEST_INT8)
        scales[rows] = scale
        codes[rows] = values.mul(_reciprocal(scale)).round_()
    return IntMatrix(8, codes, scales, shape[1])


def _quantize_int4(blocks: Iterable[Tensor], shape: tuple[int, int]) -> IntMatrix:
    """A scale and an offset per group, from the group's lowest value to its highest."""
    num_rows, num_columns = shape
    codes = torch.empty(num_rows, num_columns // 2, dtype=torch.uint8)
    scales, offsets = (torch.empty(num_rows, -(-num_columns // _INT4_GROUP_SIZE)) for _ in range(2))
    for rows, block in _with_rows(blocks):
        groups = _in_groups(block.to(torch.float32, memory_format=torch.contiguous_format))
        low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
        scale = _to_float16_values((high - low).div_(_HIGHEST_INT4))
        scales[rows] = scale.squeeze(2)
        # Stored with 8 added, so an offset is the value of 8.
        offsets[rows] = torch.add(low, scale, alpha=8).squeeze(2)
        pairs = (groups - low).mul_(_reciprocal(scale)).round_().to(torch.uint8).view(len(block), -1, 2)
        codes[rows] = (pairs[..., 0] | pairs[..., 1] << 4)[:, : num_columns // 2]
    return IntMatrix(4, codes, scales, _INT4_GROUP_SIZE, offsets)


def _with_rows(blocks: Iterable[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    start = 0
    for block in blocks:
        yield slice(start, start + len(block)), block
        start += len(block)


def _in_groups(values: Tensor) -> Tensor:
    """[n, K] to [n, groups, size]; the last column fills up the last group, which leaves its range as it is."""
    num_missing = -values.shape[1] % _INT4_GROUP_SIZE
    if num_missing:
        values = torch.cat((values, values[:, -1:].expand(-1, num_missing)), dim=1)
    return values.view(len(values), -1, _INT4_GROUP_SIZE)


def _to_float16_values(scale: Tensor) -> Tensor:
    """`scale` rounded to 11 bits, so that a backend may keep it in half the memory, unless that loses more of it."""
    is_normal = (scale >= _FLOAT16.tiny) & (scale <= _FLOAT16.max)
    return torch.where(is_normal, scale.half().float(), scale)


def _reciprocal(scale: Tensor) -> Tensor:
    """Finite where all values are equal, and so the scale is 0."""
    return scale.clamp(min=_SMALLEST_SCALE).reciprocal_()
