"""Each published format of a layer, read as a whole and in any slices."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from services.worker.weights.checkpoint import CheckpointWeights
from services.worker.weights.quantization.config import QuantizationConfig
from services.worker.weights.weight_files import WeightFiles
from shared.model_files.model_dir import ModelDirectoryError
from tests.support.models.quantized_checkpoints import SCHEMES, mxfp4_stack

# Not multiples of any block, group or word.
SHAPE = (75, 171)
MXFP4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}}


@contextmanager
def weights_of(tmp_path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Iterator[CheckpointWeights]:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with WeightFiles(tmp_path) as files:
        yield CheckpointWeights(files, torch.float32, QuantizationConfig.from_json(config))


def random_slice(draw: random.Random, size: int) -> slice:
    start = draw.randrange(size)
    return slice(start, draw.randint(start + 1, size))


def matrix(shape: tuple[int, ...], seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dense_expert(
    weights: CheckpointWeights, name: str, shape: tuple[int, int, int], expert: int, **part: Any
) -> Tensor:
    matrix = weights.stacked(name, shape, expert, **part)
    assert isinstance(matrix, Tensor)
    return matrix


@pytest.mark.parametrize("name", SCHEMES)
def test_a_layer_has_the_values_of_its_format_whole_and_in_slices(tmp_path: Path, name: str) -> None:
    layer = "model.layers.1.self_attn.q_proj"
    quantized = SCHEMES[name].quantize(matrix(SHAPE))
    tensors = {layer + suffix: tensor for suffix, tensor in quantized.tensors.items()}
    draw = random.Random(name)
    with weights_of(tmp_path, tensors, {"quantization_config": SCHEMES[name].config}) as weights:
        torch.testing.assert_close(weights.dense(layer, SHAPE), quantized.values, rtol=1e-6, atol=0)
        for _ in range(20):
            rows, columns = random_slice(draw, SHAPE[0]), random_slice(draw, SHAPE[1])
            part = weights.dense(layer, SHAPE, rows=rows, columns=columns)
            torch.testing.assert_close(part, quantized.values[rows, columns], rtol=1e-6, atol=0)
        weights.check_complete()


def test_mxfp4_experts_match_transformers_whole_and_in_slices(tmp_path: Path) -> None:
    stack = mxfp4_stack(matrix((3, 96, 50)))
    theirs = convert_moe_packed_tensors(stack.tensors["_blocks"], stack.tensors["_scales"], dtype=torch.float32)
    name, draw = "model.layers.0.mlp.experts.gate_up_proj", random.Random(1)
    with weights_of(tmp_path, {name + suffix: part for suffix, part in stack.tensors.items()}, MXFP4) as weights:
        assert torch.equal(theirs, stack.values)
        for expert in (0, 1, 2):
            assert torch.equal(dense_expert(weights, name, (3, 96, 50), expert), theirs[expert].T)
        for _ in range(20):
            expert, rows, columns = draw.randrange(3), random_slice(draw, 50), random_slice(draw, 96)
            part = dense_expert(weights, name, (3, 96, 50), expert, rows=rows, columns=columns)
            assert torch.equal(part, theirs[expert].T[rows, columns])
        weights.check_complete()


@pytest.mark.parametrize("config", [{}, MXFP4])
def test_plain_stacked_experts_are_read_in_any_slices(tmp_path: Path, config: Mapping[str, Any]) -> None:
    stack = matrix((3, 20, 50))
    with weights_of(tmp_path, {"experts.down_proj": stack}, config) as weights:
        for expert in (0, 1, 2):
            assert torch.equal(dense_expert(weights, "experts.down_proj", (3, 20, 50), expert), stack[expert].T)
        part = dense_expert(weights, "experts.down_proj", (3, 20, 50), 2, rows=slice(9, 30), columns=slice(7))
        assert torch.equal(part, stack[2, :7, 9:30].T)
        assert part.is_contiguous()


def test_every_fp8_code_has_the_value_that_torch_gives_it(tmp_path: Path) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = codes[~codes.float().isnan()].reshape(2, 127)
    tensors = {"a_proj.weight": numbers, "a_proj.weight_scale": torch.tensor(1.0)}
    with weights_of(tmp_path, tensors, {"quantization_config": {"quant_method": "fp8"}}) as weights:
        assert torch.equal(weights.dense("a_proj", (2, 127)), numbers.float())


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_in_an_fp8_weight_is_detected(tmp_path: Path, code: int) -> None:
    weight = matrix((4, 6)).to(torch.float8_e4m3fn)
    weight.view(torch.uint8)[2, 3] = code
    tensors = {"a_proj.weight": weight, "a_proj.weight_scale": torch.tensor(1.0)}
    with weights_of(tmp_path, tensors, {"quantization_config": {"quant_method": "fp8"}}) as weights:
        weights.linear("a_proj", (4, 6))
        with pytest.raises(ModelDirectoryError, match="not finite: a_proj"):
            weights.check_complete()


def test_a_nan_in_an_mxfp4_scale_is_detected(tmp_path: Path) -> None:
    stack = mxfp4_stack(matrix((2, 32, 5)))
    stack.tensors["_scales"][1, 4, 0] = 255
    with weights_of(
        tmp_path, {"experts.up" + suffix: part for suffix, part in stack.tensors.items()}, MXFP4
    ) as weights:
        weights.stacked("experts.up", (2, 32, 5), 1)
        with pytest.raises(ModelDirectoryError, match="not finite"):
            weights.check_complete()


def test_scales_may_be_powers_of_two_in_a_byte(tmp_path: Path) -> None:
    weight, scales = matrix((4, 6)).to(torch.float8_e4m3fn), torch.tensor([[2.0, 0.25]])
    tensors = {"a_proj.weight": weight, "a_proj.weight_scale_inv": scales.to(torch.float8_e8m0fnu)}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 3], "scale_fmt": "ue8m0"}}
    with weights_of(tmp_path, tensors, config) as weights:
        assert torch.equal(weights.dense("a_proj", (4, 6)), weight.float() * scales.repeat_interleave(3, dim=1))


@pytest.mark.parametrize(
    ("scheme", "suffix", "change", "message"),
    [
        ("compressed int4, activation order", ".weight_g_idx", lambda t: t + 4, "weight_g_idx names a group"),
        ("compressed int4, activation order", ".weight_g_idx", lambda t: t - 1, "weight_g_idx names a group"),
        ("compressed int4, groups", ".weight_shape", lambda t: t + 32, "weight_shape says"),
    ],
)
def test_inconsistent_tensors_are_refused(tmp_path: Path, scheme: str, suffix: str, change: Any, message: str) -> None:
    tensors = {f"a_proj{key}": part for key, part in SCHEMES[scheme].quantize(matrix((8, 64))).tensors.items()}
    tensors[f"a_proj{suffix}"] = change(tensors[f"a_proj{suffix}"])
    with weights_of(tmp_path, tensors, {"quantization_config": SCHEMES[scheme].config}) as weights:
        weights.linear("a_proj", (8, 64))
        with pytest.raises(ModelDirectoryError, match=rf"malformed: a_proj \({message}"):
            weights.check_complete()
