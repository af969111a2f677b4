"""Which format each layer of a checkpoint has."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from transformers import AwqConfig, FbgemmFp8Config, FineGrainedFP8Config, GPTQConfig, Mxfp4Config

from services.worker.weights.quantization.config import QuantizationConfig
from services.worker.weights.quantization.keys import WITHOUT_EFFECT
from shared.model_files.model_dir import ModelDirectoryError
from tests.support.models.published_formats import PUBLISHED
from tests.support.models.quantized_checkpoints import SCHEMES

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


def label_of(config: Mapping[str, Any], layer: str) -> str:
    return QuantizationConfig.from_json({"quantization_config": config}).linear_format(layer).label


def compressed(**values: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": INT4, "format": "pack-quantized"}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **values}


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}])
def test_without_a_quantization_config_all_layers_are_plain(config: Mapping[str, Any]) -> None:
    assert QuantizationConfig.from_json(config).linear_format("model.layers.0.mlp.up_proj").label == "plain"


@pytest.mark.parametrize(
    ("layer", "is_plain"),
    [
        ("lm_head", True),
        ("model.lm_head", True),
        ("model.layers.1", True),
        ("model.layers.1.mlp.up_proj", True),
        ("model.layers.11.mlp.up_proj", False),
        ("model.layers.12.mlp.gate", True),
        ("model.layers.12.mlp.gate_proj", False),
        ("model.layers.3.self_attn.q_proj", False),
        ("model.layers.4.self_attn.q_proj", True),
    ],
)
def test_a_list_of_fp8_names_matches_suffixes_prefixes_and_expressions(layer: str, is_plain: bool) -> None:
    names = ["lm_head", "model.layers.1", "model.layers.*.mlp.gate", r"model\.layers\.[4-6]\.self_attn"]
    for key in ("modules_to_not_convert", "ignored_layers"):
        assert (label_of({"quant_method": "fp8", key: names}, layer) == "plain") is is_plain


def test_an_empty_list_excludes_no_layer() -> None:
    assert label_of({"quant_method": "fp8", "modules_to_not_convert": []}, "lm_head") == "fp8"
    assert label_of({"quant_method": "fp8", "modules_to_not_convert": None}, "lm_head") == "fp8"


def test_ignored_layers_of_compressed_tensors_are_whole_names_and_expressions() -> None:
    config = compressed(ignore=["lm_head", r"re:.*\.mlp\.gate$", "model.layers.3"])
    for layer, is_plain in (
        ("lm_head", True),
        ("model.lm_head", False),
        ("model.layers.0.mlp.gate", True),
        ("model.layers.0.mlp.gate_proj", False),
        ("model.layers.3.mlp.up_proj", False),
    ):
        assert (label_of(config, layer) == "plain") is is_plain


def test_a_layers_own_name_takes_precedence_over_expressions_and_those_over_its_class() -> None:
    groups = {
        "group_0": {"targets": ["Linear"], "weights": INT4, "format": "pack-quantized"},
        "group_1": {"targets": [r"re:.*down_proj"], "weights": FP8, "format": "float-quantized"},
        "group_2": {"targets": ["model.layers.0.mlp.down_proj"], "weights": None},
    }
    config = compressed(config_groups=groups, format="mixed-precision")
    assert label_of(config, "model.layers.0.mlp.up_proj") == "int4, packed"
    assert label_of(config, "model.layers.1.mlp.down_proj") == "fp8, channel"
    assert label_of(config, "model.layers.0.mlp.down_proj") == "plain"


def test_a_class_without_layers_targets_nothing() -> None:
    groups = {"group_0": {"targets": ["Conv2d"], "weights": INT4, "format": "pack-quantized"}}
    assert label_of(compressed(config_groups=groups), "model.layers.0.mlp.up_proj") == "plain"


def test_an_older_name_of_the_configuration_is_read() -> None:
    config = QuantizationConfig.from_json({"compression_config": SCHEMES["compressed int4, groups"].config})
    assert config.linear_format("model.layers.0.mlp.up_proj").label == "int4, packed"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "hqq"},
            "'hqq' is not supported; supported: awq, compressed-tensors, fbgemm_fp8, fp8, gguf, gptq, modelopt, ",
        ),
        ({"bits": 4}, "quant_method None is not supported"),
        ("fp8", "quant_method None is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "method 'fp8': ValueError"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size is"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["("]}, "method 'fp8'"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        (
            compressed(config_groups={"group_0": {"targets": ["Linear"], "weights": INT4, "format": "marlin-24"}}),
            "marlin",
        ),
        (
            compressed(
                config_groups={"g": {"targets": ["Linear"], "weights": {**INT4, "num_bits": 3}}},
                format="pack-quantized",
            ),
            "'pack-quantized' with symmetric int weights of 3 bits is not supported; supported: .*4 or 8",
        ),
        (
            compressed(
                config_groups={"g": {"targets": ["Linear"], "weights": {**FP8, "num_bits": 4, "symmetric": False}}},
                format="nvfp4-pack-quantized",
            ),
            "'nvfp4-pack-quantized' with asymmetric float weights of 4 bits",
        ),
        (
            compressed(
                config_groups={"g": {"targets": ["Linear"], "weights": {**FP8, "num_bits": 4, "group_size": 64}}},
                format="mxfp4-pack-quantized",
            ),
            "group_size 64 of format 'mxfp4-pack-quantized': must be 32",
        ),
        (
            compressed(config_groups={"g": {"targets": ["Linear"], "weights": {**INT4, "strategy": "tensor_group"}}}),
            "strategy 'tensor_group'",
        ),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
        (compressed(transform_config={"config_groups": {"u": {}}}), "transform_config"),
        (compressed(ignore=["re:("]), "compressed-tensors"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype 'fp4' is not supported; supported: fp8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "is_marlin_format": True}, "is_marlin_format"),
    ],
)
def test_an_unsupported_configuration_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(ModelDirectoryError, match=message):
        QuantizationConfig.from_json({"quantization_config": config})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything inside `value`, a part of a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


@pytest.mark.filterwarnings("ignore:Possible nested set")
@pytest.mark.parametrize("name", [*SCHEMES, *PUBLISHED])
def test_a_configuration_with_any_value_is_read_or_refused(name: str) -> None:
    config = json.loads(json.dumps({**SCHEMES, **PUBLISHED}[name].config))
    values: tuple[Any, ...] = (
        None,
        True,
        0,
        -1,
        1 << 70,
        0.5,
        float("inf"),
        float("nan"),
        "",
        "x",
        [],
        [0],
        [{}],
        {},
        {"a": 1},
    )
    for *path, key in places(config):
        for value in values:
            changed = deepcopy(config)
            part = changed
            for step in path:
                part = part[step]
            part[key] = value
            try:
                stored = QuantizationConfig.from_json({"quantization_config": changed})
            except ModelDirectoryError:
                continue
            stored.linear_format("model.layers.0.mlp.up_proj").stored_tensors((40, 80))


def objects(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every object in a JSON document, itself first."""
    if isinstance(value, dict):
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from objects(item, (*path, key))


@pytest.mark.parametrize("name", [*SCHEMES, *PUBLISHED])
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_new_key_anywhere_is_refused_or_named_and_no_published_one_is(name: str, key: str) -> None:
    config = json.loads(json.dumps({**SCHEMES, **PUBLISHED}[name].config))
    assert QuantizationConfig.from_json({key: config}).unknown_keys == ()
    without_effect = WITHOUT_EFFECT[config["quant_method"]]
    for path in objects(config):
        if without_effect.keys() & set(path):
            continue
        changed = deepcopy(config)
        part = changed
        for step in path:
            part = part[step]
        part["new_gate"] = 0.5
        named = ".".join((key, *(step for step in path if isinstance(step, str)), "new_gate"))
        try:
            assert QuantizationConfig.from_json({key: changed}).unknown_keys == (named,)
        except ModelDirectoryError:
            # A layer, or a group of them, of this name.
            assert path


def test_what_transformers_writes_of_a_method_has_no_unknown_key() -> None:
    written = [AwqConfig(), GPTQConfig(bits=4), FbgemmFp8Config(), Mxfp4Config(), FineGrainedFP8Config()]
    for config in (*written, FineGrainedFP8Config(weight_block_size=None)):
        values = json.loads(json.dumps(config.to_dict()))
        assert QuantizationConfig.from_json({"quantization_config": values}).unknown_keys == ()


def test_a_key_of_a_file_of_its_own_is_named_as_there(tmp_path: Path) -> None:
    written = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "new_gate": 1}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(written))
    stored = QuantizationConfig.read(tmp_path, {})
    assert (stored.file, stored.unknown_keys) == ("hf_quant_config.json", ("quantization.new_gate",))


def test_the_configuration_of_exceptions_is_read_as_that_of_all_layers() -> None:
    config = {**PUBLISHED["gptq"].config, "dynamic": {"+:.*up_proj": {"bits": 8, "new_gate": 2}}, "new": 3}
    stored = QuantizationConfig.from_json({"quantization_config": config})
    assert stored.linear_format("model.layers.0.mlp.up_proj").label == "gptq, int8"
    assert stored.unknown_keys == (
        "quantization_config.dynamic.+:.*up_proj.new_gate",
        "quantization_config.new",
    )
