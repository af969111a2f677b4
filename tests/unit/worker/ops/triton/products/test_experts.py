"""Mixtures of experts: grouped products with weights in every format compute what the reference backend does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.ops import ExpertWeights, RouterScore, RoutingRule, SwigluClamp, load_ops
from services.worker.ops.matrices import Mxfp4Matrix, dense
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.ops.triton.backend import TritonOps
from services.worker.ops.triton.products.experts import TritonExperts
from services.worker.ops.triton.products.fp8_rows import FNUZ, OCP, Fp8Encoding
from tests.support.kernels.attention_batches import random
from tests.support.kernels.float8_rows import rounded
from tests.support.kernels.packed_matrices import KINDS, PLAIN_NUMBERS, MatrixKind

HIDDEN, INNER = 64, 32
CLAMP = SwigluClamp(1.702, 1.5)


@dataclass(frozen=True)
class Case:
    """A layer's experts, and a step's tokens. A clamp is accompanied by biases, as in gpt-oss."""

    kinds: tuple[MatrixKind, ...] = (PLAIN_NUMBERS,)
    num_experts: int = 5
    num_chosen: int = 2
    num_tokens: int = 7
    clamp: SwigluClamp | None = None
    dtype: torch.dtype = torch.float32
    hidden: int = HIDDEN
    inner: int = INNER

    def experts(self) -> list[ExpertWeights]:
        """Each in the next of the formats."""
        return [self._expert(number, self.kinds[number % len(self.kinds)]) for number in range(self.num_experts)]

    def _expert(self, number: int, kind: MatrixKind) -> ExpertWeights:
        has_bias = self.clamp is not None
        return ExpertWeights(
            kind.make(2 * self.inner, self.hidden, seed=10 * number, dtype=self.dtype),
            kind.make(self.hidden, self.inner, seed=10 * number + 5, dtype=self.dtype),
            random(2 * self.inner, seed=number).to(self.dtype) if has_bias else None,
            random(self.hidden, seed=number + 1).to(self.dtype) if has_bias else None,
        )

    def step(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, expert ids and their weights."""
        scores, weights = random(self.num_tokens, self.num_experts, seed=3), random(self.num_tokens, self.num_chosen)
        x = random(self.num_tokens, self.hidden, seed=2).to(self.dtype)
        return x, scores.topk(self.num_chosen).indices.int(), weights

    def kernel(self) -> TritonExperts:
        return TritonExperts(self.experts(), self.clamp, self.dtype)

    def expected(self) -> Tensor:
        return load_ops("reference").prepare_experts(self.experts(), self.clamp, self.dtype)(*self.step())


CASES = (
    *(Case((kind,)) for kind in KINDS),
    Case((KINDS[-1],), clamp=CLAMP, num_chosen=3, hidden=96, inner=64),
    # Nothing is a power of two, and no expert has a whole tile.
    Case(num_experts=7, num_chosen=3, num_tokens=3, clamp=CLAMP, hidden=45, inner=21),
    # More than a tile for every expert.
    Case((KINDS[0],), num_experts=2, num_chosen=1, num_tokens=50),
    Case((KINDS[0], PLAIN_NUMBERS, KINDS[-1])),
    Case(num_experts=1, num_chosen=1, num_tokens=1),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_compute_what_they_compute_on_the_reference_backend(case: Case) -> None:
    torch.testing.assert_close(case.kernel()(*case.step()), case.expected(), atol=2e-5, rtol=1e-5)


@given(
    num_experts=st.integers(1, 9),
    num_chosen=st.integers(1, 9),
    num_tokens=st.integers(1, 20),
    has_clamp=st.booleans(),
    inner=st.integers(1, 20),
)
@settings(max_examples=8)
def test_a_token_gets_the_weighted_sum_of_its_experts(
    num_experts: int, num_chosen: int, num_tokens: int, has_clamp: bool, inner: int
) -> None:
    clamp = CLAMP if has_clamp else None
    case = Case((PLAIN_NUMBERS,), num_experts, min(num_chosen, num_experts), num_tokens, clamp, hidden=24, inner=inner)
    torch.testing.assert_close(case.kernel()(*case.step()), case.expected(), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [PLAIN_NUMBERS, KINDS[0]], ids=str)
@pytest.mark.usefixtures("bfloat16_products")
def test_bfloat16_is_summed_in_float32(kind: MatrixKind) -> None:
    case = Case((kind,), num_experts=4, num_chosen=4, dtype=torch.bfloat16)
    kernel, (x, expert_ids, weights) = case.kernel(), case.step()
    output = kernel(x, expert_ids, weights)
    assert output.dtype == torch.bfloat16
    ones = torch.ones(case.num_tokens, 1)
    ids = [torch.full((case.num_tokens, 1), expert, dtype=torch.int32) for expert in range(4)]
    alone = [kernel(x, each, ones).float() for each in ids]
    ordered = weights.gather(1, expert_ids.argsort(dim=1))
    total = torch.zeros(x.shape)
    for expert in range(4):
        total += ordered[:, expert, None] * alone[expert]
    # Rounded once, by the interpreter towards zero.
    torch.testing.assert_close(output.float(), total, atol=1e-6, rtol=2**-7)
    exact = Case((kind,), num_experts=4, num_chosen=4).kernel()
    torch.testing.assert_close(output.float(), exact(x.float(), expert_ids, weights), atol=0.05, rtol=0.05)


def test_the_sum_is_by_rising_expert_in_whatever_order_they_are_chosen() -> None:
    case = Case(num_chosen=3)
    kernel, (x, expert_ids, weights) = case.kernel(), case.step()
    output = kernel(x, expert_ids, weights)
    assert torch.equal(kernel(x, expert_ids.flip(1), weights.flip(1)), output)


@pytest.mark.parametrize("clamp", [None, CLAMP])
def test_a_tokens_nan_stays_its_own(clamp: SwigluClamp | None) -> None:
    case = Case(clamp=clamp)
    kernel, (x, expert_ids, weights) = case.kernel(), case.step()
    expected = kernel(x, expert_ids, weights)
    x[3] = torch.nan
    weights[5] = torch.nan
    output = kernel(x, expert_ids, weights)
    assert output[[3, 5]].isnan().all()
    others = [0, 1, 2, 4, 6]
    assert torch.equal(output[others], expected[others])


@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:All-NaN slice")
def test_a_padded_rows_nan_chooses_experts_that_exist() -> None:
    logits = random(3, 6)
    logits[1] = torch.nan
    for score in RouterScore:
        expert_ids, weights = TritonOps().route(logits, RoutingRule(2, score, renormalizes=True))
        assert ((expert_ids >= 0) & (expert_ids < 6)).all()
        assert weights.isnan().any(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize("number", [-1, 5, 2**30])
def test_a_choice_of_no_expert_adds_nothing(number: int) -> None:
    case = Case()
    kernel, (x, expert_ids, weights) = case.kernel(), case.step()
    without = kernel(x, expert_ids[:, 1:], weights[:, 1:])
    expert_ids[:, 0] = number
    assert torch.equal(kernel(x, expert_ids, weights), without)


def test_tokens_and_choices_are_not_modified_and_may_be_apart() -> None:
    case = Case()
    kernel, (x, expert_ids, weights) = case.kernel(), case.step()
    expected = kernel(x, expert_ids, weights)
    apart = x.T.contiguous().T, expert_ids.T.contiguous().T, weights.T.contiguous().T
    assert torch.equal(kernel(*apart), expected)
    assert all(torch.equal(*pair) for pair in zip(apart, case.step(), strict=True))


def test_experts_are_requested_one_by_one_and_not_kept() -> None:
    case = Case(clamp=CLAMP)
    expected, memory = case.kernel()(*case.step()), case.experts()[0]

    def into_the_same_memory() -> Iterator[ExpertWeights]:
        for expert in case.experts():
            for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
                getattr(memory, name).copy_(getattr(expert, name))
            yield memory

    assert torch.equal(TritonExperts(into_the_same_memory(), CLAMP, torch.float32)(*case.step()), expected)


def test_without_experts_or_tokens_there_is_nothing_to_add() -> None:
    none = TritonExperts([], None, torch.float32)
    no_choice = torch.empty(2, 0, dtype=torch.int32)
    assert torch.equal(none(torch.ones(2, 3), no_choice, torch.empty(2, 0)), torch.zeros(2, 3))
    case = Case(num_tokens=0)
    assert case.kernel()(*case.step()).shape == (0, HIDDEN)


def test_matrices_of_one_format_are_not_made_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((KINDS[-1],))
    expected, experts = case.expected(), case.experts()
    monkeypatch.setattr(Mxfp4Matrix, "to_dense", lambda *_: pytest.fail("made dense"))
    output = TritonExperts(experts, None, torch.float32)(*case.step())
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("group_size", "encoding"), [(128, OCP), (4096, FNUZ)])
@pytest.mark.usefixtures("float8")
def test_experts_in_fp8_take_rows_in_fp8(group_size: int, encoding: Fp8Encoding) -> None:
    kind = MatrixKind(MatrixFormat.FP8, group_size)
    case = Case((kind,), num_experts=3, num_tokens=4, hidden=256, inner=150)
    x, expert_ids, weights = case.step()
    output = TritonExperts(case.experts(), None, torch.float32, encoding=encoding)(x, expert_ids, weights)
    expected = torch.zeros(x.shape, dtype=torch.float64)
    for number, expert in enumerate(case.experts()):
        gate_up, down = (dense(matrix, torch.float32).double() for matrix in (expert.gate_up, expert.down))
        gate, up = (rounded(x, min(group_size, 256), encoding) @ gate_up.T).chunk(2, dim=1)
        inner = rounded((F.silu(gate) * up).float(), min(group_size, 150), encoding)
        expected += (weights * (expert_ids == number)).sum(dim=1, keepdim=True) * (inner @ down.T)
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.usefixtures("float8")
def test_experts_in_other_formats_take_rows_as_they_are() -> None:
    case = Case((PLAIN_NUMBERS,))
    kernel = TritonExperts(case.experts(), None, torch.float32, encoding=OCP)
    assert torch.equal(kernel(*case.step()), case.kernel()(*case.step()))
