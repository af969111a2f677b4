"""Matrices joined by rows and columns, and reordered by rows, in every format."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from services.worker.ops.block_types import Q4_K, Q6_K, BlockType
from services.worker.ops.matrices import BlockMatrix, Fp8Matrix, IntMatrix, JoinedMatrix, Matrix, Mxfp4Matrix, dense
from services.worker.ops.matrix_rows import MatrixFormat, format_of, join_columns, join_rows, take_rows
from services.worker.weights.dummy_parts import write_block_scales


def int8(num_rows: int, group_size: int = 64, *, has_offsets: bool = False) -> IntMatrix:
    codes = torch.randint(-128, 128, (num_rows, 64), dtype=torch.int8)
    shape = (num_rows, -(-64 // group_size))
    return IntMatrix(8, codes, torch.rand(shape), group_size, torch.rand(shape) if has_offsets else None)


def int4(num_rows: int, order: int | None = None) -> IntMatrix:
    """The columns of one with an `order` are shuffled by it."""
    codes = torch.randint(0, 256, (num_rows, 32), dtype=torch.uint8)
    columns = None if order is None else torch.randperm(64, generator=torch.Generator().manual_seed(order))
    return IntMatrix(4, codes, torch.rand(num_rows, 2), 32, torch.rand(num_rows, 2), columns)


def mxfp4(num_rows: int) -> Mxfp4Matrix:
    codes = torch.randint(0, 256, (num_rows, 32), dtype=torch.uint8)
    return Mxfp4Matrix(codes, torch.randint(110, 140, (num_rows, 2), dtype=torch.uint8))


def fp8(num_rows: int, group_size: int = 64) -> Fp8Matrix:
    codes = torch.randint(0, 127, (num_rows, 64), dtype=torch.uint8)
    return Fp8Matrix(codes, torch.rand(num_rows, -(-64 // group_size)), group_size)


def blocks(block_type: BlockType, num_rows: int, num_columns: int = 256) -> BlockMatrix:
    shape = num_rows, num_columns // block_type.num_values, block_type.num_bytes
    stored = torch.randint(0, 256, shape, dtype=torch.uint8)
    write_block_scales(stored, block_type, 0.01)
    return BlockMatrix(block_type, stored)


def values(matrix: Matrix) -> Tensor:
    return dense(matrix, torch.float32)


@pytest.mark.parametrize(
    ("matrices", "expected"),
    [
        ([int8(3), int8(1), int8(5)], MatrixFormat.INT8),
        ([int8(3, 16, has_offsets=True), int8(1, 16, has_offsets=True)], MatrixFormat.INT8),
        ([int4(2), int4(7)], MatrixFormat.INT4),
        ([int4(2, 1), int4(7, 1)], MatrixFormat.INT4),
        ([int4(2, 1), int4(7, 2)], None),
        ([int4(2, 1), int4(7)], None),
        ([mxfp4(2), mxfp4(7)], MatrixFormat.MXFP4),
        ([fp8(2, 16), fp8(7, 16)], MatrixFormat.FP8),
        ([fp8(2), fp8(7, 16)], None),
        ([int8(4)], MatrixFormat.INT8),
        ([torch.rand(2, 64), torch.rand(1, 64)], None),
        ([int8(3), int8(3, 32)], None),
        ([int8(3), int8(3, has_offsets=True)], None),
        ([int8(3), int4(3)], None),
        ([int4(3), mxfp4(1), torch.rand(2, 64)], None),
    ],
)
def test_joined_rows_keep_their_values_and_a_common_format(
    matrices: list[Matrix], expected: MatrixFormat | None
) -> None:
    joined = join_rows(matrices, torch.float32)
    assert format_of(joined) is expected
    assert torch.equal(values(joined), torch.cat([values(matrix) for matrix in matrices]))


def test_blocks_are_joined_without_dequantising_them_and_like_ones_together() -> None:
    matrices: list[Matrix] = [blocks(Q4_K, 3), blocks(Q4_K, 2), blocks(Q6_K, 5), torch.rand(1, 256)]
    joined = join_rows(matrices, torch.float32)
    assert isinstance(joined, JoinedMatrix)
    assert [part.shape[0] for part in joined.parts] == [5, 5, 1]
    assert (joined.shape, format_of(joined)) == ((11, 256), MatrixFormat.GGUF)
    assert torch.equal(values(joined), torch.cat([values(matrix) for matrix in matrices]))
    alike = join_rows(matrices[:2], torch.float32)
    assert isinstance(alike, BlockMatrix)
    assert torch.equal(values(take_rows(alike, torch.tensor([4, 0]))), values(alike)[[4, 0]])


@pytest.mark.parametrize(
    ("matrices", "expected"),
    [
        ([int8(3, 16), int8(3, 16), int8(3, 16)], MatrixFormat.INT8),
        ([int8(3), int8(3)], MatrixFormat.INT8),
        # The last group of one, or its only one, has fewer columns than it could have.
        ([int8(3, 48), int8(3, 48)], None),
        ([int8(3, 100), int8(3, 100)], None),
        ([int8(3, 16, has_offsets=True), int8(3, 16, has_offsets=True)], MatrixFormat.INT8),
        ([int8(3, 16, has_offsets=True), int8(3, 16)], None),
        ([int4(3), int4(3)], MatrixFormat.INT4),
        ([int4(3, 1), int4(3, 1)], None),
        ([int4(3), int8(3, 32)], None),
        ([mxfp4(3), mxfp4(3)], MatrixFormat.MXFP4),
        ([fp8(3, 16), fp8(3, 16)], MatrixFormat.FP8),
        ([fp8(3, 16), fp8(3)], None),
        ([blocks(Q4_K, 3), blocks(Q4_K, 3, 512)], MatrixFormat.GGUF),
        ([blocks(Q4_K, 3), blocks(Q6_K, 3)], None),
        ([blocks(Q4_K, 3), torch.rand(3, 128)], None),
        ([int4(3, 1)], MatrixFormat.INT4),
        ([torch.rand(3, 5), torch.rand(3, 7)], None),
    ],
)
def test_joined_columns_keep_their_values_and_a_common_format_of_whole_groups(
    matrices: list[Matrix], expected: MatrixFormat | None
) -> None:
    joined = join_columns(matrices, torch.float32)
    assert format_of(joined) is expected
    assert joined.shape == (3, sum(matrix.shape[1] for matrix in matrices))
    assert torch.equal(values(joined), torch.cat([values(matrix) for matrix in matrices], dim=1))


def test_a_mixture_is_dense_in_the_requested_dtype() -> None:
    joined = join_rows([int8(3), torch.rand(2, 64, dtype=torch.bfloat16)], torch.bfloat16)
    assert isinstance(joined, Tensor)
    assert joined.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "matrix", [int8(6), int8(6, 16, has_offsets=True), int4(6), mxfp4(6), fp8(6), torch.rand(6, 64)]
)
def test_rows_are_taken_in_any_order_in_the_same_format(matrix: Matrix) -> None:
    rows = torch.tensor([4, 0, 0, 5])
    taken = take_rows(matrix, rows)
    assert format_of(taken) is format_of(matrix)
    assert torch.equal(values(taken), values(matrix)[rows])


def test_a_matrix_without_a_column_or_row_can_be_joined() -> None:
    empty = replace(int8(3), codes=torch.empty(0, 64, dtype=torch.int8), scales=torch.empty(0, 1))
    assert torch.equal(values(join_rows([empty, empty], torch.float32)), torch.empty(0, 64))
