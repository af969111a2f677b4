"""GGUF's blocks as `lockstep import` keeps them; see `block_types`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from typing_extensions import override

from services.worker.ops.block_types import BLOCK_TYPES, Q4_0, Q4_1, Q8_0, BlockType
from services.worker.ops.matrices import BlockMatrix, Matrix
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.weights.quantization.layer_format import LayerFormat, StoredTensor
from services.worker.weights.quantization.rules import FormatRules, UnsupportedFormatError

__all__ = [
    "BLOCK_TYPES",
    "GROUPED",
    "HEAD_ORDER",
    "METHOD",
    "OUT_PROJECTIONS",
    "SUFFIX",
    "TILED",
    "BlockType",
    "GgufFormat",
    "gguf_config",
    "gguf_rules",
]

SUFFIX = ".blocks"
"""What follows a layer's name."""
METHOD = "gguf"
"""The `quant_method` in config.json."""
HEAD_ORDER = "linear_value_head_order"
"""The key in config.json that has the order of value heads, in whatever has rows or columns of them: `TILED`, or
`GROUPED`, which is also meant where there is no such key."""
GROUPED = "grouped"
"""The order of Hugging Face's layout: the value heads of the first key head, then those of the second, and so on."""
TILED = "tiled"
"""The order of GGUF's files, kept where another one would cut blocks: the first value head of every key head, then the
second one of every key head, and so on."""
OUT_PROJECTIONS = {GROUPED: "out_proj", TILED: "tiled_out_proj"}
"""The names of the projection of all value heads. A release that does not know the order misses the tensor and refuses
the model, instead of computing something else."""
# As integers these take no more memory than their blocks, and every backend with kernels has some for integers.
_AS_INTEGERS = {Q8_0: MatrixFormat.INT8, Q4_0: MatrixFormat.INT4, Q4_1: MatrixFormat.INT4}


@dataclass(frozen=True, slots=True)
class GgufFormat(LayerFormat):
    """`blocks` [out, in / values of a block, bytes of a block] uint8."""

    block_type: BlockType
    unused: tuple[str, ...] = field(default=(), init=False)

    @property
    @override
    def label(self) -> str:
        return f"gguf {self.block_type.name}"

    @property
    @override
    def packed_as(self) -> MatrixFormat | None:
        return _AS_INTEGERS.get(self.block_type, MatrixFormat.GGUF)

    @override
    def stored_tensors(self, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        blocks = shape[0], -(-shape[1] // self.block_type.num_values), self.block_type.num_bytes
        return (StoredTensor("blocks", (SUFFIX,), (blocks,), ("U8",)),)

    @override
    def dequantize(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> Tensor:
        values = self.block_type.dequantize(self._blocks(parts, rows, columns))
        skipped = columns.start % self.block_type.num_values
        return values[:, skipped : skipped + len(columns)]

    @override
    def packed(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> Matrix | None:
        # None if the part cuts a block.
        if columns.start % self.block_type.num_values or columns.stop % self.block_type.num_values:
            return None
        matrix = BlockMatrix(self.block_type, self._blocks(parts, rows, columns).clone())
        return matrix.to_integers() if self.block_type in _AS_INTEGERS else matrix

    def _blocks(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> Tensor:
        """The blocks around a part, [n, blocks, bytes]."""
        num_values = self.block_type.num_values
        first, last = columns.start // num_values, -(-columns.stop // num_values)
        return parts["blocks"][rows.start : rows.stop, first:last]


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
