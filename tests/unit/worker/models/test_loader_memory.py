"""Loading needs hardly more memory than the weights afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from services.worker.weights.dummy_weights import DummyWeights
from tests.support.models.tiny_llama import TINY_CONFIG, tensor_shapes, write_tiny_llama
from tests.support.system.processes import ROOT, module_environment

pytestmark = pytest.mark.process

SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 8192, "num_hidden_layers": 4, "head_dim": 256}
CONFIG = {**TINY_CONFIG, **SIZES, "num_key_value_heads": 4, "tie_word_embeddings": False}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}

Store = Callable[[str, Tensor], dict[str, Tensor]]


def as_float32(name: str, tensor: Tensor) -> dict[str, Tensor]:
    return {name: tensor}


def as_bfloat16(name: str, tensor: Tensor) -> dict[str, Tensor]:
    return {name: tensor.bfloat16()}


def as_fp8(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if not name.endswith("_proj.weight"):
        return as_bfloat16(name, tensor)
    scales = torch.ones([-(-size // 128) for size in tensor.shape])
    return {name: tensor.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


def write_large(directory: Path, store: Store) -> int:
    """Write a model of about 270 MB in float32, with one shard per layer; returns the exact size."""
    write_tiny_llama(directory)
    (directory / "model.safetensors").unlink()
    config = {**CONFIG, "quantization_config": FP8} if store is as_fp8 else CONFIG
    (directory / "config.json").write_text(json.dumps(config))
    weights, weight_map, num_bytes = DummyWeights(0, torch.float32), {}, 0
    shards: dict[str, dict[str, Tensor]] = {}
    for name, shape in tensor_shapes(CONFIG).items():
        shard = f"{'-'.join(name.split('.')[1:3])}.safetensors"
        stored = store(name, weights.read(name, shape))
        shards.setdefault(shard, {}).update(stored)
        weight_map.update(dict.fromkeys(stored, shard))
        num_bytes += torch.Size(shape).numel() * 4
    for shard, tensors in shards.items():
        save_file(tensors, directory / shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return num_bytes


@pytest.mark.parametrize(
    ("store", "backend"),
    [
        (as_bfloat16, "cpu"),
        pytest.param(as_float32, "cpu", marks=pytest.mark.proof),
        pytest.param(as_float32, "reference", marks=pytest.mark.proof),
        pytest.param(as_fp8, "cpu", marks=pytest.mark.slow),
    ],
)
def test_the_peak_of_loading_exceeds_the_weights_by_at_most_a_fifth(tmp_path: Path, store: Store, backend: str) -> None:
    num_bytes = write_large(tmp_path, store)
    memory = memory_of_loading(tmp_path, backend)
    assert memory["peak"] <= 1.2 * num_bytes
    # The memory was measured, and the weights are in it.
    assert memory["kept"] >= 0.95 * num_bytes


@pytest.mark.parametrize(
    ("store", "quantization", "num_bits"),
    [
        (as_bfloat16, "int8", 8),
        pytest.param(as_float32, "int8", 8, marks=pytest.mark.proof),
        # A scale and an offset of 32 bits per 32 values make it 6.
        pytest.param(as_float32, "int4", 6, marks=pytest.mark.slow),
    ],
)
def test_quantising_takes_hardly_more_memory_than_what_is_kept(
    tmp_path: Path, store: Store, quantization: str, num_bits: int
) -> None:
    num_embedding_bytes = 4 * SIZES["vocab_size"] * SIZES["hidden_size"]
    num_matrix_bytes = write_large(tmp_path, store) - num_embedding_bytes
    memory = memory_of_loading(tmp_path, "packing", quantization)
    # The head has 8 bits.
    expected = num_embedding_bytes + num_matrix_bytes * num_bits / 32 + num_embedding_bytes / 4 * (1 - num_bits / 8)
    assert memory["peak"] <= expected + 20e6
    assert 0.95 * expected <= memory["kept"]


def memory_of_loading(model_dir: Path, *arguments: str) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.support.models.load_memory", str(model_dir), *arguments]
    result = subprocess.run(command, cwd=ROOT, env=module_environment(), capture_output=True, text=True, check=True)
    memory: dict[str, int] = json.loads(result.stdout)
    return memory
