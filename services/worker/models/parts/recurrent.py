"""Configuration and loading of layers with the gated delta rule, and of models that have them beside attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.forward.state_cache import NO_STATES, LayerState, StateSpec, StateTensor
from services.worker.layers.gated_delta import GatedDelta
from services.worker.layers.linear import Linear, sum_over_ranks
from services.worker.layers.shard import Part, Shard
from services.worker.models.config import ConfigValues
from services.worker.models.parts.decoder import DecoderConfig, DecoderLayer, DecoderModel, FeedForward
from services.worker.models.parts.plain_attention import FULL, AttentionConfig, load_attention, load_rotary
from services.worker.ops import DeltaGates, Matrix
from services.worker.ops.matrix_rows import join_columns, join_rows, take_rows
from services.worker.weights.quantization.gguf_blocks import GROUPED, HEAD_ORDER, OUT_PROJECTIONS, TILED
from shared.model_files.model_dir import ModelDirectoryError

LINEAR = "linear_attention"


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """A family's gated delta rule, the same in every layer that has it. `num_key_heads` divides `num_value_heads`."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int
    head_order: str
    """`GROUPED` or `TILED`: the order of value heads in whatever has rows or columns of them."""

    @classmethod
    def from_json(cls, values: ConfigValues) -> DeltaConfig:
        """Read the sizes."""
        read = cls(
            num_key_heads=values.size("linear_num_key_heads"),
            num_value_heads=values.size("linear_num_value_heads"),
            key_dim=values.size("linear_key_head_dim"),
            value_dim=values.size("linear_value_head_dim"),
            conv_size=values.size("linear_conv_kernel_dim"),
            head_order=values.choice(HEAD_ORDER, tuple(OUT_PROJECTIONS), default=GROUPED),
        )
        if read.num_value_heads % read.num_key_heads:
            raise ModelDirectoryError(
                f"config.json: linear_num_value_heads {read.num_value_heads} is not a multiple of linear_num_key_heads "
                f"{read.num_key_heads}"
            )
        if read.conv_size < 2:
            raise ModelDirectoryError(f"config.json: linear_conv_kernel_dim is {read.conv_size}, must be at least 2")
        return read

    @property
    def num_shared(self) -> int:
        """Value heads of one key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def is_tiled(self) -> bool:
        """Whether value heads are in the order of GGUF's files, instead of that of their key heads."""
        return self.head_order == TILED

    def key_heads(self, shard: Shard) -> Part:
        """This rank's key heads, whose value heads are its own too."""
        return shard.part("linear_num_key_heads", self.num_key_heads)

    def value_heads(self, key_heads: Part) -> list[Part]:
        """The runs of these key heads' value heads among all value heads. A rank has them in this order."""
        if not self.is_tiled or len(key_heads) == key_heads.total:
            return [key_heads.times(self.num_shared)]
        first_heads = range(0, self.num_value_heads, self.num_key_heads)
        return [Part(self.num_value_heads, first + key_heads.start, first + key_heads.stop) for first in first_heads]

    def layer_state(self, shard: Shard) -> LayerState:
        """What a sequence keeps of this rank's heads: the convolution's last inputs, and a matrix per value head."""
        (width,), num_values = self.layer_inputs(shard)[0].shape, self._num_values(shard)
        return (
            StateTensor((self.conv_size - 1, width), shard.weights.dtype),
            StateTensor((num_values, self.key_dim, self.value_dim), torch.float32),
        )

    def layer_inputs(self, shard: Shard) -> LayerState:
        """What this rank's heads take in of a token: the convolution's input, and both gates of each value head."""
        num_values, dtype = self._num_values(shard), shard.weights.dtype
        width = 2 * len(self.key_heads(shard)) * self.key_dim + num_values * self.value_dim
        return StateTensor((width,), dtype), StateTensor((2 * num_values,), dtype)

    def _num_values(self, shard: Shard) -> int:
        return len(self.key_heads(shard)) * self.num_shared


@dataclass(frozen=True, slots=True)
class DeltaProjections:
    """What a family stores its own way, of this rank's heads."""

    qkvz: Matrix
    """Rows of all queries, then keys, values and output gates."""
    b: Tensor
    a: Tensor


# Reads the projections of the layer whose tensors' names begin with the prefix.
ReadProjections = Callable[[Shard, DecoderConfig, str, DeltaConfig], DeltaProjections]


def read_mixed(shard: Shard, config: DecoderConfig, prefix: str, delta: DeltaConfig) -> DeltaProjections:
    """Read `in_proj_qkvz` and `in_proj_ba`, whose rows are those of one key head after the other."""
    weights, part, num_shared = shard.weights, delta.key_heads(shard), delta.num_shared
    sizes = [delta.key_dim, delta.key_dim, *[num_shared * delta.value_dim] * 2]
    both = part.times(sum(sizes))
    by_head = torch.arange(len(both), device=weights.device).view(len(part), -1)
    rows = torch.cat([each.flatten() for each in torch.split(by_head, sizes, dim=1)])
    mixed = weights.linear(f"{prefix}.in_proj_qkvz", (both.total, config.hidden_size), rows=both.run)
    gates = part.times(2 * num_shared)
    ba = weights.dense(f"{prefix}.in_proj_ba", (gates.total, config.hidden_size), rows=gates.run)
    b, a = ba.view(len(part), 2, num_shared, config.hidden_size).transpose(0, 1).flatten(1, 2)
    return DeltaProjections(take_rows(mixed, rows), b, a)


def read_plain(shard: Shard, config: DecoderConfig, prefix: str, delta: DeltaConfig) -> DeltaProjections:
    """Read `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`, whose rows are in the order of their heads."""
    weights, part, hidden = shard.weights, delta.key_heads(shard), config.hidden_size
    heads = delta.value_heads(part)
    convolved = _convolved(delta, part)
    names = [f"{prefix}.in_proj_qkv"] * len(convolved) + [f"{prefix}.in_proj_z"] * len(heads)
    runs = [*convolved, *(run.times(delta.value_dim) for run in heads)]
    parts = [weights.linear(name, (run.total, hidden), rows=run.run) for name, run in zip(names, runs, strict=True)]
    b, a = (
        torch.cat([weights.dense(f"{prefix}.in_proj_{name}", (run.total, hidden), rows=run.run) for run in heads])
        for name in "ba"
    )
    return DeltaProjections(join_rows(parts, weights.dtype), b, a)


def load_delta(
    shard: Shard, config: DecoderConfig, layer: int, *, delta: DeltaConfig, read: ReadProjections
) -> GatedDelta:
    """This rank's heads; the output projection is summed over the ranks."""
    ops, weights, prefix = shard.ops, shard.weights, f"model.layers.{layer}.linear_attn"
    part, dtype = delta.key_heads(shard), shard.weights.dtype
    heads = delta.value_heads(part)
    stored = read(shard, config, prefix, delta)
    conv = torch.cat(
        [
            weights.read(f"{prefix}.conv1d.weight", (run.total, 1, delta.conv_size), rows=run.run)
            for run in _convolved(delta, part)
        ]
    )
    log, bias = (
        torch.cat([weights.read(f"{prefix}.{name}", (run.total,), rows=run.run, dtype=torch.float32) for run in heads])
        for name in ("A_log", "dt_bias")
    )
    return GatedDelta(
        ops,
        layer,
        qkvz=Linear(ops, stored.qkvz, dtype),
        # Precise even where other matrices are quantised: an error in a decay grows with each token.
        gates=Linear(ops, torch.cat((stored.b, stored.a)), dtype),
        params=DeltaGates(-log.exp(), bias, delta.is_tiled),
        conv=conv[:, 0].t().contiguous(),
        norm=weights.read(f"{prefix}.norm.weight", (delta.value_dim,)),
        eps=config.rms_norm_eps,
        output=sum_over_ranks(_load_output(shard, config, prefix, delta), shard.tp),
    )


def read_layer_types(values: ConfigValues, num_layers: int) -> tuple[str, ...]:
    """Each layer's type: by `layer_types`, or else every `full_attention_interval`-th one has full attention."""
    types = values.texts("layer_types", num_layers)
    if types is None:
        interval = values.size("full_attention_interval", default=4)
        types = tuple(LINEAR if (layer + 1) % interval else FULL for layer in range(num_layers))
    if unknown := set(types) - {LINEAR, FULL}:
        raise ModelDirectoryError(f"config.json: layer_types {sorted(unknown)} are not supported")
    if FULL not in types:
        raise ModelDirectoryError(f"config.json: layer_types has no {FULL}, without which there is no KV cache")
    return types


def load_hybrid_model(
    shard: Shard,
    values: ConfigValues,
    config: DecoderConfig,
    *,
    attention: AttentionConfig,
    read: ReadProjections,
    load_feed_forward: Callable[[int], FeedForward],
) -> DecoderModel:
    """Load a model of layers with attention and layers with the gated delta rule.

    What `attention` has beyond the model's own layers are those that draft, whose KV comes last.
    """
    types = read_layer_types(values, config.num_layers)
    delta = DeltaConfig.from_json(values)
    rotary = load_rotary(shard, config, attention.heads)
    layers = []
    for layer, kind in enumerate(types):
        attends = (
            load_attention(shard, config, layer, attention)
            if kind == FULL
            else load_delta(shard, config, layer, delta=delta, read=read)
        )
        layers.append(DecoderLayer.load(shard, config, layer, attention=attends, mlp=load_feed_forward(layer)))
    kv_layers = attention.kv_layers(shard, config.context_length)
    return DecoderModel(
        shard,
        config,
        layers=layers,
        rotaries=[rotary] * len(layers),
        kv_layers=[() if layer < len(types) and types[layer] == LINEAR else kv for layer, kv in enumerate(kv_layers)],
        states=_spec(shard, delta, types) if LINEAR in types else NO_STATES,
    )


def _spec(shard: Shard, delta: DeltaConfig, types: tuple[str, ...]) -> StateSpec:
    state, inputs = delta.layer_state(shard), delta.layer_inputs(shard)
    return StateSpec(*(tuple(each if kind == LINEAR else () for kind in types) for each in (state, inputs)))


def _load_output(shard: Shard, config: DecoderConfig, prefix: str, delta: DeltaConfig) -> Linear:
    """Load the projection of the value heads. It stays packed unless a run of this rank's columns cuts a block."""
    weights, name = shard.weights, OUT_PROJECTIONS[delta.head_order]
    columns = [heads.times(delta.value_dim) for heads in delta.value_heads(delta.key_heads(shard))]
    matrices = [weights.linear(f"{prefix}.{name}", (config.hidden_size, run.total), columns=run.run) for run in columns]
    weight = join_columns(matrices, weights.dtype)
    # Freed before the kernel makes another copy.
    del matrices
    return Linear(shard.ops, weight, weights.dtype)


def _convolved(delta: DeltaConfig, key_heads: Part) -> list[Part]:
    """The runs of queries, keys and values among all of them, which lie one after the other."""
    keys = key_heads.times(delta.key_dim)
    runs = [(0, keys), (keys.total, keys)]
    runs += [(2 * keys.total, run.times(delta.value_dim)) for run in delta.value_heads(key_heads)]
    total = 2 * keys.total + delta.num_value_heads * delta.value_dim
    return [Part(total, start + run.start, start + run.stop) for start, run in runs]
