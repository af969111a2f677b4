"""Random weights from a configuration alone: independent of order and slices, and suitable for running the model."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.models.loader import LoadedModel, LoadOptions, load_model
from services.worker.ops import load_ops
from services.worker.ops.matrices import Mxfp4Matrix, dense
from services.worker.ops.matrix_rows import MatrixFormat, format_of
from services.worker.weights.dummy_weights import DummyWeights
from services.worker.weights.model_weights import WeightFormats
from services.worker.weights.quantization.config import QuantizationConfig
from services.worker.weights.quantization.gguf_blocks import BLOCK_TYPES, gguf_config
from shared.model_files.model_dir import ModelDirectoryError
from tests.support.models.paged_model import PagedModel
from tests.support.models.published_formats import PUBLISHED
from tests.support.models.tiny_llama import TINY_CONFIG, write_tiny_llama

Config = dict[str, Any]

# More values than one period of the random numbers, so that slices cross its end.
SHAPE = (1100, 1001)


def load_dummy(model_dir: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(model_dir, load_ops("cpu"), dtype, lambda _: None, options=LoadOptions(dummy_seed=seed))


def write_config(model_dir: Path, **changes: Any) -> Path:
    (model_dir / "config.json").write_text(json.dumps({**TINY_CONFIG, **changes}))
    return model_dir


def test_values_do_not_depend_on_order_or_slices() -> None:
    weights, again = DummyWeights(3, torch.float32), DummyWeights(3, torch.float32)
    matrix, expert = weights.dense("a", SHAPE), weights.stacked("experts", (3, 40, 50), 1)
    rows, columns = slice(900, 1090), slice(17, 800)
    part = weights.stacked("experts", (3, 40, 50), 1, rows=slice(10, 30), columns=slice(5, 9))
    assert isinstance(expert, Tensor)
    assert isinstance(part, Tensor)
    assert torch.equal(part, expert[10:30, 5:9])
    assert torch.equal(again.dense("a", SHAPE, rows=rows, columns=columns), matrix[rows, columns])
    assert torch.equal(again.dense("a", SHAPE, rows=rows), matrix[rows])
    assert torch.equal(again.dense("a", SHAPE), matrix)
    table = weights.read("table.weight", SHAPE)
    assert torch.equal(again.read("table.weight", SHAPE, rows=rows), table[rows])


def test_a_scale_is_1() -> None:
    assert torch.equal(DummyWeights(3, torch.bfloat16).scale(["a", "b"]), torch.ones(1))


def test_names_and_seeds_distinguish_weights() -> None:
    def values(seed: int, name: str) -> tuple[float, ...]:
        return tuple(DummyWeights(seed, torch.float32).dense(name, (3, 4)).flatten().tolist())

    assert len({values(1, "a"), values(1, "b"), values(2, "a")}) == 3
    assert values(1, "a") == values(1, "a")


def test_matrices_keep_the_size_of_activations_and_norms_are_about_one() -> None:
    weights = DummyWeights(1, torch.bfloat16)
    matrix = weights.dense("a", (2000, 1000)).float()
    assert matrix.mean().abs() < 1e-3
    assert (matrix.std() * 1000**0.5 - 1).abs() < 0.05
    norm = weights.read("input_layernorm.weight", (5000,)).float()
    assert (norm.mean() - 1).abs() < 0.01
    assert 0.05 < norm.std() < 0.2
    assert weights.read("up_proj.bias", (5000,)).float().abs().max() < 0.2
    assert weights.read("scale", ()).shape == ()
    # No two rows are equal.
    assert torch.unique(matrix, dim=0).shape == matrix.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_configuration_alone_gives_a_model_with_finite_logits(tmp_path: Path, dtype: torch.dtype) -> None:
    loaded = load_dummy(write_config(tmp_path, num_hidden_layers=12, attention_bias=True), dtype=dtype)
    paged = PagedModel(loaded.model, load_ops("cpu"), num_blocks=8)
    logits = paged.prefill_all(paged.add(list(range(40))))
    assert logits.isfinite().all()
    assert 0.01 < logits.std() < 100
    assert loaded.facts.context_length == 512


def test_the_digest_covers_configuration_and_seed(tmp_path: Path) -> None:
    write_config(tmp_path)
    first = load_dummy(tmp_path)
    assert load_dummy(tmp_path).weights_digest == first.weights_digest
    assert load_dummy(tmp_path, seed=1).weights_digest != first.weights_digest
    write_config(tmp_path, rms_norm_eps=1e-6)
    assert load_dummy(tmp_path).weights_digest != first.weights_digest


def test_a_dummy_has_the_model_digest_that_the_tokenizer_computes(tmp_path: Path) -> None:
    real = load_model(write_tiny_llama(tmp_path), load_ops("cpu"), torch.float32, lambda _: None)
    (tmp_path / "model.safetensors").unlink()
    dummy = load_dummy(tmp_path)
    assert dummy.facts.model_digest == real.facts.model_digest
    assert dummy.weights_digest != real.weights_digest


def quantization(weights: Config, name: str, **changes: Any) -> Config:
    """A configuration of compressed-tensors."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": groups, **changes}


INT4_GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
GGUF_INTEGERS = {"Q8_0": MatrixFormat.INT8, "Q4_0": MatrixFormat.INT4, "Q4_1": MatrixFormat.INT4}
FORMATS: dict[str, tuple[MatrixFormat, Config]] = {
    "fp8": (MatrixFormat.FP8, {"quant_method": "fp8"}),
    "fp8-blocks": (MatrixFormat.FP8, {"quant_method": "fp8", "weight_block_size": [16, 32]}),
    "int8-channel": (MatrixFormat.INT8, quantization({"num_bits": 8, "strategy": "channel"}, "int-quantized")),
    "int8-packed": (MatrixFormat.INT8, quantization({"num_bits": 8, "strategy": "channel"}, "pack-quantized")),
    "int4": (MatrixFormat.INT4, quantization(INT4_GROUPS, "pack-quantized")),
    "int4-offsets": (MatrixFormat.INT4, quantization({**INT4_GROUPS, "symmetric": False}, "pack-quantized")),
    "int8-offsets": (
        MatrixFormat.INT8,
        quantization({"num_bits": 8, "strategy": "channel", "symmetric": False}, "pack-quantized"),
    ),
    "int8-tensor-offsets": (MatrixFormat.INT8, quantization({"num_bits": 8, "symmetric": False}, "int-quantized")),
    **{
        f"gguf-{name}": (GGUF_INTEGERS.get(name, MatrixFormat.GGUF), gguf_config({"layer": kind, "lm_head": kind}))
        for name, kind in BLOCK_TYPES.items()
    },
    **{
        name: (packed_as, dict(PUBLISHED[name].config))
        for packed_as, names in (
            (MatrixFormat.INT4, ("awq", "gptq", "gptq, activation order", "quark int4, in order")),
            (MatrixFormat.INT8, ("gptq, 8 bits", "quark int8")),
            (MatrixFormat.MXFP4, ("quark mxfp4",)),
        )
        for name in names
    },
}


def packed_weights(config: Config, *, seed: int = 1, kept: bool = True, device: str = "cpu") -> DummyWeights:
    """Weights of a quantised checkpoint on a backend that keeps all formats, or none."""
    stored = QuantizationConfig.from_json({"quantization_config": config})
    formats = WeightFormats(frozenset(MatrixFormat) if kept else frozenset())
    return DummyWeights(seed, torch.float32, device=device, config=stored, formats=formats)


@pytest.mark.parametrize("name", FORMATS)
def test_layers_are_in_the_format_of_the_configuration(name: str) -> None:
    packed_as, config = FORMATS[name]
    weights = packed_weights(config)
    matrix = weights.linear("layer", (160, 256))
    assert format_of(matrix) is packed_as
    assert weights.packed_formats == {packed_as}
    values = dense(matrix, torch.float32)
    assert 0.5 < values.std() * 256**0.5 < 2
    assert values.mean().abs() < 0.2 * values.std()
    # The same values where the backend has no kernels for the format, and in a part.
    torch.testing.assert_close(packed_weights(config, kept=False).linear("layer", (160, 256)), values)
    part = weights.linear("layer", (160, 256), rows=slice(32, 64), columns=slice(64, 128))
    torch.testing.assert_close(dense(part, torch.float32), values[32:64, 64:128])
    assert not torch.equal(dense(packed_weights(config, seed=2).linear("layer", (160, 256)), torch.float32), values)


@pytest.mark.parametrize("name", FORMATS)
def test_packed_layers_are_made_on_the_device(name: str) -> None:
    packed_as, config = FORMATS[name]
    matrix = packed_weights(config, device="meta").linear("layer", (160, 256))
    assert format_of(matrix) is packed_as
    assert not isinstance(matrix, Tensor)
    tensors = [getattr(matrix, field.name) for field in fields(matrix)]
    assert {tensor.device.type for tensor in tensors if isinstance(tensor, Tensor)} == {"meta"}


def test_only_blocks_of_gguf_are_also_in_heads_and_embeddings() -> None:
    shape = (64, 32)
    assert isinstance(packed_weights(FORMATS["fp8"][1]).head("lm_head", shape), Tensor)
    assert isinstance(packed_weights(FORMATS["int4"][1]).embedding("model.embed_tokens", shape), Tensor)
    assert format_of(packed_weights(FORMATS["gguf-Q8_0"][1]).head("lm_head", shape)) is MatrixFormat.INT8


def test_layers_that_the_configuration_leaves_out_are_plain() -> None:
    config = {"quant_method": "fp8", "modules_to_not_convert": ["gate"]}
    assert isinstance(packed_weights(config).linear("mlp.gate", (64, 32)), Tensor)


def test_stacks_of_experts_are_in_mxfp4() -> None:
    weights, shape = packed_weights({"quant_method": "mxfp4"}), (3, 64, 96)
    first, second = (weights.stacked("experts", shape, number) for number in (0, 1))
    assert isinstance(first, Mxfp4Matrix)
    assert isinstance(second, Mxfp4Matrix)
    assert first.shape == (96, 64)
    assert not torch.equal(first.codes, second.codes)
    values = first.to_dense(torch.float32)
    assert 0.5 < values.std() * 64**0.5 < 2
    part = weights.stacked("experts", shape, 0, rows=slice(10, 20), columns=slice(32, 64))
    assert torch.equal(dense(part, torch.float32), values[10:20, 32:])
    # A part that cuts a group of 32 columns is dequantised.
    assert isinstance(weights.stacked("experts", shape, 0, columns=slice(8, 40)), Tensor)
    assert isinstance(weights.linear("q_proj", (64, 32)), Tensor)


def test_a_dummy_of_a_checkpoint_in_an_unknown_format_is_refused(tmp_path: Path) -> None:
    quantized = write_config(tmp_path, quantization_config={"quant_method": "hqq"})
    with pytest.raises(ModelDirectoryError, match="'hqq' is not supported"):
        load_dummy(quantized)


def test_loading_a_dummy_can_be_stopped(tmp_path: Path) -> None:
    def stop(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_model(write_config(tmp_path), load_ops("cpu"), torch.float32, stop, options=LoadOptions(dummy_seed=0))


def test_without_a_configuration_there_is_no_dummy(tmp_path: Path) -> None:
    with pytest.raises(ModelDirectoryError, match=r"config\.json"):
        load_dummy(tmp_path)
