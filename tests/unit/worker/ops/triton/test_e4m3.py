"""Codes of FP8 E4M3 are made and read as torch does, but for what has no code."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.triton.e4m3 import finite_from_e4m3, from_e4m3, to_e4m3
from tests.support.kernels.attention_batches import random

CODES = torch.arange(256, dtype=torch.uint8)
NUMBERS = CODES.view(torch.float8_e4m3fn).float()
IS_NAN = (CODES & 0x7F) == 0x7F


@triton.jit  # type: ignore[untyped-decorator]
def _read_kernel(codes, numbers, finite, size: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, size)
    stored = tl.load(codes + places)
    tl.store(numbers + places, from_e4m3(stored))
    tl.store(finite + places, finite_from_e4m3(stored))


@triton.jit  # type: ignore[untyped-decorator]
def _make_kernel(values, codes, inverse_scale, size: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, size)
    tl.store(codes + places, to_e4m3(tl.load(values + places), inverse_scale))


def codes_of(values: Tensor, inverse_scale: float = 1.0) -> Tensor:
    size = triton.next_power_of_2(len(values))
    padded, codes = torch.zeros(size), torch.zeros(size, dtype=torch.uint8)
    padded[: len(values)] = values
    _make_kernel[(1,)](padded, codes, inverse_scale, size=size)
    return codes[: len(values)]


def torch_codes_of(values: Tensor) -> Tensor:
    return values.to(torch.float8_e4m3fn).view(torch.uint8)


def test_every_code_is_read() -> None:
    numbers, finite = torch.empty(2, 256)
    _read_kernel[(1,)](CODES, numbers, finite, size=256)
    assert torch.equal(numbers[~IS_NAN], NUMBERS[~IS_NAN])
    assert torch.equal(finite[~IS_NAN], NUMBERS[~IS_NAN])
    assert numbers[IS_NAN].isnan().all()


def test_every_number_gets_its_code() -> None:
    assert torch.equal(codes_of(NUMBERS)[~IS_NAN], CODES[~IS_NAN])


def test_numbers_are_rounded_to_the_nearest_and_ties_to_even() -> None:
    positive = NUMBERS[:0x7F]
    ties = (positive[1:] + positive[:-1]) / 2
    nearly = torch.cat([ties.nextafter(torch.tensor(end)) for end in (0.0, math.inf)])
    # Of all sizes that a float32 has in the range, subnormal codes included.
    drawn = random(20000) * torch.exp2(torch.arange(20000) % 26 - 18.0)
    values = torch.cat((ties, nearly, drawn.clamp(-448, 448)))
    for signed in (values, -values):
        assert torch.equal(codes_of(signed), torch_codes_of(signed))


@pytest.mark.parametrize("value", [448.0, 449.0, 464.0, 1e6, 3e38])
def test_what_is_too_large_becomes_the_largest_number(value: float) -> None:
    assert codes_of(torch.tensor([value, -value])).tolist() == [0x7E, 0xFE]


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in multiply")
@pytest.mark.parametrize("inverse_scale", [1.0, 0.001, 1000.0])
def test_only_what_is_not_finite_becomes_nan(inverse_scale: float) -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf, 3e38, -3e38, 0.0, 1e-45])
    assert ((codes_of(values, inverse_scale) & 0x7F) == 0x7F).tolist() == [True] * 3 + [False] * 4


def test_a_value_is_multiplied_before_it_is_rounded() -> None:
    values, inverse_scale = 100 * random(500), 1 / 0.37
    scaled = values * torch.tensor(inverse_scale, dtype=torch.float32)
    assert torch.equal(codes_of(values, inverse_scale), torch_codes_of(scaled.clamp(-448, 448)))
