"""Integers of 4 or 8 bits packed into int32, with a scale per group of columns, per output channel or per tensor.

Source: compressed-tensors 0.20, compressors/pack_quantized: value i of a row is in bits [i * n, (i + 1) * n) of its
words, lowest first, with 2^(n - 1) added to make it unsigned. Zero points are packed the same way along the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from typing_extensions import override

from services.worker.ops.matrices import IntMatrix, Matrix
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.weights.quantization.layer_format import (
    FLOAT_DTYPES,
    LayerFormat,
    MalformedLayerError,
    StoredTensor,
)
from services.worker.weights.quantization.scaled import Granularity

_WORD_BITS = 32
ZERO_BYTES = {4: 0x88, 8: 0x80}
"""A byte of zeros in words whose values are not signed, by bits."""
# Both four-bit values of each byte as float32, viewed as one int64: one lookup is faster than two.
_PAIRS = (
    torch.tensor([(float(byte & 0xF) - 8, float(byte >> 4) - 8) for byte in range(256)]).view(torch.int64).flatten()
)


@dataclass(frozen=True, slots=True)
class PackedIntFormat(LayerFormat):
    """`weight_packed` [out, in * bits / 32] and `weight_scale`; a weight is `(value - zero point) * scale`.

    With `weight_g_idx` [in], GPTQ's activation order, entry i is the group of column i; otherwise every `group_size`
    consecutive columns form a group.
    """

    num_bits: int
    granularity: Granularity
    is_symmetric: bool
    unused: tuple[str, ...] = field(default=(".input_scale", ".input_zero_point", ".output_scale"), init=False)

    @property
    @override
    def label(self) -> str:
        return f"int{self.num_bits}, packed"

    @property
    @override
    def packed_as(self) -> MatrixFormat | None:
        return MatrixFormat.INT4 if self.num_bits == 4 else MatrixFormat.INT8

    @override
    def stored_tensors(self, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        scale_shapes = self.granularity.scale_shapes(shape)
        stored = [
            StoredTensor("packed", (".weight_packed",), ((shape[0], self._num_words(shape[1])),), ("I32",)),
            StoredTensor("scale", (".weight_scale",), scale_shapes, FLOAT_DTYPES),
            StoredTensor("shape", (".weight_shape",), ((2,),), ("I64", "I32")),
        ]
        if not self.is_symmetric:
            packed_shape = (self._num_words(shape[0]), *scale_shapes[0][1:])
            zero_point = StoredTensor("zero_point", (".weight_zero_point",), (packed_shape,), ("I32",))
            stored.append(replace(zero_point, zero_byte=ZERO_BYTES[self.num_bits]))
        if self.granularity.columns is not None:
            group_index = StoredTensor("groups", (".weight_g_idx",), ((shape[1],),), ("I32", "I64"), is_optional=True)
            stored.append(group_index)
        return tuple(stored)

    @override
    def dequantize(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> Tensor:
        values = _unpack(self._words(parts)[rows.start : rows.stop], self.num_bits, columns)
        if not self.is_symmetric:
            values -= self._spread(self._zero_points(parts, rows), parts.get("groups"), range(len(rows)), columns)
        return values.mul_(self._spread(parts["scale"], parts.get("groups"), rows, columns))

    @override
    def packed(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> Matrix | None:
        words, group_size = self._words(parts), self.granularity.group_size(columns)
        per_byte = 8 // self.num_bits
        is_cut = columns.start % per_byte or columns.stop % per_byte
        groups = parts.get("groups")
        order = try_column_order(groups, self.granularity.columns, columns)
        if group_size is None or is_cut or (groups is not None and order is None):
            return None
        codes = words[rows.start : rows.stop].contiguous().view(torch.uint8)
        codes = codes[:, columns.start // per_byte : columns.stop // per_byte]
        # Eight bits have 128 added; IntMatrix has four bits with 8 added, as here.
        codes = codes.bitwise_xor(0x80).view(torch.int8) if per_byte == 1 else codes
        scales, offsets = self.granularity.by_group(parts["scale"], rows, columns), None
        if not self.is_symmetric:
            zero_points = self._zero_points(parts, rows)
            offsets = self.granularity.by_group(zero_points, range(len(rows)), columns).mul_(scales).neg_()
        codes = codes.clone(memory_format=torch.contiguous_format)
        return ordered(IntMatrix(self.num_bits, codes, scales, group_size, offsets), order)

    def _words(self, parts: Mapping[str, Tensor]) -> Tensor:
        words, shape = parts["packed"], parts["shape"].tolist()
        if self._num_words(shape[1]) != words.shape[1] or shape[0] != words.shape[0]:
            raise MalformedLayerError(f"weight_shape says {shape}, weight_packed is {list(words.shape)}")
        return words

    def _zero_points(self, parts: Mapping[str, Tensor], rows: range) -> Tensor:
        """[len(rows), all groups], float32."""
        return _unpack(parts["zero_point"].T, self.num_bits, rows).T

    def _num_words(self, num_values: int) -> int:
        return -(-num_values * self.num_bits // _WORD_BITS)

    def _spread(self, scales: Tensor, groups: Tensor | None, rows: range, columns: range) -> Tensor:
        if groups is None:
            return self.granularity.expand(scales, rows, columns)
        return spread_by_index(scales[rows.start : rows.stop], groups[columns.start : columns.stop], "weight_g_idx")


def try_column_order(groups: Tensor | None, group_size: int | None, columns: range) -> Tensor | None:
    """The columns of a part in the order of their groups, [len(columns)] int64, those of a group in their own order.

    None if no groups are stored, or if groups of a part have other sizes than those of consecutive columns.

    Args:
        groups: [all columns], each column's group, in any order: GPTQ's `desc_act`.
        group_size: Columns in a group; None means all.
    """
    if groups is None:
        return None
    part = groups[columns.start : columns.stop]
    order = part.argsort(stable=True)
    consecutive = torch.arange(columns.start, columns.stop, dtype=groups.dtype)
    consecutive = torch.zeros_like(part) if group_size is None else consecutive.floor_divide_(group_size)
    return order if torch.equal(part[order], consecutive) else None


def ordered(matrix: IntMatrix, order: Tensor | None) -> IntMatrix:
    """A matrix whose scales are of columns in this `order`, and whose codes are not in it yet."""
    if order is None or torch.equal(order, torch.arange(len(order))):
        return matrix
    codes = matrix.codes
    if matrix.num_bits == 8:
        return replace(matrix, codes=codes.index_select(1, order), column_order=order)
    # Whole rows of the transposed matrix are taken, which is three times as fast as columns.
    codes = codes.T.contiguous()
    codes = torch.stack((codes & 0xF, codes >> 4), dim=1).flatten(0, 1).index_select(0, order)
    codes = (codes[0::2] | codes[1::2] << 4).T.contiguous()
    return replace(matrix, codes=codes, column_order=order)


def spread_by_index(scales: Tensor, groups: Tensor, name: str) -> Tensor:
    """Each column's values of `scales` [n, groups], as [n, columns] float32.

    Args:
        groups: [columns], each column's group.
        name: What the tensor of groups is called.

    Raises:
        MalformedLayerError: there is no such group.
    """
    group_of = groups.long()
    if len(group_of) and not 0 <= int(group_of.min()) <= int(group_of.max()) < scales.shape[1]:
        raise MalformedLayerError(f"{name} names a group outside the {scales.shape[1]} that exist")
    return scales.float()[:, group_of]


def _unpack(words: Tensor, num_bits: int, columns: range) -> Tensor:
    """`columns` of each row of `words` [n, words] int32, as signed numbers [n, len(columns)] float32."""
    per_byte = 8 // num_bits
    first, last = columns.start // per_byte, -(-columns.stop // per_byte)
    packed = words.contiguous().view(torch.uint8)[:, first:last]
    if per_byte == 1:
        return packed.float() - 128
    values = _PAIRS.index_select(0, packed.flatten().int()).view(torch.float32).view(len(packed), -1)
    skipped = columns.start - first * per_byte
    return values[:, skipped : skipped + len(columns)]
