"""The products of every format, with every set of instructions, compared with float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.ops import Ops
from services.worker.ops.block_types import BLOCK_TYPES
from services.worker.ops.matrices import BlockMatrix, IntMatrix, JoinedMatrix, Matrix, Mxfp4Matrix, dense
from services.worker.ops.matrix_rows import join_rows
from services.worker.ops.native.backend import NativeOps
from services.worker.ops.native.isa import Isa, available_isas

every_isa = pytest.mark.parametrize("isa", available_isas(), ids=lambda isa: isa.value)

FLOAT, INT8, INT4, MXFP4 = "float", "int8", "int4", "mxfp4"
KINDS = [FLOAT, INT8, INT4, MXFP4]
# GGUF's blocks: every layout of codes, scales and offsets.
BLOCKS = ["Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    for isa in available_isas():
        NativeOps(isa).use_threads(1)
    torch.set_num_threads(num_threads)


@dataclass(frozen=True)
class Case:
    kind: str
    dtype: torch.dtype
    num_rows: int
    num_inputs: int
    num_outputs: int
    group_size: int = 32
    has_offsets: bool = False
    has_exact_halves: bool = False
    has_bias: bool = True
    num_threads: int = 2
    seed: int = 0

    def activation_levels(self, isa: Isa) -> tuple[int, int]:
        """How many columns of the quantised activations share a scale, and how many levels it has above zero."""
        if self.kind in BLOCK_TYPES:
            return BLOCK_TYPES[self.kind].group_size, 127
        if self.group_size < self.num_inputs or self.kind == MXFP4:
            return 32, 127
        is_in_planes = isa is Isa.AMX and self.kind == INT8
        return (self.num_inputs, 127 * 128) if is_in_planes else (64, 127)

    def random(self, *shape: int, part: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(100 * self.seed + part))

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(self.seed))

    def weight(self) -> Matrix:
        outputs, inputs = self.num_outputs, self.num_inputs
        if self.kind == FLOAT:
            return self.random(outputs, inputs, part=1).to(self.dtype)
        if self.kind in BLOCK_TYPES:
            block_type = BLOCK_TYPES[self.kind]
            blocks = self.integers(0, 256, outputs, inputs // block_type.num_values, block_type.num_bytes)
            # Scales of any sign, and of other sizes than offsets.
            for part, at in enumerate(block_type.float16_at):
                halves = self.random(outputs, inputs // block_type.num_values, 1, part=6 + part).half() / 64
                blocks[..., at : at + 2] = halves.view(torch.uint8)
            return BlockMatrix(block_type, blocks.to(torch.uint8))
        if self.kind == MXFP4:
            exponents = self.integers(120, 131, outputs, inputs // 32).to(torch.uint8)
            return Mxfp4Matrix(self.integers(0, 256, outputs, inputs // 2).to(torch.uint8), exponents)
        groups = -(-inputs // self.group_size)
        scales = self.random(outputs, groups, part=2) / 8
        offsets = self.random(outputs, groups, part=3) if self.has_offsets else None
        scales = scales.half().float() if self.has_exact_halves else scales
        if self.kind == INT8:
            codes = self.integers(-128, 128, outputs, inputs).to(torch.int8)
            return IntMatrix(8, codes, scales, self.group_size, offsets)
        return IntMatrix(
            4, self.integers(0, 256, outputs, inputs // 2).to(torch.uint8), scales, self.group_size, offsets
        )

    def x(self) -> Tensor:
        """Rows that are apart, and not aligned to anything but an element."""
        return self.random(self.num_rows, self.num_inputs + 3, part=4).to(self.dtype)[:, 1:-2]

    def bias(self) -> Tensor | None:
        return self.random(self.num_outputs, part=5).to(self.dtype) if self.has_bias else None


def column_multiple(kind: str) -> int:
    """What the number of a matrix's columns is a multiple of."""
    return BLOCK_TYPES[kind].num_values if kind in BLOCK_TYPES else {INT4: 2, MXFP4: 32}.get(kind, 1)


def case_of(kind: str, num_columns: int, **values: Any) -> Case:
    """A case of about as many columns."""
    multiple = column_multiple(kind)
    return Case(kind, num_inputs=-(-num_columns // multiple) * multiple, **values)


def cases() -> st.SearchStrategy[Case]:
    """Sizes around those of tiles and blocks of rows."""
    sizes = st.sampled_from([1, 2, 15, 31, 32, 33, 64, 70, 100, 129])

    def of_kind(kind: str) -> st.SearchStrategy[Case]:
        multiple = column_multiple(kind)
        inputs = sizes.map(lambda size: multiple * size)
        return st.builds(
            Case,
            kind=st.just(kind),
            dtype=st.sampled_from([torch.float32, torch.bfloat16]),
            num_rows=st.integers(0, 18) | st.sampled_from([31, 37, 48, 51, 66]),
            num_inputs=st.sampled_from([1, 2, 3, 9]).map(lambda n: n * multiple) if multiple > 2 else inputs,
            num_outputs=sizes,
            group_size=st.sampled_from([8, 32, 64, 96, 4096]),
            has_offsets=st.booleans(),
            has_exact_halves=st.booleans(),
            has_bias=st.booleans(),
            num_threads=st.integers(1, 4),
            seed=st.integers(0, 1000),
        )

    return st.sampled_from([*KINDS, *BLOCK_TYPES]).flatmap(of_kind)


def error_bound(case: Case, isa: Isa, x: Tensor, weight: Tensor, expected: Tensor) -> Tensor:
    """How far a product may be from the exact one."""
    # Sums in float32, with some slack for their order.
    bound = 1e-5 * (x.abs() @ weight.abs().T) + 1e-6
    if case.kind != FLOAT:
        # An activation is rounded to one of the levels up to its group's largest, so by at most half a level.
        size, num_levels = case.activation_levels(isa)
        padded = F.pad(x.abs(), (0, -x.shape[1] % size))
        groups = padded.view(len(x), padded.shape[1] // size, size)
        levels = (groups.amax(-1) / num_levels).repeat_interleave(size, dim=1)[:, : x.shape[1]]
        bound += 0.5001 * levels @ weight.abs().T
    if case.dtype == torch.bfloat16:
        # The result is rounded to 8 bits.
        bound += 2**-8 * (expected.abs() + bound)
        if case.kind in (INT8, INT4):
            # A matrix whose groups have no kernel is dense, and then rounded itself.
            bound += 2**-8 * (x.abs() @ weight.abs().T)
    return bound


@every_isa
@given(case=cases())
@settings(max_examples=100, deadline=None)
def test_a_product_is_within_its_rounding_of_the_exact_one(isa: Isa, case: Case) -> None:
    ops, x, weight, bias = NativeOps(isa), case.x(), case.weight(), case.bias()
    ops.use_threads(case.num_threads)
    output = ops.prepare_linear(weight, bias, case.dtype)(x)
    exact_x, exact_weight = x.double(), dense(weight, torch.float32).double()
    expected = F.linear(exact_x, exact_weight, None if bias is None else bias.double())
    assert (output.dtype, output.shape) == (case.dtype, expected.shape)
    assert ((output.double() - expected).abs() <= error_bound(case, isa, exact_x, exact_weight, expected)).all()


@every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [*KINDS, *BLOCKS])
def test_a_rows_bits_depend_on_neither_its_batch_nor_the_threads(isa: Isa, kind: str, dtype: torch.dtype) -> None:
    case = case_of(kind, 320, dtype=dtype, num_rows=50, num_outputs=200, has_offsets=True)
    ops, x = NativeOps(isa), case.x()
    kernel = ops.prepare_linear(case.weight(), case.bias(), dtype)
    expected = torch.cat([kernel(row.clone().unsqueeze(0)) for row in x])
    for num_threads in range(1, 5):
        ops.use_threads(num_threads)
        assert torch.equal(kernel(x), expected)
        assert torch.equal(kernel(x[:7]), expected[:7])


def check_that_its_batch_changes_no_bit_of_a_row(isa: Isa, case: Case, row: int) -> None:
    ops, x = NativeOps(isa), case.x()
    kernel = ops.prepare_linear(case.weight(), case.bias(), case.dtype)
    ops.use_threads(case.num_threads)
    assert torch.equal(kernel(x)[row : row + 1], kernel(x[row : row + 1].clone()))


def cases_with_a_row() -> st.SearchStrategy[tuple[Case, int]]:
    """Matrices that tiles multiply where there are some, with any number of rows, and one of these."""
    some = st.builds(
        Case,
        kind=st.sampled_from([FLOAT, INT8]),
        dtype=st.just(torch.bfloat16),
        num_rows=st.integers(1, 70) | st.integers(1, 1100),
        num_inputs=st.sampled_from([1, 32, 95, 576]),
        num_outputs=st.sampled_from([1, 33, 200]),
        group_size=st.just(4096),
        num_threads=st.integers(1, 3),
        seed=st.integers(0, 1000),
    )
    return some.flatmap(lambda case: st.tuples(st.just(case), st.integers(0, case.num_rows - 1)))


@every_isa
@given(case_and_row=cases_with_a_row())
@settings(deadline=None)
def test_what_multiplies_a_matrix_is_chosen_by_the_matrix_and_not_by_the_number_of_rows(
    isa: Isa, case_and_row: tuple[Case, int]
) -> None:
    check_that_its_batch_changes_no_bit_of_a_row(isa, *case_and_row)


@pytest.mark.proof
@every_isa
@given(case_and_row=cases_with_a_row())
@settings(max_examples=3000, deadline=None)
def test_so_it_is_for_thousands_of_matrices(isa: Isa, case_and_row: tuple[Case, int]) -> None:
    check_that_its_batch_changes_no_bit_of_a_row(isa, *case_and_row)


@every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [FLOAT, INT8])
def test_blocks_of_every_size_are_multiplied(isa: Isa, kind: str, dtype: torch.dtype) -> None:
    # Neither rows nor columns fill a tile.
    case = Case(kind, dtype, num_rows=70, num_inputs=95, num_outputs=70, group_size=4096, has_offsets=True)
    x, weight, bias = case.x(), case.weight(), case.bias()
    kernel = NativeOps(isa).prepare_linear(weight, bias, dtype)
    exact_x, exact_weight = x.double(), dense(weight, torch.float32).double()
    expected = F.linear(exact_x, exact_weight, None if bias is None else bias.double())
    bound = error_bound(case, isa, exact_x, exact_weight, expected)
    for num_rows in range(1, 71):
        assert ((kernel(x[:num_rows]).double() - expected[:num_rows]).abs() <= bound[:num_rows]).all()


@every_isa
def test_many_rows_are_multiplied_in_parts(isa: Isa) -> None:
    case = Case(INT8, torch.float32, num_rows=2100, num_inputs=2080, num_outputs=40, group_size=4096)
    kernel, x = NativeOps(isa).prepare_linear(case.weight(), None, case.dtype), case.x()
    output = kernel(x)
    for place in (0, 500, 1023, 1024, 2099):
        assert torch.equal(output[place], kernel(x[place : place + 1])[0])


@every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [FLOAT, INT8, INT4])
def test_many_rows_with_many_outputs_have_the_bits_of_a_few_rows(isa: Isa, kind: str, dtype: torch.dtype) -> None:
    # A thread's outputs fill several tiles; neither the last tile nor the last block of rows is full.
    case = Case(kind, dtype, num_rows=150, num_inputs=200, num_outputs=1333, group_size=4096)
    ops, x = NativeOps(isa), case.x()
    kernel = ops.prepare_linear(case.weight(), case.bias(), dtype)
    expected = torch.cat([kernel(x[first : first + 7]) for first in range(0, 150, 7)])
    for num_threads in (1, 2):
        ops.use_threads(num_threads)
        assert torch.equal(kernel(x), expected)
        assert torch.equal(kernel(x[:65]), expected[:65])


@every_isa
@pytest.mark.parametrize("kind", [FLOAT, INT8, INT4])
@pytest.mark.parametrize("num_outputs", [255, 257, 513, 1333])
def test_threads_that_share_a_few_rows_write_every_output(isa: Isa, kind: str, num_outputs: int) -> None:
    # From less than a piece for each of four threads to pieces of unequal sizes.
    case = Case(kind, torch.bfloat16, num_rows=8, num_inputs=64, num_outputs=num_outputs)
    ops, x = NativeOps(isa), case.x()
    kernel = ops.prepare_linear(case.weight(), case.bias(), case.dtype)
    ops.use_threads(1)
    expected = kernel(x)
    for num_threads in range(2, 6):
        ops.use_threads(num_threads)
        for num_rows in (1, 3, 8):
            # Memory that is given out again would have the results of another number of threads.
            kernel(torch.zeros_like(x[:num_rows]))
            assert torch.equal(kernel(x[:num_rows]), expected[:num_rows])


@every_isa
def test_the_most_negative_codes_are_multiplied_exactly(isa: Isa) -> None:
    weight = IntMatrix(8, torch.full((40, 64), -128, dtype=torch.int8), torch.ones(40, 1), group_size=64)
    x = torch.full((3, 64), -127.0)
    x[:, ::2] = 127.0
    kernel = NativeOps(isa).prepare_linear(weight, None, torch.float32)
    assert torch.equal(kernel(x.abs()), torch.full((3, 40), -128.0 * 127 * 64))
    assert torch.equal(kernel(-x.abs()), torch.full((3, 40), 128.0 * 127 * 64))
    assert torch.equal(kernel(x), torch.zeros(3, 40))


@every_isa
@pytest.mark.parametrize("num_columns", [2**17, 2**17 + 1])
def test_sums_of_very_many_columns_do_not_overflow(isa: Isa, num_columns: int) -> None:
    weight = IntMatrix(8, torch.full((1, num_columns), -128, dtype=torch.int8), torch.ones(1, 1), num_columns)
    output = NativeOps(isa).prepare_linear(weight, None, torch.float32)(torch.ones(2, num_columns))
    torch.testing.assert_close(output, torch.full((2, 1), -128.0 * num_columns))


@every_isa
@pytest.mark.parametrize("kind", [*KINDS, *BLOCKS])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_reaches_its_rows_results_only(isa: Isa, kind: str, value: float) -> None:
    case = case_of(kind, 96, dtype=torch.float32, num_rows=9, num_outputs=40)
    kernel, x = NativeOps(isa).prepare_linear(case.weight(), None, case.dtype), case.x().clone()
    expected = kernel(x)
    x[4, 70] = value
    output = kernel(x)
    # A code of zero times infinity is NaN.
    assert not output[4].isfinite().any()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(output[others], expected[others])


@every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [*KINDS, *BLOCKS])
@pytest.mark.parametrize("group_size", [64, 4096])
def test_a_tied_embedding_has_the_rows_of_the_heads_weight(
    isa: Isa, kind: str, dtype: torch.dtype, group_size: int
) -> None:
    case = case_of(kind, 160, dtype=dtype, num_rows=1, num_outputs=75, group_size=group_size, has_offsets=True)
    weight, token_ids = case.weight(), torch.tensor([74, 0, 31, 32, 33, 74, 40])
    embedding, head = NativeOps(isa).prepare_tied(weight, dtype)
    expected = dense(weight, dtype)[token_ids]
    # Equal but for the rounding of the product before an offset is added.
    torch.testing.assert_close(
        embedding(token_ids), expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
    )
    assert embedding(token_ids[:0]).shape == (0, case.num_inputs)
    assert torch.equal(head(case.x()), NativeOps(isa).prepare_head(weight, dtype)(case.x()))


@every_isa
@pytest.mark.parametrize("kind", [*KINDS, *BLOCKS])
def test_logits_are_products_that_were_not_rounded(isa: Isa, kind: str) -> None:
    case = case_of(kind, 160, dtype=torch.bfloat16, num_rows=9, num_outputs=75)
    weight, x = case.weight(), case.x()
    logits = NativeOps(isa).prepare_head(weight, torch.bfloat16)(x)
    assert logits.dtype == torch.float32
    assert (logits != logits.bfloat16()).any()
    assert torch.equal(logits.bfloat16(), NativeOps(isa).prepare_linear(weight, None, torch.bfloat16)(x))


@every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_in_several_formats_are_joined_in_their_own(isa: Isa, dtype: torch.dtype) -> None:
    ops = NativeOps(isa)
    cases = [Case(kind, dtype, 5, 512, size) for kind, size in (("Q4_K", 70), ("Q6_K", 1), (FLOAT, 33), (INT8, 32))]
    weights, x, bias = [case.weight() for case in cases], cases[0].x(), torch.rand(136)
    joined = join_rows(weights, dtype)
    assert isinstance(joined, JoinedMatrix)
    biases = torch.split(bias, [70, 1, 33, 32])
    parts = [ops.prepare_linear(*part, dtype)(x) for part in zip(weights, biases, strict=True)]
    assert torch.equal(ops.prepare_linear(joined, bias, dtype)(x), torch.cat(parts, dim=1))


def test_many_rows_of_blocks_are_packed_in_parts() -> None:
    weight, token_ids = Case("Q5_1", torch.float32, 1, 32, 4133).weight(), torch.tensor([0, 2047, 2048, 4096, 4132])
    embedding = native().prepare_embedding(weight, torch.float32)
    assert torch.equal(embedding(token_ids), dense(weight, torch.float32)[token_ids])


def native() -> Ops:
    return NativeOps(available_isas()[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [FLOAT, INT8, *BLOCKS])
def test_an_embedding_has_the_rows_of_its_weight(kind: str, dtype: torch.dtype) -> None:
    weight = case_of(kind, 160, dtype=dtype, num_rows=1, num_outputs=75).weight()
    embedding, token_ids = native().prepare_embedding(weight, dtype), torch.tensor([74, 0, 31, 74])
    assert torch.equal(embedding(token_ids), dense(weight, dtype)[token_ids])
    assert embedding(token_ids[:0]).shape == (0, weight.shape[1])


@pytest.mark.parametrize("token_id", [-1, 75])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_token_id_outside_the_vocabulary_is_refused(token_id: int, is_tied: bool) -> None:
    weight = torch.ones(75, 8)
    tied, _ = native().prepare_tied(weight, torch.float32)
    embedding = tied if is_tied else native().prepare_embedding(weight, torch.float32)
    with pytest.raises(IndexError, match=f"token id {token_id} is not in a vocabulary of 75"):
        embedding(torch.tensor([3, token_id]))


@pytest.mark.parametrize("x", [torch.ones(2, 9), torch.ones(2, 8).bfloat16(), torch.ones(2, 8).double()])
def test_a_wrong_shape_or_dtype_is_refused(x: Tensor) -> None:
    kernel = native().prepare_linear(torch.ones(4, 8), None, torch.float32)
    with pytest.raises(ValueError, match=r"expected \[T, 8\] torch.float32"):
        kernel(x)


def test_columns_may_be_apart() -> None:
    kernel, x = native().prepare_linear(torch.eye(8), None, torch.float32), torch.arange(24.0).view(8, 3)
    assert torch.equal(kernel(x.T), x.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_bits", [8, 4])
def test_columns_in_another_order_are_those_of_the_rows(num_bits: int, dtype: torch.dtype) -> None:
    ops, order = native(), torch.randperm(96, generator=torch.Generator().manual_seed(1))
    case = Case(INT8 if num_bits == 8 else INT4, dtype, 300, 96, 70, has_offsets=True, has_bias=False)
    in_order, x = case.weight(), case.x()
    assert isinstance(in_order, IntMatrix)
    weight = replace(in_order, column_order=order)
    kernel = ops.prepare_linear(weight, None, dtype)
    expected = ops.prepare_linear(in_order, None, dtype)(x[:, order])
    for rows in (x, x[:2], x.T.contiguous().T):
        assert torch.equal(kernel(rows), expected[: len(rows)])
    assert torch.equal(ops.prepare_head(weight, dtype)(x), ops.prepare_head(in_order, dtype)(x[:, order]))
    row = x[:1].contiguous()
    capture = ops.make_capture(torch.device("cpu"), [])
    assert capture is not None
    assert torch.equal(capture(lambda: kernel(row))(), expected[:1])
    # An embedding's rows have their columns in the matrix's own order.
    embedding, head = ops.prepare_tied(weight, dtype)
    torch.testing.assert_close(embedding(torch.tensor([3])), dense(weight, dtype)[3:4])
    bound = error_bound(case, available_isas()[-1], x.float(), dense(weight, torch.float32), torch.zeros(()))
    assert ((head(x) - x.float() @ dense(weight, torch.float32).T).abs() <= bound).all()
    with pytest.raises(ValueError, match=r"expected \[T, 96\]"):
        kernel(x[:, :95])
