"""Mixtures of experts as families have them in their checkpoints: reading and loading."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from services.worker.layers.linear import Linear
from services.worker.layers.moe import Router, SparseMlp
from services.worker.models.config import ConfigValues
from services.worker.models.decoder import DecoderConfig, load_mlp
from services.worker.ops import ExpertGroups, ExpertWeights, Ops, RouterScore, RoutingRule
from services.worker.weights import ModelWeights
from shared.model_dir import ModelDirectoryError

# What the gate's, the up and the down projection of an expert are called.
ExpertNames = tuple[str, str, str]
_EXPERT_NAMES: ExpertNames = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class SparseConfig:
    """What a family's mixtures of experts are made of, the same in every layer that has one."""

    num_experts: int
    # Of one expert.
    inner_size: int
    # Without the correction, which is a layer's own.
    rule: RoutingRule
    has_correction: bool = False
    # What the router's logits are computed in; None: what the model is.
    router_dtype: torch.dtype | None = None
    # Of the expert that all tokens use; 0: there is none.
    shared_size: int = 0
    has_shared_bias: bool = False

    def __post_init__(self) -> None:
        """Check that there are as many experts as are chosen.

        Raises:
            ModelDirectoryError: there are not.
        """
        choosable, groups = self.num_experts, self.rule.groups
        if groups is not None:
            group_size, rest = divmod(self.num_experts, groups.num_groups)
            if rest or groups.num_chosen > groups.num_groups or groups.num_judging > group_size:
                raise ModelDirectoryError(f"config.json: {self.num_experts} experts do not make {groups}")
            choosable = groups.num_chosen * group_size
        if self.rule.num_chosen > choosable:
            raise ModelDirectoryError(
                f"config.json: num_experts_per_tok is {self.rule.num_chosen}, but there are {choosable} to choose from"
            )

    @classmethod
    def corrected_sigmoid(cls, values: ConfigValues) -> SparseConfig:
        """That of DeepSeek-V3, V3.2 and GLM-4-MoE: sigmoid scores, corrected for the choice, and groups.

        Raises:
            ModelDirectoryError: a value is missing or malformed, or they do not fit each other.
        """
        values.choice("scoring_func", ("sigmoid",), default="sigmoid")
        values.choice("topk_method", ("noaux_tc",), default="noaux_tc")
        inner_size = values.size("moe_intermediate_size")
        rule = RoutingRule(
            num_chosen=values.size("num_experts_per_tok"),
            score=RouterScore.SIGMOID,
            groups=read_groups(values, num_judging=2),
            renormalizes=values.flag("norm_topk_prob", default=True),
            scale=values.number("routed_scaling_factor"),
        )
        return cls(
            num_experts=values.size("n_routed_experts", "num_local_experts"),
            inner_size=inner_size,
            rule=rule,
            has_correction=True,
            router_dtype=torch.float32,
            shared_size=values.count("n_shared_experts", default=0) * inner_size,
        )


def read_groups(values: ConfigValues, *, num_judging: int) -> ExpertGroups | None:
    """The groups that experts are chosen from; None when there is one only.

    Raises:
        ModelDirectoryError: a value is missing or malformed.
    """
    num_groups = values.size("n_group")
    return ExpertGroups(num_groups, values.size("topk_group"), num_judging) if num_groups > 1 else None


def load_sparse_mlp(
    ops: Ops,
    config: DecoderConfig,
    weights: ModelWeights,
    prefix: str,
    *,
    sparse: SparseConfig,
    names: ExpertNames = _EXPERT_NAMES,
) -> SparseMlp:
    """The mixture at `prefix`: `.gate`, the projections of `.experts.0` and so on, and `.shared_experts`."""
    rule, dtype = sparse.rule, sparse.router_dtype or weights.dtype
    if sparse.has_correction:
        name = f"{prefix}.gate.e_score_correction_bias"
        rule = replace(rule, correction=weights.read(name, (sparse.num_experts,), dtype=torch.float32))
    gate = weights.linear(f"{prefix}.gate", (sparse.num_experts, config.hidden_size))
    router = Router(ops, Linear(ops, gate.to(dtype)), rule, dtype=dtype)
    experts = ops.prepare_experts(_read_experts(weights, f"{prefix}.experts", names, sparse, config), clamp=None)
    if not sparse.shared_size:
        return SparseMlp(router, experts)
    shared = load_mlp(
        ops,
        config,
        weights,
        f"{prefix}.shared_experts",
        inner_size=sparse.shared_size,
        has_bias=sparse.has_shared_bias,
    )
    return SparseMlp(router, experts, shared)


def _read_experts(
    weights: ModelWeights, prefix: str, names: ExpertNames, sparse: SparseConfig, config: DecoderConfig
) -> Iterator[ExpertWeights]:
    gate, up, down = names
    size, inner_shape = sparse.inner_size, (sparse.inner_size, config.hidden_size)
    for expert in range(sparse.num_experts):
        gate_up = weights.empty((2 * size, config.hidden_size))
        weights.linear(f"{prefix}.{expert}.{gate}", inner_shape, out=gate_up[:size])
        weights.linear(f"{prefix}.{expert}.{up}", inner_shape, out=gate_up[size:])
        yield ExpertWeights(gate_up, weights.linear(f"{prefix}.{expert}.{down}", (config.hidden_size, size)))
