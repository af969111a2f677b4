"""Products whose sums over columns are shared by several programs are those with the dense matrix."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from services.worker.ops.matrices import dense
from services.worker.ops.triton.products import linear
from services.worker.ops.triton.products.fp8_rows import OCP
from services.worker.ops.triton.products.linear import PackedLinear
from services.worker.ops.triton.products.split_sums import sum_splits
from services.worker.ops.triton.products.tile_sizes import choose_splits
from tests.support.kernels.attention_batches import random
from tests.support.kernels.float8_rows import rounded
from tests.support.kernels.packed_matrices import KINDS, MatrixKind

# In float32 a program reads 32 columns at a time, so there are 29 tiles and 7 splits of 5 tiles: one has none.
NUM_COLUMNS = 928


@pytest.fixture
def split_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of splits of each product that has any."""
    counts: list[int] = []

    def record(partial: torch.Tensor, bias: torch.Tensor | None, output: torch.Tensor) -> None:
        counts.append(len(partial))
        sum_splits(partial, bias, output)

    monkeypatch.setattr(linear, "sum_splits", record)
    return counts


@pytest.mark.parametrize(("kind", "has_bias"), [(KINDS[1], True), (KINDS[2], False), (KINDS[7], True)], ids=str)
def test_a_split_product_is_that_with_the_dense_matrix(
    kind: MatrixKind, split_counts: list[int], *, has_bias: bool
) -> None:
    weight, x = kind.make(35, NUM_COLUMNS), random(3, NUM_COLUMNS, seed=1)
    bias = random(35) if has_bias else None
    output = PackedLinear(weight, bias, torch.float32)(x)
    expected = F.linear(x.double(), dense(weight, torch.float32).double(), None if bias is None else bias.double())
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=1e-5)
    assert split_counts == [7]


@pytest.mark.parametrize("group_size", [128, 4096])
@pytest.mark.usefixtures("float8")
def test_a_split_product_of_rows_in_fp8_is_that_of_their_numbers(group_size: int, split_counts: list[int]) -> None:
    # 9 tiles of 128 columns.
    num_columns = 1100
    weight, x = MatrixKind(KINDS[5].format, group_size).make(35, num_columns), random(3, num_columns, seed=1)
    output = PackedLinear(weight, None, torch.float32, encoding=OCP)(x)
    expected = rounded(x, min(group_size, num_columns), OCP) @ dense(weight, torch.float32).double().T
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=1e-5)
    assert split_counts == [2]


def test_more_numbers_than_a_program_adds_up_are_added_up_in_the_order_of_the_splits() -> None:
    # So large that another order would have other bits.
    partial, bias = random(5, 7, 333).exp() * random(5, 7, 333, seed=1), random(333, seed=2)
    output = torch.empty(7, 333)
    sum_splits(partial, bias, output)
    expected = torch.zeros(7, 333)
    for split in partial:
        expected = expected + split
    assert torch.equal(output, expected + bias)
    assert not torch.equal(output, partial.flip(0).sum(dim=0) + bias)


def test_an_exact_product_is_not_split(split_counts: list[int]) -> None:
    x = random(3, NUM_COLUMNS)
    PackedLinear(KINDS[0].make(35, NUM_COLUMNS), None, torch.float32, is_exact=True)(x)
    assert split_counts == []


def test_a_sum_is_split_where_tiles_are_few_and_only_as_far_as_there_is_work() -> None:
    # Qwen3-8B in steps of few rows: a key's projection, and one that is wide enough.
    assert choose_splits(1024 // 32, 4096 // 128) == 8
    assert choose_splits(4096 // 32, 4096 // 128) == 1
    for num_programs in range(1, 200):
        for num_steps in (0, 1, 7, 8, 40, 1000):
            num_splits = choose_splits(num_programs, num_steps)
            assert num_splits == 1 or num_steps // num_splits >= 4
            assert num_programs * num_splits <= 512
    assert [choose_splits(num_programs, 1000) for num_programs in (1, 64, 100, 127, 128)] == [8, 8, 5, 4, 1]
