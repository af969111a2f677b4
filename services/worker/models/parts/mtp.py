"""Multi-token prediction: layers after a checkpoint's last one that draft the token after the next.

Source: arXiv:2412.19437 (DeepSeek-V3), section 2.2, equations 21 to 23; GLM-4.5 has the same layout. Embedding and head
are the model's, as in the paper; the copies in checkpoints are not read. Qwen3-Next and Qwen3.5 store one such layer
under names of its own, `mtp.…`; source: vLLM, `Qwen3NextMultiTokenPredictor` and `Qwen3_5MultiTokenPredictor`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from services.worker.layers.linear import Linear
from services.worker.layers.norm import RmsNorm
from services.worker.layers.shard import Part, Shard
from services.worker.models.config import ConfigValues
from services.worker.models.parts.decoder import DecoderConfig, DecoderLayer, DecoderModel, layer_name, load_norm
from services.worker.models.protocol import MtpLayers
from services.worker.weights.model_weights import ModelWeights
from shared.model_files.model_dir import ModelDirectoryError

_NUM_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
_SHARED = ("embed_tokens.", "shared_head.head.")
_OWN_NAME = "mtp."
# Where Qwen3.5 counts its layers; Qwen3-Next does not, and has one.
_NUM_OWN = ("mtp_num_hidden_layers", "num_nextn_predict_layers")


class _MtpNames(NamedTuple):
    """What a checkpoint calls the parts of an `MtpLayer` around its block."""

    embedding_norm: str
    hidden_norm: str
    join: str
    last_norm: str

    @classmethod
    def of_layer(cls, layer: int) -> _MtpNames:
        """The names in a layer after the model's own."""
        return cls(*(f"{layer_name(layer)}.{part}" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm")))


_OWN_NAMES = _MtpNames(
    *(f"{_OWN_NAME}{part}" for part in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"))
)


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """Joins a hidden state and the next token's embedding, and runs a decoder layer."""

    embedding_norm: RmsNorm
    hidden_norm: RmsNorm
    join: Linear
    """[T, 2 * hidden], the embedding first, to [T, hidden]."""
    block: DecoderLayer
    last_norm: RmsNorm

    @classmethod
    def load(cls, shard: Shard, config: DecoderConfig, names: _MtpNames, *, block: DecoderLayer) -> MtpLayer:
        """Load a layer of the checkpoint around its decoder layer."""
        size = config.hidden_size
        return cls(
            embedding_norm=load_norm(shard, config, names.embedding_norm),
            hidden_norm=load_norm(shard, config, names.hidden_norm),
            join=Linear.load(shard, [names.join], [Part.whole(size)], inputs=Part.whole(2 * size)),
            block=block,
            last_norm=load_norm(shard, config, names.last_norm),
        )


class DecoderMtpLayers(MtpLayers):
    """A checkpoint's layers. Embedding, head and rotation are the model's. See `MtpLayers`."""

    def __init__(self, model: DecoderModel, layers: Sequence[MtpLayer], *, num_shared_positions: int = 0) -> None:
        self.num_layers = len(layers)
        self.num_shared_positions = num_shared_positions
        self._model = model
        self._layers = list(layers)

    @override
    @torch.inference_mode()
    def forward(self, hidden: Tensor, token_ids: Tensor, positions: Tensor, layer: int) -> Tensor:
        parts, model = self._layers[layer], self._model
        embedded = parts.embedding_norm(model.embed(token_ids))
        residual = parts.join(torch.cat((embedded, parts.hidden_norm(hidden)), dim=-1))
        added = parts.block(None, residual, model.rotary.select(positions))
        return parts.last_norm.add(added, residual)

    @override
    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._model.compute_logits(hidden)


def mtp_layers_to_load(values: ConfigValues, config: DecoderConfig, weights: ModelWeights, *, with_mtp: bool) -> range:
    """The numbers of the layers to load, after the model's own; empty if not requested or not stored.

    Tensors that will not be read are marked as ignored in `weights`.
    """
    numbers = _layer_numbers(config.num_layers, values)
    prefixes = _prefixes(numbers)
    # A config.json written by transformers counts these layers, although their weights are not saved.
    if with_mtp and any(f"{prefix}eh_proj.weight" in weights for prefix in prefixes):
        weights.ignore(prefixes=[prefix + name for prefix in prefixes for name in _SHARED])
        return numbers
    weights.ignore(prefixes=prefixes)
    return range(0)


def num_mtp_layers(values: ConfigValues) -> int:
    """How many layers a configuration names, whether or not a checkpoint has them."""
    return values.count(*_NUM_LAYERS, default=0)


def mtp_prefixes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """How the names of the layers' tensors begin, whether or not a checkpoint has them; none if there are no layers."""
    values = ConfigValues(config)
    if not num_mtp_layers(values):
        return (_OWN_NAME,)
    return (*_prefixes(_layer_numbers(values.count("num_hidden_layers"), values)), _OWN_NAME)


def _layer_numbers(num_layers: int, values: ConfigValues) -> range:
    return range(num_layers, num_layers + num_mtp_layers(values))


def _prefixes(numbers: range) -> tuple[str, ...]:
    return tuple(f"model.layers.{number}." for number in numbers)


def load_mtp(
    shard: Shard,
    config: DecoderConfig,
    model: DecoderModel,
    *,
    blocks: Sequence[DecoderLayer],
    num_shared_positions: int = 0,
) -> DecoderMtpLayers | None:
    """Load the layers around `blocks`, which follow the model's own; None if there are none."""
    layers = [
        MtpLayer.load(shard, config, _MtpNames.of_layer(number), block=block)
        for number, block in enumerate(blocks, start=config.num_layers)
    ]
    return DecoderMtpLayers(model, layers, num_shared_positions=num_shared_positions) if layers else None


def has_own_mtp(values: ConfigValues, weights: ModelWeights, *, with_mtp: bool) -> bool:
    """Whether to load the layer that has names of its own: it is requested, and stored.

    Tensors that will not be read are marked as ignored in `weights`.

    Raises:
        ModelDirectoryError: it is not the one layer that there is in published checkpoints.
    """
    if not with_mtp or f"{_OWN_NAMES.last_norm}.weight" not in weights:
        weights.ignore(prefixes=[_OWN_NAME])
        return False
    values.only("mtp_use_dedicated_embeddings", False)
    if (count := values.count(*_NUM_OWN, default=1)) != 1:
        raise ModelDirectoryError(f"config.json: {count} prediction layers are not supported, only one is")
    return True


def load_own_mtp(
    shard: Shard, config: DecoderConfig, model: DecoderModel, load_block: Callable[[str], DecoderLayer]
) -> DecoderMtpLayers:
    """Load the layer that has names of its own; `load_block` gets that of its decoder layer."""
    layer = MtpLayer.load(shard, config, _OWN_NAMES, block=load_block(f"{_OWN_NAME}layers.0"))
    return DecoderMtpLayers(model, [layer])
