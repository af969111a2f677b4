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

import torch
from torch import Tensor

from services.worker.weights.quantization.layer_format import StoredTensor
from services.worker.weights.quantization.rules import FormatRules

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
BLOCK_TYPES = (Q8_0, Q4_0, Q4_1)
_BYTES_TO_TYPE = {block_type.num_bytes: block_type for block_type in BLOCK_TYPES}


@dataclass(frozen=True, slots=True)
class GgufFormat:
    """`blocks` [out, in / 32, bytes of a block] uint8; the number of bytes tells the type."""

    label: str = field(default="gguf blocks", init=False)
    unused: tuple[str, ...] = field(default=(), init=False)
    is_transposed: bool = field(default=False, init=False)

    def stored_tensors(self, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        """See `LayerFormat`."""
        shapes = tuple((shape[0], -(-shape[1] // _VALUES), block_type.num_bytes) for block_type in BLOCK_TYPES)
        return (StoredTensor("blocks", (SUFFIX,), shapes, ("U8",)),)

    def dequantize(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> Tensor:
        """See `LayerFormat`. The same operations as ggml's, so the same bits."""
        first, last = columns.start // _VALUES, -(-columns.stop // _VALUES)
        blocks = parts["blocks"][rows.start : rows.stop, first:last]
        block_type = _BYTES_TO_TYPE[blocks.shape[-1]]
        num_header_bytes = 2 * block_type.num_header_values
        header = blocks[..., :num_header_bytes].contiguous().view(torch.float16).float()
        values = _codes(blocks[..., num_header_bytes:], block_type).float().mul_(header[..., :1])
        if block_type is Q4_1:
            values += header[..., 1:]
        skipped = columns.start - first * _VALUES
        return values.flatten(1)[:, skipped : skipped + len(columns)]


def gguf_rules() -> FormatRules:
    """Every layer that is not stored as floats has blocks."""
    return FormatRules(((lambda _: True, GgufFormat()),))


def _codes(stored: Tensor, block_type: BlockType) -> Tensor:
    """The codes of blocks [..., bytes], as [..., 32] int8; Q4_0's have 8 subtracted."""
    if block_type is Q8_0:
        return stored.view(torch.int8)
    codes = torch.cat((stored & 0xF, stored >> 4), dim=-1).view(torch.int8)
    return codes - 8 if block_type is Q4_0 else codes
