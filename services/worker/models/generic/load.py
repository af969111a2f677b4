"""Loads a model of transformers' class: every weight is read once, into our products or the class's own parameters."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from services.worker.layers.embedding import Embedding, Head
from services.worker.layers.linear import Linear, sum_over_ranks
from services.worker.layers.moe import ReadExpert, load_experts
from services.worker.layers.shard import Part, Shard
from services.worker.models.generic.build import PlacedProduct, Skeleton, build_skeleton, read_class
from services.worker.models.generic.dry_run import UnservableError
from services.worker.models.generic.identity import identity_of
from services.worker.models.generic.model import GenericModel
from services.worker.models.generic.names import StoredNames
from services.worker.models.generic.one_op import Norm
from services.worker.models.generic.products import use_experts
from services.worker.models.generic.self_check import check_alone
from services.worker.models.parts.decoder import load_ends
from services.worker.ops import ExpertWeights
from services.worker.ops.matrix_rows import join_rows
from services.worker.weights.dummy_weights import DummyWeights
from shared.model_files.implementations import TESTED_TRANSFORMERS, TRANSFORMERS_ARCHITECTURES
from shared.model_files.model_dir import ModelDirectoryError, architectures_of

_LONG = "longrope"
# The seed of a check's random weights.
_SEED = 1

logger = logging.getLogger(__name__)


def load_generic(config: Mapping[str, Any], shard: Shard) -> GenericModel:
    """Load a rank's part of the model that the first architecture of `config` names, with transformers' code.

    A class, or a release of transformers, that no test covers is first tried with random weights.

    Raises:
        UnservableError: its code cannot be run on several sequences over a paged cache.
        ModelDirectoryError: transformers has no such class; otherwise see `ModelWeights`.
    """
    names = architectures_of(config)
    if not names:
        raise ModelDirectoryError("config.json: architectures is missing or empty")
    device = shard.weights.device
    if not _is_tested(names[0]) and device.type != "meta":
        facts = {"architecture": names[0], "transformers": transformers.__version__}
        logger.info("trying on random weights what no test covers", extra=facts)
        weights = DummyWeights(_SEED, shard.weights.dtype, device=device)
        check_alone(_load(names[0], config, replace(shard, weights=weights)), shard.ops, device)
    return _load(names[0], config, shard)


def _is_tested(architecture: str) -> bool:
    release = ".".join(transformers.__version__.split(".")[:2])
    return architecture in TRANSFORMERS_ARCHITECTURES and release in TESTED_TRANSFORMERS


def _load(architecture: str, config: Mapping[str, Any], shard: Shard) -> GenericModel:
    model_class, made = read_class(config, architecture)
    context_length = shard.context.context_of(_own_context(made))
    skeleton = build_skeleton(model_class, made, shard, context_length)
    if skeleton.whole_layers and shard.weights.device.type != "meta":
        logger.info(
            "each rank computes layers whole, with their weights, that transformers' plan does not split",
            extra={"layers": skeleton.whole_layers, "ranks": shard.tp.size},
        )
    shard.weights.ignore(patterns=sorted(skeleton.causal._keys_to_ignore_on_load_unexpected or ()))
    stored = StoredNames(skeleton.causal, shard.weights)
    # Before weights are read: what fills buffers draws parameters too, which on `meta` costs nothing.
    has_long_factors = _fill_buffers(skeleton, shard.weights.device, context_length)
    for placed in skeleton.products:
        _load_product(placed, shard, stored)
    for name, module in skeleton.experts.items():
        _load_experts(name, module, shard, stored)
    _load_ends(skeleton, shard, stored, is_tied=bool(made.get_text_config().tie_word_embeddings))
    _load_rest(skeleton, shard, stored)
    if shard.weights.device.type != "meta":
        for module, form in skeleton.norms:
            module.forward = Norm(shard.ops, form, module)
    scales = torch.ones(1, device=shard.weights.device) if shard.kv_dtype == torch.float8_e4m3fn else None
    model = GenericModel(
        skeleton, shard, context_length=context_length, has_long_factors=has_long_factors, kv_scales=scales
    )
    model.code = identity_of(model_class)
    return model


def _own_context(config: PreTrainedConfig) -> int:
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if type(context) is not int or context < 1:
        raise ModelDirectoryError(f"config.json: max_position_embeddings is {context!r}, not a positive integer")
    return context


def _load_product(placed: PlacedProduct, shard: Shard, names: StoredNames) -> None:
    weights, inputs = shard.weights, placed.inputs
    matrices = [
        weights.linear(names.module(each.name), (each.part.total, inputs.total), rows=each.part.run, columns=inputs.run)
        for each in placed.outputs
    ]
    weight = join_rows(matrices, weights.dtype)
    del matrices
    bias = None
    if placed.has_bias:
        parts = [
            weights.read(names.tensor(f"{each.name}.bias"), (each.part.total,), rows=each.part.run)
            for each in placed.outputs
        ]
        bias = torch.cat(parts) if inputs.start == 0 else None
    linear = Linear(shard.ops, weight, weights.dtype, bias)
    placed.module.kernel = linear if len(inputs) == inputs.total else sum_over_ranks(linear, shard.tp)


def _load_experts(name: str, module: nn.Module, shard: Shard, names: StoredNames) -> None:
    gate_up, down = module.get_parameter("gate_up_proj"), module.get_parameter("down_proj")
    num_experts, hidden_size, inner_size = down.shape
    if gate_up.shape != (num_experts, 2 * inner_size, hidden_size):
        raise UnservableError(f"the experts of {name} have matrices {[*gate_up.shape]} and {[*down.shape]}")
    sizes = num_experts, inner_size, hidden_size
    read = _expert_reader(f"{name}.gate_up_proj", f"{name}.down_proj", sizes, shard, names)
    use_experts(module, load_experts(shard, num_experts=num_experts, inner_size=inner_size, read=read))
    del module.gate_up_proj, module.down_proj


def _expert_reader(
    gate_up: str, down: str, sizes: tuple[int, int, int], shard: Shard, names: StoredNames
) -> ReadExpert:
    weights, (num_experts, inner_size, hidden_size) = shard.weights, sizes
    inner_shape, down_shape = (inner_size, hidden_size), (hidden_size, inner_size)
    gate_up_parts, down_parts = names.stack(gate_up), names.stack(down)
    gate_up_name, down_name = (
        each if parts else names.tensor(each) for each, parts in ((gate_up, gate_up_parts), (down, down_parts))
    )

    def read(expert: int, inner: Part) -> ExpertWeights:
        if gate_up_parts is None:
            runs = [inner.run, slice(inner_size + inner.run.start, inner_size + inner.run.stop)]
            shape = num_experts, hidden_size, 2 * inner_size
            rows = [weights.stacked(gate_up_name, shape, expert, rows=run, in_any_order=True) for run in runs]
        else:
            rows = [weights.expert(each, inner_shape, rows=inner.run) for each in gate_up_parts.of(expert)]
        if down_parts is None:
            shape = num_experts, inner_size, hidden_size
            last = weights.stacked(down_name, shape, expert, columns=inner.run, in_any_order=True)
        else:
            last = weights.expert(down_parts.of(expert)[0], down_shape, columns=inner.run)
        return ExpertWeights(join_rows(rows, weights.dtype), last)

    return read


def _load_ends(skeleton: Skeleton, shard: Shard, names: StoredNames, *, is_tied: bool) -> None:
    weights, head = shard.weights, skeleton.head
    assert head is not None
    shape = head.out_features, head.in_features
    parts = shard.parts("vocab_size", shape[0])
    part = parts[shard.tp.rank]
    first, last = names.module(skeleton.embedding_name), names.module(skeleton.head_name)
    if skeleton.embedding is not None:
        vectors, projection = load_ends(shard, shape, part, is_tied=is_tied, names=(first, last))
        skeleton.embedding.kernel = Embedding(vectors, part, shard.tp)
    else:
        matrix = weights.head(first if is_tied else last, shape, rows=part.run)
        projection = shard.ops.prepare_head(matrix, weights.dtype)
    kernel = Head(projection, parts, shard.tp)
    if not skeleton.has_head_bias:
        head.kernel = kernel
        return
    bias = weights.read(names.tensor(f"{skeleton.head_name}.bias"), shape[:1])
    head.kernel = lambda hidden: kernel(hidden) + bias


def _load_rest(skeleton: Skeleton, shard: Shard, names: StoredNames) -> None:
    """Read the parameters and persistent buffers of modules that are the class's own."""
    wide = skeleton.causal._keep_in_fp32_modules_strict or ()
    owners = [(skeleton.prefix, path, module) for path, module in skeleton.base.named_modules()]
    owners += [("", path, module) for path, module in skeleton.causal.named_modules()]
    for prefix, path, module in owners:
        owned = {**module._parameters}
        owned |= {key: each for key, each in module._buffers.items() if key not in module._non_persistent_buffers_set}
        for key, value in owned.items():
            if value is None:
                continue
            name = ".".join(part for part in (prefix, path, key) if part)
            dtype = torch.float32 if any(each in name for each in wide) else value.dtype
            tensor = _read_own(module, key, names.tensor(name), shard, dtype)
            if key in module._buffers:
                module._buffers[key] = tensor
            else:
                module._parameters[key] = nn.Parameter(tensor, requires_grad=False)


def _read_own(module: nn.Module, key: str, name: str, shard: Shard, dtype: torch.dtype) -> Tensor:
    """A tensor of a module that is the class's own; the matrix of a linear layer may be stored in any format."""
    if isinstance(module, nn.Linear) and key == "weight":
        shape = module.out_features, module.in_features
        return shard.weights.dense(name.removesuffix(".weight"), shape).to(dtype)
    tensor: Tensor = module._parameters[key] if key in module._parameters else module._buffers[key]  # type: ignore[assignment]
    return shard.weights.read(name, tuple(tensor.shape), dtype=dtype)


def _fill_buffers(skeleton: Skeleton, device: torch.device, context_length: int) -> bool:
    """Compute the buffers that are not stored, as transformers does after it has made a model on `meta`.

    Returns:
        Whether positions have LongRoPE's factors for long contexts.

    Raises:
        UnservableError: transformers leaves one undefined.
    """
    has_long_factors = False
    for path, module in skeleton.base.named_modules():
        keys = [key for key in module._non_persistent_buffers_set if module._buffers.get(key) is not None]
        if keys:
            _fill(skeleton.causal, module, keys, path)
        has_long_factors |= _fix_long_factors(module, context_length)
        for key in keys:
            module._buffers[key] = _tensor(module, key).to(device)
    return has_long_factors


def _fill(model: PreTrainedModel, module: nn.Module, keys: list[str], path: str) -> None:
    """Fill twice, from different garbage: what differs was not filled."""
    shapes = {key: _tensor(module, key) for key in keys}
    results: list[dict[str, Tensor]] = []
    for garbage in (0, 1):
        for key, like in shapes.items():
            module._buffers[key] = torch.full(like.shape, garbage, dtype=like.dtype, device="cpu")
        with torch.device("cpu"):
            model._init_weights(module)
        results.append({key: _tensor(module, key) for key in keys})
    if left := [key for key in keys if not torch.equal(results[0][key], results[1][key])]:
        raise UnservableError(f"the buffer {path}.{left[0]} is not stored, and transformers does not compute it")


def _tensor(module: nn.Module, key: str) -> Tensor:
    buffer = module._buffers[key]
    assert buffer is not None
    return buffer


def _fix_long_factors(module: Any, context_length: int) -> bool:
    """Let a rotation by LongRoPE have the factors of the context served, whatever a step's positions."""
    rope_type = getattr(module, "rope_type", None)
    if rope_type != _LONG:
        if isinstance(rope_type, dict) and _LONG in rope_type.values():
            raise UnservableError("layers differ in LongRoPE")
        return False
    parameters = module.config.rope_parameters
    original = int(parameters["original_max_position_embeddings"])
    is_long = context_length > original
    length = original + 1 if is_long else original
    inverse, scaling = ROPE_INIT_FUNCTIONS[_LONG](module.config, torch.device("cpu"), seq_len=length)
    module._buffers["inv_freq"] = inverse
    module.attention_scaling = scaling
    # Any other type leaves the frequencies as they are.
    module.rope_type = "default"
    return is_long
