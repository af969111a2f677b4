"""A model directory that cannot be loaded: the error says what it has instead, and what to do about it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.worker.models.loader import LoadedModel, load_model
from services.worker.models.registry import loader_for
from services.worker.ops import load_ops
from shared.model_files.model_dir import ARCHITECTURES, ModelDirectoryError
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.tiny_llama import TINY_CONFIG, write_tiny_llama

WEIGHTS = "model.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 269060552\n"
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path)


def load(model_dir: Path) -> LoadedModel:
    return load_model(model_dir, load_ops("cpu"), torch.float32, lambda _: None)


def refusal(model_dir: Path) -> str:
    with pytest.raises(ModelDirectoryError) as error_info:
        load(model_dir)
    return str(error_info.value)


def move_weights(model_dir: Path, *names: str) -> None:
    for name in names:
        shutil.copy(model_dir / WEIGHTS, model_dir / name)
    (model_dir / WEIGHTS).unlink()


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        (["pytorch_model.bin"], "weights are in pytorch_model.bin, whose format can run code .*AutoModelForCausalLM"),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], "bin and 1 more, whose format can run"),
        (["consolidated.00.pth"], "weights are in consolidated.00.pth, whose format can run code"),
        (
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
            r"shards \(model-00001-of-00002.safetensors and 1 more\) but no model.safetensors.index.json.*download it",
        ),
        (["consolidated.safetensors"], r"Mistral's own format \(consolidated.safetensors\).*Hugging Face's format"),
        (
            ["consolidated-00001-of-00002.safetensors", "params.json", "tekken.json"],
            r"own format \(params.json, consolidated-00001-of-00002.safetensors, tekken.json\), which is not read: "
            "take .*config.json.*tokenizer.json",
        ),
        (["model.fp16.safetensors"], "there is model.fp16.safetensors: a model in one file must be called model.safe"),
        (["adapter_model.safetensors", "adapter_config.json"], "adapter_config.json.*merge the two"),
        (["tiny-q8_0.gguf"], "lockstep serve .*/tiny-q8_0.gguf`"),
        ([], "the directory has no weights"),
    ],
)
def test_weights_in_another_format_are_named(model_dir: Path, names: list[str], advice: str) -> None:
    move_weights(model_dir, *names)
    with pytest.raises(ModelDirectoryError, match=f"^{model_dir / WEIGHTS}: no such file; .*{advice}"):
        load(model_dir)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("params.json", r"Mistral's own format \(params.json\)"),
        ("adapter_config.json", "merge the two"),
        ("a.gguf", "lockstep serve .*/a.gguf`"),
    ],
)
def test_a_missing_configuration_is_explained(model_dir: Path, name: str, advice: str) -> None:
    (model_dir / "config.json").rename(model_dir / name)
    with pytest.raises(ModelDirectoryError, match=rf"config\.json: No such file or directory: .*{advice}"):
        load(model_dir)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", WEIGHTS])
def test_a_git_lfs_pointer_is_told_from_the_file_itself(model_dir: Path, name: str) -> None:
    (model_dir / name).write_text(POINTER)
    assert refusal(model_dir).startswith(f"{model_dir / name} is a Git LFS pointer, not the file itself: ")


def test_a_shard_that_is_a_git_lfs_pointer_is_told(model_dir: Path) -> None:
    names = list(load_file(model_dir / WEIGHTS))
    move_weights(model_dir, "model-1.safetensors")
    (model_dir / "model-2.safetensors").write_text(POINTER)
    weight_map = {**dict.fromkeys(names, "model-1.safetensors"), "other": "model-2.safetensors"}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert refusal(model_dir).startswith(f"{model_dir / 'model-2.safetensors'} is a Git LFS pointer")


@pytest.mark.parametrize("name", ["tokenizer.model", "qwen.tiktoken", "vocab.json"])
def test_a_vocabulary_in_another_format_is_named_with_how_to_convert_it(model_dir: Path, name: str) -> None:
    (model_dir / "tokenizer.json").rename(model_dir / name)
    message = refusal(model_dir)
    assert message.startswith(
        f"{model_dir / 'tokenizer.json'}: No such file or directory: the vocabulary is in {name},"
    )
    assert "AutoTokenizer" in message
    assert "save_pretrained" in message


def test_kimis_vocabulary_is_named_with_the_command_that_converts_it(model_dir: Path) -> None:
    (model_dir / "tokenizer.json").rename(model_dir / "tiktoken.model")
    assert refusal(model_dir) == (
        f"{model_dir / 'tokenizer.json'}: No such file or directory: the vocabulary is in tiktoken.model: make it of "
        f"that with `lockstep import {model_dir}`"
    )


def test_mistrals_own_vocabulary_is_named_with_what_to_take_instead(model_dir: Path) -> None:
    (model_dir / "tokenizer.json").rename(model_dir / "tekken.json")
    message = refusal(model_dir)
    assert "the vocabulary is in Mistral's own format (tekken.json), which is not read: take " in message
    assert "tokenizer.json, tokenizer_config.json and the chat template" in message
    assert "mistral_format=False" in message


@pytest.mark.parametrize(
    ("params", "script"),
    [
        ({"dim": 5120}, "convert_mistral_weights_to_hf.py"),
        ({"dim": 5120, "vision_encoder": {"hidden_size": 1024}}, "convert_mistral3_weights_to_hf.py"),
        ({"llama_4_scaling": {"beta": 0.1}, "vision_encoder": {}}, "convert_ministral3_weights_to_hf.py"),
        ([], "convert_mistral_weights_to_hf.py"),
    ],
)
def test_the_script_that_converts_a_mistral_is_that_of_its_kind(model_dir: Path, params: object, script: str) -> None:
    (model_dir / "config.json").unlink()
    (model_dir / "params.json").write_text(json.dumps(params))
    assert script in refusal(model_dir)


def renamed(change: Callable[[str], str]) -> Change:
    return lambda tensors: {change(name): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (renamed(lambda name: f"language_model.{name}"), "they have the prefix 'language_model.' too many"),
        (renamed(lambda name: f"base_model.model.{name}"), "they have the prefix 'base_model.model.' too many"),
        (renamed(lambda name: name.removeprefix("model.")), "they lack the prefix 'model.'"),
        (
            renamed(lambda name: name.replace("model.", "transformer.", 1)),
            "they have the prefix 'transformer.' instead of 'model.'",
        ),
        (
            renamed(lambda name: name.replace("model.", "model.language_model.", 1)),
            "they have the prefix 'model.language_model.' instead of 'model.'",
        ),
    ],
)
def test_names_that_differ_by_a_prefix_are_told_by_it(model_dir: Path, change: Change, difference: str) -> None:
    save_file(change(load_file(model_dir / WEIGHTS)), model_dir / WEIGHTS)
    message = refusal(model_dir)
    assert "names differ by a prefix: " in message
    assert difference in message
    assert "model.layers.0.input_layernorm.weight is expected" in message


def test_a_single_missing_layer_is_no_difference_of_prefixes(model_dir: Path) -> None:
    tensors = load_file(model_dir / WEIGHTS)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    tensors["other.layers.0.weight"] = torch.ones(1)
    save_file(tensors, model_dir / WEIGHTS)
    assert "prefix" not in refusal(model_dir)


@pytest.mark.parametrize("scale", [None, "weight_scale", "weight_scale_inv"])
def test_fp8_weights_without_a_configuration_are_told(model_dir: Path, scale: str | None) -> None:
    tensors = load_file(model_dir / WEIGHTS)
    for name in [name for name in tensors if "_proj" in name]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        if scale is not None:
            tensors[f"{name.removesuffix('weight')}{scale}"] = torch.ones(1)
    save_file(tensors, model_dir / WEIGHTS)
    assert (
        "weights are stored in FP8 (model.layers.0.mlp.down_proj.weight), but config.json has no quantization_config"
        in (refusal(model_dir))
    )


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_packed", "qweight"])
def test_quantised_weights_without_a_configuration_are_told(model_dir: Path, suffix: str) -> None:
    tensors = load_file(model_dir / WEIGHTS)
    name = f"model.layers.0.mlp.up_proj.{suffix}"
    tensors[name] = torch.ones(4)
    save_file(tensors, model_dir / WEIGHTS)
    assert f"weights are stored quantised ({name}), but config.json has no quantization_config" in refusal(model_dir)


def test_an_adapter_beside_a_base_model_is_named_in_the_log(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    load(model_dir)
    assert caplog.records == []
    (model_dir / "adapter_config.json").write_text("{}")
    (model_dir / "adapter_model.safetensors").write_bytes(b"")
    load(model_dir)
    [record] = caplog.records
    assert "adapter, which is not used" in record.message
    assert vars(record)["files"] == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("architectures", 5, "architectures is 5, not a list of names"),
        ("architectures", "LlamaForCausalLM", "architectures is 'LlamaForCausalLM', not a list of names"),
        ("architectures", [5], r"architectures is \[5\], not a list of names"),
        ("architectures", [["LlamaForCausalLM"]], "architectures is .*, not a list of names"),
        ("architectures", {"LlamaForCausalLM": 1}, "architectures is .*, not a list of names"),
        ("architectures", [], "architectures is missing or empty; supported: DeepseekV2ForCausalLM, "),
        ("architectures", None, "architectures is missing or empty; supported: DeepseekV2ForCausalLM, "),
        ("architectures", ["BertModel"], r"architectures is \['BertModel'\], none of which is supported; supported: "),
        ("num_hidden_layers", "32", "num_hidden_layers is '32', not a whole number"),
        ("num_hidden_layers", [2], r"num_hidden_layers is \[2\], not a whole number"),
        ("hidden_size", None, "hidden_size is null"),
        ("hidden_size", {}, r"hidden_size is \{\}, not a whole number"),
        ("vocab_size", "512", "vocab_size is '512', not a positive integer"),
        ("max_position_embeddings", "many", "max_position_embeddings is 'many', not a whole number"),
        ("max_position_embeddings", None, "max_position_embeddings is null"),
        ("rms_norm_eps", "1e-5", "rms_norm_eps is '1e-5', not a number"),
        ("tie_word_embeddings", "yes", "tie_word_embeddings is 'yes', neither true nor false"),
        ("hidden_act", ["silu"], r"hidden_act \['silu'\] is not supported"),
        ("hidden_act", 1, "hidden_act 1 is not supported"),
        ("rope_scaling", "linear", "rope_scaling is 'linear', not an object"),
        ("rope_scaling", ["linear"], r"rope_scaling is \['linear'\], not an object"),
        ("rope_scaling", {"type": ["yarn"]}, r"rope type \['yarn'\]: .*not supported"),
        ("rope_scaling", {"type": "linear", "factor": [2]}, r"factor is \[2\], not a number"),
        ("rope_scaling", {"type": "yarn", "factor": 2.0, "beta_fast": "32"}, "beta_fast is '32', not a number"),
        ("rope_parameters", 7, "rope_parameters is 7, not an object"),
        ("rope_parameters", {"rope_theta": "1e6"}, "rope_theta is '1e6', not a number"),
        ("rope_theta", {}, "rope_theta is {}, not a number"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor is 0.5, but this architecture rotates whole heads"),
        ("per_layer_config", {"0": {"num_key_value_heads": 1}}, "per_layer_config is .* not supported"),
        ("is_encoder_decoder", True, "is_encoder_decoder is True, which is not supported; supported: False"),
        ("quantization_config", "fp8", "quant_method None is not supported"),
        ("quantization_config", {"quant_method": ["fp8"]}, r"quant_method \['fp8'\] is not supported"),
        ("eos_token_id", "2", "eos_token_id is '2', not a token id"),
    ],
)
def test_a_malformed_configuration_is_refused_by_key_and_value(
    model_dir: Path, key: str, value: object, message: str
) -> None:
    config = {**TINY_CONFIG, key: value}
    if key in ("rope_scaling", "rope_theta", "partial_rotary_factor"):
        del config["rope_parameters"]
    if key == "eos_token_id":
        (model_dir / "generation_config.json").unlink()
    (model_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelDirectoryError, match=rf"config\.json: .*{message}"):
        load(model_dir)


def test_no_value_of_a_wrong_type_is_a_traceback(model_dir: Path) -> None:
    values = [5, -1, 0, 1e400, True, "x", "", [], [5], [[]], {}, {"a": {"b": 1}}, None, 2**70]
    keys = [*TINY_CONFIG, "rope_theta", "rope_scaling", "sliding_window", "layer_types", "quantization_config"]
    for key in keys:
        for value in values:
            (model_dir / "config.json").write_text(json.dumps({**TINY_CONFIG, "num_hidden_layers": 1, key: value}))
            with suppress(ModelDirectoryError):
                load(model_dir)


@pytest.mark.parametrize("text", ["[" * 100_000, "\ufeff{}", "{]", "nul"])
def test_what_is_no_json_is_refused_by_file(model_dir: Path, text: str) -> None:
    (model_dir / "config.json").write_text(text, encoding="utf-8")
    assert refusal(model_dir).startswith(f"{model_dir / 'config.json'}: ")


def test_the_architectures_that_the_launcher_knows_are_those_that_workers_serve() -> None:
    # transformers has one under another name, which is served too; the others are texts that were taken out of a whole.
    others = ["KimiK25ForConditionalGeneration", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"]
    assert sorted(ARCHITECTURES) == sorted([*SMALL_CONFIGS, *others])
    for name in ARCHITECTURES:
        assert callable(loader_for({"architectures": ["Unknown", name]}))
