"""A family that wraps the parts of plain layers: a factor on what they add to the residual stream, and on logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from services.worker.layers.shard import Shard
from services.worker.models.config import ConfigValues
from services.worker.models.parts.decoder import DecoderConfig, DecoderLayer, DecoderModel, FeedForward, SelfAttention
from services.worker.models.parts.plain_attention import AttentionConfig, AttentionHeads, MakeLayer, load_plain_model
from services.worker.models.parts.sparse_mlp import SparseConfig, load_sparse_mlp
from services.worker.ops import RopeRows, RouterScore, RoutingRule, load_ops
from services.worker.weights.dummy_weights import DummyWeights
from services.worker.weights.model_weights import ModelWeights
from services.worker.weights.planned_weights import PlannedWeights
from tests.support.models.paged_model import PagedModel
from tests.support.models.small_configs import SMALL_CONFIGS

OPS = load_ops("reference")
VALUES = ConfigValues(SMALL_CONFIGS["Qwen3MoeForCausalLM"]["plain"])
SPARSE = SparseConfig(num_experts=8, inner_size=24, rule=RoutingRule(2, RouterScore.SOFTMAX))
TOKENS = [5, 17, 3, 40]


class DoubledModel(DecoderModel):
    """A model of its own for the family."""

    @override
    def compute_logits(self, hidden: Tensor) -> Tensor:
        return super().compute_logits(hidden) * 2.0


def scaled(factor: float) -> MakeLayer:
    """Wrap both parts of each layer."""

    def make(
        shard: Shard, config: DecoderConfig, layer: int, *, attention: SelfAttention, mlp: FeedForward
    ) -> DecoderLayer:
        def attend(x: Tensor, rope: RopeRows) -> Tensor:
            return attention(x, rope).mul_(factor)

        def feed_forward(x: Tensor) -> Tensor:
            return mlp(x).mul_(factor)

        return DecoderLayer.load(shard, config, layer, attention=attend, mlp=feed_forward)

    return make


def load(weights: ModelWeights, **family: Any) -> DecoderModel:
    """A model with experts in each layer; `family` are further arguments of `load_plain_model`."""
    shard = Shard(OPS, weights)
    config = DecoderConfig.from_json(VALUES, shard.context)
    attention = AttentionConfig(AttentionHeads.from_json(VALUES), [None] * config.num_layers)

    def load_feed_forward(layer: int) -> FeedForward:
        return load_sparse_mlp(shard, config, f"model.layers.{layer}.mlp", sparse=SPARSE)

    return load_plain_model(shard, config, attention=attention, load_feed_forward=load_feed_forward, **family)


def logits(*, tokens: Sequence[int] = TOKENS, **family: Any) -> Tensor:
    """The logits of the last token."""
    paged = PagedModel(load(DummyWeights(1, torch.float32), **family), OPS)
    return paged.prefill([paged.add(tokens)])


def test_experts_in_a_wrapper_are_known() -> None:
    for family in ({}, {"make_layer": scaled(0.5)}):
        weights = PlannedWeights(torch.float32)
        load(weights, **family)
        assert weights.has_experts


def test_a_wrapper_is_around_both_parts_of_every_layer() -> None:
    plain = logits()
    assert torch.equal(logits(make_layer=scaled(1.0)), plain)
    assert not torch.allclose(logits(make_layer=scaled(0.5)), plain)
    # Without what layers add, the embeddings alone are left: the last token's, wherever it is.
    alone = [logits(tokens=tokens, make_layer=scaled(0.0)) for tokens in (TOKENS, TOKENS[-1:])]
    assert torch.equal(*alone)


def test_a_model_may_have_logits_of_its_own() -> None:
    assert torch.equal(logits(model=DoubledModel), logits() * 2)
