"""Weights out of a bad file are refused before a kernel reads them, or are read within their bounds.

`test_sanitizers.py` runs this file with kernels that check every access.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.worker.models.loader import LoadOptions, load_model
from services.worker.ops.experts import ExpertWeights
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.ops.native.backend import NativeOps
from services.worker.weights.checkpoint import CheckpointWeights
from services.worker.weights.dummy_parts import write_block_scales
from services.worker.weights.model_weights import WeightFormats
from services.worker.weights.quantization.config import QuantizationConfig
from services.worker.weights.quantization.gguf_blocks import BLOCK_TYPES, BlockType, gguf_config
from services.worker.weights.weight_files import WeightFiles
from shared.model_files.model_dir import ModelDirectoryError
from tests.support.models.hostile_tensors import CONTENTS, FLOAT_CONTENTS, contents, damages
from tests.support.models.paged_model import PagedModel
from tests.support.models.published_formats import PUBLISHED
from tests.support.models.quantized_checkpoints import SCHEMES, WEIGHTS, Scheme, mxfp4_stack, write_quantized
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model
from tests.support.models.tiny_llama import write_tiny_llama

LAYER = "model.layers.1.self_attn.q_proj"
# The last tile of rows is not full, nor is the last group.
SHAPE = (40, 80)
GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
EXPERT_SHAPES = {GATE_UP: (2, 32, 64), DOWN: (2, 32, 32)}
MXFP4 = {"quant_method": "mxfp4"}
TRANSPOSED = ("awq", "gptq, activation order")
# The scale of activations that are not quantised here.
UNUSED = ".input_scale"
CHANGES = {"num_hidden_layers": 1, "tie_word_embeddings": False}

Use = Callable[[CheckpointWeights], None]


def matrix(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def blocks(block_type: BlockType) -> dict[str, Tensor]:
    """Two whole blocks of GGUF in a row, with small scales."""
    stored = torch.randint(256, (SHAPE[0], 2, block_type.num_bytes), dtype=torch.uint8)
    write_block_scales(stored, block_type, 0.01)
    return {f"{LAYER}.blocks": stored}


def layers() -> Iterator[tuple[str, Mapping[str, Any], dict[str, Tensor]]]:
    """The name, configuration and tensors of a layer in every format but those of stacks."""
    yield "plain", {}, {f"{LAYER}.weight": matrix(SHAPE)}
    for name, scheme in {**SCHEMES, **{name: PUBLISHED[name] for name in TRANSPOSED}}.items():
        if not scheme.others:
            quantized = scheme.quantize(matrix(SHAPE))
            yield name, scheme.config, {LAYER + suffix: tensor for suffix, tensor in quantized.tensors.items()}
    for block_type in BLOCK_TYPES.values():
        yield block_type.name, gguf_config({LAYER: block_type}), blocks(block_type)


LAYERS = {name: (config, tensors) for name, config, tensors in layers()}


def outcome(
    directory: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], use: Use, quantized: MatrixFormat | None
) -> str:
    """What the error says, or nothing if the weights were used."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / WEIGHTS)
    formats = WeightFormats(NativeOps.formats, quantized)
    with WeightFiles(directory) as files:
        stored = QuantizationConfig.from_json({"quantization_config": config})
        weights = CheckpointWeights(files, torch.float32, stored, formats=formats)
        try:
            use(weights)
        except ModelDirectoryError as error:
            return str(error)
    return ""


def check_all(
    directory: Path,
    tensors: dict[str, Tensor],
    config: Mapping[str, Any],
    use: Use,
    quantized: MatrixFormat | None = None,
) -> None:
    """Use weights with one tensor damaged, for each tensor and damage. An error must name the layer."""
    assert outcome(directory, tensors, config, use, quantized) == ""
    refused: Counter[str] = Counter()
    for name, tensor in tensors.items():
        layer = next(prefix for prefix in (LAYER, *EXPERT_SHAPES) if name.startswith(prefix))
        for damage, damaged in damages(tensor):
            message = outcome(directory, {**tensors, name: damaged}, config, use, quantized)
            assert not message or layer in message, f"{name} {damage}: {message}"
            refused[name] += bool(message)
    assert all(refused[name] for name in tensors if not name.endswith(UNUSED))


@pytest.mark.parametrize("name", LAYERS)
def test_a_damaged_layer_is_refused_or_computed_within_its_bounds(tmp_path: Path, ops: NativeOps, name: str) -> None:
    num_rows, width = shape = SHAPE[0], 2 * BLOCK_TYPES[name].num_values if name in BLOCK_TYPES else SHAPE[1]
    x, token_ids = matrix((3, width)), torch.tensor([0, num_rows - 1])
    run = slice(width // 2, width) if name in BLOCK_TYPES else slice(16, 72)

    def use(weights: CheckpointWeights) -> None:
        layer, cut = weights.linear(LAYER, shape), weights.linear(LAYER, shape, columns=run)
        weights.check_complete()
        embed, head = ops.prepare_tied(layer, torch.float32)
        assert head(x).shape == (3, num_rows)
        assert embed(token_ids).shape == (2, width)
        assert ops.prepare_linear(cut, None, torch.float32)(x[:, run]).shape == (3, num_rows)

    config, tensors = LAYERS[name]
    check_all(tmp_path, tensors, config, use)


@pytest.mark.parametrize("quantized", [MatrixFormat.INT8, MatrixFormat.INT4])
def test_a_damaged_layer_is_quantised_within_its_bounds(
    tmp_path: Path, ops: NativeOps, quantized: MatrixFormat
) -> None:
    def use(weights: CheckpointWeights) -> None:
        layer = weights.linear(LAYER, SHAPE)
        weights.check_complete()
        ops.prepare_linear(layer, None, torch.float32)(matrix((3, SHAPE[1])))

    check_all(tmp_path, {f"{LAYER}.weight": matrix(SHAPE)}, {}, use, quantized)


def test_damaged_experts_are_refused_or_computed_within_their_bounds(tmp_path: Path, ops: NativeOps) -> None:
    ids, shares = torch.tensor([[0, 1], [1, 0], [1, 0]], dtype=torch.int32), torch.full((3, 2), 0.5)

    def use(weights: CheckpointWeights) -> None:
        def expert(number: int) -> ExpertWeights:
            gate_up, down = (weights.stacked(name, shape, number) for name, shape in EXPERT_SHAPES.items())
            return ExpertWeights(gate_up, down)

        experts: list[ExpertWeights] = [expert(0), expert(1)]
        weights.check_complete()
        kernel = ops.prepare_experts(experts, None, torch.float32)
        assert kernel(matrix((3, 32)), ids, shares).shape == (3, 32)

    stacks = {name: mxfp4_stack(matrix(shape)) for name, shape in EXPERT_SHAPES.items()}
    tensors = {name + suffix: tensor for name, stack in stacks.items() for suffix, tensor in stack.tensors.items()}
    check_all(tmp_path, tensors, MXFP4, use)


# Zero points add to what is read, so without them a group of each kind is enough.
@pytest.mark.parametrize(
    ("name", "group_size"),
    [
        *(("compressed int4, asymmetric", size) for size in (1, 2, 7, 30, 31, 33, 48, 1 << 40, 1 << 70)),
        *(("compressed int4, groups", size) for size in (1, 31, 48, 1 << 70)),
    ],
)
def test_groups_of_any_size_are_computed_within_their_bounds(
    tmp_path: Path, ops: NativeOps, name: str, group_size: int
) -> None:
    config, tensors = LAYERS[name]
    group = config["config_groups"]["group_0"]
    config = {
        **config,
        "config_groups": {"group_0": {**group, "weights": {**group["weights"], "group_size": group_size}}},
    }
    num_groups = -(-SHAPE[1] // group_size)
    # Zero points are packed along the rows, so that one column is for one group, as in scales.
    by_group = {
        tensor_name: tensor[:, :1].expand(-1, num_groups)
        for tensor_name, tensor in tensors.items()
        if tensor_name.endswith(("scale", "zero_point"))
    }

    def use(weights: CheckpointWeights) -> None:
        for layer in (weights.linear(LAYER, SHAPE), weights.dense(LAYER, SHAPE)):
            weights.check_complete()
            ops.prepare_linear(layer, None, torch.float32)(matrix((3, SHAPE[1])))

    assert outcome(tmp_path, {**tensors, **by_group}, config, use, None) == ""


def run(model_dir: Path, ops: NativeOps, quantized: MatrixFormat | None = None) -> None:
    """Load a model, compute a prompt, and one token after it; an error must be of the directory."""
    try:
        loaded = load_model(model_dir, ops, torch.float32, lambda _: None, options=LoadOptions(quantization=quantized))
    except ModelDirectoryError:
        return
    paged = PagedModel(loaded.model, ops, num_blocks=8)
    sequence = paged.add([5, 9, 300, 4, 77])
    paged.prefill([sequence])
    sequence.token_ids.append(11)
    paged.decode_runs([sequence], [1])


def run_with_contents(model_dir: Path, ops: NativeOps, quantized: MatrixFormat | None = None) -> None:
    """Run the model with the contents of every tensor damaged, one after the other and all together."""
    tensors = load_file(model_dir / WEIGHTS)
    for damage in {**CONTENTS, **FLOAT_CONTENTS}:
        damaged = {
            name: contents(tensor)[damage](tensor).contiguous() if damage in contents(tensor) else tensor
            for name, tensor in tensors.items()
        }
        changes = ({name: damaged[name]} for name in tensors if "layers.1" not in name)
        for change in (*changes, damaged):
            save_file({**tensors, **change}, model_dir / WEIGHTS)
            run(model_dir, ops, quantized)


@pytest.mark.proof
@pytest.mark.parametrize("scheme", [name for name in SCHEMES if "int" in name])
def test_a_model_with_any_contents_is_refused_or_computed(tmp_path: Path, ops: NativeOps, scheme: str) -> None:
    plain = write_tiny_llama(tmp_path / "plain", changes=CHANGES)
    quantized, _ = write_quantized(plain, tmp_path, SCHEMES[scheme])
    run_with_contents(quantized, ops)


@pytest.mark.proof
@pytest.mark.parametrize("quantized", [None, MatrixFormat.INT8, MatrixFormat.INT4])
def test_a_plain_model_with_any_contents_is_refused_or_computed(
    tmp_path: Path, ops: NativeOps, quantized: MatrixFormat | None
) -> None:
    run_with_contents(write_tiny_llama(tmp_path / "plain", changes=CHANGES), ops, quantized)


@pytest.mark.proof
def test_experts_with_any_contents_are_refused_or_computed(tmp_path: Path, ops: NativeOps) -> None:
    config = {**next(iter(SMALL_CONFIGS["GptOssForCausalLM"].values())), "intermediate_size": 32}
    plain = write_small_model(build_model("GptOssForCausalLM", config), tmp_path / "plain")
    scheme = Scheme(MXFP4, mxfp4_stack, plain=("q_proj", "k_proj", "v_proj", "o_proj", "lm_head"))
    quantized, _ = write_quantized(plain, tmp_path, scheme)
    run_with_contents(quantized, ops)
