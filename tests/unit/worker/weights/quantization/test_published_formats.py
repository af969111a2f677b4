"""AWQ, GPTQ, Quark, ModelOpt and 4-bit floats: values, what stays packed, whole models, names of layers, damage."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.worker.models.loader import load_model
from services.worker.ops import load_ops
from services.worker.ops.matrices import dense
from services.worker.ops.matrix_rows import MatrixFormat, format_of
from services.worker.weights.checkpoint import CheckpointWeights
from services.worker.weights.model_weights import WeightFormats
from services.worker.weights.quantization.config import QuantizationConfig
from services.worker.weights.weight_files import WeightFiles
from shared.model_files.model_dir import CONFIG, ModelDirectoryError
from tests.support.models.packing_ops import PackingOps
from tests.support.models.paged_model import PagedModel
from tests.support.models.published_formats import PUBLISHED, quark_config
from tests.support.models.quantized_checkpoints import WEIGHTS, write_quantized
from tests.support.models.tiny_llama import write_tiny_llama

LAYER = "model.layers.1.self_attn.q_proj"
# No multiple of four groups, nor of a tile.
SHAPE = (72, 160)
CHANGES = {"num_hidden_layers": 2, "tie_word_embeddings": False, "attention_bias": True, "intermediate_size": 160}
PROMPT = [5, 9, 300, 4, 77]
INT4 = {"dtype": "int4", "qscheme": "per_group", "ch_axis": -1, "group_size": 32, "symmetric": True}
# What stays packed; the others are dequantised.
KEPT = {
    **dict.fromkeys(
        ("awq", "awq, channels", "gptq", "gptq, asymmetric", "gptq, version 2", "gptq, activation order"),
        MatrixFormat.INT4,
    ),
    **dict.fromkeys(("quark uint4", "quark int4, in order"), MatrixFormat.INT4),
    **dict.fromkeys(("gptq, 8 bits", "quark int8"), MatrixFormat.INT8),
    **dict.fromkeys(("quark mxfp4", "compressed mxfp4"), MatrixFormat.MXFP4),
    **dict.fromkeys(("quark fp8, tensor", "quark fp8, channels", "modelopt fp8"), MatrixFormat.FP8),
}


@contextmanager
def weights_of(
    directory: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], *kept: MatrixFormat
) -> Iterator[CheckpointWeights]:
    save_file({LAYER + suffix: tensor.contiguous() for suffix, tensor in tensors.items()}, directory / WEIGHTS)
    stored = QuantizationConfig.from_json({"quantization_config": config})
    with WeightFiles(directory) as files:
        yield CheckpointWeights(files, torch.float32, stored, formats=WeightFormats(kept=frozenset(kept)))


def matrix(shape: tuple[int, ...], *, offset: float = 0.3) -> Tensor:
    """Random numbers whose zero points are not in the middle."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) + offset


def random_part(draw: random.Random, size: int, multiple: int = 1) -> slice:
    """Not empty, between multiples of a divisor of `size`."""
    start, stop = sorted(draw.sample(range(0, size + 1, multiple), 2))
    return slice(start, stop)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_layer_has_the_values_of_its_format_whole_and_in_slices(tmp_path: Path, name: str) -> None:
    quantized, draw = PUBLISHED[name].quantize(matrix(SHAPE)), random.Random(name)
    with weights_of(tmp_path, quantized.tensors, PUBLISHED[name].config) as weights:
        torch.testing.assert_close(weights.dense(LAYER, SHAPE), quantized.values, rtol=1e-6, atol=0)
        for _ in range(20):
            rows, columns = random_part(draw, SHAPE[0]), random_part(draw, SHAPE[1])
            part = weights.dense(LAYER, SHAPE, rows=rows, columns=columns)
            torch.testing.assert_close(part, quantized.values[rows, columns], rtol=1e-6, atol=0)
        weights.check_complete()
    with weights_of(tmp_path, quantized.tensors, PUBLISHED[name].config, *MatrixFormat) as weights:
        whole = weights.linear(LAYER, SHAPE)
        assert format_of(whole) is KEPT.get(name)
        torch.testing.assert_close(dense(whole, torch.float32), quantized.values, rtol=1e-6, atol=1e-6)
        for _ in range(20):
            rows, columns = random_part(draw, SHAPE[0]), random_part(draw, SHAPE[1], 32)
            if name == "gptq, activation order":
                columns = slice(SHAPE[1])
            kept = weights.linear(LAYER, SHAPE, rows=rows, columns=columns)
            assert format_of(kept) is KEPT.get(name)
            torch.testing.assert_close(
                dense(kept, torch.float32), quantized.values[rows, columns], rtol=1e-6, atol=1e-6
            )
        # A part that cuts a group may be dense.
        rows, columns = random_part(draw, SHAPE[0]), slice(17, 51)
        cut = dense(weights.linear(LAYER, SHAPE, rows=rows, columns=columns), torch.float32)
        torch.testing.assert_close(cut, quantized.values[rows, columns], rtol=1e-6, atol=1e-6)
        weights.check_complete()


@pytest.fixture(scope="module")
def plain_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("plain"), changes=CHANGES)


def logits_of(model_dir: Path) -> tuple[Tensor, PackingOps]:
    ops = PackingOps()
    paged = PagedModel(load_model(model_dir, ops, torch.float32, lambda _: None).model, ops, num_blocks=8)
    return paged.prefill_all(paged.add(PROMPT)), ops


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_computes_the_same_as_its_values_with_all_layers_in_their_format(
    plain_dir: Path, tmp_path: Path, name: str
) -> None:
    quantized, values = write_quantized(plain_dir, tmp_path, PUBLISHED[name])
    logits, ops = logits_of(quantized)
    expected, _ = logits_of(values)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    # Fused: query, key and value; gate and up. The head is plain.
    kept = KEPT.get(name)
    assert ops.counts == ({None: 9} if kept is None else {kept: 8, None: 1})
    assert (logits_of(plain_dir)[0] - expected).abs().max() > 1e-2


def change_of(name: str, **values: Any) -> dict[str, Any]:
    return {**PUBLISHED[name].config, **values}


def label_of(config: Mapping[str, Any], layer: str, **whole: Any) -> str:
    return QuantizationConfig.from_json({"quantization_config": config, **whole}).linear_format(layer).label


@pytest.mark.parametrize("name", ["awq", "gptq, activation order", "gptq, 8 bits", "quark mxfp4"])
def test_native_kernels_compute_what_the_values_do(plain_dir: Path, tmp_path: Path, name: str) -> None:
    quantized, values = write_quantized(plain_dir, tmp_path, PUBLISHED[name])
    ops, expected = load_ops("native"), logits_of(values)[0]
    loaded = load_model(quantized, ops, torch.float32, lambda _: None)
    assert loaded.packed_formats == {KEPT[name]}
    paged = PagedModel(loaded.model, ops, num_blocks=8)
    # They quantise activations to 8 bits, whose rounding is about a hundredth of a typical value.
    assert (paged.prefill_all(paged.add(PROMPT)) - expected).std() < 0.05 * expected.std()


@pytest.mark.parametrize(
    ("name", "file", "told"),
    [
        (
            "modelopt nvfp4",
            "hf_quant_config.json",
            {"producer": {}, "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}},
        ),
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}),
        ("awq", "quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}),
    ],
)
def test_a_configuration_in_a_file_of_its_own_is_read(
    plain_dir: Path, tmp_path: Path, name: str, file: str, told: dict[str, Any]
) -> None:
    quantized, values = write_quantized(plain_dir, tmp_path, PUBLISHED[name])
    shutil.copy(values / CONFIG, quantized / CONFIG)
    (quantized / file).write_text(json.dumps(told), encoding="utf-8")
    torch.testing.assert_close(logits_of(quantized)[0], logits_of(values)[0], rtol=1e-5, atol=1e-5)
    (quantized / file).write_text(json.dumps({**told, "quant_method": "x"}), encoding="utf-8")
    with pytest.raises(ModelDirectoryError, match=f"{file}: quant_method 'x' is not supported"):
        logits_of(quantized)


def test_biases_of_zeros_that_the_model_does_not_have_are_left_out_and_others_are_refused(
    plain_dir: Path, tmp_path: Path
) -> None:
    """AutoGPTQ wrote them for every layer."""
    quantized, values = write_quantized(plain_dir, tmp_path, PUBLISHED["gptq"])
    tensors = load_file(quantized / WEIGHTS)
    bias = "model.layers.0.mlp.up_proj.bias"
    save_file({**tensors, bias: torch.zeros(160)}, quantized / WEIGHTS)
    torch.testing.assert_close(logits_of(quantized)[0], logits_of(values)[0], rtol=1e-5, atol=1e-5)
    save_file({**tensors, bias: torch.arange(160.0)}, quantized / WEIGHTS)
    with pytest.raises(ModelDirectoryError, match=f"unexpected for this architecture: {bias}"):
        logits_of(quantized)


UP, GATE, DOWN, QUERY = (f"model.layers.3.{name}" for name in ("mlp.up_proj", "mlp.gate", "mlp.down_proj", LAYER[-16:]))
NAMED: dict[str, tuple[Mapping[str, Any], dict[str, str]]] = {
    "parts of names that AWQ left out": (
        change_of("awq", modules_to_not_convert=["gate", "visual"]),
        {UP: "awq, int4", GATE: "plain", f"{GATE}_proj": "plain"},
    ),
    "exceptions of GPTQ": (
        change_of(
            "gptq",
            lm_head=True,
            dynamic={
                r"-:.*\.3\.mlp\.gate$": {},
                r"+:.*down_proj": {"bits": 8},
                r".*\.3\.": {"checkpoint_format": "gptq"},
            },
        ),
        {GATE: "plain", DOWN: "gptq, int8", UP: "gptq, int4", "lm_head": "gptq, int4"},
    ),
    "the modules that GPTQ was applied to": (
        change_of("gptq", modules_in_block_to_quantize=[["self_attn.q_proj"], ["mlp.up_proj"]]),
        {UP: "gptq, int4", QUERY: "gptq, int4", DOWN: "plain", "lm_head": "plain"},
    ),
    "what Quark excludes, and formats by layer": (
        quark_config(
            INT4,
            exclude=["lm_head", "*.mlp.gate", r"re:.*\.3\.self_attn\..*"],
            layer_quant_config={
                "*.mlp.*": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}},
                UP: {"weight": None},
                "*down_proj": {"weight": INT4},
            },
        ),
        {GATE: "plain", QUERY: "plain", UP: "plain", DOWN: "quark, fp8_e4m3", f"{GATE}_proj": "quark, fp8_e4m3"},
    ),
    "a format of Quark by class": (
        quark_config(
            INT4, layer_type_quant_config={"Linear": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}}
        ),
        {UP: "quark, fp8_e4m3", "lm_head": "plain"},
    ),
    "what ModelOpt ignores": (
        change_of("modelopt fp8", ignore=["lm_head", "model.layers.3.mlp*", "model.layers.3.self_attn"]),
        {UP: "plain", QUERY: "plain", "model.layers.30.self_attn.q_proj": "modelopt, fp8"},
    ),
    "formats of ModelOpt by layer": (
        change_of(
            "modelopt fp8",
            quant_algo="MIXED_PRECISION",
            quantized_layers={UP: {"quant_algo": "NVFP4", "group_size": 16}},
        ),
        {UP: "nvfp4", DOWN: "plain"},
    ),
}


@pytest.mark.parametrize("case", NAMED)
def test_a_layer_has_the_format_that_its_name_selects_also_in_a_multimodal_checkpoint(case: str) -> None:
    config, labels = NAMED[case]
    assert {layer: label_of(config, layer) for layer in labels} == labels
    # There the rules have the checkpoint's names.
    stored = json.loads(json.dumps(config).replace('"model.layers', '"model.language_model.layers'))
    whole = {"architectures": ["Qwen3VLForConditionalGeneration"]}
    assert {layer: label_of(stored, layer, **whole) for layer in labels} == labels


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (change_of("awq", version="GEMV"), "version 'gemv' is not supported; supported: gemm"),
        (change_of("awq", zero_point=False), "zero_point false"),
        (change_of("awq", bits=8), "8 bits are not supported; supported: 4"),
        (change_of("awq", modules_to_not_convert="lm_head"), "not names of layers"),
        (change_of("gptq", bits=3), "3 bits are not supported; supported: 4, 8"),
        (change_of("gptq", checkpoint_format="marlin"), "'marlin' is not supported; supported: gptq, gptq_v2"),
        (change_of("gptq", group_size=0), "group_size is 0"),
        (change_of("gptq", dynamic={".*down_proj": {"bits": 2}}), "2 bits are not supported"),
        (change_of("quark int8", export={"weight_format": "fake_quantized", "pack_method": "order"}), "fake_quantized"),
        (
            change_of("quark int8", export={"weight_format": "real_quantized", "pack_method": "x"}),
            "'x' .*reorder, order",
        ),
        (change_of("quark int8", export=None), "method 'quark'"),
        (
            change_of("quark int8", algo_config=[{"name": "rotation", "r1": True, "r4": True}]),
            "r4 of algorithm 'rotation'",
        ),
        (quark_config({**INT4, "dtype": "fp6_e2m3"}), "dtype 'fp6_e2m3', .*supported: fp8_e4m3"),
        (quark_config({**INT4, "qscheme": "per_channel", "ch_axis": 0}), "'int4', qscheme 'per_channel'"),
        (quark_config({**INT4, "zero_point_type": "float32"}), "dtype 'int4'"),
        (quark_config({**INT4, "is_dynamic": True}), "dtype 'int4'"),
        (change_of("quark mxfp4", global_quant_config={"weight": [INT4, INT4]}), "2 stages"),
        (change_of("quark mxfp4", global_quant_config={"weight": INT4, "bias": INT4}), "biases"),
        (change_of("modelopt fp8", quant_algo="W4A8_AWQ"), "'W4A8_AWQ' is not supported; supported: FP8, .*NVFP4"),
        (change_of("modelopt nvfp4", group_size=32), "group_size 32 of NVFP4: must be 16"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ModelDirectoryError, match=message):
        QuantizationConfig.from_json({"quantization_config": config})


@pytest.mark.parametrize(
    ("name", "suffix", "change", "message"),
    [
        ("awq", ".qweight", lambda t: t[:, :-1], r"wrong shape: .*qweight has shape \[160, 8\], not \[160, 9\]"),
        ("awq", ".qweight", lambda t: t.T, "wrong shape: .*qweight"),
        ("awq", ".qweight", lambda t: t.float(), "wrong dtype: .*F32, not I32"),
        ("awq", ".qzeros", lambda t: t[1:], "wrong shape: .*qzeros"),
        ("awq", ".scales", lambda t: t * torch.inf, f"not finite: {LAYER}"),
        ("awq", ".scales", lambda t: t[:2], "wrong shape: .*scales"),
        ("gptq", ".qweight", lambda t: t[1:], "wrong shape: .*qweight"),
        ("gptq", ".g_idx", lambda t: t + 1, "malformed: .*g_idx names a group outside the 5 that exist"),
        ("gptq", ".g_idx", lambda t: t * 0 - 1, "malformed: .*g_idx names a group"),
        ("gptq", ".g_idx", lambda t: t[1:], "wrong shape: .*g_idx"),
        ("gptq, activation order", ".g_idx", None, "missing: .*g_idx"),
        ("gptq", ".qzeros", None, "missing: .*qzeros"),
        ("quark uint4", ".weight_zero_point", None, "missing: .*weight_zero_point"),
        ("quark uint4", ".weight", lambda t: t.to(torch.uint8), "wrong dtype: .*weight has dtype U8, not I32"),
        ("quark mxfp4", ".weight", lambda t: t[:, 1:], "wrong shape: .*weight"),
        ("quark mxfp4", ".weight_scale", lambda t: t.fill_(255), f"not finite: {LAYER}"),
        ("quark fp8, channels", ".weight_scale", lambda t: t[1:], "wrong shape: .*weight_scale"),
        ("modelopt fp8", ".weight_scale", None, "missing: .*weight_scale"),
        ("modelopt nvfp4", ".weight_scale_2", None, "missing: .*weight_scale_2"),
        ("modelopt nvfp4", ".weight_scale", lambda t: t.view(torch.uint8), "wrong dtype: .*U8, not F8_E4M3"),
        ("compressed nvfp4", ".weight_global_scale", lambda t: t * 0, f"not finite: {LAYER}"),
        ("compressed mxfp4", ".weight_scale", lambda t: t[:, 1:], "wrong shape: .*weight_scale"),
    ],
)
def test_a_damaged_layer_is_refused(tmp_path: Path, name: str, suffix: str, change: Any, message: str) -> None:
    tensors = dict(PUBLISHED[name].quantize(matrix(SHAPE)).tensors)
    if change is None:
        del tensors[suffix]
    else:
        tensors[suffix] = change(tensors[suffix])
    for kept in ([], [*MatrixFormat]):
        with weights_of(tmp_path, tensors, PUBLISHED[name].config, *kept) as weights:
            assert tuple(weights.linear(LAYER, SHAPE).shape) == SHAPE
            with pytest.raises(ModelDirectoryError, match=message):
                weights.check_complete()


def test_zero_points_of_signed_codes_need_not_be_stored(tmp_path: Path) -> None:
    for name in ("quark int8", "quark int4, in order"):
        quantized = PUBLISHED[name].quantize(matrix(SHAPE))
        tensors = {suffix: part for suffix, part in quantized.tensors.items() if suffix != ".weight_zero_point"}
        for kept in ([], [*MatrixFormat]):
            with weights_of(tmp_path, tensors, PUBLISHED[name].config, *kept) as weights:
                values = dense(weights.linear(LAYER, SHAPE), torch.float32)
                torch.testing.assert_close(values, quantized.values, rtol=1e-6, atol=1e-6)
                weights.check_complete()
