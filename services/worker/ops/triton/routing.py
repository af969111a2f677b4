"""Chooses and weighs the experts of each token: a program has all scores of one token, so its bits are its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.routing import EPSILON, RouterScore, RoutingRule
from services.worker.ops.triton.sampling.ordering import column_of, ranked, value_of

_SOFTMAX = tl.constexpr(0)
_LOGIT = tl.constexpr(1)
_SIGMOID = tl.constexpr(2)
_SCORES = {RouterScore.SOFTMAX: _SOFTMAX, RouterScore.LOGIT: _LOGIT, RouterScore.SIGMOID: _SIGMOID}
# Below every rank.
_CHOSEN = tl.constexpr(-(2**63))
_EPSILON = tl.constexpr(EPSILON)
_NUM_WARPS = 1


@triton.jit
def _weights_of_all(logits):
    """The softmax of `logits` [n]; -inf has no weight."""
    powers = tl.exp(logits - tl.max(logits, axis=0))
    return powers / tl.sum(powers, axis=0)


@triton.jit
def _within_best_groups(
    ranks,
    preferences,
    experts,
    GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    MOST_GROUPS: tl.constexpr,
    NUM_BEST: tl.constexpr,
    NUM_SCORING: tl.constexpr,
):
    """`preferences` [n] with -inf outside the best groups; `ranks` are theirs."""
    groups = tl.arange(0, MOST_GROUPS)
    merits = tl.full((MOST_GROUPS,), 0.0, tl.float32)
    for group in range(NUM_GROUPS):
        own = tl.where(experts // GROUP_SIZE == group, ranks, _CHOSEN)
        merit = tl.full([], 0.0, tl.float32)
        for _ in range(NUM_SCORING):
            best = tl.max(own, axis=0)
            merit += value_of(best)
            own = tl.where(own == best, _CHOSEN, own)
        merits = tl.where(groups == group, merit, merits)
    group_ranks = tl.where(groups < NUM_GROUPS, ranked(merits, groups), _CHOSEN)
    is_within = experts < 0
    for _ in range(NUM_BEST):
        best = tl.max(group_ranks, axis=0)
        is_within = is_within | (experts // GROUP_SIZE == column_of(best))
        group_ranks = tl.where(group_ranks == best, _CHOSEN, group_ranks)
    return tl.where(is_within, preferences, float("-inf"))


@triton.jit
def _route_kernel(
    logits,
    correction,
    expert_ids,
    expert_weights,
    row_stride,
    scale,
    SCORE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    MOST_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    MOST_CHOSEN: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    MOST_GROUPS: tl.constexpr,
    NUM_BEST_GROUPS: tl.constexpr,
    NUM_SCORING: tl.constexpr,
    RENORMALIZES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, MOST_EXPERTS)
    is_expert = experts < NUM_EXPERTS
    scores = tl.load(logits + token * row_stride + experts, mask=is_expert, other=float("-inf"))
    if SCORE == _SOFTMAX:
        scores = _weights_of_all(scores)
    elif SCORE == _SIGMOID:
        scores = tl.sigmoid(scores)
    preferences = scores
    if correction is not None:
        preferences += tl.load(correction + experts, mask=is_expert, other=0.0)
    ranks = tl.where(is_expert, ranked(preferences, experts), _CHOSEN)
    if NUM_BEST_GROUPS < NUM_GROUPS:
        preferences = _within_best_groups(
            ranks,
            preferences,
            experts,
            NUM_EXPERTS // NUM_GROUPS,
            NUM_GROUPS,
            MOST_GROUPS,
            NUM_BEST_GROUPS,
            NUM_SCORING,
        )
        ranks = tl.where(is_expert, ranked(preferences, experts), _CHOSEN)

    places = tl.arange(0, MOST_CHOSEN)
    chosen = tl.full((MOST_CHOSEN,), 0, tl.int32)
    weights = tl.full((MOST_CHOSEN,), float("-inf") if SCORE == _LOGIT else 0.0, tl.float32)
    for place in range(NUM_CHOSEN):
        best = tl.max(ranks, axis=0)
        expert = column_of(best)
        chosen = tl.where(places == place, expert, chosen)
        weights = tl.where(places == place, tl.sum(tl.where(experts == expert, scores, 0.0), axis=0), weights)
        ranks = tl.where(ranks == best, _CHOSEN, ranks)
    if SCORE == _LOGIT:
        weights = _weights_of_all(weights)
    if RENORMALIZES:
        weights = weights / (tl.sum(weights, axis=0) + _EPSILON)
    outputs = token * NUM_CHOSEN + places
    tl.store(expert_ids + outputs, chosen, mask=places < NUM_CHOSEN)
    tl.store(expert_weights + outputs, weights * scale, mask=places < NUM_CHOSEN)


def route(logits: Tensor, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """See `Ops.route`.

    Args:
        logits: [T, E] float32; rows may have any stride.
    """
    num_tokens, num_experts = logits.shape
    expert_ids = torch.empty((num_tokens, rule.num_chosen), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_tokens, rule.num_chosen), dtype=torch.float32, device=logits.device)
    if not num_tokens:
        return expert_ids, weights
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_groups = rule.groups.num_groups if rule.groups is not None else 1
    _route_kernel[(num_tokens,)](
        logits,
        rule.correction,
        expert_ids,
        weights,
        logits.stride(0),
        rule.scale,
        SCORE=_SCORES[rule.score].value,
        NUM_EXPERTS=num_experts,
        MOST_EXPERTS=triton.next_power_of_2(num_experts),
        NUM_CHOSEN=rule.num_chosen,
        MOST_CHOSEN=triton.next_power_of_2(rule.num_chosen),
        NUM_GROUPS=num_groups,
        MOST_GROUPS=triton.next_power_of_2(num_groups),
        NUM_BEST_GROUPS=rule.groups.num_chosen if rule.groups is not None else 1,
        NUM_SCORING=rule.groups.num_scoring if rule.groups is not None else 1,
        RENORMALIZES=rule.renormalizes,
        num_warps=_NUM_WARPS,
    )
    return expert_ids, weights
