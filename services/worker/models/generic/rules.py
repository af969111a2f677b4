"""What is refused before modelling code runs, since it would mix the rows of a step, or positions of long contexts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from services.worker.models.generic.dry_run import UnservableError

_SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Those of a layer's feed-forward network, which has one row for each token.
_FEED_FORWARD_TYPES = frozenset({"dense", "sparse", "moe", "mlp"})
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def refuse_config(config: PreTrainedConfig) -> None:
    """Refuse what the configuration alone says.

    Raises:
        UnservableError: it is not a decoder of tokens with plain attention in every layer.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise UnservableError("it has an encoder")
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", None):
        raise UnservableError("tokens see later ones")
    for name in ("layer_types", "layers_block_type", "block_types"):
        kinds = {str(kind) for kind in getattr(config, name, None) or ()}
        if others := sorted(kinds - _SERVED_LAYER_TYPES - _FEED_FORWARD_TYPES - {"attention"}):
            raise UnservableError(f"layers of type {', '.join(others)} are not attention over all tokens or a window")
    for rope_type in _rope_types(config):
        if "dynamic" in rope_type:
            raise UnservableError(f"rope type {rope_type} changes with the longest sequence of a step")


def refuse_model(model: PreTrainedModel) -> None:
    """Refuse what the built model shows.

    Raises:
        UnservableError: it keeps a state besides keys and values, or has no attention interface.
    """
    for name, module in model.named_modules():
        if getattr(module, "_is_stateful", False):
            raise UnservableError("it keeps a state besides keys and values")
        if isinstance(module, _CONVOLUTIONS):
            raise UnservableError(f"{name} is a convolution over tokens")
    if not model._supports_attention_backend:
        raise UnservableError("its attention cannot be replaced")


def _rope_types(config: PreTrainedConfig) -> Iterator[str]:
    """The types of all rotations; those of layers with their own are inside."""
    parameters: Any = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return
    for each in (parameters, *parameters.values()):
        if isinstance(each, dict) and isinstance(each.get("rope_type"), str):
            yield each["rope_type"]
