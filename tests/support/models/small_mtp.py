"""Small models with multi-token prediction (MTP) layers, in the published checkpoint layout."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.modeling_layers import MtpLayer

from shared.model_files.model_dir import CONFIG
from tests.support.models.small_configs import SMALL_CONFIGS, Config
from tests.support.models.small_models import build_model, randomise, write_small_model

WEIGHTS = "model.safetensors"
# Architectures to serve with such layers, and how many.
MTP_ARCHITECTURES = {
    "DeepseekV3ForCausalLM": 1,
    "Glm4MoeForCausalLM": 2,
    "GlmMoeDsaForCausalLM": 1,
    "Qwen3NextForCausalLM": 1,
}
# Families with one such layer, which has attention and names of its own; their norms are stored without their 1.
_OWN_NAMES = ("Qwen3Next", "Qwen3_5")
# How the names of lists end that have an entry for each layer.
_BY_LAYER = ("layer_types", "indexer_types")
# The scale of what a layer adds to its input when drafts should often be right: so small that the next token depends
# mostly on the last one, which a layer that passes the embedding through can predict.
_GAIN_OF_SURE_DRAFTS = 0.15


@dataclass(frozen=True)
class SmallMtpModel:
    """A transformers model, its MTP layers, and the checkpoint of both."""

    model: Any
    layers: list[MtpLayer]
    directory: Path


@torch.no_grad()
def make_small_mtp_model(
    architecture: str, variant: str, directory: Path, *, num_mtp_layers: int = 1, has_sure_drafts: bool = False
) -> SmallMtpModel:
    """Build a model with more layers than its configuration has, and turn the last ones into MTP layers.

    Args:
        architecture: A key of `SMALL_CONFIGS`, or the text's own class of a multimodal one.
        variant: A key of `SMALL_CONFIGS[architecture]`.
        num_mtp_layers: At least 1.
        has_sure_drafts: Whether most drafts should be right; otherwise hardly any is.
    """
    whole_name = architecture.replace("ForCausalLM", "ForConditionalGeneration")
    values = SMALL_CONFIGS[architecture if architecture in SMALL_CONFIGS else whole_name][variant]
    num_layers = values["num_hidden_layers"]
    whole = build_model(architecture, _with_more_layers(architecture, values, num_mtp_layers))
    layers = [_make_layer(whole, num_layers + number) for number in range(num_mtp_layers)]
    has_own_names = architecture.startswith(_OWN_NAMES)
    if has_sure_drafts:
        _make_sure(whole, layers, plain_norm=0.0 if has_own_names else 1.0)
    write_small_model(whole, directory)
    _add_to_checkpoint(whole, layers, directory, has_own_names=has_own_names)
    model = copy.deepcopy(whole)
    del model.model.layers[num_layers:]
    model.config.num_hidden_layers = num_layers
    return SmallMtpModel(model, layers, directory)


def _with_more_layers(architecture: str, values: Config, num_mtp_layers: int) -> Config:
    """The values of a model with as many more layers, all of which have an indexer, or attention, if any has."""
    longer = {**values, "num_hidden_layers": values["num_hidden_layers"] + num_mtp_layers}
    config = getattr(transformers, architecture).config_class(**values)
    if architecture.startswith(_OWN_NAMES):
        return {**longer, "layer_types": [*config.layer_types, *["full_attention"] * num_mtp_layers]}
    kinds = getattr(config, "indexer_types", None)
    return longer if kinds is None else {**longer, "indexer_types": [*kinds, *["full"] * num_mtp_layers]}


class MtpBlock(nn.Module):
    """A decoder layer that returns hidden states alone, and keeps what it selected."""

    selected: Tensor | None = None
    """What the tokens of the last call attended to, [1, num_tokens, most], if the layer has an indexer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, **arguments: Any) -> Tensor:
        """Call the layer."""
        result: Any = self.layer(hidden, **arguments)
        states: Tensor
        states, self.selected = result if isinstance(result, tuple) else (result, None)
        return states


def _make_layer(whole: Any, number: int) -> MtpLayer:
    block = whole.model.layers[number]
    layer = MtpLayer(whole.config, type(block), type(whole.model.norm), number)
    randomise(layer, number, is_tied=False)
    layer.mtp_block = MtpBlock(block)
    return layer.eval()


def _make_sure(whole: Any, layers: list[MtpLayer], *, plain_norm: float) -> None:
    """Let drafts often be right; `plain_norm` is the weight of a norm that multiplies by 1."""
    for name, parameter in whole.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            parameter.mul_(_GAIN_OF_SURE_DRAFTS)
    hidden = whole.config.hidden_size
    for layer in layers:
        layer.post_norm.weight.copy_(whole.model.norm.weight)
        layer.enorm.weight.fill_(plain_norm)
        layer.eh_proj.weight.mul_(_GAIN_OF_SURE_DRAFTS)
        layer.eh_proj.weight[:, :hidden] += torch.eye(hidden)


def _add_to_checkpoint(whole: Any, mtp_layers: list[MtpLayer], directory: Path, *, has_own_names: bool) -> None:
    num_layers = whole.config.num_hidden_layers - len(mtp_layers)
    tensors = load_file(directory / WEIGHTS)
    if has_own_names:
        [layer] = mtp_layers
        last = f"model.layers.{num_layers}."
        tensors = {name.replace(last, "mtp.layers.0."): value for name, value in tensors.items()}
        tensors |= _named(layer, "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"))
    for number, layer in enumerate([] if has_own_names else mtp_layers, start=num_layers):
        prefix = f"model.layers.{number}"
        tensors |= _named(layer, f"{prefix}.", ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
        tensors[f"{prefix}.embed_tokens.weight"] = whole.model.embed_tokens.weight.detach().clone()
        tensors[f"{prefix}.shared_head.head.weight"] = whole.lm_head.weight.detach().clone()
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((directory / CONFIG).read_text())
    # transformers writes the types of all layers; published checkpoints only those of the main model.
    config |= {name: value[:num_layers] for name, value in config.items() if name.endswith(_BY_LAYER)}
    count = "mtp_num_hidden_layers" if has_own_names else "num_nextn_predict_layers"
    config |= {"num_hidden_layers": num_layers, count: len(mtp_layers)}
    (directory / CONFIG).write_text(json.dumps(config, indent=2))


def _named(layer: MtpLayer, prefix: str, names: tuple[str, str, str, str]) -> dict[str, Tensor]:
    """What a layer has around its block, under these names."""
    modules = layer.enorm, layer.hnorm, layer.eh_proj, layer.post_norm
    return {
        f"{prefix}{name}.weight": module.weight.detach().clone() for name, module in zip(names, modules, strict=True)
    }
