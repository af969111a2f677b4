"""MXFP4: 32 values of 4 bits share one power-of-two scale; stacks of experts, as in gpt-oss, and single matrices.

Sources: OCP Microscaling Formats v1.0, sections 5.3.3 (E2M1) and 5.4.1 (E8M0, 255 is NaN); transformers 5.23,
integrations/mxfp4.py, `convert_moe_packed_tensors` (stacks; the low half of a byte comes first); compressed-tensors
0.20, compressors/mxfp4, and Quark 0.13, torch/utils/pack.py, `Pack_fp4` (matrices).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from services.worker.ops.matrices import Matrix, Mxfp4Matrix
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.weights.quantization.layer_format import LayerFormat, StoredTensor
from services.worker.weights.quantization.scaled import Granularity

_GROUP = 32
_GROUPS = Granularity(1, _GROUP)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Both float32 values of each byte, viewed as one int64: one lookup is eight times as fast as two.
_PAIRS = torch.tensor([(_E2M1[byte & 0xF], _E2M1[byte >> 4]) for byte in range(256)]).view(torch.int64).flatten()
_E8M0 = torch.tensor([2.0 ** (exponent - 127) for exponent in range(255)] + [float("nan")])


@dataclass(frozen=True, slots=True)
class Mxfp4StackFormat(LayerFormat):
    """A stack of matrices: `_blocks` [experts, out, in / 32, 16] uint8 and `_scales` [experts, out, in / 32] uint8."""

    label: str = field(default="mxfp4", init=False)
    unused: tuple[str, ...] = field(default=(), init=False)
    packed_as: MatrixFormat | None = field(default=MatrixFormat.MXFP4, init=False)

    @override
    def stored_tensors(self, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        num_experts, in_features, out_features = shape
        scales = (num_experts, out_features, -(-in_features // _GROUP))
        return (
            StoredTensor("blocks", ("_blocks",), ((*scales, _GROUP // 2),), ("U8",)),
            StoredTensor("scales", ("_scales",), (scales,), ("U8", "F8_E8M0")),
        )

    @override
    def dequantize(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> Tensor:
        return _dequantize(parts["blocks"].flatten(1), parts["scales"], rows, columns)

    @override
    def packed(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> Matrix | None:
        return _packed(parts["blocks"].flatten(1), parts["scales"], rows, columns)


@dataclass(frozen=True, slots=True)
class Mxfp4Format(LayerFormat):
    """A matrix: two values in each byte [out, in / 2] uint8, and `weight_scale` [out, in / 32] uint8."""

    suffix: str
    """The suffix of the values' name."""
    label: str = field(default="mxfp4", init=False)
    unused: tuple[str, ...] = field(default=(".input_scale", ".input_global_scale", ".output_scale"), init=False)
    packed_as: MatrixFormat | None = field(default=MatrixFormat.MXFP4, init=False)

    @override
    def stored_tensors(self, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        num_outputs, num_inputs = shape
        scales = num_outputs, -(-num_inputs // _GROUP)
        return (
            StoredTensor("blocks", (self.suffix,), ((num_outputs, -(-num_inputs // 2)),), ("U8",)),
            StoredTensor("scales", (".weight_scale",), (scales,), ("U8", "F8_E8M0")),
        )

    @override
    def dequantize(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> Tensor:
        return _dequantize(parts["blocks"], parts["scales"], rows, columns)

    @override
    def packed(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> Matrix | None:
        return _packed(parts["blocks"], parts["scales"], rows, columns)


def e2m1_values(codes: Tensor, columns: range) -> Tensor:
    """The numbers of `columns` of each row of `codes` [n, columns / 2] uint8, as [n, len(columns)] float32."""
    codes = codes[:, columns.start // 2 : -(-columns.stop // 2)]
    values = _PAIRS.index_select(0, codes.flatten().int()).view(torch.float32).view(len(codes), -1)
    skipped = columns.start % 2
    return values[:, skipped : skipped + len(columns)]


def _dequantize(codes: Tensor, exponents: Tensor, rows: range, columns: range) -> Tensor:
    """A part of a matrix with `codes` [out, in / 2] and `exponents` [out, in / 32]."""
    values = e2m1_values(codes[rows.start : rows.stop], columns)
    powers = _E8M0[exponents[rows.start : rows.stop].view(torch.uint8).int()]
    return values.mul_(_GROUPS.expand(powers, range(len(rows)), columns))


def _packed(codes: Tensor, exponents: Tensor, rows: range, columns: range) -> Matrix | None:
    """The same part, packed; None if it cuts a group."""
    if columns.start % _GROUP or columns.stop % _GROUP:
        return None
    codes = codes[rows.start : rows.stop, columns.start // 2 : columns.stop // 2]
    exponents = exponents[rows.start : rows.stop, columns.start // _GROUP : columns.stop // _GROUP].view(torch.uint8)
    return Mxfp4Matrix(*(part.clone(memory_format=torch.contiguous_format) for part in (codes, exponents)))
