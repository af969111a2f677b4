"""What GGUF's blocks mean, compared with the library that defines them."""

from __future__ import annotations

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.ops.block_types import BLOCK_TYPES, BlockType
from services.worker.ops.matrices import BlockMatrix

by_type = pytest.mark.parametrize("block_type", BLOCK_TYPES.values(), ids=lambda block_type: block_type.name)


def random_blocks(block_type: BlockType, num_rows: int, num_blocks: int, seed: int) -> Tensor:
    """Any bytes, but finite numbers where a block has a float16."""
    generator = torch.Generator().manual_seed(seed)
    shape = num_rows, num_blocks, block_type.num_bytes
    blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    for at in block_type.float16_at:
        halves = torch.randn(num_rows, num_blocks, 1, generator=generator).half()
        blocks[..., at : at + 2] = halves.view(torch.uint8)
    return blocks


@by_type
@given(num_rows=st.integers(1, 5), num_blocks=st.integers(1, 4), seed=st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_values_have_the_bits_of_the_library(block_type: BlockType, num_rows: int, num_blocks: int, seed: int) -> None:
    kind = gguf.GGMLQuantizationType[block_type.name]
    assert gguf.GGML_QUANT_SIZES[kind] == (block_type.num_values, block_type.num_bytes)
    blocks = random_blocks(block_type, num_rows, num_blocks, seed)
    expected = torch.from_numpy(gguf.dequantize(blocks.flatten(1).numpy(), kind).copy())
    matrix = BlockMatrix(block_type, blocks)
    dense = matrix.to_dense(torch.float32)
    assert matrix.shape == tuple(dense.shape)
    assert torch.equal(dense.view(torch.int32), expected.view(torch.int32))


@by_type
def test_integers_have_the_values_but_for_the_rounding_of_offsets(block_type: BlockType) -> None:
    matrix = BlockMatrix(block_type, random_blocks(block_type, 7, 3, seed=1))
    integers, expected = matrix.to_integers(), matrix.to_dense(torch.float32)
    assert integers.shape == matrix.shape
    assert integers.num_bits == (4 if block_type.num_bits <= 4 and block_type.table is None else 8)
    if integers.offsets is None:
        assert torch.equal(integers.to_dense(torch.float32), expected)
    else:
        # An offset may have 8 scales added.
        bound = 2**-22 * integers.scales.abs().mul(16).add(integers.offsets.abs()).repeat_interleave(
            block_type.group_size, dim=1
        )
        assert ((integers.to_dense(torch.float32) - expected).abs() <= bound).all()
