"""Qwen's architectures with gated delta rules in most layers: Qwen3-Next, and Qwen3.5 and 3.6, dense or with experts.

Qwen3-Next becomes a Qwen3.5 with experts: the layers are the same, but Qwen3.5 stores projections apart, as GGUF does,
and so each of them keeps its format.

Value heads are stored by key head. In Qwen3.5's files they are tiled: the first value head of every key head, then the
second one of every key head, and so on, in whatever has rows or columns of value heads. That order is kept, and
config.json says so, where another one would cut blocks of columns.

Sources: as of `architectures`; llama.cpp, conversion/qwen.py (`Qwen3NextModel`, `_LinearAttentionVReorderBase`),
src/models/qwen3next.cpp, qwen35.cpp and qwen35moe.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from services.worker.weights.gguf_import.architecture import (
    Architecture,
    Config,
    Key,
    Rules,
    partly_rotated,
    plain_sizes,
)
from services.worker.weights.gguf_import.gguf_file import GgufTensor
from services.worker.weights.gguf_import.layer_rules import EXPERTS, KEYS, MLP, VALUE_OUTPUT, offset_norm, shared_expert
from services.worker.weights.gguf_import.metadata import Metadata, UnsupportedGgufError
from services.worker.weights.gguf_import.routed_architectures import set_drafts_apart
from services.worker.weights.gguf_import.tensors import ResultTensors, Rule, Sizes, Tensor, read_values
from services.worker.weights.quantization.gguf_blocks import BLOCK_TYPES, GROUPED, HEAD_ORDER, OUT_PROJECTIONS, TILED

# The rules of a layer's projections, by the names of its tensors.
_Projections = Callable[[frozenset[str]], Rules]
_LINEAR, _FULL = "linear_attention", "full_attention"
_RECURRENT_LAYERS = "attention.recurrent_layers"
_OUTPUT = "ssm_out.weight"


@dataclass(frozen=True, slots=True)
class _HeadRows(Rule):
    """A matrix whose last rows are those of value heads."""

    source: str
    name: str
    sizes: str
    """As `Tensor`'s."""
    before: str = "none"
    """The name of the number of rows before those of the value heads."""
    head: str = "value"
    """The name of the number of rows of a value head."""
    has_middle: bool = False
    """Whether the result has a dimension of 1 before the last one, as a convolution has."""

    def shapes(self, sizes: Sizes) -> Mapping[str, tuple[int, ...]]:
        """See `Rule`."""
        return {self.source: tuple(sizes[name] for name in self.sizes.split())}

    def convert(self, tensors: Mapping[str, GgufTensor], prefix: str, sizes: Sizes, results: ResultTensors) -> None:
        """See `Rule`."""
        tensor = tensors[self.source]
        rows = _runs(sizes, first=sizes[self.before], head=sizes[self.head])
        shape = (tensor.shape[0], 1, tensor.shape[1]) if self.has_middle else tensor.shape
        results.add_rows(prefix + self.name, tensor, rows, shape=shape)


@dataclass(frozen=True, slots=True)
class _HeadNumbers(Rule):
    """A number of each value head."""

    source: str
    name: str
    is_decay: bool = False
    """Whether GGUF has the number by which a step is multiplied, and Hugging Face's layout the logarithm of its
    negative."""

    def shapes(self, sizes: Sizes) -> Mapping[str, tuple[int, ...]]:
        """See `Rule`."""
        return {self.source: (sizes["value_heads"],)}

    def convert(self, tensors: Mapping[str, GgufTensor], prefix: str, sizes: Sizes, results: ResultTensors) -> None:
        """See `Rule`.

        Raises:
            UnsupportedGgufError: a decay is not negative.
        """
        tensor = tensors[self.source]
        [numbers] = read_values(tensor, 0, 1).astype(np.float64)
        if self.is_decay:
            if not (np.isfinite(numbers) & (numbers < 0)).all():
                raise UnsupportedGgufError(f"has {tensor.name} with values that are not negative")
            numbers = np.log(-numbers)
        ordered = numbers[_stored_heads(sizes)]
        results.add_values(prefix + self.name, [tensor], ordered.shape, lambda: iter([ordered]))


@dataclass(frozen=True, slots=True)
class _HeadColumns(Rule):
    """A matrix whose columns are those of value heads."""

    source: str
    name: str

    def shapes(self, sizes: Sizes) -> Mapping[str, tuple[int, ...]]:
        """See `Rule`."""
        return {self.source: (sizes["hidden"], sizes["values"])}

    def convert(self, tensors: Mapping[str, GgufTensor], prefix: str, sizes: Sizes, results: ResultTensors) -> None:
        """See `Rule`."""
        tensor = tensors[self.source]
        columns = _runs(sizes, first=0, head=sizes["value"]) if sizes["tiles"] > 1 else []
        results.add_rows(prefix + self.name, tensor, [range(tensor.num_rows)], columns=columns)


@dataclass(frozen=True, slots=True)
class _MixedRows(Rule):
    """A matrix that has the rows of several projections, one key head after the other."""

    source: str
    parts: tuple[str, ...]
    """The names of the numbers of rows that a key head has of each part."""
    name_to_parts: Mapping[str, tuple[int, ...]]
    """The parts of each projection, by its name."""

    def shapes(self, sizes: Sizes) -> Mapping[str, tuple[int, ...]]:
        """See `Rule`."""
        return {self.source: (sizes["key_heads"] * sum(sizes[part] for part in self.parts), sizes["hidden"])}

    def convert(self, tensors: Mapping[str, GgufTensor], prefix: str, sizes: Sizes, results: ResultTensors) -> None:
        """See `Rule`."""
        ends = np.cumsum([sizes[part] for part in self.parts]).tolist()
        starts = [0, *ends[:-1]]
        heads = range(0, sizes["key_heads"] * ends[-1], ends[-1])
        for name, parts in self.name_to_parts.items():
            rows = [range(head + starts[part], head + ends[part]) for part in parts for head in heads]
            results.add_rows(prefix + name, tensors[self.source], rows)


def _stored_heads(sizes: Sizes) -> list[int]:
    """Where the file has each value head."""
    num_heads, num_tiles = sizes["value_heads"], sizes["tiles"]
    return [head % num_tiles * (num_heads // num_tiles) + head // num_tiles for head in range(num_heads)]


def _runs(sizes: Sizes, *, first: int, head: int) -> list[range]:
    """What is before the value heads, which begin at `first`, and then each of them, of size `head`."""
    if sizes["tiles"] == 1:
        return [range(first + sizes["value_heads"] * head)]
    runs = [range(first + place * head, first + (place + 1) * head) for place in _stored_heads(sizes)]
    return [range(first), *runs] if first else runs


_DELTA = "linear_attn."
_QKV, _Z, _B, _A = (f"{_DELTA}in_proj_{name}.weight" for name in ("qkv", "z", "b", "a"))
_SPLIT_QKVZ: Rules = (
    _HeadRows("attn_qkv.weight", _QKV, "convolved hidden", before="keys"),
    _HeadRows("attn_gate.weight", _Z, "values hidden"),
)
_SPLIT_GATES: Rules = (
    _HeadRows("ssm_beta.weight", _B, "value_heads hidden", head="one"),
    _HeadRows("ssm_alpha.weight", _A, "value_heads hidden", head="one"),
)
_MIXED_GATES = _MixedRows("ssm_ba.weight", ("tile", "tile"), {_B: (0,), _A: (1,)})
# What llama.cpp's converter wrote in 2025.
_MIXED_QKVZ = _MixedRows("ssm_in.weight", ("key", "key", "tile_values", "tile_values"), {_QKV: (0, 1, 2), _Z: (3,)})
_RECURRENT: Rules = (
    _HeadRows("ssm_conv1d.weight", f"{_DELTA}conv1d.weight", "convolved taps", before="keys", has_middle=True),
    _HeadNumbers("ssm_a", f"{_DELTA}A_log", is_decay=True),
    _HeadNumbers("ssm_dt.bias", f"{_DELTA}dt_bias"),
    Tensor("ssm_norm.weight", f"{_DELTA}norm.weight", "value"),
)
_NORMS: tuple[Tensor, ...] = (
    offset_norm("attn_norm.weight", "input_layernorm.weight"),
    offset_norm("post_attention_norm.weight", "post_attention_layernorm.weight"),
)
_ATTENTION: tuple[Tensor, ...] = (
    Tensor("attn_q.weight", "self_attn.q_proj.weight", "gated_query hidden"),
    Tensor("attn_k.weight", "self_attn.k_proj.weight", "key_value hidden"),
    *VALUE_OUTPUT,
    offset_norm("attn_q_norm.weight", "self_attn.q_norm.weight", "head"),
    offset_norm("attn_k_norm.weight", "self_attn.k_norm.weight", "head"),
)
_SPARSE: tuple[Tensor, ...] = (
    *EXPERTS,
    *shared_expert("mlp.shared_expert"),
    Tensor("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", "one hidden"),
)
_DRAFTS: Rules = (
    Tensor("nextn.eh_proj.weight", "fc.weight", "hidden twice_hidden"),
    offset_norm("nextn.enorm.weight", "pre_fc_norm_embedding.weight"),
    offset_norm("nextn.hnorm.weight", "pre_fc_norm_hidden.weight"),
    offset_norm("nextn.shared_head_norm.weight", "norm.weight"),
)
_HYBRID_KEYS: Mapping[str, Key] = {
    "full_attention_interval": Key("full_attention_interval", "size", 4),
    "linear_conv_kernel_dim": Key("ssm.conv_kernel"),
    "linear_key_head_dim": Key("ssm.state_size"),
    "linear_num_key_heads": Key("ssm.group_count"),
    "linear_num_value_heads": Key("ssm.time_step_rank"),
    "num_nextn_predict_layers": Key("nextn_predict_layers", "count", 0),
}
_EXPERT_KEYS: Mapping[str, Key] = {
    "moe_intermediate_size": Key("expert_feed_forward_length"),
    "num_experts": Key("expert_count"),
    "num_experts_per_tok": Key("expert_used_count"),
    "shared_expert_intermediate_size": Key("expert_shared_feed_forward_length"),
}


def _rules(
    feed_forward: tuple[Tensor, ...], projections: _Projections, config: Config, layer: int, names: frozenset[str]
) -> Rules:
    if layer >= config["num_hidden_layers"]:
        block = (*_NORMS, *_ATTENTION, *feed_forward)
        return (*_DRAFTS, *(replace(rule, name=f"layers.0.{rule.name}") for rule in block))
    if config["layer_types"][layer] == _FULL:
        return (*_NORMS, *_ATTENTION, *feed_forward)
    output = _HeadColumns(_OUTPUT, f"{_DELTA}{OUT_PROJECTIONS[config.get(HEAD_ORDER, GROUPED)]}.weight")
    return (*_NORMS, *projections(names), *_RECURRENT, output, *feed_forward)


def _split_projections(_names: frozenset[str]) -> Rules:
    return (*_SPLIT_QKVZ, *_SPLIT_GATES)


def _mixed_projections(names: frozenset[str]) -> Rules:
    return (*((_MIXED_QKVZ,) if "ssm_in.weight" in names else _SPLIT_QKVZ), _MIXED_GATES)


def _complete(metadata: Metadata, config: Config, names: Collection[str]) -> None:
    if config["num_nextn_predict_layers"] > 1:
        raise UnsupportedGgufError(
            f"has nextn_predict_layers {config['num_nextn_predict_layers']}; only 1 is supported"
        )
    set_drafts_apart(metadata, config, names)
    config["layer_types"] = _layer_types(metadata, config.pop("full_attention_interval"), config["num_hidden_layers"])
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if num_values % num_keys:
        raise UnsupportedGgufError(f"has ssm.time_step_rank {num_values}, not a multiple of ssm.group_count {num_keys}")
    width = metadata.size("ssm.inner_size")
    if width % num_values:
        raise UnsupportedGgufError(f"has ssm.inner_size {width}, not a multiple of ssm.time_step_rank {num_values}")
    config["linear_value_head_dim"] = width // num_values


def _layer_types(metadata: Metadata, interval: int, num_layers: int) -> list[str]:
    """The types of layers, by number.

    A list of them decides, as in llama.cpp: files with one may be irregular, and have an interval all the same. That
    each layer has its type's tensors is checked with the tensors.

    Raises:
        UnsupportedGgufError: there are fewer layers than the interval, and no list.
    """
    if _RECURRENT_LAYERS in metadata:
        return [_LINEAR if is_linear else _FULL for is_linear in metadata.flags(_RECURRENT_LAYERS, num_layers)]
    if interval > num_layers:
        raise UnsupportedGgufError(f"has full_attention_interval {interval}, but only {num_layers} layers")
    return [_LINEAR if (layer + 1) % interval else _FULL for layer in range(num_layers)]


def _complete_moe(metadata: Metadata, config: Config, names: Collection[str]) -> None:
    # No layer is dense.
    metadata.size("feed_forward_length", default=1)
    _complete(metadata, config, names)


def _keep_order(config: Config, tensors: Mapping[str, GgufTensor]) -> None:
    """Keep the file's order of value heads where another one would cut blocks that are kept."""
    if config["linear_num_value_heads"] == config["linear_num_key_heads"]:
        return
    kinds = {tensor.kind for name, tensor in tensors.items() if name.endswith(f".{_OUTPUT}")}
    kept = [BLOCK_TYPES[kind.name] for kind in kinds if kind.name in BLOCK_TYPES]
    if any(config["linear_value_head_dim"] % block_type.num_values for block_type in kept):
        config[HEAD_ORDER] = TILED


def _sizes(config: Config, *, is_tiled: bool) -> Sizes:
    sizes = plain_sizes({"intermediate_size": 0, **config})
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key, value, tile = config["linear_key_head_dim"], config["linear_value_head_dim"], num_values // num_keys
    return {
        **sizes,
        "none": 0,
        "one": 1,
        "twice_hidden": 2 * config["hidden_size"],
        "gated_query": 2 * sizes["query"],
        "key_heads": num_keys,
        "value_heads": num_values,
        # How many value heads a key head has, and how many of them are brought together.
        "tile": tile,
        "tiles": tile if is_tiled and HEAD_ORDER not in config else 1,
        "tile_values": tile * value,
        "key": key,
        "value": value,
        "keys": 2 * num_keys * key,
        "values": num_values * value,
        "convolved": 2 * num_keys * key + num_values * value,
        "taps": config["linear_conv_kernel_dim"],
        "experts": config.get("num_experts", 0),
        "expert_inner": config.get("moe_intermediate_size", 0),
        "shared_inner": config.get("shared_expert_intermediate_size", 0),
    }


QWEN3_5 = Architecture(
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    partial(_rules, MLP, _split_projections),
    {**KEYS, **_HYBRID_KEYS},
    {"attention_bias": False, "hidden_act": "silu"},
    widths=partly_rotated,
    extend=_complete,
    arrange=_keep_order,
    sizes=partial(_sizes, is_tiled=True),
    norm=offset_norm("output_norm.weight", "model.norm.weight"),
    draft_prefix="mtp.",
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    rules=partial(_rules, _SPARSE, _split_projections),
    keys={**{name: key for name, key in QWEN3_5.keys.items() if name != "intermediate_size"}, **_EXPERT_KEYS},
    extend=_complete_moe,
)
QWEN3_NEXT = replace(
    QWEN3_5_MOE,
    rules=partial(_rules, _SPARSE, _mixed_projections),
    arrange=lambda _config, _tensors: None,
    sizes=partial(_sizes, is_tiled=False),
)
