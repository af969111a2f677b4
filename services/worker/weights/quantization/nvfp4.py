"""NVFP4: 16 values of 4 bits share a scale in E4M3, and a matrix has one in float32.

Sources: compressed-tensors 0.20, compressors/nvfp4, and quantization/lifecycle/forward.py, `dequantize` (which divides
by the matrix's scale); ModelOpt 0.47, torch/quantization/qtensor/nvfp4_tensor.py (which multiplies by it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor
from typing_extensions import override

from services.worker.ops.matrices import Matrix
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.weights.quantization.layer_format import LayerFormat, StoredTensor
from services.worker.weights.quantization.mxfp4 import e2m1_values
from services.worker.weights.quantization.scaled import Granularity

NVFP4_GROUP_SIZE = 16
_GROUPS = Granularity(1, NVFP4_GROUP_SIZE)


@dataclass(frozen=True, slots=True)
class Nvfp4Format(LayerFormat):
    """Two values in each byte [out, in / 2] uint8, `weight_scale` [out, in / 16] in E4M3, and a number.

    No backend computes with it: it is dequantised at load.
    """

    suffix: str
    """The suffix of the values' name."""
    matrix_scale_suffix: str
    is_divisor: bool
    """Whether scales are divided by the matrix's; otherwise they are multiplied by it."""
    label: str = field(default="nvfp4", init=False)
    unused: tuple[str, ...] = field(default=(".input_scale", ".input_global_scale", ".output_scale"), init=False)
    packed_as: MatrixFormat | None = field(default=None, init=False)

    @override
    def stored_tensors(self, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        num_outputs, num_inputs = shape
        scales = num_outputs, -(-num_inputs // NVFP4_GROUP_SIZE)
        return (
            StoredTensor("codes", (self.suffix,), ((num_outputs, -(-num_inputs // 2)),), ("U8",)),
            StoredTensor("scale", (".weight_scale",), (scales,), ("F8_E4M3",)),
            StoredTensor("matrix_scale", (self.matrix_scale_suffix,), ((), (1,)), ("F32",)),
        )

    @override
    def dequantize(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> Tensor:
        scales, matrix_scale = parts["scale"][rows.start : rows.stop].float(), parts["matrix_scale"].flatten()
        scales = scales / matrix_scale if self.is_divisor else scales * matrix_scale
        values = e2m1_values(parts["codes"][rows.start : rows.stop], columns)
        return values.mul_(_GROUPS.expand(scales, range(len(rows)), columns))

    @override
    def packed(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> Matrix | None:
        return None
