"""The kernel chooses and weighs experts as the rules of `ops.routing` do; `ops/test_routing.py` has them one by one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.ops import ExpertGroups, RouterScore, RoutingRule
from services.worker.ops import routing as rules
from services.worker.ops.triton.routing import route
from tests.support.kernels.attention_batches import random


@given(
    score=st.sampled_from(RouterScore),
    num_experts=st.sampled_from([4, 6, 20, 36, 64]),
    group_counts=st.sampled_from([None, (1, 1), (2, 1), (2, 2)]),
    num_chosen=st.integers(1, 3),
    has_correction=st.booleans(),
    renormalizes=st.booleans(),
    scale=st.sampled_from([1.0, 2.5]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60)
def test_it_computes_what_the_rules_say(
    *,
    score: RouterScore,
    num_experts: int,
    group_counts: tuple[int, int] | None,
    num_chosen: int,
    has_correction: bool,
    renormalizes: bool,
    scale: float,
    seed: int,
) -> None:
    # Where there are fewer experts in the best groups than are chosen, all of the others are equally bad.
    groups = None if group_counts is None else ExpertGroups(*group_counts, num_scoring=2)
    correction = random(num_experts, seed=seed + 1) if has_correction else None
    rule = RoutingRule(num_chosen, score, correction, groups, renormalizes=renormalizes, scale=scale)
    logits = random(5, num_experts + 3, seed=seed)[:, 1:-2]
    expert_ids, weights = route(logits, rule)
    expected_ids, expected_weights = rules.route(logits, rule)
    assert torch.equal(expert_ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, atol=1e-7, rtol=1e-5)


def test_columns_may_be_apart_and_rows_missing() -> None:
    rule, logits = RoutingRule(2, RouterScore.SOFTMAX), random(6, 4)
    assert torch.equal(route(logits.T, rule)[0], route(logits.T.contiguous(), rule)[0])
    expert_ids, weights = route(torch.empty(0, 4), rule)
    assert expert_ids.shape == weights.shape == (0, 2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("score", RouterScore)
@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:All-NaN slice")
def test_a_row_that_is_not_finite_still_chooses_experts_that_exist(score: RouterScore, value: float) -> None:
    rule = RoutingRule(4, score, groups=ExpertGroups(3, 2, 2), renormalizes=True)
    logits = torch.cat((torch.full((1, 9), value), random(1, 9)))
    expert_ids, weights = route(logits, rule)
    assert len(set(expert_ids[0].tolist())) == 4
    assert set(expert_ids[0].tolist()) <= set(range(9))
    assert torch.equal(weights[1], route(logits[1:], rule)[1][0])
