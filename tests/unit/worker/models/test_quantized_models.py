"""Whole models in published formats: our output compared with that of the values they encode."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.worker.models.loader import LoadOptions, load_model
from services.worker.ops import Ops, load_ops
from services.worker.ops.matrix_rows import MatrixFormat
from shared.model_files.model_dir import ModelDirectoryError
from tests.support.models.packing_ops import PackingOps
from tests.support.models.paged_model import PagedModel
from tests.support.models.quantized_checkpoints import SCHEMES, write_quantized
from tests.support.models.tiny_llama import write_tiny_llama

CHANGES = {"num_hidden_layers": 2, "tie_word_embeddings": False, "attention_bias": True}
FP8 = torch.float8_e4m3fn
UP = "model.layers.0.mlp.up_proj"


def logits_of(
    model_dir: Path,
    *,
    backend: str = "reference",
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
) -> Tensor:
    ops, options = load_ops(backend), LoadOptions(kv_dtype=kv_dtype)
    paged = PagedModel(load_model(model_dir, ops, dtype, lambda _: None, options=options).model, ops, num_blocks=8)
    return paged.prefill_all(paged.add([5, 9, 300, 4, 77]))


@pytest.fixture(scope="module")
def plain_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("plain"), changes=CHANGES)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantized_model_computes_the_same_as_its_values(plain_dir: Path, tmp_path: Path, scheme: str) -> None:
    quantized, values = write_quantized(plain_dir, tmp_path, SCHEMES[scheme])
    expected = logits_of(values)
    torch.testing.assert_close(logits_of(quantized), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits_of(quantized, backend="cpu"), expected, rtol=1e-4, atol=1e-4)
    # And it differs from the model that it was made from.
    assert (logits_of(plain_dir) - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("scheme", "counts"),
    [
        # Fused: query, key and value; gate and up. Output, down and the head, which is plain, are on their own.
        ("compressed int8, W8A8", {MatrixFormat.INT8: 8, None: 1}),
        ("compressed int8, asymmetric", {MatrixFormat.INT8: 8, None: 1}),
        ("compressed int4, groups", {MatrixFormat.INT4: 8, None: 1}),
        ("compressed int4, asymmetric", {MatrixFormat.INT4: 8, None: 1}),
        ("compressed int4, activation order", {MatrixFormat.INT4: 8, None: 1}),
        # The second layer's down projection is plain too.
        ("fp8, blocks", {MatrixFormat.FP8: 7, None: 2}),
        ("fp8, e5m2", {None: 9}),
        # The fused parts are int4, the others FP8, and the first layer's feed-forward network is plain.
        ("mixed", {MatrixFormat.INT4: 3, MatrixFormat.FP8: 3, None: 3}),
    ],
)
def test_a_backend_with_kernels_for_a_format_is_given_it(
    plain_dir: Path, tmp_path: Path, scheme: str, counts: dict[MatrixFormat | None, int]
) -> None:
    quantized, values = write_quantized(plain_dir, tmp_path, SCHEMES[scheme])
    ops = PackingOps()
    paged = PagedModel(load_model(quantized, ops, torch.float32, lambda _: None).model, ops, num_blocks=8)
    assert ops.counts == counts
    logits = paged.prefill_all(paged.add([5, 9, 300, 4, 77]))
    torch.testing.assert_close(logits, logits_of(values), rtol=1e-5, atol=1e-5)


def test_a_quantized_model_runs_in_bfloat16(plain_dir: Path, tmp_path: Path) -> None:
    quantized, values = write_quantized(plain_dir, tmp_path, SCHEMES["fp8, blocks"])
    assert torch.equal(logits_of(quantized, dtype=torch.bfloat16), logits_of(values, dtype=torch.bfloat16))


def drop_scale(tensors: dict[str, Tensor], suffix: str) -> None:
    tensors[UP + suffix] = torch.ones_like(tensors[UP + suffix])


def exchange_scales(tensors: dict[str, Tensor], suffix: str) -> None:
    other = "model.layers.0.mlp.gate_proj" + suffix
    tensors[UP + suffix], tensors[other] = tensors[other], tensors[UP + suffix]


def shift_scales(tensors: dict[str, Tensor], suffix: str) -> None:
    tensors[UP + suffix] = tensors[UP + suffix].roll(1, dims=0)


# Formats with several scales per layer, and the scales' names.
SCALED = {
    "fp8, blocks": ".weight_scale_inv",
    "compressed fp8, channels": ".weight_scale",
    "compressed int8, W8A8": ".weight_scale",
    "compressed int8, asymmetric": ".weight_zero_point",
    "compressed int4, groups": ".weight_scale",
    "compressed int4, asymmetric": ".weight_zero_point",
    "compressed int4, activation order": ".weight_g_idx",
}


@pytest.mark.parametrize(
    ("scheme", "mutate"),
    [
        (scheme, mutate)
        for scheme in SCALED
        for mutate in (drop_scale, exchange_scales, shift_scales)
        # Both layers have the same groups.
        if (scheme, mutate) != ("compressed int4, activation order", exchange_scales)
    ],
)
def test_a_dropped_or_exchanged_scale_changes_the_output(
    plain_dir: Path, tmp_path: Path, scheme: str, mutate: Callable[[dict[str, Tensor], str], None]
) -> None:
    quantized, values = write_quantized(plain_dir, tmp_path, SCHEMES[scheme])
    tensors = load_file(quantized / "model.safetensors")
    mutate(tensors, SCALED[scheme])
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(AssertionError):
        torch.testing.assert_close(logits_of(quantized), logits_of(values), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        ("fp8, blocks", f"{UP}.weight_scale_inv"),
        ("compressed int8, asymmetric", f"{UP}.weight_zero_point"),
        ("compressed int4, groups", f"{UP}.weight_packed"),
        ("compressed int4, groups", f"{UP}.weight_shape"),
    ],
)
def test_a_missing_tensor_of_a_format_is_named(plain_dir: Path, tmp_path: Path, scheme: str, name: str) -> None:
    quantized, _ = write_quantized(plain_dir, tmp_path, SCHEMES[scheme])
    tensors = load_file(quantized / "model.safetensors")
    del tensors[name]
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(ModelDirectoryError, match=f"missing: {name}$"):
        logits_of(quantized)


def test_scales_of_another_granularity_are_refused(plain_dir: Path, tmp_path: Path) -> None:
    quantized, _ = write_quantized(plain_dir, tmp_path, SCHEMES["compressed fp8, channels"])
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelDirectoryError, match=r"up_proj.weight_scale has shape \[144, 1\], not \[1, 1\] or \[1\]"):
        logits_of(quantized)


def test_a_quantized_layer_that_the_configuration_excludes_is_refused(plain_dir: Path, tmp_path: Path) -> None:
    quantized, _ = write_quantized(plain_dir, tmp_path, SCHEMES["compressed fp8, channels"])
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["ignore"].append("re:.*up_proj")
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelDirectoryError) as error_info:
        logits_of(quantized)
    assert f"wrong dtype: {UP}.weight and 1 more" in str(error_info.value)
    assert "has dtype F8_E4M3, not F32 or F16 or BF16" in str(error_info.value)
    assert f"unexpected for this architecture: {UP}.weight_scale" in str(error_info.value)


def test_scales_of_a_quantized_cache_are_not_read(plain_dir: Path, tmp_path: Path) -> None:
    quantized, _ = write_quantized(plain_dir, tmp_path, SCHEMES["compressed fp8, channels"])
    expected = logits_of(quantized)
    tensors = load_file(quantized / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.5)
    tensors["model.layers.0.self_attn.k_proj.output_scale"] = torch.tensor(0.5)
    save_file(tensors, quantized / "model.safetensors")
    assert torch.equal(logits_of(quantized), expected)


def write_with_scales(plain_dir: Path, directory: Path, key_name: str, value_name: str, value: float) -> Path:
    """Write a copy of the model with scales of its second layer's keys, 3, and values."""
    shutil.copytree(plain_dir, directory)
    tensors, layer = load_file(plain_dir / "model.safetensors"), "model.layers.1.self_attn"
    scales = {f"{layer}.{key_name}": torch.tensor(3.0), f"{layer}.{value_name}": torch.tensor([value])}
    save_file({**tensors, **scales}, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("key_name", "value_name", "value"),
    [
        ("attn.k_scale", "attn.v_scale", 0.05),
        ("k_proj.k_scale", "v_proj.v_scale", 0.05),
        ("qkv_proj.k_scale", "qkv_proj.v_scale", 0.05),
        ("qkqkv_proj.k_scale", "qkqkv_proj.v_scale", 0.05),
        ("k_proj.output_scale", "v_proj.output_scale", 0.05),
        ("kv_scale", "kv_scale", 3.0),
    ],
)
def test_scales_of_a_cache_in_fp8_are_found_by_every_publishers_name(
    plain_dir: Path, tmp_path: Path, key_name: str, value_name: str, value: float
) -> None:
    usual = write_with_scales(plain_dir, tmp_path / "usual", "k_scale", "v_scale", value)
    named = write_with_scales(plain_dir, tmp_path / "named", key_name, value_name, value)
    expected = logits_of(usual, kv_dtype=FP8)
    assert torch.equal(logits_of(named, kv_dtype=FP8), expected)
    assert not torch.equal(logits_of(plain_dir, kv_dtype=FP8), expected)
    # Other caches have no use for them.
    assert torch.equal(logits_of(named), logits_of(plain_dir))
    assert (logits_of(plain_dir) - expected).abs().max() < 1


def test_a_malformed_scale_is_refused_where_it_is_used(plain_dir: Path, tmp_path: Path) -> None:
    model_dir = write_with_scales(plain_dir, tmp_path / "model", "k_scale", "v_scale", 0.0)
    logits_of(model_dir)
    with pytest.raises(ModelDirectoryError, match=r"malformed: model.layers.1.self_attn.v_scale \(a scale of 0.0\)"):
        logits_of(model_dir, kv_dtype=FP8)


def costs_of(model_dir: Path, ops: Ops, caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of the lines about formats."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "services.worker"):
        load_model(model_dir, ops, torch.float32, lambda _: None)
    return [record.__dict__ for record in caplog.records if "num_matrices" in record.__dict__]


def test_the_cost_of_dequantizing_is_logged_once_per_format(
    plain_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, _ = write_quantized(plain_dir, tmp_path, SCHEMES["mixed"])
    records = costs_of(quantized, load_ops("reference"), caplog)
    # o_proj of both layers, down_proj of the second; q, k and v of both, gate and up of the second.
    assert {record["format"]: record["num_matrices"] for record in records} == {"fp8, channel": 3, "int4, packed": 8}
    assert all(record["message"].startswith("no kernel for this format") for record in records)
    assert all(0 < record["stored_bytes"] < record["memory_bytes"] for record in records)


def test_a_format_that_is_kept_is_logged_as_such_and_apart_from_layers_that_cannot_be(
    plain_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, _ = write_quantized(plain_dir, tmp_path, SCHEMES["compressed int8, W8A8"])
    (record,) = costs_of(quantized, PackingOps(), caplog)
    assert record["message"] == "weights are computed with in the format they are stored in"
    assert record["num_matrices"] == 14
    assert record["memory_bytes"] == record["stored_bytes"]
    quantized, _ = write_quantized(plain_dir, tmp_path / "2", SCHEMES["fp8, e5m2"])
    (record,) = costs_of(quantized, PackingOps(), caplog)
    assert record["message"].startswith("weights were dequantised at load: these layers cannot be computed")
    assert record["memory_bytes"] > record["stored_bytes"]
