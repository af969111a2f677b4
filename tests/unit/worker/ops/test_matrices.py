"""Quantised matrices, element by element."""

from __future__ import annotations

import pytest
import torch

from services.worker.ops.matrices import MXFP4_VALUES, Fp8Matrix, IntMatrix, Mxfp4Matrix, dense


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("group_size", [4, 6, 10, 64])
@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("num_bits", [4, 8])
def test_an_element_is_its_code_times_its_groups_scale_plus_the_offset(
    num_bits: int, has_offsets: bool, group_size: int
) -> None:
    num_groups = -(-10 // group_size)
    codes = torch.randint(-(1 << num_bits - 1), 1 << num_bits - 1, (3, 10), generator=generator())
    scales = torch.randn(3, num_groups, generator=generator())
    offsets = torch.randn(3, num_groups, generator=generator()) if has_offsets else None
    stored = codes.to(torch.int8)
    if num_bits == 4:
        stored = ((codes[:, ::2] + 8) | (codes[:, 1::2] + 8) << 4).to(torch.uint8)
    matrix = IntMatrix(num_bits, stored, scales, group_size, offsets)
    assert matrix.shape == (3, 10)
    for row in range(3):
        for column in range(10):
            group = column // group_size
            expected = codes[row, column] * scales[row, group] + (0.0 if offsets is None else offsets[row, group])
            assert matrix.to_dense(torch.float32)[row, column] == expected


def test_an_mxfp4_element_is_a_small_float_times_its_groups_power_of_two() -> None:
    codes = torch.arange(128).view(2, 64) % 16
    exponents = torch.tensor([[127, 120], [254, 1]], dtype=torch.uint8)
    matrix = Mxfp4Matrix((codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), exponents)
    assert matrix.shape == (2, 64)
    values = dense(matrix, torch.float64)
    for row in range(2):
        for column in range(64):
            scale = 2.0 ** (int(exponents[row, column // 32]) - 127)
            exact = MXFP4_VALUES[int(codes[row, column])] * scale
            assert values[row, column] == torch.tensor(exact, dtype=torch.float32)


def test_an_fp8_element_is_a_small_float_times_its_groups_scale() -> None:
    numbers = torch.tensor([[0.0, -448.0, 2.0**-9, 1.75, -2.0], [1.0, 3.5, 240.0, -0.0, 2.0**-6]])
    scales = torch.tensor([[0.5, 3.0], [2.0**-10, 1.0]])
    matrix = Fp8Matrix(numbers.to(torch.float8_e4m3fn).view(torch.uint8), scales, group_size=3)
    assert matrix.shape == (2, 5)
    assert torch.equal(dense(matrix, torch.float32), numbers * scales.repeat_interleave(3, dim=1)[:, :5])


def test_a_tensor_is_its_own_dense_form() -> None:
    tensor = torch.ones(2, 3)
    assert dense(tensor, torch.float32) is tensor
