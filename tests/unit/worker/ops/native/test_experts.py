"""Experts in packed formats, with every set of instructions, compared with the same products one by one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.ops import ExpertWeights, SwigluClamp
from services.worker.ops.experts import gate_and_up
from services.worker.ops.matrices import IntMatrix, Matrix, Mxfp4Matrix
from services.worker.ops.native.backend import NativeOps
from services.worker.ops.native.isa import Isa, available_isas
from tests.support.pairwise import every_pair

HIDDEN_SIZE, INNER_SIZE, NUM_EXPERTS = 96, 160, 5

every_isa = pytest.mark.parametrize("isa", available_isas(), ids=lambda isa: isa.value)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrix(kind: str, num_rows: int, num_columns: int, seed: int) -> Matrix:
    generator = torch.Generator().manual_seed(seed)
    if kind == "float":
        return random(num_rows, num_columns, seed=seed) / 10
    nibbles = torch.randint(0, 256, (num_rows, num_columns // 2), generator=generator).to(torch.uint8)
    if kind == "mxfp4":
        exponents = torch.randint(120, 124, (num_rows, num_columns // 32), generator=generator)
        return Mxfp4Matrix(nibbles, exponents.to(torch.uint8))
    scales = random(num_rows, num_columns // 32, seed=seed + 1).abs() / 40
    if kind == "int4":
        return IntMatrix(4, nibbles, scales, 32)
    codes = torch.randint(-128, 128, (num_rows, num_columns), generator=generator).to(torch.int8)
    return IntMatrix(8, codes, scales / 16, 32)


def expert(kind: str, number: int) -> ExpertWeights:
    return ExpertWeights(
        matrix(kind, 2 * INNER_SIZE, HIDDEN_SIZE, 10 * number),
        matrix(kind, HIDDEN_SIZE, INNER_SIZE, 10 * number + 1),
        random(2 * INNER_SIZE, seed=10 * number + 2),
        random(HIDDEN_SIZE, seed=10 * number + 3),
    )


@every_isa
@every_pair(
    clamp=[None, SwigluClamp(1.702, 7.0)],
    kinds=[["float"], ["int8"], ["int4"], ["mxfp4"], ["int8", "float", "mxfp4"]],
    num_tokens=[0, 1, 40],
)
def test_experts_compute_what_their_products_compute(
    isa: Isa, kinds: list[str], clamp: SwigluClamp | None, num_tokens: int
) -> None:
    ops, num_chosen = NativeOps(isa), 3
    experts = [expert(kinds[number % len(kinds)], number) for number in range(NUM_EXPERTS)]
    x = random(num_tokens, HIDDEN_SIZE, seed=1)
    expert_ids = random(num_tokens, NUM_EXPERTS, seed=2).topk(num_chosen).indices.int()
    weights = F.softmax(random(num_tokens, num_chosen, seed=3), dim=1)
    output = ops.prepare_experts(experts, clamp, torch.float32)(x, expert_ids, weights)
    expected = torch.zeros(num_tokens, HIDDEN_SIZE)
    for number, one in enumerate(experts):
        projected = ops.prepare_linear(one.gate_up, one.gate_up_bias, torch.float32)(x)
        result = ops.prepare_linear(one.down, one.down_bias, torch.float32)(gate_and_up(projected, clamp))
        expected += result * (weights * (expert_ids == number)).sum(dim=1, keepdim=True)
    # An activation that is rounded differently may quantise to the next level: 1 / 127 of the largest, times a weight.
    torch.testing.assert_close(output, expected, atol=1e-4 if kinds == ["float"] else 0.1, rtol=1e-4)


@every_isa
def test_more_tokens_than_are_computed_at_once_are_independent(isa: Isa) -> None:
    experts = [expert("int8", number) for number in range(NUM_EXPERTS)]
    kernel, num_tokens = NativeOps(isa).prepare_experts(experts, None, torch.float32), 700
    x, weights = random(num_tokens, HIDDEN_SIZE, seed=1), random(num_tokens, 2, seed=3)
    expert_ids = random(num_tokens, NUM_EXPERTS, seed=2).topk(2).indices.int()
    output = kernel(x, expert_ids, weights)
    for token in (0, 300, 511, 512, 699):
        row = slice(token, token + 1)
        assert torch.equal(kernel(x[row], expert_ids[row], weights[row]), output[row])


def test_without_experts_there_is_nothing_to_add() -> None:
    kernel = NativeOps(available_isas()[-1]).prepare_experts([], None, torch.float32)
    no_choice = torch.empty(2, 0, dtype=torch.int32)
    assert torch.equal(kernel(torch.ones(2, 3), no_choice, torch.empty(2, 0)), torch.zeros(2, 3))


@every_isa
def test_experts_that_are_elsewhere_are_not_computed(isa: Isa) -> None:
    kernel = NativeOps(isa).prepare_experts(
        [expert("int8", number) for number in range(NUM_EXPERTS)], None, torch.float32
    )
    x, weights = random(600, HIDDEN_SIZE, seed=1), random(600, 3, seed=3)
    expert_ids = random(600, 2 * NUM_EXPERTS, seed=2).topk(3).indices.clamp(max=NUM_EXPERTS).int()
    is_elsewhere = expert_ids == NUM_EXPERTS
    x[is_elsewhere.all(dim=1)] = torch.nan
    output = kernel(x, expert_ids, weights)
    expected = kernel(x.nan_to_num(), expert_ids.masked_fill(is_elsewhere, 0), weights.masked_fill(is_elsewhere, 0.0))
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("expert_id", [-1, NUM_EXPERTS + 1])
def test_an_expert_that_does_not_exist_is_refused(expert_id: int) -> None:
    experts = [expert("float", number) for number in range(NUM_EXPERTS)]
    kernel = NativeOps(available_isas()[-1]).prepare_experts(experts, None, torch.float32)
    with pytest.raises(IndexError, match=f"expert {expert_id} is not one of 5"):
        kernel(random(1, HIDDEN_SIZE, seed=1), torch.tensor([[0, expert_id]], dtype=torch.int32), torch.ones(1, 2))


@pytest.mark.parametrize("x", [torch.ones(2, 9), torch.ones(2, HIDDEN_SIZE).bfloat16()])
def test_a_wrong_shape_or_dtype_is_refused(x: Tensor) -> None:
    experts = [expert("float", number) for number in range(NUM_EXPERTS)]
    kernel = NativeOps(available_isas()[-1]).prepare_experts(experts, None, torch.float32)
    with pytest.raises(ValueError, match=rf"expected \[T, {HIDDEN_SIZE}\] torch.float32"):
        kernel(x, torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1))


def test_ids_of_another_dtype_are_refused() -> None:
    kernel = NativeOps(available_isas()[-1]).prepare_experts([expert("float", 0)], None, torch.float32)
    with pytest.raises(ValueError, match=r"expected expert ids of torch.int32, got torch.int64"):
        kernel(random(2, HIDDEN_SIZE, seed=1), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
