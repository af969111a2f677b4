"""Makes a model of transformers' class, without weights, that calls our attention and products."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.integrations.moe import _default_apply_gate
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from services.worker.layers.shard import Part, Shard
from services.worker.models.generic import attention, products, rotary
from services.worker.models.generic.attention import IMPLEMENTATION, attending
from services.worker.models.generic.dry_run import DryRun, PlannedCall, UnservableError
from services.worker.models.generic.one_op import (
    CODE_ERRORS,
    GatedNetwork,
    NetworkForm,
    NormForm,
    find_network,
    find_norm,
)
from services.worker.models.generic.products import Product, Vectors
from services.worker.models.generic.rules import refuse_config, refuse_model
from services.worker.models.generic.split import Split, SplitPlan
from services.worker.recorded_config import peek
from shared.model_files.model_dir import ModelDirectoryError

# transformers sets torch's default dtype while it makes a model, for all threads.
_making = threading.Lock()
# Tokens of a dry run. An odd number, so that a head that is cut in two does not fit into a view.
_NUM_TOKENS = 3


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs of a linear layer that are computed here."""

    name: str
    """The layer's."""
    part: Part


@dataclass(frozen=True, slots=True)
class PlacedProduct:
    """Linear layers of the same inputs, whose weights are still to be read."""

    module: Product
    outputs: tuple[Outputs, ...]
    """Side by side."""
    inputs: Part
    has_bias: bool


@dataclass
class _BaseOutput(BaseModelOutputWithPastAndCrossAttentions):  # type: ignore[misc]
    """All that a class looks for in what its base model returns."""

    router_logits: Tensor | None = None


class _Rows(nn.Module):
    """In the place of the base model where only logits are computed: its result is what it is given."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _BaseOutput:
        """Hidden states [1, n, hidden] as the base model's."""
        return _BaseOutput(last_hidden_state=cast(Any, inputs_embeds))

    @property
    def decoder(self) -> _Rows:
        """What a class calls that asks a part of its base model, as OPT does."""
        return self


@dataclass(slots=True)
class Skeleton:
    """A model whose products and parameters are on `meta`, or missing."""

    causal: PreTrainedModel
    """Computes logits of hidden states, which it takes for embeddings."""
    base: PreTrainedModel
    """Computes hidden states of tokens."""
    products: list[PlacedProduct] = field(default_factory=list)
    experts: dict[str, nn.Module] = field(default_factory=dict)
    """Modules of experts, by name."""
    norms: list[tuple[nn.Module, NormForm]] = field(default_factory=list)
    """Modules that `Ops.rms_norm` computes, once they have weights."""
    embedding: Vectors | None = None
    """None if the class's own embeddings are kept, with their weights."""
    head: Product | None = None
    has_head_bias: bool = False
    embedding_name: str = ""
    head_name: str = ""
    whole_layers: list[str] = field(default_factory=list)
    """See `SplitPlan.whole_layers`."""
    calls: list[PlannedCall] = field(default_factory=list)

    @property
    def prefix(self) -> str:
        """The base model's name in the whole."""
        return str(self.causal.base_model_prefix)


def read_class(config: Mapping[str, Any], architecture: str) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """transformers' class of an architecture, and its configuration. Never code of the model's own.

    Raises:
        ModelDirectoryError: transformers has no such class, or refuses the configuration.
    """
    kind = config.get("model_type")
    if architecture not in _causal_classes() or kind not in CONFIG_MAPPING:
        raise ModelDirectoryError(
            f"config.json: transformers {transformers.__version__} has no decoder {architecture} of type {kind!r}"
        )
    plain = {name: _plain(peek(config, name)) for name in config if name not in ("auto_map", "quantization_config")}
    try:
        made = CONFIG_MAPPING[kind].from_dict(plain)
        known = CONFIG_MAPPING[kind]().to_dict()
    except Exception as error:
        raise ModelDirectoryError(f"config.json: transformers refuses it: {error}") from error
    for name in known.keys() & config.keys():
        # Records that it is read.
        _plain(config[name])
    made.use_cache = False
    for name in ("output_router_logits", "output_hidden_states", "output_attentions"):
        if getattr(made, name, False):
            setattr(made, name, False)
    return getattr(transformers, architecture), made


def build_skeleton(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, shard: Shard, context_length: int
) -> Skeleton:
    """Make the model on `meta`, replace its products, and find out what it asks of attention.

    Raises:
        UnservableError: it cannot be served; the message begins with the class and says why.
    """
    attention.register()
    products.register()
    try:
        refuse_config(config)
        causal = _make(model_class, config, shard.weights.dtype)
        refuse_model(causal)
        rotary.register(causal)
        skeleton = _take_apart(causal, shard)
        skeleton.calls = _run_dry(skeleton, config, context_length)
    except UnservableError as error:
        raise UnservableError(f"{model_class.__name__} cannot be served with transformers' code: {error}") from error
    return skeleton


def _causal_classes() -> frozenset[str]:
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return frozenset(name for each in names for name in ([each] if isinstance(each, str) else each))


def _plain(value: Any) -> Any:
    """A JSON value without a record of what was asked for."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _make(model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    try:
        with _making, torch.device("meta"):
            causal = model_class._from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION)
    except CODE_ERRORS as error:
        raise UnservableError(f"it cannot be made with our attention: {error}") from error
    # Not an argument above: classes without experts have no such key.
    causal.config._experts_implementation = IMPLEMENTATION
    return causal.eval()


def _take_apart(causal: PreTrainedModel, shard: Shard) -> Skeleton:
    base = getattr(causal, causal.base_model_prefix, None)
    head, embedding = causal.get_output_embeddings(), causal.get_input_embeddings()
    if not isinstance(base, PreTrainedModel) or type(head) is not nn.Linear or not isinstance(embedding, nn.Embedding):
        raise UnservableError("it has no base model with embeddings and a head")
    skeleton, dtype = Skeleton(causal, base), shard.weights.dtype
    plan = SplitPlan(causal, shard.tp.size)
    linears: dict[str, nn.Linear] = {}
    gates = _gates(causal)
    for name, module in list(causal.named_modules()):
        if module is head:
            skeleton.head_name, skeleton.has_head_bias = name, head.bias is not None
            skeleton.head = Product(head.in_features, head.out_features)
            _replace(causal, name, skeleton.head)
        elif module is embedding:
            skeleton.embedding_name = name
            if type(embedding) is nn.Embedding:
                skeleton.embedding = Vectors(embedding.embedding_dim, dtype)
                _replace(causal, name, skeleton.embedding)
        elif hasattr(module, "is_concatenated"):
            _check_experts(name, module)
            skeleton.experts[name] = module
        elif type(module) is nn.Linear and name not in gates:
            linears[name] = module
            _replace(causal, name, Product(module.in_features, module.out_features))
        elif norm := find_norm(module, dtype):
            skeleton.norms.append((module, norm))
    # Before parts are taken, so that all ranks see the same.
    networks = {name: form for name, module in causal.named_modules() if (form := find_network(module, dtype))}
    for name, linear in linears.items():
        placed = _place(name, causal.get_submodule(name), linear, plan.split_of(name), shard)
        skeleton.products.append(placed)
    skeleton.whole_layers = plan.whole_layers(list(linears))
    for name, form in networks.items():
        _use_network(skeleton, name, form, shard)
    setattr(causal, causal.base_model_prefix, _Rows())
    return skeleton


def _use_network(skeleton: Skeleton, name: str, form: NetworkForm, shard: Shard) -> None:
    if form.gate.out_features + (form.up.out_features if form.up else 0) != 2 * form.down.in_features:
        return
    gate_up = form.gate if form.up is None else _join(skeleton, form.gate, form.up)
    if gate_up is not None:
        _replace(skeleton.causal, name, GatedNetwork(shard.ops, form.activation, gate_up, form.down))


def _join(skeleton: Skeleton, gate: Product, up: Product) -> Product | None:
    """One product in the place of two; None if these are not alike."""
    first, second = (next(each for each in skeleton.products if each.module is module) for module in (gate, up))
    if (first.inputs, first.has_bias) != (second.inputs, second.has_bias):
        return None
    module = Product(gate.in_features, gate.out_features + up.out_features)
    joined = PlacedProduct(module, first.outputs + second.outputs, first.inputs, first.has_bias)
    skeleton.products = [joined if each is first else each for each in skeleton.products if each is not second]
    return module


def _gates(causal: PreTrainedModel) -> frozenset[str]:
    """Linear layers that weigh experts, each of them or all: they stay the class's own, and are not quantised."""
    modules = dict(causal.named_modules())
    blocks = {
        name.rpartition(".")[0]: weight.shape[0]
        for name, module in modules.items()
        if hasattr(module, "is_concatenated") and (weight := module._parameters.get("down_proj")) is not None
    }
    return frozenset(
        name
        for block, num_experts in blocks.items()
        for name, module in modules.items()
        if name.startswith(f"{block}.") and type(module) is nn.Linear and module.out_features in (1, num_experts)
    )


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def _place(name: str, module: Product, linear: nn.Linear, split: Split, shard: Shard) -> PlacedProduct:
    """Have `module` compute this rank's part of `linear`."""
    inputs = Part.whole(linear.in_features)
    outputs: tuple[Part, ...] = (Part.whole(linear.out_features),)
    kind = re.sub(r"\.\d+\.", ".*.", name)
    if split is Split.INPUTS:
        inputs = shard.part(kind, linear.in_features)
    elif split is Split.OUTPUTS:
        outputs = (shard.part(kind, linear.out_features),)
    elif split is Split.PACKED_OUTPUTS:
        half, total = shard.part(kind, linear.out_features // 2), linear.out_features
        outputs = tuple(Part(total, start + half.start, start + half.stop) for start in (0, total // 2))
    module.in_features, module.out_features = len(inputs), sum(map(len, outputs))
    return PlacedProduct(module, tuple(Outputs(name, part) for part in outputs), inputs, linear.bias is not None)


def _check_experts(name: str, module: nn.Module) -> None:
    """Experts of one form: rows of gate and up side by side, and SiLU."""
    flags = {each: getattr(module, each) for each in ("has_gate", "is_concatenated")}
    flags |= {each: not getattr(module, each) for each in ("is_transposed", "has_bias", "has_post_expert_norm")}
    flags["matrices"] = {"gate_up_proj", "down_proj"} <= module._parameters.keys()
    is_plain = all(flags.values()) and getattr(type(module), "_apply_gate", None) is _default_apply_gate
    if not is_plain or not isinstance(getattr(module, "act_fn", None), (nn.SiLU, SiLUActivation)):
        raise UnservableError(f"{name}: experts that are not gated by SiLU, or have biases or another order of weights")


def _run_dry(skeleton: Skeleton, config: PreTrainedConfig, context_length: int) -> list[PlannedCall]:
    run = DryRun(context_length)
    # Buffers that modelling code made on the host are numbers for the device.
    try:
        with torch.inference_mode(), torch.device("meta"), attending(run):
            token_ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64)
            outputs = skeleton.base(**step_arguments(token_ids[0], token_ids[0]))
            hidden = outputs.last_hidden_state
            logits = skeleton.causal(inputs_embeds=hidden, use_cache=False).logits
    except UnservableError:
        raise
    except CODE_ERRORS as error:
        raise UnservableError(f"a dry run ends with {type(error).__name__}: {error}") from error
    if getattr(outputs, "past_key_values", None) is not None:
        raise UnservableError("it keeps a cache of its own")
    if not run.calls:
        raise UnservableError("it calls no attention")
    if logits.shape != (1, _NUM_TOKENS, config.get_text_config().vocab_size):
        raise UnservableError(f"its logits have the shape {[*logits.shape]}")
    return run.calls


def step_arguments(token_ids: Tensor, positions: Tensor) -> dict[str, Any]:
    """Arguments of the base model for the tokens [T] of a step.

    The mask of ones keeps transformers from looking for sequences in the values of positions.
    """
    ones = torch.ones(1, len(token_ids), dtype=torch.int64, device=token_ids.device)
    return {
        "input_ids": token_ids[None],
        "attention_mask": ones,
        "position_ids": positions[None],
        "use_cache": False,
    }
