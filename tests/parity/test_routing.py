"""Routers against transformers' where scores tie: the same experts, or others with equal scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from services.worker.models.loader import load_model
from services.worker.ops import BACKEND_NAMES, Ops, RouterScore, RoutingRule, load_ops
from tests.support.models.paged_model import PagedModel
from tests.support.models.parity import make_prompts
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.small_models import build_small_model, write_small_model

NUM_TOKENS = 2000
# Scores closer than this count as equal.
TIE = 1e-6
# Only the first configuration of each architecture is part of `make test`.
CASES = [
    pytest.param(architecture, variant, marks=() if number == 0 else (pytest.mark.slow,))
    for architecture, variants in SMALL_CONFIGS.items()
    for number, (variant, config) in enumerate(variants.items())
    if "num_experts_per_tok" in config and variant != "dense-layers-only"
]


class RuleReader:
    """A backend that records the routing rule of each layer."""

    def __init__(self, ops: Ops) -> None:
        self.rules: list[RoutingRule] = []
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def route(self, logits: Tensor, rule: RoutingRule) -> tuple[Tensor, Tensor]:
        """See `Ops.route`."""
        self.rules.append(rule)
        return self._ops.route(logits, rule)


def read_rule(model_dir: Path, backend: str) -> RoutingRule:
    """The routing rule of a checkpoint's last layer."""
    reader = RuleReader(load_ops(backend))
    model = load_model(model_dir, cast(Ops, reader), torch.float32, lambda _: None).model
    paged = PagedModel(model, load_ops(backend))
    paged.prefill([paged.add(make_prompts((2,))[0])])
    return reader.rules[-1]


def logits_with_ties(num_experts: int) -> Tensor:
    """Logits with few distinct values, some closer than the float32 precision of scores, and some without ties."""
    generator = torch.Generator().manual_seed(num_experts)
    few = torch.randint(-2, 3, (NUM_TOKENS, num_experts), generator=generator).float()
    noise = torch.randn(NUM_TOKENS, num_experts, generator=generator)
    kinds = torch.arange(NUM_TOKENS)[:, None] % 3
    return torch.where(kinds == 0, few, torch.where(kinds == 1, few + 1e-7 * noise, noise))


def their_router(model: Any) -> Any:
    """The last layer's router, changed to take logits instead of hidden states."""
    router = [module for module in model.modules() if type(module).__name__.lower().endswith("router")][-1]
    router.weight.copy_(torch.eye(*router.weight.shape))
    if hasattr(router, "bias"):
        router.bias.zero_()
    if hasattr(router, "e_score_correction_bias"):
        # Reduce it to few distinct values, like the logits.
        router.e_score_correction_bias.copy_((8 * router.e_score_correction_bias).round() / 8)
    return router


def preferences(logits: Tensor, rule: RoutingRule) -> Tensor:
    """The scores by which experts are chosen, before grouping, in float64."""
    wide = logits.double()
    scores = {RouterScore.SOFTMAX: wide.softmax(-1), RouterScore.SIGMOID: wide.sigmoid(), RouterScore.LOGIT: wide}
    chosen_by = scores[rule.score]
    return chosen_by if rule.correction is None else chosen_by + rule.correction


def is_as_good(scores: Tensor, ours: set[int], theirs: set[int], rule: RoutingRule) -> bool:
    """Whether one token's choices differ only in ties; `scores` [E] are those by which experts are chosen."""
    if rule.groups is not None:
        grouped = scores.view(rule.groups.num_groups, -1)
        merits = grouped.topk(rule.groups.num_scoring).values.sum(-1)
        size = grouped.shape[1]
        if different := {expert // size for expert in ours} ^ {expert // size for expert in theirs}:
            last = merits.topk(rule.groups.num_chosen).values[-1]
            return all(abs(merits[group] - last) <= 2 * TIE for group in different)
    values = [torch.sort(scores[sorted(choice)]).values for choice in (ours, theirs)]
    return bool(((values[0] - values[1]).abs() <= TIE).all())


@torch.no_grad()
@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_experts_are_those_of_transformers_or_tie_with_them(tmp_path: Path, architecture: str, variant: str) -> None:
    model = build_small_model(architecture, variant)
    router = their_router(model)
    directory = write_small_model(model, tmp_path)
    num_experts, hidden_size = router.weight.shape
    logits = logits_with_ties(num_experts)
    hidden = torch.zeros(NUM_TOKENS, hidden_size)
    hidden[:, :num_experts] = logits
    _, their_weights, their_ids = router(hidden)
    for backend in BACKEND_NAMES:
        rule = read_rule(directory, backend)
        ids, weights = load_ops(backend).route(logits, rule)
        scores = preferences(logits, rule)
        same = (ids.sort(-1).values == their_ids.sort(-1).values).all(-1)
        assert same.any()
        for token in (~same).nonzero().flatten().tolist():
            assert is_as_good(scores[token], set(ids[token].tolist()), set(their_ids[token].tolist()), rule)
        spread, their_spread = (
            torch.zeros(NUM_TOKENS, num_experts).scatter_(-1, choice, values)[same]
            for choice, values in ((ids, weights), (their_ids, their_weights))
        )
        torch.testing.assert_close(spread, their_spread, atol=1e-6, rtol=1e-6)
