"""MXFP4, the format of gpt-oss's experts: 32 values of 4 bits share one power-of-two scale.

Sources: OCP Microscaling Formats v1.0, sections 5.3.3 (E2M1) and 5.4.1 (E8M0, 255 is NaN); transformers 5.23,
integrations/mxfp4.py, `convert_moe_packed_tensors` (layout; a byte's low four bits come first).
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

_GROUP = 32
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
        first, last = columns.start // _GROUP, -(-columns.stop // _GROUP)
        blocks = parts["blocks"][rows.start : rows.stop, first:last]
        exponents = parts["scales"][rows.start : rows.stop, first:last].view(torch.uint8)
        pairs = _PAIRS.index_select(0, blocks.flatten().int())
        values = pairs.view(torch.float32).view(len(rows), last - first, _GROUP)
        values *= _E8M0[exponents.int()][..., None]
        skipped = columns.start - first * _GROUP
        return values.flatten(1)[:, skipped : skipped + len(columns)]

    @override
    def packed(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> Matrix | None:
        if columns.start % _GROUP or columns.stop % _GROUP:
            return None
        place = slice(rows.start, rows.stop), slice(columns.start // _GROUP, columns.stop // _GROUP)
        codes, exponents = parts["blocks"][place].flatten(1), parts["scales"][place].view(torch.uint8)
        return Mxfp4Matrix(*(part.clone(memory_format=torch.contiguous_format) for part in (codes, exponents)))
