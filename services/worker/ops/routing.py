"""Which experts a token goes to: the rules that families have, and how they are computed.

Source: arXiv:2401.04088, section 2.1 (Mixtral); 2405.04434, section 2.2.2 (groups of experts); 2412.19437, equations
12 to 16 (sigmoid, correction); 2508.10925 (gpt-oss).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

# Keeps a sum of scores that are all 0 from being divided by.
_EPSILON = 1e-20


class RouterScore(Enum):
    """What an expert's score is, by which it is chosen and from which its weight comes."""

    # The softmax over all logits.
    SOFTMAX = "softmax"
    # The logit; weights are the softmax over the logits of those chosen.
    LOGIT = "logit"
    # The sigmoid of the logit.
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Experts are chosen from the best groups only, which are runs of equal length.

    A group is judged by the sum of its `num_judging` best experts.
    """

    num_groups: int
    num_chosen: int
    num_judging: int


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How a layer chooses experts and weighs them."""

    # Experts per token.
    num_chosen: int
    score: RouterScore
    # [E] float32, added to the scores for the choice but not for the weights.
    correction: Tensor | None = None
    groups: ExpertGroups | None = None
    # Whether a token's weights are divided by their sum.
    renormalizes: bool = False
    # What the weights are multiplied by, last.
    scale: float = 1.0


def route(logits: Tensor, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """See `Ops.route`."""
    scores = _scores(logits, rule.score)
    preferences = scores if rule.correction is None else scores + rule.correction
    if rule.groups is not None:
        preferences = _within_best_groups(preferences, rule.groups)
    expert_ids = _best(preferences, rule.num_chosen)
    weights = scores.gather(-1, expert_ids)
    if rule.score is RouterScore.LOGIT:
        weights = weights.softmax(dim=-1)
    if rule.renormalizes:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _EPSILON)
    return expert_ids, weights if rule.scale == 1.0 else weights * rule.scale


def _scores(logits: Tensor, score: RouterScore) -> Tensor:
    if score is RouterScore.SOFTMAX:
        return logits.softmax(dim=-1)
    return logits.sigmoid() if score is RouterScore.SIGMOID else logits


def _within_best_groups(preferences: Tensor, groups: ExpertGroups) -> Tensor:
    """`preferences` [T, E] with -inf for the experts of all groups but the best."""
    grouped = preferences.view(preferences.shape[0], groups.num_groups, -1)
    merits = grouped.topk(groups.num_judging, dim=-1).values.sum(dim=-1)
    is_out = torch.ones_like(merits, dtype=torch.bool).scatter_(-1, _best(merits, groups.num_chosen), False)
    return grouped.masked_fill(is_out.unsqueeze(-1), float("-inf")).flatten(-2)


def _best(scores: Tensor, count: int) -> Tensor:
    """The columns of the largest scores, best first, of equal ones the lower column."""
    # `topk` takes any of equal ones.
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
