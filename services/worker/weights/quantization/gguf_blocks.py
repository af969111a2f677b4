"""GGUF's blocks of 32 values as `lockstep import` keeps them: Q8_0, Q4_0 and Q4_1.

    Q8_0   scale: float16                     32 * int8                          value = scale * code
    Q4_0   scale: float16                     16 bytes of two unsigned codes     value = scale * (code - 8)
    Q4_1   scale: float16, minimum: float16   16 bytes of two unsigned codes     value = scale * code + minimum

Byte i of a block of four-bit codes has the code of value i in its low half and that of value i + 16 in its high half.

Source: ggml, src/ggml-common.h (`block_q8_0`, `block_q4_0`, `block_q4_1`) and src/ggml-quants.c (`dequantize_row_*`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from services.worker.ops.matrices import IntMatrix, Matrix
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.weights.quantization.layer_format import LayerFormat, StoredTensor
from services.worker.weights.quantization.rules import FormatRules, UnsupportedFormatError

SUFFIX = ".blocks"
"""What follows a layer's name."""
METHOD = "gguf"
"""The `quant_method` in config.json."""
_VALUES = 32


@dataclass(frozen=True, slots=True)
class BlockType:
    """One kind of block."""

    name: str
    num_header_values: int
    """float16 values before the codes."""
    num_bits: int

    @property
    def num_bytes(self) -> int:
        """Bytes of a block."""
        return 2 * self.num_header_values + _VALUES * self.num_bits // 8


Q8_0 = BlockType("Q8_0", 1, 8)
Q4_0 = BlockType("Q4_0", 1, 4)
Q4_1 = BlockType("Q4_1", 2, 4)
BLOCK_TYPES = {block_type.name: block_type for block_type in (Q8_0, Q4_0, Q4_1)}
"""By GGUF's name."""


@dataclass(frozen=True, slots=True)
class GgufFormat(LayerFormat):
    """`blocks` [out, in / 32, bytes of a block] uint8."""

    block_type: BlockType
    unused: tuple[str, ...] = field(default=(), init=False)

    @property
    @override
    def label(self) -> str:
        return f"gguf {self.block_type.name}"

    @property
    @override
    def packed_as(self) -> MatrixFormat | None:
        return MatrixFormat.INT8 if self.block_type.num_bits == 8 else MatrixFormat.INT4

    @override
    def stored_tensors(self, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        blocks = shape[0], -(-shape[1] // _VALUES), self.block_type.num_bytes
        return (StoredTensor("blocks", (SUFFIX,), (blocks,), ("U8",)),)

    @override
    def dequantize(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> Tensor:
        # The same operations as ggml's, so the same bits.
        header, codes = self._read(parts, rows, columns)
        values = (codes - 8 if self.block_type is Q4_0 else codes).float().mul_(header[..., :1])
        if self.block_type is Q4_1:
            values += header[..., 1:]
        skipped = columns.start % _VALUES
        return values.flatten(1)[:, skipped : skipped + len(columns)]

    @override
    def packed(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> Matrix | None:
        # None if the part cuts a block.
        if columns.start % _VALUES or columns.stop % _VALUES:
            return None
        header, codes = self._read(parts, rows, columns)
        scales, offsets = header[..., 0].contiguous(), None
        if self.block_type is Q4_1:
            # IntMatrix's codes of four bits have 8 subtracted.
            offsets = header[..., 1].add(scales, alpha=8)
        codes = codes.flatten(1)
        if self.block_type.num_bits == 4:
            pairs = codes.view(torch.uint8).view(len(codes), -1, 2)
            codes = pairs[..., 0] | pairs[..., 1] << 4
        return IntMatrix(self.block_type.num_bits, codes.contiguous(), scales, _VALUES, offsets)

    def _read(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> tuple[Tensor, Tensor]:
        """The header [n, blocks, values] float32 and the codes [n, blocks, 32] int8 of the blocks around a part."""
        first, last = columns.start // _VALUES, -(-columns.stop // _VALUES)
        blocks = parts["blocks"][rows.start : rows.stop, first:last]
        num_header_bytes = 2 * self.block_type.num_header_values
        header = blocks[..., :num_header_bytes].contiguous().view(torch.float16).float()
        return header, self._codes(blocks[..., num_header_bytes:])

    def _codes(self, stored: Tensor) -> Tensor:
        """The codes of blocks [..., bytes], as [..., 32] int8; those of four bits are 0 to 15."""
        if self.block_type is Q8_0:
            return stored.contiguous().view(torch.int8)
        return torch.cat((stored & 0xF, stored >> 4), dim=-1).view(torch.int8)


def block_types(tensors: Mapping[str, Tensor]) -> dict[str, BlockType]:
    """The types of all tensors that are blocks, by layer; the size of a block tells its type."""
    bytes_to_type = {block_type.num_bytes: block_type for block_type in BLOCK_TYPES.values()}
    return {
        name.removesuffix(SUFFIX): bytes_to_type[tensor.shape[-1]]
        for name, tensor in tensors.items()
        if name.endswith(SUFFIX)
    }


def gguf_config(layer_to_type: Mapping[str, BlockType]) -> dict[str, Any]:
    """The `quantization_config` for layers with blocks."""
    layers = {
        block_type.name: [layer for layer, its_type in layer_to_type.items() if its_type is block_type]
        for block_type in BLOCK_TYPES.values()
    }
    return {"quant_method": METHOD, "layers": {name: names for name, names in layers.items() if names}}


def gguf_rules(values: Mapping[str, Any]) -> FormatRules:
    """Parse the `quantization_config`.

    Raises:
        UnsupportedFormatError: there is no such type of block.
        KeyError, TypeError, ValueError: the configuration is malformed.
    """
    layers = dict(values["layers"])
    if unknown := layers.keys() - BLOCK_TYPES.keys():
        raise UnsupportedFormatError(
            f"block type {min(unknown)!r} is not supported; supported: {', '.join(BLOCK_TYPES)}"
        )
    rules = [(frozenset(map(str, names)), GgufFormat(BLOCK_TYPES[name])) for name, names in layers.items()]
    return FormatRules(tuple((names.__contains__, layer_format) for names, layer_format in rules))
