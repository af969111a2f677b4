"""Rows quantised to FP8, their products with FP8 matrices, and which GPUs have instructions for these.

The interpreter does not show how a GPU rounds to FP8, nor in how many bits its instructions add up; see
`compute_float8`.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.device import DeviceError
from services.worker.ops.matrices import Fp8Matrix
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.ops.triton.products.fp8_rows import FNUZ, OCP, Fp8Encoding, RowFormat, device_encoding
from services.worker.ops.triton.products.linear import PackedLinear
from services.worker.ops.triton.products.weight_tile import DeviceMatrix
from tests.support.kernels.attention_batches import random
from tests.support.kernels.float8_rows import quantize, rounded
from tests.support.kernels.packed_matrices import MatrixKind

pytestmark = pytest.mark.usefixtures("float8")
every_encoding = pytest.mark.parametrize("encoding", [OCP, FNUZ], ids=["ocp", "fnuz"])
EVERY_CODE = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)


@every_encoding
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_columns", "group_size"), [(300, 128), (1300, 128), (128, 128), (300, 300), (1300, 1300)])
def test_each_group_has_the_scale_of_its_largest_number_and_the_nearest_codes(
    encoding: Fp8Encoding, dtype: torch.dtype, num_columns: int, group_size: int
) -> None:
    # Rows that are apart, some of their numbers large, some small.
    x = (random(5, num_columns + 3).exp() * random(5, num_columns + 3, seed=1)).to(dtype)[:, 1:-2]
    rows = RowFormat(group_size, encoding).quantize(x)
    codes, scales = quantize(x, group_size, encoding)
    assert rows.scales is not None
    assert torch.equal(rows.scales, scales)
    assert rows.values.dtype is encoding.dtype
    assert torch.equal(rows.values.view(torch.uint8), codes.view(torch.uint8))


@every_encoding
def test_numbers_from_the_largest_to_the_smallest_keep_their_codes(encoding: Fp8Encoding) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(encoding.dtype).float()
    codes, values = codes[values.isfinite()], values[values.isfinite()]
    rows = RowFormat(len(values), encoding).quantize(values.unsqueeze(0))
    assert rows.scales is not None
    assert rows.scales.item() == 1.0
    assert torch.equal(rows.values.view(torch.uint8).squeeze(0), codes)


@every_encoding
def test_zeros_and_numbers_too_small_for_a_scale_are_zeros(encoding: Fp8Encoding) -> None:
    rows = RowFormat(64, encoding).quantize(torch.tensor([[0.0], [1e-38]]).repeat(1, 64))
    assert rows.scales is not None
    assert not rows.values.float().any()
    assert (rows.scales > 0).all()


@every_encoding
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_value_that_is_not_finite_reaches_its_rows_results_only(encoding: Fp8Encoding, value: float) -> None:
    kernel = PackedLinear(fp8(20, 200, 128), None, torch.float32, encoding=encoding)
    x = random(9, 200)
    expected = kernel(x)
    x[8, 170] = value
    output = kernel(x)
    assert not output[8].isfinite().any()
    assert torch.equal(output[:8], expected[:8])


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "group_size", "encoding"),
    [
        (19, 300, 128, OCP),
        (3, 256, 128, FNUZ),
        (19, 600, 256, FNUZ),
        (19, 300, 4096, OCP),
        (70, 200, 200, FNUZ),
        (3, 40, 128, OCP),
    ],
)
def test_a_product_is_that_of_the_numbers_that_both_codes_mean(
    num_rows: int, num_columns: int, group_size: int, encoding: Fp8Encoding
) -> None:
    weight, bias, x = fp8(33, num_columns, group_size), random(33), random(num_rows, num_columns, seed=1)
    output = PackedLinear(weight, bias, torch.float32, encoding=encoding)(x).double()
    dense = weight.to_dense(torch.float32).double()
    columns = 128 if group_size < num_columns else num_columns
    expected = F.linear(rounded(x, columns, encoding), dense, bias.double())
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-5)
    # It is not the product of rows as they are, but as near to it as FP8 allows.
    plain = F.linear(x.double(), dense, bias.double())
    assert 0.001 < (output - plain).norm() / plain.norm() < 0.05


@pytest.mark.parametrize("group_size", [128, 4096])
def test_bfloat16_rows_have_bfloat16_results(group_size: int) -> None:
    weight, x = fp8(33, 300, group_size), random(3, 300, seed=1).bfloat16()
    output = PackedLinear(weight, None, torch.bfloat16, encoding=OCP)(x)
    expected = rounded(x, min(group_size, 300), OCP) @ weight.to_dense(torch.float32).double().T
    assert output.dtype == torch.bfloat16
    # The interpreter rounds to bfloat16 towards zero.
    torch.testing.assert_close(output.double(), expected, atol=1e-4, rtol=2**-7)


@pytest.mark.parametrize("group_size", [24, 64, 192])
def test_rows_stay_as_they_are_where_the_matrix_has_other_groups(group_size: int) -> None:
    weight, x = fp8(9, 200, group_size), random(3, 200)
    output = PackedLinear(weight, None, torch.float32, encoding=OCP)(x)
    assert torch.equal(output, PackedLinear(weight, None, torch.float32)(x))


def test_a_matrix_without_columns_or_in_another_format_has_no_rows_in_fp8() -> None:
    empty = Fp8Matrix(torch.empty(9, 0, dtype=torch.uint8), torch.empty(9, 0), group_size=128)
    bias = random(9)
    assert torch.equal(PackedLinear(empty, bias, torch.float32, encoding=OCP)(torch.empty(2, 0)), bias.expand(2, -1))
    int8 = MatrixKind(MatrixFormat.INT8).make(9, 300)
    assert DeviceMatrix.of(int8, OCP).row_format is None


@every_encoding
def test_every_code_of_a_matrix_has_its_value_in_every_encoding(encoding: Fp8Encoding) -> None:
    weight = Fp8Matrix(EVERY_CODE.view(2, 127).clone(), torch.tensor([[0.5], [3.0]]), group_size=127)
    codes, scales = encoding.encode(weight)
    assert torch.equal(codes.float() * scales, weight.to_dense(torch.float32))
    # The argument is not written: others may have it too.
    assert torch.equal(weight.codes.flatten(), EVERY_CODE)


def test_in_ocps_encoding_a_matrix_is_not_copied() -> None:
    weight = fp8(33, 300, 128)
    assert DeviceMatrix.of(weight, OCP).codes.data_ptr() == weight.codes.data_ptr()


@pytest.mark.parametrize(
    ("gpu", "encoding"), [((8, 9), OCP), ((9, 0), OCP), ((10, 0), OCP), ("gfx942", FNUZ), ("gfx950:sramecc+", OCP)]
)
def test_the_gpu_decides_on_the_encoding(
    gpu: tuple[int, int] | str, encoding: Fp8Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_gpu(gpu, monkeypatch)
    assert device_encoding() is encoding


@pytest.mark.parametrize(("gpu", "name"), [((8, 6), "sm_86"), ("gfx90a:sramecc+:xnack-", "gfx90a")])
def test_a_gpu_without_fp8_instructions_is_refused_by_name(
    gpu: tuple[int, int] | str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_gpu(gpu, monkeypatch)
    with pytest.raises(
        DeviceError, match=f"--activation-quantization fp8: no FP8 matrix instructions for {name}, only"
    ):
        device_encoding()


def stand_in_gpu(gpu: tuple[int, int] | str, patch: pytest.MonkeyPatch) -> None:
    """Let torch say that there is an NVIDIA GPU with a capability, or an AMD GPU with a name."""
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "get_device_capability", lambda _: gpu)
    patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(gcnArchName=gpu))
    patch.setattr(torch.version, "hip", "7.0" if isinstance(gpu, str) else None)


def fp8(num_rows: int, num_columns: int, group_size: int) -> Fp8Matrix:
    """Random numbers as they are in checkpoints: small codes with their signs, -0 among them."""
    values: Tensor = random(num_rows, num_columns) / math.sqrt(num_columns)
    codes, _ = quantize(values, num_columns, OCP)
    codes = codes.view(torch.uint8)
    codes[::2, ::7] = 0x80
    scales = random(num_rows, -(-num_columns // group_size), seed=1).abs() / 448
    return Fp8Matrix(codes, scales, group_size)
