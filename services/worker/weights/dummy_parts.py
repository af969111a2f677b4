"""Random contents for the tensors of a packed layer, as a checkpoint would store them.

Every code is equally likely, except E4M3's upper half, which contains NaN. Zero points are 0, and groups are of
consecutive columns. Scales are equal, and make the values of the matrix as large as those of a dense one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from math import prod

import torch
from torch import Tensor

from services.worker.ops.block_types import BlockType
from services.worker.ops.matrices import MXFP4_VALUES
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.weights.quantization.gguf_blocks import GgufFormat
from services.worker.weights.quantization.layer_format import LayerFormat, StoredTensor

# Returns so many random bytes, uint8, those of a role from some place on.
DrawBytes = Callable[[str, int], Tensor]

_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32}
# Clears the highest bit of E4M3's exponent: numbers stay below 2.
_LOW_E4M3 = 0xBF
_E8M0_BIAS = 127
_LARGE_BLOCK = 256


def dummy_parts(layer_format: LayerFormat, shape: Sequence[int], spread: float, draw: DrawBytes) -> dict[str, Tensor]:
    """The whole tensors of a layer by role, for a matrix whose values have about this standard deviation.

    Codes are where `draw` makes them, scales and zero points on the host.

    Args:
        shape: As for `LayerFormat.stored_tensors`.
    """
    assert layer_format.packed_as is not None, "a plain layer has no packed parts"
    packed_as = layer_format.packed_as
    parts: dict[str, Tensor] = {}
    if isinstance(layer_format, GgufFormat):
        (stored,) = layer_format.stored_tensors(tuple(shape))
        blocks = _part(stored, 1.0, draw)
        write_block_scales(blocks, layer_format.block_type, spread / _block_spread(layer_format.block_type))
        return {stored.role: blocks}
    scale = spread / _code_spread(packed_as)
    for stored in layer_format.stored_tensors(tuple(shape)):
        if stored.role == "shape":
            parts[stored.role] = torch.tensor(shape)
        elif stored.role == "zero_point":
            parts[stored.role] = _zero_points(stored)
        elif not stored.is_optional and stored.role != "groups":
            parts[stored.role] = _part(stored, scale, draw)
    return parts


def write_block_scales(blocks: Tensor, block_type: BlockType, scale: float) -> None:
    """Write the scale, and an offset that centres the values, into random blocks [..., bytes] uint8, in place."""
    middle = ((1 << block_type.num_bits) - 1) / 2
    # Types of 256 values subtract it.
    offset = scale * (middle if block_type.num_values == _LARGE_BLOCK else -middle)
    for at, value in zip(block_type.float16_at, (scale, offset), strict=False):
        blocks[..., at : at + 2] = torch.tensor([value], dtype=torch.float16).view(torch.uint8).to(blocks.device)


def _part(stored: StoredTensor, scale: float, draw: DrawBytes) -> Tensor:
    shape, dtype = stored.shapes[0], _DTYPES.get(stored.dtypes[0])
    if dtype is None:
        return torch.full(shape, scale)
    if stored.role == "scales":
        # The only scales that are stored in whole numbers: powers of two.
        return torch.full(shape, round(math.log2(scale)) + _E8M0_BIAS, dtype=dtype)
    codes = draw(stored.role, prod(shape) * dtype.itemsize)
    if dtype is torch.float8_e4m3fn:
        codes &= _LOW_E4M3
    return codes.view(dtype).view(shape)


def _zero_points(stored: StoredTensor) -> Tensor:
    dtype = _DTYPES[stored.dtypes[0]]
    num_bytes = prod(stored.shapes[0]) * dtype.itemsize
    return torch.full((num_bytes,), stored.zero_byte, dtype=torch.uint8).view(dtype).view(stored.shapes[0])


@cache
def _block_spread(block_type: BlockType) -> float:
    """The standard deviation of values in blocks with a scale of 1."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (64, 4, block_type.num_bytes), generator=generator, dtype=torch.uint8)
    write_block_scales(blocks, block_type, 1.0)
    return float(block_type.dequantize(blocks).std())


def _code_spread(matrix_format: MatrixFormat) -> float:
    """The root mean square of codes that are equally likely."""
    if matrix_format is MatrixFormat.INT8:
        values = torch.arange(-128.0, 128.0)
    elif matrix_format is MatrixFormat.INT4:
        values = torch.arange(-8.0, 8.0)
    elif matrix_format is MatrixFormat.MXFP4:
        values = torch.tensor(MXFP4_VALUES)
    else:
        codes = torch.arange(256, dtype=torch.int16).to(torch.uint8) & _LOW_E4M3
        values = codes.view(torch.float8_e4m3fn).float()
    return float(values.square().mean().sqrt())
