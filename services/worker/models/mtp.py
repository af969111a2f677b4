"""Multi-token prediction: the layers behind a checkpoint's last one that draft what comes after the next token.

Source: arXiv:2412.19437 (DeepSeek-V3), section 2.2, equations 21 to 23. GLM-4.5 has the same layout. Embedding and
head are the model's own, as the paper has it; the copies that checkpoints bring stay unread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.layers.linear import Linear
from services.worker.layers.norm import RmsNorm
from services.worker.layers.shard import Part, Shard
from services.worker.models.config import ConfigValues
from services.worker.models.decoder import DecoderConfig, DecoderLayer, DecoderModel, load_norm
from services.worker.weights.model_weights import ModelWeights

_SHARED = ("embed_tokens.", "shared_head.head.")


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """One of them: joins a hidden state and the embedding of the next token, and runs a decoder layer on that."""

    embedding_norm: RmsNorm
    hidden_norm: RmsNorm
    # From both, the embedding first, to the hidden size.
    join: Linear
    block: DecoderLayer
    last_norm: RmsNorm

    @classmethod
    def load(cls, shard: Shard, config: DecoderConfig, layer: int, *, block: DecoderLayer) -> MtpLayer:
        """Layer number `layer` of a checkpoint, around its decoder layer.

        Raises:
            ModelDirectoryError: a tensor is missing or of another shape.
        """
        prefix, size = f"model.layers.{layer}", config.hidden_size
        return cls(
            embedding_norm=load_norm(shard, config, f"{prefix}.enorm"),
            hidden_norm=load_norm(shard, config, f"{prefix}.hnorm"),
            join=Linear.load(shard, [f"{prefix}.eh_proj"], [Part.whole(size)], inputs=Part.whole(2 * size)),
            block=block,
            last_norm=load_norm(shard, config, f"{prefix}.shared_head.norm"),
        )


class DecoderMtpLayers:
    """The layers of one checkpoint. See `MtpLayers`."""

    def __init__(self, model: DecoderModel, layers: Sequence[MtpLayer]) -> None:
        """Share embedding, head and rotation with `model`."""
        self.num_layers = len(layers)
        self._model = model
        self._layers = list(layers)

    @torch.inference_mode()
    def forward(self, hidden: Tensor, token_ids: Tensor, positions: Tensor, layer: int) -> Tensor:
        """See `MtpLayers.forward`."""
        parts, model = self._layers[layer], self._model
        embedded = parts.embedding_norm(model.embedding(token_ids))
        residual = parts.join(torch.cat((embedded, parts.hidden_norm(hidden)), dim=-1))
        added = parts.block(None, residual, model.rotary.select(positions))
        return parts.last_norm.add(added, residual)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `MtpLayers.compute_logits`."""
        return self._model.compute_logits(hidden)


def mtp_layers_to_load(values: ConfigValues, config: DecoderConfig, weights: ModelWeights, *, with_mtp: bool) -> range:
    """The numbers of the layers to load, behind those of the model; whatever else there is of them is left unread.

    Args:
        values: config.json.
        config: Its common values.
        weights: The model's.
        with_mtp: Whether they are asked for. None are loaded where the checkpoint has none.

    Raises:
        ModelDirectoryError: their number is malformed.
    """
    num_layers = values.count("num_nextn_predict_layers", "num_mtp_layers", default=0)
    numbers = range(config.num_layers, config.num_layers + num_layers)
    prefixes = [f"model.layers.{number}." for number in numbers]
    # transformers names them in the config.json that it writes, and leaves their weights out.
    if with_mtp and any(f"{prefix}eh_proj.weight" in weights for prefix in prefixes):
        weights.ignore(prefixes=[prefix + name for prefix in prefixes for name in _SHARED])
        return numbers
    weights.ignore(prefixes=prefixes)
    return range(0)


def load_mtp(
    shard: Shard, config: DecoderConfig, model: DecoderModel, *, blocks: Sequence[DecoderLayer]
) -> DecoderMtpLayers | None:
    """The layers around `blocks`, the decoder layers behind the model's own; None where there are none.

    Raises:
        ModelDirectoryError: a tensor is missing or of another shape.
    """
    layers = [
        MtpLayer.load(shard, config, number, block=block)
        for number, block in enumerate(blocks, start=config.num_layers)
    ]
    return DecoderMtpLayers(model, layers) if layers else None
