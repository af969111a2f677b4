"""Configuration and loading of mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from services.worker.layers.linear import Linear
from services.worker.layers.moe import Experts, ReadExpert, Router, SparseMlp, load_experts
from services.worker.layers.shard import Part, Shard
from services.worker.models.config import ConfigValues
from services.worker.models.parts.decoder import DecoderConfig, FeedForward, load_mlp
from services.worker.ops import ExpertGroups, ExpertWeights, RouterScore, RoutingRule, SwigluClamp
from services.worker.ops.matrix_rows import join_rows
from services.worker.weights.model_weights import ModelWeights
from shared.model_files.model_dir import ModelDirectoryError

# An expert's gate, up and down projections.
ExpertNames = tuple[str, str, str]
_EXPERT_NAMES: ExpertNames = ("gate_proj", "up_proj", "down_proj")
_GATE_UP = "gate_up_proj"


@dataclass(frozen=True, slots=True)
class SparseConfig:
    """A family's mixture of experts, the same in every layer."""

    num_experts: int
    inner_size: int
    """Per expert."""
    rule: RoutingRule
    """Without its correction, which differs between layers."""
    has_correction: bool = False
    router_dtype: torch.dtype | None = None
    """The dtype of the router's logits; None means the model's."""
    shared_size: int = 0
    """Inner size of the shared expert; 0 if there is none."""
    has_shared_bias: bool = False
    has_stacks: bool = False
    """Whether the experts may be stored as two stacks; see `_stack_reader`."""

    def __post_init__(self) -> None:
        """Raise `ModelDirectoryError` if there are too few experts, or they cannot be grouped."""
        choosable, groups = self.num_experts, self.rule.groups
        if groups is not None:
            group_size, rest = divmod(self.num_experts, groups.num_groups)
            if rest or groups.num_chosen > groups.num_groups or groups.num_scoring > group_size:
                raise ModelDirectoryError(f"config.json: {self.num_experts} experts cannot be split into {groups}")
            choosable = groups.num_chosen * group_size
        if self.rule.num_chosen > choosable:
            raise ModelDirectoryError(
                f"config.json: num_experts_per_tok is {self.rule.num_chosen}, but there are {choosable} to choose from"
            )

    @classmethod
    def corrected_sigmoid(cls, values: ConfigValues) -> SparseConfig:
        """The mixture of DeepSeek-V3, V3.2 and GLM-4-MoE: sigmoid scores with a correction bias, and groups."""
        values.choice("scoring_func", ("sigmoid",), default="sigmoid")
        values.choice("topk_method", ("noaux_tc",), default="noaux_tc")
        inner_size = values.size("moe_intermediate_size")
        rule = RoutingRule(
            num_chosen=values.size("num_experts_per_tok"),
            score=RouterScore.SIGMOID,
            groups=read_groups(values, num_scoring=2),
            renormalizes=values.flag("norm_topk_prob", default=True),
            scale=values.number("routed_scaling_factor"),
        )
        return cls(
            num_experts=values.size("n_routed_experts", "num_local_experts", "num_experts"),
            inner_size=inner_size,
            rule=rule,
            has_correction=True,
            router_dtype=torch.float32,
            shared_size=values.count("n_shared_experts", default=0) * inner_size,
        )


def read_groups(values: ConfigValues, *, num_scoring: int) -> ExpertGroups | None:
    """The groups that experts are chosen from; None if there is only one."""
    num_groups = values.size("n_group")
    return ExpertGroups(num_groups, values.size("topk_group"), num_scoring) if num_groups > 1 else None


def load_sparse_mlp(
    shard: Shard,
    config: DecoderConfig,
    prefix: str,
    *,
    sparse: SparseConfig,
    names: ExpertNames = _EXPERT_NAMES,
    shared: FeedForward | None = None,
) -> SparseMlp:
    """Load `{prefix}.gate`, the projections of `.experts.0` and so on, and `.shared_experts`.

    Args:
        shared: A shared expert that is not `.shared_experts`; `sparse` then has none.
    """
    ops, weights = shard.ops, shard.weights
    rule, dtype = sparse.rule, sparse.router_dtype or weights.dtype
    if sparse.has_correction:
        name = f"{prefix}.gate.e_score_correction_bias"
        rule = replace(rule, correction=weights.read(name, (sparse.num_experts,), dtype=torch.float32))
    gate = weights.dense(f"{prefix}.gate", (sparse.num_experts, config.hidden_size))
    router = Router(ops, Linear(ops, gate.to(dtype), dtype), rule, dtype=dtype)
    is_stacked = sparse.has_stacks and f"{prefix}.experts.{_GATE_UP}" in weights
    read = (
        _stack_reader(weights, f"{prefix}.experts", sparse, config)
        if is_stacked
        else _expert_reader(weights, f"{prefix}.experts", names, sparse, config)
    )
    experts = load_routed_experts(shard, sparse, read)
    if not sparse.shared_size:
        return SparseMlp(router, experts, shared)
    shared_prefix, has_bias = f"{prefix}.shared_experts", sparse.has_shared_bias
    shared = load_mlp(shard, config, shared_prefix, inner_size=sparse.shared_size, has_bias=has_bias)
    return SparseMlp(router, experts, shared)


def load_routed_experts(
    shard: Shard, sparse: SparseConfig, read: ReadExpert, *, clamp: SwigluClamp | None = None
) -> Experts:
    """Load this rank's share; see `load_experts`."""
    num_experts, inner_size = sparse.num_experts, sparse.inner_size
    if shard.parallel.ep is not None:
        # Reads an empty part of every expert, so that all ranks see the same tensors, problems and digest.
        for expert in range(num_experts):
            read(expert, Part(inner_size, 0, 0))
    return load_experts(shard, num_experts=num_experts, inner_size=inner_size, read=read, clamp=clamp)


@dataclass(frozen=True, slots=True)
class FeedForwardConfig:
    """Dense networks in some layers, mixtures of experts in the others."""

    dense_layers: frozenset[int]
    """All others have experts, including MTP layers."""
    dense_size: int
    """A dense layer's inner size; 0 if there is none."""
    sparse: SparseConfig
    has_dense_bias: bool = False

    @classmethod
    def from_json(
        cls,
        values: ConfigValues,
        dense_layers: frozenset[int],
        sparse: SparseConfig,
        *,
        has_dense_bias: bool = False,
    ) -> FeedForwardConfig:
        """Read the size of the dense layers."""
        dense_size = values.size("intermediate_size") if dense_layers else 0
        return cls(dense_layers, dense_size, sparse, has_dense_bias)

    def load(self, shard: Shard, config: DecoderConfig, layer: int) -> FeedForward:
        """Load a layer's network."""
        prefix = f"model.layers.{layer}.mlp"
        if layer not in self.dense_layers:
            return load_sparse_mlp(shard, config, prefix, sparse=self.sparse)
        return load_mlp(shard, config, prefix, inner_size=self.dense_size, has_bias=self.has_dense_bias)


def _expert_reader(
    weights: ModelWeights, prefix: str, names: ExpertNames, sparse: SparseConfig, config: DecoderConfig
) -> ReadExpert:
    gate, up, down = names
    inner_shape, down_shape = (sparse.inner_size, config.hidden_size), (config.hidden_size, sparse.inner_size)

    def read(expert: int, inner: Part) -> ExpertWeights:
        gate_up = [weights.expert(f"{prefix}.{expert}.{name}", inner_shape, rows=inner.run) for name in (gate, up)]
        down_part = weights.expert(f"{prefix}.{expert}.{down}", down_shape, columns=inner.run)
        return ExpertWeights(join_rows(gate_up, weights.dtype), down_part)

    return read


def _stack_reader(weights: ModelWeights, prefix: str, sparse: SparseConfig, config: DecoderConfig) -> ReadExpert:
    """Experts are stored as two stacks; the first half of `gate_up_proj`'s outputs is the gate's.

    Published input features first; transformers 5 writes them output features first.
    Source: transformers 5, conversion_mapping.py, `qwen3_vl_moe`.
    """
    num_experts, inner_size, hidden_size = sparse.num_experts, sparse.inner_size, config.hidden_size
    gate_up_shape, down_shape = (num_experts, hidden_size, 2 * inner_size), (num_experts, inner_size, hidden_size)

    def read(expert: int, inner: Part) -> ExpertWeights:
        runs = [inner.run, slice(inner_size + inner.run.start, inner_size + inner.run.stop)]
        gate_up = [
            weights.stacked(f"{prefix}.{_GATE_UP}", gate_up_shape, expert, rows=run, in_any_order=True) for run in runs
        ]
        down = weights.stacked(f"{prefix}.down_proj", down_shape, expert, columns=inner.run, in_any_order=True)
        return ExpertWeights(join_rows(gate_up, weights.dtype), down)

    return read
