"""GGUF's blocks of quantised values: the types that weights are kept in, and what their bytes mean.

A value is its code, or what a table has for it, times the scale of its group of columns, plus an offset in some types.
Types of 32 values have float16 scales and offsets. Those of 256 have factors of a few bits for each group, times a
float16 for the block.

Source: ggml, src/ggml-common.h (`block_q4_K` and its neighbours, `kvalues_iq4nl`) and src/ggml-quants.c
(`dequantize_row_*`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Levels:
    """A number for each group of columns, in n rows."""

    values: Tensor
    """[n, groups] float16, or int8 factors of `units`."""
    units: Tensor | None = None
    """[n, blocks] float16."""

    def floats(self) -> Tensor:
        """[n, groups] float32; exact."""
        if self.units is None:
            return self.values.float()
        groups_per_block = self.values.shape[1] // self.units.shape[1]
        return self.values.float().mul_(self.units.float().repeat_interleave(groups_per_block, dim=1))


@dataclass(frozen=True, slots=True)
class BlockParts:
    """What n rows of blocks consist of."""

    codes: Tensor
    """[n, columns] uint8."""
    scales: Levels
    offsets: Levels | None = None


@dataclass(frozen=True, slots=True)
class BlockType:
    """One type of block."""

    name: str
    """GGUF's name of the type."""
    num_values: int
    num_bytes: int
    num_bits: int
    """Bits of a code."""
    group_size: int
    """Columns that share a scale, and an offset."""
    split: Callable[[Tensor], BlockParts]
    """Takes blocks [n, blocks, bytes] uint8, at least one in a row."""
    zero: int = 0
    """The code of zero."""
    table: tuple[int, ...] | None = None
    """The values of codes, where those are not `code - zero`."""
    float16_at: tuple[int, ...] = (0,)
    """Where a block has a float16: the first byte of each."""

    def values(self, codes: Tensor) -> Tensor:
        """The integers that codes [..., columns] uint8 mean, float32."""
        if self.table is None:
            return codes.float().sub_(self.zero)
        return torch.tensor(self.table, dtype=torch.float32, device=codes.device)[codes.int()]

    def dequantize(self, blocks: Tensor) -> Tensor:
        """Blocks [n, blocks, bytes] uint8 as [n, columns] float32.

        The operations are those of ggml, so the bits are the same.
        """
        parts = self.split(blocks)
        scales = parts.scales.floats().unsqueeze(2)
        values = self.values(parts.codes).view(*scales.shape[:2], self.group_size)
        values.mul_(scales)
        if parts.offsets is not None:
            values += parts.offsets.floats().unsqueeze(2)
        return values.flatten(1)


def _fields(stored: Tensor, num_bits: int, run: int) -> Tensor:
    """The fields of `num_bits` bits in bytes [..., bytes] uint8, as [..., bytes * 8 / num_bits] uint8.

    First come the lowest fields of `run` bytes, one byte after the other, then the next fields of the same bytes.
    """
    shifts = torch.arange(0, 8, num_bits, dtype=torch.uint8, device=stored.device).unsqueeze(1)
    runs = stored.reshape(*stored.shape[:-1], stored.shape[-1] // run, 1, run)
    return runs.bitwise_right_shift(shifts).bitwise_and_((1 << num_bits) - 1).flatten(-3)


def _halves(blocks: Tensor, first: int) -> Tensor:
    """The float16 at byte `first` of each block, [n, blocks]."""
    return blocks[..., first : first + 2].contiguous().view(torch.float16).squeeze(-1)


def _factors(stored: Tensor, zero: int = 0) -> Tensor:
    """[n, blocks, groups] uint8 as [n, blocks * groups] int8, with `zero` subtracted."""
    return stored.view(torch.int8).sub(zero).flatten(1)


def _six_bit_factors(stored: Tensor) -> tuple[Tensor, Tensor]:
    """The eight scales and eight minimums in 12 bytes [n, blocks, 12], each [n, blocks, 8] uint8.

    Four scales and four minimums are in the low six bits of the first 8 bytes. The others have their low four bits in
    the last 4 bytes, and the upper two in the top bits of the first 8.
    """
    first, last = stored[..., :8], stored[..., 8:]
    low, upper = first & 0x3F, (first >> 2) & 0x30
    scales = torch.cat((low[..., :4], last & 0xF | upper[..., :4]), dim=-1)
    minimums = torch.cat((low[..., 4:], last >> 4 | upper[..., 4:]), dim=-1)
    return scales, minimums


def _q8_0(blocks: Tensor) -> BlockParts:
    return BlockParts((blocks[..., 2:] ^ 0x80).flatten(1), Levels(_halves(blocks, 0)))


def _q4_0(blocks: Tensor) -> BlockParts:
    return BlockParts(_fields(blocks[..., 2:], 4, 16).flatten(1), Levels(_halves(blocks, 0)))


def _q4_1(blocks: Tensor) -> BlockParts:
    codes = _fields(blocks[..., 4:], 4, 16).flatten(1)
    return BlockParts(codes, Levels(_halves(blocks, 0)), Levels(_halves(blocks, 2)))


def _five_bits(upper: Tensor, lower: Tensor) -> Tensor:
    """Codes with their upper bits in 4 bytes, one after the other, and the lower four in 16."""
    return (_fields(lower, 4, 16) | _fields(upper, 1, 1) << 4).flatten(1)


def _q5_0(blocks: Tensor) -> BlockParts:
    return BlockParts(_five_bits(blocks[..., 2:6], blocks[..., 6:]), Levels(_halves(blocks, 0)))


def _q5_1(blocks: Tensor) -> BlockParts:
    codes = _five_bits(blocks[..., 4:8], blocks[..., 8:])
    return BlockParts(codes, Levels(_halves(blocks, 0)), Levels(_halves(blocks, 2)))


def _q2_k(blocks: Tensor) -> BlockParts:
    factors = blocks[..., :16]
    scales = Levels(_factors(factors & 0xF), _halves(blocks, 80))
    offsets = Levels(_factors(factors >> 4), -_halves(blocks, 82))
    return BlockParts(_fields(blocks[..., 16:80], 2, 32).flatten(1), scales, offsets)


def _q3_k(blocks: Tensor) -> BlockParts:
    codes = _fields(blocks[..., 32:96], 2, 32) | _fields(blocks[..., :32], 1, 32) << 2
    factors = _fields(blocks[..., 96:104], 4, 8) | _fields(blocks[..., 104:108], 2, 4) << 4
    return BlockParts(codes.flatten(1), Levels(_factors(factors, zero=32), _halves(blocks, 108)))


def _with_minimums(blocks: Tensor, codes: Tensor) -> BlockParts:
    scales, minimums = _six_bit_factors(blocks[..., 4:16])
    offsets = Levels(_factors(minimums), -_halves(blocks, 2))
    return BlockParts(codes.flatten(1), Levels(_factors(scales), _halves(blocks, 0)), offsets)


def _q4_k(blocks: Tensor) -> BlockParts:
    return _with_minimums(blocks, _fields(blocks[..., 16:], 4, 32))


def _q5_k(blocks: Tensor) -> BlockParts:
    return _with_minimums(blocks, _fields(blocks[..., 48:], 4, 32) | _fields(blocks[..., 16:48], 1, 32) << 4)


def _q6_k(blocks: Tensor) -> BlockParts:
    codes = _fields(blocks[..., :128], 4, 64) | _fields(blocks[..., 128:192], 2, 32) << 4
    return BlockParts(codes.flatten(1), Levels(_factors(blocks[..., 192:208].contiguous()), _halves(blocks, 208)))


def _iq4_xs(blocks: Tensor) -> BlockParts:
    factors = _fields(blocks[..., 4:8], 4, 1) | _fields(blocks[..., 2:4], 2, 1) << 4
    codes = _fields(blocks[..., 8:], 4, 16).flatten(1)
    return BlockParts(codes, Levels(_factors(factors, zero=32), _halves(blocks, 0)))


IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

Q8_0 = BlockType("Q8_0", 32, 34, 8, 32, _q8_0, zero=128)
Q4_0 = BlockType("Q4_0", 32, 18, 4, 32, _q4_0, zero=8)
Q4_1 = BlockType("Q4_1", 32, 20, 4, 32, _q4_1, float16_at=(0, 2))
Q5_0 = BlockType("Q5_0", 32, 22, 5, 32, _q5_0, zero=16)
Q5_1 = BlockType("Q5_1", 32, 24, 5, 32, _q5_1, float16_at=(0, 2))
IQ4_NL = BlockType("IQ4_NL", 32, 18, 4, 32, _q4_0, table=IQ4_VALUES)
Q2_K = BlockType("Q2_K", 256, 84, 2, 16, _q2_k, float16_at=(80, 82))
Q3_K = BlockType("Q3_K", 256, 110, 3, 16, _q3_k, zero=4, float16_at=(108,))
Q4_K = BlockType("Q4_K", 256, 144, 4, 32, _q4_k, float16_at=(0, 2))
Q5_K = BlockType("Q5_K", 256, 176, 5, 32, _q5_k, float16_at=(0, 2))
Q6_K = BlockType("Q6_K", 256, 210, 6, 16, _q6_k, zero=32, float16_at=(208,))
IQ4_XS = BlockType("IQ4_XS", 256, 136, 4, 32, _iq4_xs, table=IQ4_VALUES)

BLOCK_TYPES = {
    block_type.name: block_type
    for block_type in (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS)
}
"""Types by GGUF's name."""
