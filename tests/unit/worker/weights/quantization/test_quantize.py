"""Quantising a matrix: errors are at most half a step, whatever the values and however they are cut into blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.worker.ops.matrices import IntMatrix
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.weights.quantization.dequantize import has_finite_values
from services.worker.weights.quantization.quantize import quantize

FORMATS = [MatrixFormat.INT8, MatrixFormat.INT4]
# The last group is smaller.
SHAPE = (40, 70)


def matrix(shape: tuple[int, int] = SHAPE) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    # Groups of very different sizes, one-sided ones, one of equal values and one of zeros.
    values[:, :32] *= 1e-6
    values[1] = values[1].abs()
    values[2] = 0.25
    values[3] = 0
    return values


def quantized(values: Tensor, matrix_format: MatrixFormat, block_size: int = 7) -> IntMatrix:
    return quantize(torch.split(values, block_size), (values.shape[0], values.shape[1]), matrix_format)


def steps(packed: IntMatrix) -> Tensor:
    """Each value's distance between codes."""
    num_columns = packed.shape[1]
    return packed.scales.repeat_interleave(packed.group_size, dim=1)[:, :num_columns].expand(packed.shape)


@pytest.mark.parametrize("matrix_format", FORMATS)
def test_every_value_is_off_by_at_most_half_a_step_of_its_group(matrix_format: MatrixFormat) -> None:
    values = matrix()
    packed = quantized(values, matrix_format)
    assert packed.shape == SHAPE
    error = (packed.to_dense(torch.float32) - values).abs()
    assert (error <= 0.501 * steps(packed) + 1e-7 * values.abs()).all()


# In 4 bits a scale has the precision of float16.
@pytest.mark.parametrize(("matrix_format", "precision"), [(MatrixFormat.INT8, 1e-5), (MatrixFormat.INT4, 2e-3)])
def test_extreme_values_and_constants_are_kept(matrix_format: MatrixFormat, precision: float) -> None:
    values = matrix()
    dense = quantized(values, matrix_format).to_dense(torch.float32)
    largest = values.abs().argmax(dim=1, keepdim=True)
    torch.testing.assert_close(dense.gather(1, largest), values.gather(1, largest), rtol=precision, atol=0)
    torch.testing.assert_close(dense[2:4], values[2:4], rtol=1e-6, atol=0)


@pytest.mark.parametrize("matrix_format", FORMATS)
def test_neither_blocks_nor_the_dtype_of_exact_values_change_the_result(matrix_format: MatrixFormat) -> None:
    values = matrix().bfloat16()
    whole = quantized(values.float(), matrix_format, block_size=40)
    for block_size in (1, 39):
        part = quantized(values, matrix_format, block_size)
        assert torch.equal(part.codes, whole.codes)
        assert torch.equal(part.scales, whole.scales)
        assert torch.equal(part.to_dense(torch.float32), whole.to_dense(torch.float32))


@pytest.mark.parametrize("matrix_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_may_be_transposed_views(matrix_format: MatrixFormat, dtype: torch.dtype) -> None:
    values = matrix((64, 96)).to(dtype)
    expected = quantized(values, matrix_format).to_dense(torch.float32)
    assert torch.equal(quantized(values.T.contiguous().T, matrix_format).to_dense(torch.float32), expected)


def test_a_row_has_one_scale_in_8_bits_and_a_scale_and_an_offset_per_32_columns_in_4() -> None:
    int8, int4 = (quantized(matrix(), matrix_format) for matrix_format in FORMATS)
    assert (int8.num_bits, int8.group_size, tuple(int8.scales.shape), int8.offsets) == (8, 70, (40, 1), None)
    assert int8.codes.min() >= -127
    assert (int4.num_bits, int4.group_size, tuple(int4.scales.shape)) == (4, 32, (40, 3))
    assert int4.offsets is not None
    assert tuple(int4.codes.shape) == (40, 35)


def test_scales_of_4_bits_are_float16_values_unless_these_are_too_coarse() -> None:
    ordinary = quantized(matrix()[:, 32:], MatrixFormat.INT4).scales
    assert torch.equal(ordinary, ordinary.half().float())
    assert not torch.equal(ordinary, ordinary.bfloat16().float())
    tiny = quantized(matrix() * 1e-6, MatrixFormat.INT4).scales
    assert not torch.equal(tiny, tiny.half().float())


def test_an_odd_number_of_columns_takes_8_bits() -> None:
    values = matrix((5, 33))
    assert quantized(values, MatrixFormat.INT4).num_bits == 8


@pytest.mark.parametrize("matrix_format", FORMATS)
@pytest.mark.parametrize("damage", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_is_seen_in_the_scales(matrix_format: MatrixFormat, damage: float) -> None:
    values = matrix()
    assert has_finite_values(quantized(values, matrix_format))
    values[17, 69] = damage
    assert not has_finite_values(quantized(values, matrix_format))


@pytest.mark.parametrize("matrix_format", FORMATS)
def test_numbers_of_any_size_are_quantised(matrix_format: MatrixFormat) -> None:
    for size in (1e-35, 1e36):
        values = matrix() * size
        dense = quantized(values, matrix_format).to_dense(torch.float32)
        assert (dense - values).abs().max() <= 0.1 * values.abs().max()
    # Below the smallest normal number there is no precision to keep.
    dense = quantized(matrix() * 1e-42, matrix_format).to_dense(torch.float32)
    assert dense.abs().max() < 1e-38


def test_four_bits_keep_values_that_are_on_a_grid_of_four_bits_already() -> None:
    codes = torch.randint(0, 16, (6, 64), generator=torch.Generator().manual_seed(2))
    codes[:, ::32], codes[:, 1::32] = 0, 15
    values = codes * torch.tensor([0.25, 0.007, 1e-4, 1.0, 3.0, 100.0]).view(6, 1) - 0.3
    packed = quantized(values, MatrixFormat.INT4)
    assert ((packed.to_dense(torch.float32) - values).abs() < 0.01 * steps(packed)).all()
