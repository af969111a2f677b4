"""Mixtures of experts on both backends, compared with their definition in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.ops import BACKEND_NAMES, ExpertWeights, Matrix, Ops, SwigluClamp, load_ops
from services.worker.ops.matrices import dense

HIDDEN_SIZE, INNER_SIZE = 24, 20

every_backend = pytest.mark.parametrize("ops", [load_ops(name) for name in BACKEND_NAMES], ids=BACKEND_NAMES)


@dataclass(frozen=True)
class Case:
    """A step's tokens and their experts; few tokens and many experts leave some experts without tokens."""

    num_experts: int
    num_chosen: int
    num_tokens: int
    has_bias: bool
    clamp: SwigluClamp | None
    seed: int

    def random(self, *shape: int, part: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(100 * self.seed + part))

    def experts(self) -> list[ExpertWeights]:
        return [
            ExpertWeights(
                self.random(2 * INNER_SIZE, HIDDEN_SIZE, part=4 * expert),
                self.random(HIDDEN_SIZE, INNER_SIZE, part=4 * expert + 1),
                self.random(2 * INNER_SIZE, part=4 * expert + 2) if self.has_bias else None,
                self.random(HIDDEN_SIZE, part=4 * expert + 3) if self.has_bias else None,
            )
            for expert in range(self.num_experts)
        ]

    def step(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, expert ids and their weights."""
        scores = self.random(self.num_tokens, self.num_experts, part=91)
        weights = self.random(self.num_tokens, self.num_chosen, part=92)
        tokens = 0.5 * self.random(self.num_tokens, HIDDEN_SIZE, part=90)
        return tokens, scores.topk(self.num_chosen).indices.int(), weights


def cases(*, max_tokens: int = 40) -> st.SearchStrategy[Case]:
    return st.integers(1, 12).flatmap(
        lambda num_experts: st.builds(
            Case,
            num_experts=st.just(num_experts),
            num_chosen=st.integers(1, num_experts),
            num_tokens=st.integers(1, max_tokens),
            has_bias=st.booleans(),
            clamp=st.none() | st.just(SwigluClamp(1.702, 1.5)),
            seed=st.integers(0, 1000),
        )
    )


def defined(case: Case) -> Tensor:
    """Each token's sum over its experts, one product at a time."""
    experts, (x, expert_ids, weights) = case.experts(), case.step()
    total = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(case.num_tokens):
        for expert_id, weight in zip(expert_ids[token].tolist(), weights[token].double(), strict=True):
            total[token] += weight * one_expert(x[token].double(), experts[expert_id], case.clamp)
    return total


def one_expert(x: Tensor, expert: ExpertWeights, clamp: SwigluClamp | None) -> Tensor:
    gate, up = torch.split(product(x, expert.gate_up, expert.gate_up_bias), INNER_SIZE)
    if clamp is None:
        inner = gate * gate.sigmoid() * up
    else:
        gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
        inner = (up + 1) * gate * (clamp.alpha * gate).sigmoid()
    return product(inner, expert.down, expert.down_bias)


def without_bias(expert: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    gate_up, down = (dense(weight, torch.float32).to(dtype) for weight in (expert.gate_up, expert.down))
    return ExpertWeights(gate_up, down)


def product(x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
    return F.linear(x, dense(weight, torch.float32).double(), None if bias is None else bias.double())


@every_backend
@given(case=cases())
@settings(max_examples=60)
def test_a_token_gets_the_weighted_sum_of_its_experts(ops: Ops, case: Case) -> None:
    kernel = ops.prepare_experts(case.experts(), case.clamp, torch.float32)
    torch.testing.assert_close(kernel(*case.step()).double(), defined(case), atol=2e-4, rtol=1e-5)


@every_backend
def test_tokens_and_choices_are_not_modified(ops: Ops) -> None:
    case = Case(num_experts=6, num_chosen=2, num_tokens=9, has_bias=True, clamp=SwigluClamp(1.702, 1.5), seed=1)
    step = case.step()
    ops.prepare_experts(case.experts(), case.clamp, torch.float32)(*step)
    assert all(torch.equal(*pair) for pair in zip(step, case.step(), strict=True))


@every_backend
def test_experts_are_requested_one_by_one_and_not_kept(ops: Ops) -> None:
    case = Case(num_experts=4, num_chosen=2, num_tokens=9, has_bias=False, clamp=None, seed=2)
    expected = ops.prepare_experts(case.experts(), None, torch.float32)(*case.step())
    memory = case.experts()[0]

    def into_the_same_memory() -> Iterator[ExpertWeights]:
        for expert in case.experts():
            for name in ("gate_up", "down"):
                getattr(memory, name).copy_(getattr(expert, name))
            yield memory

    assert torch.equal(ops.prepare_experts(into_the_same_memory(), None, torch.float32)(*case.step()), expected)


@every_backend
def test_bfloat16_is_summed_in_float32(ops: Ops) -> None:
    case = Case(num_experts=6, num_chosen=6, num_tokens=9, has_bias=False, clamp=None, seed=3)
    rounded = [without_bias(expert, torch.bfloat16) for expert in case.experts()]
    x, expert_ids, weights = case.step()
    kernel = ops.prepare_experts(rounded, None, torch.bfloat16)
    output = kernel(x.bfloat16(), expert_ids, weights)
    assert output.dtype == torch.bfloat16
    ids = [torch.full((9, 1), expert, dtype=torch.int32) for expert in range(6)]
    alone = [kernel(x.bfloat16(), each, torch.ones(9, 1)).float() for each in ids]
    columns = weights.gather(1, expert_ids.argsort(dim=1))
    summed = sum(columns[:, expert, None] * alone[expert] for expert in range(6))
    assert isinstance(summed, Tensor)
    # Half a unit in the last place: rounded once, at the end.
    torch.testing.assert_close(output.float(), summed, atol=1e-5, rtol=2**-8)


@every_backend
def test_a_nan_of_one_token_does_not_spread(ops: Ops) -> None:
    case = Case(num_experts=3, num_chosen=2, num_tokens=7, has_bias=True, clamp=None, seed=4)
    kernel, (x, expert_ids, weights) = ops.prepare_experts(case.experts(), None, torch.float32), case.step()
    expected = kernel(x, expert_ids, weights)
    x[3] = torch.nan
    output = kernel(x, expert_ids, weights)
    assert output[3].isnan().all()
    others = [0, 1, 2, 4, 5, 6]
    torch.testing.assert_close(output[others], expected[others])


@every_backend
@given(case=cases(max_tokens=12), num_here=st.integers(0, 12))
@settings(max_examples=25)
def test_an_expert_that_is_elsewhere_adds_nothing(ops: Ops, case: Case, num_here: int) -> None:
    num_here = min(num_here, case.num_experts)
    x, expert_ids, weights = case.step()
    all_of_them = ops.prepare_experts(case.experts(), case.clamp, torch.float32)
    expected = all_of_them(x, expert_ids, weights.masked_fill(expert_ids >= num_here, 0.0))
    # Another rank computes a token that is not finite.
    is_elsewhere = (expert_ids >= num_here).all(dim=1)
    x[is_elsewhere] = torch.nan
    some = ops.prepare_experts(case.experts()[:num_here], case.clamp, torch.float32)
    output = some(x, expert_ids.clamp(max=num_here), weights)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    assert not output[is_elsewhere].any()


@given(case=cases(max_tokens=12))
@settings(max_examples=40)
def test_reference_gives_a_token_the_same_bits_in_any_batch_and_order_of_experts(case: Case) -> None:
    kernel, (x, expert_ids, weights) = (
        load_ops("reference").prepare_experts(case.experts(), case.clamp, torch.float32),
        case.step(),
    )
    together = kernel(x, expert_ids, weights)
    for token in range(case.num_tokens):
        row = slice(token, token + 1)
        assert torch.equal(kernel(x[row].clone(), expert_ids[row].flip(1), weights[row].flip(1)), together[row])


@given(case=cases())
@settings(max_examples=30)
def test_cpu_gives_equal_steps_equal_bits(case: Case) -> None:
    kernel = load_ops("cpu").prepare_experts(case.experts(), case.clamp, torch.float32)
    assert torch.equal(kernel(*case.step()), kernel(*case.step()))


@every_backend
@given(case=cases(max_tokens=12), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=40)
def test_outputs_of_single_experts_add_up_to_the_kernels_output(ops: Ops, case: Case, dtype: torch.dtype) -> None:
    experts = [without_bias(expert, dtype) for expert in case.experts()]
    kernel, (x, expert_ids, weights) = ops.prepare_experts(experts, case.clamp, dtype), case.step()
    x = x.to(dtype)
    numbers, order = expert_ids.flatten().sort(stable=True)
    tokens = order // case.num_chosen
    outputs = kernel(x[tokens], numbers.unsqueeze(1), torch.ones(len(tokens), 1))
    combined = ops.combine_experts(outputs, tokens, weights.flatten()[order], num_tokens=case.num_tokens)
    expected = kernel(x, expert_ids, weights)
    if ops.is_exact:
        assert torch.equal(combined, expected)
    torch.testing.assert_close(combined, expected, atol=2e-4, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5)


@every_backend
def test_a_token_without_outputs_is_zero(ops: Ops) -> None:
    outputs, tokens, weights = torch.ones(2, 3), torch.tensor([2, 2]), torch.tensor([0.5, 2.0])
    combined = ops.combine_experts(outputs, tokens, weights, num_tokens=3)
    assert combined.tolist() == [[0.0] * 3, [0.0] * 3, [2.5] * 3]
    assert ops.combine_experts(outputs[:0], tokens[:0], weights[:0], num_tokens=0).shape == (0, 3)
