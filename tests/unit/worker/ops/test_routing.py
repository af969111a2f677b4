"""The rules by which tokens choose experts, one by one, on every backend."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.layers.linear import Linear
from services.worker.layers.moe import Router, SparseMlp
from services.worker.ops import BACKEND_NAMES, ExpertGroups, ExpertWeights, Ops, RouterScore, RoutingRule, load_ops

NAMES = (*BACKEND_NAMES, "triton")
every_backend = pytest.mark.parametrize("ops", [load_ops(name) for name in NAMES], ids=NAMES)

# Few distinct values, so most rows have ties.
LOGITS = torch.randint(-3, 4, (50, 12), generator=torch.Generator().manual_seed(0)).float() / 2


def ranked(scores: list[float], count: int) -> list[int]:
    """The columns of the largest scores; of equal ones, the lower first."""
    return sorted(range(len(scores)), key=lambda column: (-scores[column], column))[:count]


@every_backend
@pytest.mark.parametrize("score", RouterScore)
def test_of_equally_good_experts_the_lower_is_chosen(ops: Ops, score: RouterScore) -> None:
    expert_ids, _ = ops.route(LOGITS, RoutingRule(5, score))
    assert expert_ids.dtype == torch.int32
    assert expert_ids.tolist() == [ranked(row, 5) for row in LOGITS.tolist()]


@every_backend
@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (RouterScore.SOFTMAX, [0.6652, 0.2447]),
        (RouterScore.LOGIT, [0.7311, 0.2689]),
        (RouterScore.SIGMOID, [0.8808, 0.7311]),
    ],
)
def test_weights_come_from_the_scores(ops: Ops, score: RouterScore, expected: list[float]) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    expert_ids, weights = ops.route(logits, RoutingRule(2, score))
    assert expert_ids.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, torch.tensor([expected]), atol=1e-4, rtol=0)


@every_backend
def test_renormalised_weights_sum_to_the_scale(ops: Ops) -> None:
    _, weights = ops.route(LOGITS, RoutingRule(4, RouterScore.SIGMOID, renormalizes=True, scale=2.5))
    torch.testing.assert_close(weights.sum(-1), torch.full((50,), 2.5))


@every_backend
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_all_zero_scores_give_zero_weights(ops: Ops) -> None:
    logits = torch.full((1, 4), -200.0)
    _, weights = ops.route(logits, RoutingRule(2, RouterScore.SIGMOID, renormalizes=True))
    assert weights.tolist() == [[0.0, 0.0]]


@every_backend
def test_a_correction_affects_the_choice_but_not_the_weights(ops: Ops) -> None:
    logits, correction = torch.tensor([[1.0, 0.0, -1.0]]), torch.tensor([0.0, -1.0, 1.0])
    expert_ids, weights = ops.route(logits, RoutingRule(2, RouterScore.SIGMOID, correction))
    assert expert_ids.tolist() == [[2, 0]]
    torch.testing.assert_close(weights, logits.sigmoid()[:, [2, 0]])


@every_backend
@pytest.mark.parametrize(
    ("num_scoring", "num_groups_chosen", "expected"),
    # Groups of three: the best expert is in the first group, the best two, and so the best pair, are in the last.
    [(1, 1, [0, 2, 1]), (2, 1, [6, 7, 8]), (1, 2, [0, 6, 7]), (2, 2, [6, 7, 3]), (2, 3, [0, 6, 7])],
)
def test_experts_are_chosen_from_the_best_groups(
    ops: Ops, num_scoring: int, num_groups_chosen: int, expected: list[int]
) -> None:
    logits = torch.tensor([[9.0, -9.0, -8.0, 5.0, 4.0, -9.0, 8.0, 7.0, 1.0]])
    groups = ExpertGroups(3, num_groups_chosen, num_scoring)
    expert_ids, _ = ops.route(logits, RoutingRule(3, RouterScore.LOGIT, groups=groups))
    assert expert_ids.tolist() == [expected]


@every_backend
def test_of_equally_good_groups_the_lower_is_chosen(ops: Ops) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 1.0, 2.0]])
    rule = RoutingRule(2, RouterScore.LOGIT, groups=ExpertGroups(3, 2, 2))
    assert ops.route(logits, rule)[0].tolist() == [[1, 2]]


@given(seed=st.integers(0, 10**6), num_tokens=st.integers(1, 9), num_experts=st.sampled_from([8, 12, 20]))
@settings(max_examples=40)
def test_reference_chooses_and_weighs_a_token_equally_in_any_batch(
    seed: int, num_tokens: int, num_experts: int
) -> None:
    ops, generator = load_ops("reference"), torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    groups = ExpertGroups(4, 2, 2)
    for score in RouterScore:
        rule = RoutingRule(4, score, torch.randn(num_experts), groups, renormalizes=True, scale=1.8)
        expert_ids, weights = ops.route(logits, rule)
        for token in range(num_tokens):
            alone = ops.route(logits[token : token + 1].clone(), rule)
            assert torch.equal(alone[0][0], expert_ids[token])
            assert torch.equal(alone[1][0], weights[token])


@every_backend
def test_a_mixture_adds_the_outputs_of_the_chosen_and_the_shared_experts(ops: Ops) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    gate, experts = random(6, 8), [ExpertWeights(random(10, 8), random(8, 5)) for _ in range(6)]
    router = Router(ops, Linear(ops, gate, torch.float32), RoutingRule(2, RouterScore.SOFTMAX), dtype=torch.float32)
    kernel, x = ops.prepare_experts(experts, None, torch.float32), random(7, 8)
    expected = kernel(x, *ops.route(x @ gate.T, RoutingRule(2, RouterScore.SOFTMAX)))
    torch.testing.assert_close(SparseMlp(router, kernel)(x), expected)
    torch.testing.assert_close(SparseMlp(router, kernel, shared=torch.sin)(x), expected + x.sin())


@every_backend
def test_a_router_of_a_bfloat16_model_may_compute_in_float32(ops: Ops) -> None:
    gate, x = torch.tensor([[1.0, 2**-7], [1.0, 0.0]]), torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16)
    rule = RoutingRule(1, RouterScore.LOGIT)
    precise = Router(ops, Linear(ops, gate.flip(0), torch.float32), rule, dtype=torch.float32)
    rounded = Router(ops, Linear(ops, gate.flip(0).bfloat16(), torch.bfloat16), rule, dtype=torch.bfloat16)
    # In bfloat16 both logits are 256, and the lower expert is chosen.
    assert (precise(x)[0].item(), rounded(x)[0].item()) == (1, 0)
