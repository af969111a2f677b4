"""Products with packed weights are those with the numbers that the weights encode.

Each kind of matrix meets each way in which tiles differ; the other combinations are left to `make proofs`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.ops.block_types import IQ4_XS, Q4_K, Q5_0, Q6_K, BlockType
from services.worker.ops.matrices import BlockMatrix, Fp8Matrix, IntMatrix, Mxfp4Matrix, dense
from services.worker.ops.matrix_rows import MatrixFormat, join_rows
from services.worker.ops.triton.backend import TritonOps
from services.worker.ops.triton.products.linear import PackedEmbedding, PackedLinear
from services.worker.ops.triton.products.tile_sizes import TileSizes, choose_sizes
from services.worker.weights.dummy_parts import write_block_scales
from tests.support.kernels.attention_batches import random
from tests.support.kernels.packed_matrices import KINDS, MatrixKind, matrix_kinds
from tests.support.pairwise import every_pair, some_of


@given(
    kind=matrix_kinds(),
    num_rows=st.sampled_from([1, 3, 16, 19]),
    num_outputs=st.sampled_from([1, 31, 32, 70]),
    size=st.integers(1, 100),
    has_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30)
def test_a_product_is_that_with_the_dense_matrix(
    kind: MatrixKind, num_rows: int, num_outputs: int, size: int, has_bias: bool, seed: int
) -> None:
    num_inputs = -(-size // kind.column_multiple) * kind.column_multiple
    weight = kind.make(num_outputs, num_inputs, seed=seed)
    # Rows that are apart, and not aligned to anything but an element.
    x = random(num_rows, num_inputs + 3, seed=seed)[:, 1:-2]
    bias = random(num_outputs, seed=seed + 1) if has_bias else None
    output = PackedLinear(weight, bias, torch.float32)(x)
    expected = F.linear(x.double(), dense(weight, torch.float32).double(), None if bias is None else bias.double())
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=1e-5)


@some_of([(kind, 70 if number % 2 else 2) for number, kind in enumerate(KINDS)], kind=KINDS, num_rows=[2, 70])
@pytest.mark.usefixtures("bfloat16_products")
def test_bfloat16_rows_are_summed_in_float32_and_rounded_once(kind: MatrixKind, num_rows: int) -> None:
    # Larger sums of rounded numbers would be further off.
    weight, x = kind.make(40, 160), random(num_rows, 160, seed=1).bfloat16()
    bias = random(40, seed=2).bfloat16()
    output = PackedLinear(weight, bias, torch.bfloat16)(x)
    expected = F.linear(x.float(), dense(weight, torch.bfloat16).float(), bias.float())
    assert output.dtype == torch.bfloat16
    # The interpreter rounds to bfloat16 towards zero: the result, and numbers with offsets too.
    atol = 0.05 if kind.has_offsets else 1e-5
    torch.testing.assert_close(output.float(), expected, atol=atol, rtol=2**-7)


@every_pair(kind=KINDS, sizes=[TileSizes(16, 16, 32, 1, 2), TileSizes(32, 64, 64, 8, 4)], num_splits=[1, 3])
def test_the_size_of_a_tile_and_the_number_of_splits_change_no_result(
    kind: MatrixKind, sizes: TileSizes, num_splits: int
) -> None:
    weight, x = kind.make(70, 160), random(18, 160, seed=1)
    output = PackedLinear(weight, None, torch.float32)(x, sizes=sizes, num_splits=num_splits)
    expected = F.linear(x.double(), dense(weight, torch.float32).double())
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("block_type", [Q4_K, Q5_0, Q6_K, IQ4_XS], ids=lambda block_type: block_type.name)
def test_ggufs_blocks_are_multiplied_as_integers(block_type: BlockType) -> None:
    blocks = torch.randint(0, 256, (33, 512 // block_type.num_values, block_type.num_bytes), dtype=torch.uint8)
    write_block_scales(blocks, block_type, 1e-4)
    weight, x = BlockMatrix(block_type, blocks), random(3, 512, seed=1)
    expected = F.linear(x.double(), weight.to_dense(torch.float32).double())
    embedding, head = TritonOps().prepare_tied(weight, torch.float32)
    torch.testing.assert_close(head(x).double(), expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(embedding(torch.tensor([32, 0])), weight.to_dense(torch.float32)[[32, 0]])
    other = random(2, 512, seed=2)
    joined = PackedLinear(join_rows([weight, other], torch.float32), None, torch.float32)
    expected = torch.cat((expected, F.linear(x.double(), other.double())), dim=1)
    torch.testing.assert_close(joined(x).double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:overflow encountered in multiply")
def test_every_code_of_mxfp4_has_its_value_with_every_exponent() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    exponents = torch.arange(255, dtype=torch.uint8).unsqueeze(1)
    weight = Mxfp4Matrix((codes[::2] | codes[1::2] << 4).repeat(255, 1), exponents)
    # One column at a time: sums would not be finite.
    embedding, _ = TritonOps().prepare_tied(weight, torch.float32)
    assert torch.equal(embedding(torch.arange(255)), dense(weight, torch.float32))


def test_every_code_of_fp8_has_its_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    weight = Fp8Matrix(codes[codes & 0x7F != 0x7F].view(2, 127), torch.ones(2, 1), group_size=127)
    embedding, _ = TritonOps().prepare_tied(weight, torch.float32)
    assert torch.equal(embedding(torch.arange(2)), dense(weight, torch.float32))


@some_of(
    [(kind, torch.float32) for kind in KINDS] + [(KINDS[place], torch.bfloat16) for place in (1, 3, 5, 7)],
    kind=KINDS,
    dtype=[torch.float32, torch.bfloat16],
)
def test_a_tied_embedding_has_the_rows_of_the_heads_weight(kind: MatrixKind, dtype: torch.dtype) -> None:
    weight, token_ids = kind.make(75, 320), torch.tensor([74, 0, 31, 32, 33, 74, 40])
    embedding, head = TritonOps().prepare_tied(weight, dtype)
    rows = embedding(token_ids)
    assert rows.dtype == dtype
    expected = dense(weight, dtype)[token_ids]
    torch.testing.assert_close(rows, expected, atol=1e-6, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5)
    assert torch.equal(TritonOps().prepare_embedding(weight, dtype)(token_ids), rows)
    if dtype == torch.float32:
        x = random(2, 320)
        torch.testing.assert_close(head(x), x @ dense(weight, dtype).T, atol=2e-5, rtol=1e-5)


def test_a_tied_tensor_is_kept_once() -> None:
    weight, x = random(75, 24), random(2, 24, seed=1)
    embedding, head = TritonOps().prepare_tied(weight, torch.float32)
    assert torch.equal(embedding(torch.tensor([7, 74])), weight[[7, 74]])
    before = head(x)
    assert torch.equal(head(x), before)
    weight.zero_()
    assert not head(x).any()
    assert not embedding(torch.tensor([7])).any()


@some_of(
    [(kind, torch.inf if number % 2 else torch.nan) for number, kind in enumerate(KINDS)],
    kind=KINDS,
    value=[torch.nan, torch.inf],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
def test_a_value_that_is_not_finite_reaches_its_rows_results_only(kind: MatrixKind, value: float) -> None:
    kernel, x = PackedLinear(kind.make(40, 96), None, torch.float32), random(9, 96)
    expected = kernel(x)
    x[8, 70] = value
    output = kernel(x)
    # A code of zero times infinity is NaN.
    assert not output[8].isfinite().any()
    assert torch.equal(output[:8], expected[:8])


def test_columns_may_be_apart() -> None:
    weight, x = KINDS[0].make(9, 8), random(8, 3)
    kernel = PackedLinear(weight, None, torch.float32)
    assert torch.equal(kernel(x.T), kernel(x.T.contiguous()))


def test_without_rows_or_inputs_there_is_nothing_to_add() -> None:
    kernel = PackedLinear(KINDS[0].make(9, 8), None, torch.float32)
    assert kernel(torch.empty(0, 8)).shape == (0, 9)
    bias = random(9)
    empty = IntMatrix(8, torch.empty(9, 0, dtype=torch.int8), torch.empty(9, 0), group_size=32)
    assert torch.equal(PackedLinear(empty, bias, torch.float32)(torch.empty(2, 0)), bias.expand(2, -1))


@pytest.mark.parametrize("x", [torch.ones(2, 9), torch.ones(2, 8).bfloat16()])
def test_a_wrong_shape_or_dtype_is_refused(x: torch.Tensor) -> None:
    kernel = PackedLinear(KINDS[0].make(4, 8), None, torch.float32)
    with pytest.raises(ValueError, match=r"expected \[T, 8\] torch.float32"):
        kernel(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_grow_with_the_rows_in_a_few_steps(dtype: torch.dtype) -> None:
    sizes = [choose_sizes(num_rows, 4096, 4096, dtype).rows for num_rows in range(1, 1000)]
    assert sizes == sorted(sizes)
    assert set(sizes) <= {16, 64, 128}


def test_columns_in_another_order_are_those_of_the_rows() -> None:
    order, x = torch.randperm(96, generator=torch.Generator().manual_seed(1)), random(5, 96)
    in_order = MatrixKind(MatrixFormat.INT4, 32, has_offsets=True).make(40, 96)
    assert isinstance(in_order, IntMatrix)
    weight = replace(in_order, column_order=order)
    expected = PackedLinear(in_order, None, torch.float32)(x[:, order])
    assert torch.equal(PackedLinear(weight, None, torch.float32)(x), expected)
    rows = PackedEmbedding(weight, torch.float32)(torch.tensor([3, 0]))
    assert torch.equal(rows, dense(weight, torch.float32)[[3, 0]])
    with pytest.raises(ValueError, match=r"expected \[T, 96\]"):
        PackedLinear(weight, None, torch.float32)(x[:, :95])
