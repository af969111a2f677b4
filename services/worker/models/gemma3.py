"""Gemma 3's text model (arXiv:2503.19786): norms before and after both parts of a layer, windows, two rotations."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from services.worker.layers.context_limit import ContextLimit
from services.worker.layers.rotary import RopeConfig
from services.worker.layers.shard import Shard
from services.worker.models.config import ConfigValues
from services.worker.models.parts.decoder import (
    DecoderConfig,
    DecoderLayer,
    DecoderModel,
    FeedForward,
    SelfAttention,
    layer_name,
    load_mlp,
    load_norm,
)
from services.worker.models.parts.plain_attention import (
    FULL,
    SLIDING,
    AttentionConfig,
    AttentionHeads,
    load_plain_model,
    windows_by_type,
)
from services.worker.ops import Activation, RopeRows
from services.worker.recorded_config import merged
from shared.model_files.model_dir import ModelDirectoryError

# The defaults of transformers' configuration, which publishers rely on: some files have six keys.
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window_pattern": 6,
}
_WINDOW = 4096
_THETA = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
# transformers' names of the same function; see its ACT2FN.
_GELU_TANH = ("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate", "gelu_fast", "gelu_new")


def load_gemma3(config: Mapping[str, Any], shard: Shard) -> DecoderModel:
    """Load a rank's part of the model; raises as `ModelLoader` says."""
    values = ConfigValues(config, _DEFAULTS)
    _refuse_variants(values)
    common = _read_common(values, shard.context)
    types = _layer_types(values, common.num_layers)
    window = values.optional_size("sliding_window") if "sliding_window" in values.json else _WINDOW
    has_bias = values.flag("attention_bias", default=False)
    windows = windows_by_type(values, window, types)
    ropes = {kind: _read_rope(values, kind) for kind in (FULL, SLIDING)}
    attention = AttentionConfig(
        AttentionHeads.from_json(values),
        windows,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_head_norms=True,
        scale=values.size("query_pre_attn_scalar") ** -0.5,
        ropes=[ropes[FULL if window is None else SLIDING] for window in windows],
    )
    inner_size = values.size("intermediate_size")

    def load_feed_forward(layer: int) -> FeedForward:
        prefix = f"{layer_name(layer)}.mlp"
        return load_mlp(shard, common, prefix, inner_size=inner_size, activation=Activation.GELU_TANH)

    return load_plain_model(
        shard,
        common,
        attention=attention,
        load_feed_forward=load_feed_forward,
        make_layer=_load_layer,
        model=Gemma3Model,
    )


def read_offset_norm(shard: Shard, name: str, size: int) -> Tensor:
    """Read a weight w that is stored without the 1 in the factor 1 + w: the factor, [size] float32.

    w is rounded to the model's dtype first. So both are bit by bit what transformers computes in each forward pass, and
    an op that multiplies by a weight in float32 rounds where transformers does.

    Source: transformers 5, `Gemma3RMSNorm`.
    """
    return shard.weights.read(f"{name}.weight", (size,)).float() + 1.0


class Gemma3Model(DecoderModel):
    """A decoder with embeddings multiplied by the root of their width."""

    def __init__(self, shard: Shard, config: DecoderConfig, **layers: Any) -> None:
        """Take the arguments of `DecoderModel`."""
        super().__init__(shard, config, **layers)
        self._ops = shard.ops
        # In float32, then in the model's dtype, as in transformers' `Gemma3TextScaledWordEmbedding`.
        self._embedding_factor = torch.tensor(config.hidden_size**0.5).to(self.dtype).item()

    @override
    def embed(self, token_ids: Tensor) -> Tensor:
        return self._ops.scale(super().embed(token_ids), self._embedding_factor)


def _load_layer(
    shard: Shard, config: DecoderConfig, layer: int, *, attention: SelfAttention, mlp: FeedForward
) -> DecoderLayer:
    """Load a layer that also normalises what attention and feed-forward network add to the residual stream."""
    prefix = layer_name(layer)
    attention_result_norm = load_norm(shard, config, f"{prefix}.post_attention_layernorm")
    mlp_result_norm = load_norm(shard, config, f"{prefix}.post_feedforward_layernorm")

    def attend(x: Tensor, rope: RopeRows) -> Tensor:
        return attention_result_norm(attention(x, rope))

    def feed_forward(x: Tensor) -> Tensor:
        return mlp_result_norm(mlp(x))

    return DecoderLayer(
        attention_norm=load_norm(shard, config, f"{prefix}.input_layernorm"),
        attention=attend,
        mlp_norm=load_norm(shard, config, f"{prefix}.pre_feedforward_layernorm"),
        mlp=feed_forward,
    )


def _refuse_variants(values: ConfigValues) -> None:
    values.choice("hidden_activation", _GELU_TANH, default=_GELU_TANH[0])
    values.only("hidden_act", *_GELU_TANH)
    values.only("use_bidirectional_attention", False)
    values.only("attn_logit_softcapping", None)
    values.only("final_logit_softcapping", None)


def _read_common(values: ConfigValues, context: ContextLimit) -> DecoderConfig:
    """The common values; `rope` is that of full attention, whose scaling may extend the context."""
    # The activation is another one, and has been read.
    json = _changed(values.json, hidden_act=None, rope_scaling=None, rope_parameters=_rope_parameters(values, FULL))
    return replace(DecoderConfig.from_json(ConfigValues(json), context), read_norm=read_offset_norm)


def _layer_types(values: ConfigValues, num_layers: int) -> list[str]:
    """The types where `layer_types` is absent."""
    pattern = values.size("sliding_window_pattern")
    return [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers)]


def _read_rope(values: ConfigValues, kind: str) -> RopeConfig:
    parameters = _rope_parameters(values, kind)
    return RopeConfig.from_json(_changed(values.json, rope_scaling=None, rope_parameters=parameters))


def _rope_parameters(values: ConfigValues, kind: str) -> Mapping[str, Any]:
    """The rotation of one type of layer: of `rope_parameters` by type, or of older keys, where only full attention is
    scaled.

    Source: transformers 5, `Gemma3TextConfig.convert_rope_params_to_dict`.
    """
    name, default = _THETA[kind]
    theta = values.number(name, default=default)
    if theta <= 0:
        raise ModelDirectoryError(f"config.json: {name} is {theta}, must be above 0")
    given = _object(values.json, "rope_parameters")
    if unknown := sorted(set(given) - {FULL, SLIDING}):
        raise ModelDirectoryError(
            f"config.json: rope_parameters has {unknown[0]!r}, but this architecture has {FULL!r} and {SLIDING!r}"
        )
    scaling = _object(values.json, "rope_scaling") if kind == FULL else {}
    if "type" in scaling and "rope_type" not in scaling:
        # transformers would ignore it.
        raise ModelDirectoryError("config.json: rope_scaling has 'type', but this architecture has 'rope_type'")
    return merged({"rope_theta": theta}, _object(given, kind, where="rope_parameters: "), scaling)


def _changed(json: Mapping[str, Any], **changes: object) -> Mapping[str, Any]:
    # A chain writes to its first map alone.
    return ChainMap(changes, json)  # type: ignore[arg-type]


def _object(json: Mapping[str, Any], name: str, *, where: str = "") -> Mapping[str, Any]:
    """A JSON object; empty if absent."""
    value = json.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ModelDirectoryError(f"config.json: {where}{name} is {value!r}, not an object")
    return value
