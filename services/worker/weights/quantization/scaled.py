"""One-byte weights with scales: FP8 and int8, with a scale per tensor, output channel, group of columns or block.

Sources: DeepSeek-V3's inference/kernel.py, `weight_dequant` (blocks; the stored `weight_scale_inv` multiplies);
compressed-tensors 0.20, quantization/lifecycle/forward.py, `dequantize` (the other granularities, zero points).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from services.worker.ops.matrices import Fp8Matrix, IntMatrix, Matrix
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.weights.quantization.layer_format import FLOAT_DTYPES, LayerFormat, StoredTensor

FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
INT8_DTYPES = ("I8",)
_MAX_E4M3 = 448.0


@dataclass(frozen=True, slots=True)
class Granularity:
    """How many rows and columns share a scale; None means all."""

    rows: int | None
    columns: int | None

    def scale_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Possible shapes of a matrix's scales, the two-dimensional one first."""
        num_rows = 1 if self.rows is None else -(-shape[0] // self.rows)
        num_columns = 1 if self.columns is None else -(-shape[1] // self.columns)
        full = (num_rows, num_columns)
        if self.columns is not None:
            return (full,)
        return (full, (num_rows,)) if self.rows is not None else (full, (1,), ())

    def expand(self, scales: Tensor, rows: range, columns: range) -> Tensor:
        """A part's scales, float32, in a shape that broadcasts to it."""
        return _repeat(self._by_row(scales, rows), 1, self.columns, columns)

    def group_size(self, columns: range) -> int | None:
        """How many of a part's columns share a scale, the last group's maybe fewer; None if the part cuts a group."""
        if self.columns is None:
            return len(columns)
        return None if columns.start % self.columns else self.columns

    def by_group(self, scales: Tensor, rows: range, columns: range) -> Tensor:
        """A part's scales, new [len(rows), groups] float32, if it cuts no group."""
        size = self.columns or max(columns.stop, 1)
        scales = self._by_row(scales, rows)[:, columns.start // size : -(-columns.stop // size)]
        return scales.expand(len(rows), -1).clone(memory_format=torch.contiguous_format)

    def _by_row(self, scales: Tensor, rows: range) -> Tensor:
        """[len(rows) or 1, all groups of columns], float32."""
        scales = scales.reshape(1, 1) if scales.dim() == 0 else scales.reshape(scales.shape[0], -1)
        return _repeat(scales.float(), 0, self.rows, rows)


TENSOR = Granularity(None, None)
CHANNEL = Granularity(1, None)


@dataclass(frozen=True, slots=True)
class ScaledFormat(LayerFormat):
    """`weight` in a one-byte dtype; a weight is `(value - zero point) * scale`, without zero points `value * scale`."""

    # A field: otherwise the property of the base would be its default.
    label: str = field()
    dtypes: tuple[str, ...]
    granularities: tuple[Granularity, ...]
    """Allowed ones: plain "fp8" may have a scale per tensor or per channel."""
    scale_suffixes: tuple[str, ...] = (".weight_scale",)
    has_zero_point: bool = False
    may_lack_zero_point: bool = False
    """Whether zero points, which are then zeros, need not be stored."""
    unused: tuple[str, ...] = field(
        default=(".input_scale", ".activation_scale", ".input_zero_point", ".output_scale", ".output_zero_point"),
        init=False,
    )

    @property
    @override
    def packed_as(self) -> MatrixFormat | None:
        if self.dtypes == INT8_DTYPES:
            return MatrixFormat.INT8
        return None if self.has_zero_point else MatrixFormat.FP8

    @override
    def may_pack(self, columns: range) -> bool:
        return self.packed_as is not None and any(each.group_size(columns) is not None for each in self.granularities)

    @override
    def stored_tensors(self, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        scale_shapes = tuple(scale for granularity in self.granularities for scale in granularity.scale_shapes(shape))
        stored = (
            StoredTensor("weight", (".weight",), (shape,), self.dtypes),
            StoredTensor("scale", self.scale_suffixes, scale_shapes, (*FLOAT_DTYPES, "F8_E8M0")),
        )
        if not self.has_zero_point:
            return stored
        dtypes = (*INT8_DTYPES, *FP8_DTYPES)
        zero_point = StoredTensor(
            "zero_point", (".weight_zero_point",), scale_shapes, dtypes, is_optional=self.may_lack_zero_point
        )
        return (*stored, zero_point)

    @override
    def dequantize(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> Tensor:
        granularity = self._granularity_of(parts)
        values = _to_float32(parts["weight"][rows.start : rows.stop, columns.start : columns.stop])
        if "zero_point" in parts:
            values -= granularity.expand(parts["zero_point"], rows, columns)
        return values.mul_(granularity.expand(parts["scale"], rows, columns))

    @override
    def packed(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> Matrix | None:
        granularity = self._granularity_of(parts)
        group_size = granularity.group_size(columns)
        if self.packed_as is None or group_size is None or parts["weight"].dtype == torch.float8_e5m2:
            return None
        codes = parts["weight"][rows.start : rows.stop, columns.start : columns.stop]
        codes = codes.clone(memory_format=torch.contiguous_format)
        scales, offsets = granularity.by_group(parts["scale"], rows, columns), None
        if self.packed_as is MatrixFormat.FP8:
            return Fp8Matrix(codes.view(torch.uint8), scales, group_size)
        if "zero_point" in parts and not (self.may_lack_zero_point and not parts["zero_point"].float().any()):
            offsets = granularity.by_group(parts["zero_point"], rows, columns).mul_(scales).neg_()
        return IntMatrix(8, codes, scales, group_size, offsets)

    def _granularity_of(self, parts: Mapping[str, Tensor]) -> Granularity:
        shape, scale_shape = tuple(parts["weight"].shape), tuple(parts["scale"].shape)
        return next(granularity for granularity in self.granularities if scale_shape in granularity.scale_shapes(shape))


def _to_float32(weight: Tensor) -> Tensor:
    """`weight.float()`, for e4m3fn several times as fast as torch 2.13 on a CPU.

    A float16 has the same fields with more bits in each, and an exponent bias larger by 8. So a code shifted into its
    fields has the right value, subnormal or not, but for a factor of 256. NaN, the highest code of each sign, becomes
    480, above E4M3's maximum.
    """
    if weight.dtype != torch.float8_e4m3fn:
        return weight.float()
    codes = weight.contiguous().view(torch.int8).to(torch.int16)
    # The arithmetic shift puts the sign in its place and copies it into the bit below, which is cleared.
    values = (codes << 7).bitwise_and_(~0x4000).view(torch.float16).float().mul_(256.0)
    if values.numel() and max(abs(float(extreme)) for extreme in torch.aminmax(values)) > _MAX_E4M3:
        values.masked_fill_(values.abs() > _MAX_E4M3, math.nan)
    return values


def _repeat(scales: Tensor, dim: int, size: int | None, places: range) -> Tensor:
    """Scales of the indexes `places` along `dim`, where `size` consecutive ones share a scale; None means all do."""
    if size is None:
        return scales
    # A checkpoint may say any size.
    size = min(size, max(places.stop, 1))
    first = places.start // size
    scales = scales.narrow(dim, first, -(-places.stop // size) - first)
    if size > 1:
        scales = scales.repeat_interleave(size, dim)
    return scales.narrow(dim, places.start - first * size, len(places))
