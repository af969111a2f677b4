"""Integers of transposed matrices, packed into int32: AWQ, GPTQ and Quark.

    codes         AWQ, Quark   [in, out * bits / 32]     a word has output features of one input feature
                  GPTQ         [in * bits / 32, out]     a word has input features of one output feature
    zero points                [groups, out * bits / 32]
    scales                     [groups, out]             a weight is `(code - zero point) * scale`

A word has its first value in the lowest bits, but AWQ, and Quark where it reorders, have values 0 2 4 6 1 3 5 7 there.
Codes and zero points are unsigned, or both are signed. GPTQ's first version stores zero points less 1.

Sources: AutoAWQ 0.2, modules/linear/gemm.py, `WQLinear_GEMM.from_linear`; GPTQModel 4, nn_modules/qlinear, `pack`, and
utils/model.py, `convert_gptq_v1_to_v2_format_module`; Quark 0.13, torch/utils/pack.py, `Pack_4_bits`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from services.worker.ops.matrices import IntMatrix, Matrix
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.weights.quantization.layer_format import FLOAT_DTYPES, LayerFormat, StoredTensor
from services.worker.weights.quantization.packed_int import ZERO_BYTES, ordered, spread_by_index, try_column_order
from services.worker.weights.quantization.scaled import Granularity

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight output features each four bits of a word have, from the lowest on."""
_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class WordLayout:
    """How a method stores a layer."""

    suffixes: tuple[str, str, str]
    """Suffixes of codes, zero points and scales."""
    order: tuple[int, ...] | None = None
    """Which output features a word has, as in `AWQ_ORDER`; None means in order."""
    has_input_words: bool = False
    """Whether words of codes have input features; otherwise they have eight output features."""
    is_signed: bool = False
    """Whether codes and zero points are in two's complement."""
    zero_shift: int = 0
    """What zero points lack, added to them with a carry into the next one."""


@dataclass(frozen=True, slots=True)
class TransposedIntFormat(LayerFormat):
    """See above. With `g_idx` [in], GPTQ's activation order, entry i is the group of input feature i."""

    # A field: otherwise the property of the base would be its default.
    label: str = field()
    layout: WordLayout
    num_bits: int
    """4 or 8."""
    group_size: int | None
    """Input features that share a scale; None means all."""
    is_symmetric: bool = False
    """Whether zero points are the middle of the range. They need not be stored unless the layout shifts them."""
    has_group_index: bool = False
    """Whether `g_idx` must be stored; otherwise it may be."""
    unused: tuple[str, ...] = field(default=(".input_scale", ".output_scale", ".input_zero_point"), init=False)

    @property
    @override
    def packed_as(self) -> MatrixFormat | None:
        return MatrixFormat.INT4 if self.num_bits == 4 else MatrixFormat.INT8

    @property
    def _granularity(self) -> Granularity:
        return Granularity(1, self.group_size)

    @property
    def _per_word(self) -> int:
        return _WORD_BITS // self.num_bits

    @property
    def _middle(self) -> int:
        """What is added to signed codes to make them unsigned."""
        return 1 << (self.num_bits - 1)

    @override
    def stored_tensors(self, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        num_outputs, num_inputs = shape
        num_groups = 1 if self.group_size is None else -(-num_inputs // self.group_size)
        output_words, input_words = (-(-size // self._per_word) for size in shape)
        codes = (input_words, num_outputs) if self.layout.has_input_words else (num_inputs, output_words)
        of_codes, of_zeros, of_scales = self.layout.suffixes
        zero_byte = 0 if self.layout.is_signed else ZERO_BYTES[self.num_bits] - self._shift_byte
        stored = (
            StoredTensor("packed", (of_codes,), (codes,), ("I32",)),
            StoredTensor(
                "zero_point",
                (of_zeros,),
                ((num_groups, output_words),),
                ("I32",),
                is_optional=self.is_symmetric and not self.layout.zero_shift,
                zero_byte=zero_byte,
            ),
            StoredTensor("scale", (of_scales,), ((num_groups, num_outputs),), FLOAT_DTYPES),
        )
        if not self.layout.has_input_words:
            return stored
        is_optional = not self.has_group_index
        return (*stored, StoredTensor("groups", (".g_idx",), ((num_inputs,),), ("I32", "I64"), is_optional))

    @override
    def dequantize(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> Tensor:
        values = self._unpacked(self._code_bytes(parts, rows, columns), columns).float()
        scales, zeros = parts["scale"][:, rows.start : rows.stop].T, self._zero_points(parts, rows)
        values -= self._spread(zeros, parts, columns) if zeros is not None else self._middle
        return values.mul_(self._spread(scales, parts, columns))

    @override
    def packed(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> Matrix | None:
        group_size, per_byte = self._granularity.group_size(columns), 8 // self.num_bits
        is_cut = columns.start % per_byte or columns.stop % per_byte
        groups = parts.get("groups")
        order = try_column_order(groups, self.group_size, columns)
        if group_size is None or is_cut or (groups is not None and order is None):
            return None
        codes = self._code_bytes(parts, rows, columns).contiguous()
        # Eight bits have 128 added; IntMatrix has four bits with 8 added, as here.
        codes = codes.bitwise_xor(0x80).view(torch.int8) if per_byte == 1 else codes
        places = range(len(rows))
        scales = self._granularity.by_group(parts["scale"][:, rows.start : rows.stop].T, places, columns)
        zeros, offsets = self._zero_points(parts, rows), None
        if zeros is not None:
            below_middle = (self._middle - self._granularity.by_group(zeros, places, columns)).mul_(scales)
            offsets = None if self.is_symmetric and not below_middle.any() else below_middle
        return ordered(IntMatrix(self.num_bits, codes, scales, group_size, offsets), order)

    @property
    def _shift_byte(self) -> int:
        """What one byte of zero points lacks."""
        return self.layout.zero_shift * (0x11 if self.num_bits == 4 else 1)

    def _code_bytes(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> Tensor:
        """Unsigned codes as in an `IntMatrix`, uint8, of all bytes that have any of `columns`.

        Those of four bits are in pairs, of which the first and the last may each have one column more than asked for.
        """
        per_byte = 8 // self.num_bits
        first, last = columns.start // per_byte, -(-columns.stop // per_byte)
        if self.layout.has_input_words:
            words = parts["packed"][first // 4 : -(-last // 4), rows.start : rows.stop]
            words = words.T.clone(memory_format=torch.contiguous_format)
            codes = words.view(torch.uint8)[:, first % 4 : first % 4 + last - first]
        else:
            codes = self._pairs(parts["packed"][2 * first : 2 * last], rows)
        return codes ^ ZERO_BYTES[self.num_bits] if self.layout.is_signed else codes

    def _unpacked(self, codes: Tensor, columns: range) -> Tensor:
        """Codes of `columns` out of what `_code_bytes` returns, a byte each."""
        if self.num_bits == 8:
            return codes
        skipped = columns.start % 2
        return _nibbles(codes).flatten(1)[:, skipped : skipped + len(columns)]

    def _pairs(self, words: Tensor, rows: range) -> Tensor:
        """The values of output features `rows` in `words` [n, words], two of an `IntMatrix` in a byte.

        Returns:
            [len(rows), n / 2] uint8; the last value of an odd number is alone.
        """
        first, last = rows.start // 8, -(-rows.stop // 8)
        words = F.pad(words[:, first:last], (0, 0, 0, len(words) % 2)).contiguous()
        even, odd = words.view(torch.uint8).view(len(words) // 2, 2, -1).unbind(1)
        # Pairs are turned, which is several times as fast as turning their halves.
        low, high = (even & 0xF) | (odd << 4), (even >> 4) | (odd & 0xF0)
        values = torch.empty((last - first, 8, len(even)), dtype=torch.uint8, device=words.device)
        order = self.layout.order or range(8)
        for offset, pairs in enumerate((low, high)):
            of_word = pairs.T.contiguous().view(last - first, 4, len(even))
            for byte in range(4):
                values[:, order[2 * byte + offset]] = of_word[:, byte]
        skipped = rows.start - 8 * first
        return values.flatten(0, 1)[skipped : skipped + len(rows)]

    def _outputs(self, words: Tensor, rows: range) -> Tensor:
        """The values of output features `rows` in `words` [n, words], as [n, len(rows)] uint8."""
        first, last = rows.start // self._per_word, -(-rows.stop // self._per_word)
        values = words[:, first:last].contiguous().view(torch.uint8)
        values = (_nibbles(values) if self.num_bits == 4 else values).reshape(len(words), -1, self._per_word)
        if self.layout.order is not None:
            places = sorted(range(self._per_word), key=self.layout.order.__getitem__)
            values = values[..., places]
        skipped = rows.start - first * self._per_word
        return values.flatten(1)[:, skipped : skipped + len(rows)]

    def _zero_points(self, parts: Mapping[str, Tensor], rows: range) -> Tensor | None:
        """[len(rows), all groups], float32, of unsigned codes; None if none are stored: the middle of the range."""
        words = parts.get("zero_point")
        if words is None:
            return None
        shift = int.from_bytes([self._shift_byte] * 4, "little")
        zeros = self._outputs(words + shift if shift else words, rows)
        return (zeros ^ self._middle if self.layout.is_signed else zeros).T.float()

    def _spread(self, values: Tensor, parts: Mapping[str, Tensor], columns: range) -> Tensor:
        """`values` [n, groups] of each column, float32, in a shape that broadcasts to [n, len(columns)]."""
        groups = parts.get("groups")
        if groups is None:
            return self._granularity.expand(values, range(len(values)), columns)
        return spread_by_index(values, groups[columns.start : columns.stop], "g_idx")


def _nibbles(codes: Tensor) -> Tensor:
    """Both halves of each byte [n, m], the low one first, as [n, m, 2]."""
    return torch.stack((codes & 0xF, codes >> 4), dim=-1)
