"""How a token's experts are chosen and weighted.

Source: arXiv:2401.04088, section 2.1 (Mixtral); 2405.04434, section 2.2.2 (groups of experts); 2412.19437, equations
12 to 16 (sigmoid, correction bias); 2508.10925 (gpt-oss).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

EPSILON = 1e-20
"""Avoids division by zero when all scores are 0."""


class RouterScore(Enum):
    """The score by which an expert is chosen and from which its weight is derived."""

    # The softmax over all logits.
    SOFTMAX = "softmax"
    # The logit itself; weights are the softmax over the logits of the chosen experts.
    LOGIT = "logit"
    # The sigmoid of the logit.
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Equal runs of experts; experts are chosen from the best groups only."""

    num_groups: int
    num_chosen: int
    """Groups per token."""
    num_scoring: int
    """A group's score is the sum of this many best scores in it."""


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How a layer chooses and weights experts."""

    num_chosen: int
    """Experts per token."""
    score: RouterScore
    correction: Tensor | None = None
    """[E] float32, added to scores for the choice but not for the weights."""
    groups: ExpertGroups | None = None
    renormalizes: bool = False
    """Whether weights are divided by their sum."""
    scale: float = 1.0
    """Multiplies the weights, last."""


def route(logits: Tensor, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """Choose each token's experts, and their weights, with torch."""
    scores = _scores(logits, rule.score)
    preferences = scores if rule.correction is None else scores + rule.correction
    if rule.groups is not None:
        preferences = _within_best_groups(preferences, rule.groups)
    expert_ids = _best(preferences, rule.num_chosen)
    weights = scores.gather(-1, expert_ids)
    if rule.score is RouterScore.LOGIT:
        weights = weights.softmax(dim=-1)
    if rule.renormalizes:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + EPSILON)
    return expert_ids.to(torch.int32), weights if rule.scale == 1.0 else weights * rule.scale


def _scores(logits: Tensor, score: RouterScore) -> Tensor:
    if score is RouterScore.SOFTMAX:
        return logits.softmax(dim=-1)
    return logits.sigmoid() if score is RouterScore.SIGMOID else logits


def _within_best_groups(preferences: Tensor, groups: ExpertGroups) -> Tensor:
    """`preferences` [T, E] with -inf outside the best groups."""
    grouped = preferences.view(preferences.shape[0], groups.num_groups, -1)
    merits = grouped.topk(groups.num_scoring, dim=-1).values.sum(dim=-1)
    is_out = torch.ones_like(merits, dtype=torch.bool).scatter_(-1, _best(merits, groups.num_chosen), False)
    return grouped.masked_fill(is_out.unsqueeze(-1), float("-inf")).flatten(-2)


def _best(scores: Tensor, count: int) -> Tensor:
    """Columns, best first, the lower among equals."""
    # Not `topk`, which returns any of equal values.
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
