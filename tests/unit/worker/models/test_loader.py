"""Loading a model directory: what is read, what is refused, and what is reported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.worker.forward.kv_cache import attention_cache
from services.worker.models.loader import LoadedModel, load_model
from services.worker.ops import load_ops
from shared.model_files.model_dir import ModelDirectoryError, model_digest
from tests.support.models.paged_model import PagedModel
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model
from tests.support.models.tiny_llama import TINY_CONFIG, write_tiny_llama

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def load(model_dir: Path, on_progress: Callable[[float], None] = lambda _: None) -> LoadedModel:
    return load_model(model_dir, load_ops("cpu"), torch.float32, on_progress)


def change_weights(model_dir: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(model_dir / WEIGHTS)
    change(tensors)
    save_file(tensors, model_dir / WEIGHTS)


def change_config(model_dir: Path, **changes: object) -> None:
    config = {**TINY_CONFIG, **changes}
    (model_dir / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def split_into_shards(model_dir: Path, count: int = 3) -> None:
    tensors = load_file(model_dir / WEIGHTS)
    names = [f"model-{shard}.safetensors" for shard in range(count)]
    weight_map = {name: names[index % count] for index, name in enumerate(tensors)}
    for shard in names:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, model_dir / shard)
    (model_dir / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (model_dir / WEIGHTS).unlink()


def logits_of(loaded: LoadedModel) -> Tensor:
    paged = PagedModel(loaded.model, load_ops("cpu"), num_blocks=8)
    return paged.prefill_all(paged.add([5, 9, 300]))


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path)


def test_the_facts_match_the_directory(model_dir: Path) -> None:
    loaded = load(model_dir)
    assert (loaded.facts.context_length, loaded.facts.logits_width) == (512, 512)
    assert loaded.facts.eos_token_ids == (2,)
    assert loaded.facts.model_digest == model_digest(model_dir)
    assert loaded.model.kv_cache_spec.layers == (attention_cache(2, 16, torch.float32),) * 4
    assert loaded.model.dtype == torch.float32


def test_progress_rises_to_one(model_dir: Path) -> None:
    shares: list[float] = []
    load(model_dir, shares.append)
    assert shares == sorted(shares)
    assert (shares[0] > 0, shares[-1]) == (True, 1.0)


def test_shards_give_the_same_model_as_one_file(model_dir: Path) -> None:
    whole = load(model_dir)
    split_into_shards(model_dir)
    sharded = load(model_dir)
    assert sharded.weights_digest == whole.weights_digest
    assert torch.equal(logits_of(sharded), logits_of(whole))


def test_one_changed_bit_changes_the_digest(model_dir: Path) -> None:
    loaded = load(model_dir)
    before = loaded.weights_digest
    assert loaded.facts.weights_digest == before
    path = model_dir / WEIGHTS
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert load(model_dir).weights_digest != before


def test_the_model_outlives_its_files(model_dir: Path) -> None:
    loaded = load(model_dir)
    before = logits_of(loaded)
    (model_dir / WEIGHTS).write_bytes(bytes((model_dir / WEIGHTS).stat().st_size))
    assert torch.equal(logits_of(loaded), before)


def test_a_model_can_run_in_another_dtype_than_its_files(model_dir: Path) -> None:
    loaded = load_model(model_dir, load_ops("cpu"), torch.bfloat16, lambda _: None)
    assert loaded.model.dtype == torch.bfloat16
    logits = logits_of(loaded)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, logits_of(load(model_dir)), atol=0.5, rtol=0.1)


def test_unneeded_tensors_are_ignored(model_dir: Path) -> None:
    expected = logits_of(load(model_dir))

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change_weights(model_dir, add)
    assert torch.equal(logits_of(load(model_dir)), expected)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_tensors_without_values_are_not_reported_as_unexpected(tmp_path: Path) -> None:
    values = {**SMALL_CONFIGS["DeepseekV3ForCausalLM"]["plain"], "n_shared_experts": 0}
    model = build_model("DeepseekV3ForCausalLM", values)
    write_small_model(model, tmp_path)
    empty = [name for name, tensor in model.state_dict().items() if not tensor.numel()]
    assert any("shared_experts" in name for name in empty)
    prompt = torch.tensor([[5, 9, 300]])
    with torch.no_grad():
        expected = model(prompt).logits[0]
    torch.testing.assert_close(logits_of(load(tmp_path)), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.2.mlp.up_proj.weight"), "missing: model.layers.2.mlp.up_proj.weight$"),
        (lambda t: t.update({"model.norm.weight": torch.ones(65)}), r"has shape \[65\], not \[64\]$"),
        (lambda t: t.update({"model.extra.weight": torch.ones(3)}), "unexpected .*: model.extra.weight$"),
        (lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int64)}), "has dtype I64, not F32 or F16"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}), "unexpected .*q_proj.bias$"),
        (lambda t: t["model.norm.weight"].fill_(float("nan")), "not finite: model.norm.weight$"),
        (
            lambda t: t["model.layers.1.mlp.up_proj.weight"][3, 5].fill_(float("inf")),
            "not finite: model.layers.1.mlp.up",
        ),
    ],
)
def test_weights_that_do_not_match_the_configuration_are_refused(
    model_dir: Path, change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    change_weights(model_dir, change)
    with pytest.raises(ModelDirectoryError, match=message):
        load(model_dir)


def test_one_error_lists_all_problems(model_dir: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for layer in range(4):
            tensors.pop(f"model.layers.{layer}.mlp.up_proj.weight")
        tensors["model.layers.1.self_attn.k_proj.weight"] = torch.ones(64, 32)
        tensors["model.layers.3.input_layernorm.weight"] = torch.ones(64, dtype=torch.float64)
        tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
        for head in range(20):
            tensors[f"medusa{head}.weight"] = torch.ones(1)

    change_weights(model_dir, change)
    with pytest.raises(ModelDirectoryError) as error_info:
        load(model_dir)
    problems = str(error_info.value).removeprefix(f"{model_dir}: weights and configuration do not match: ").split("; ")
    assert problems == [
        "missing: model.layers.0.mlp.up_proj.weight and 3 more like model.layers.*.mlp.up_proj.weight",
        "wrong shape: model.layers.1.self_attn.k_proj.weight has shape [64, 32], not [32, 64]",
        "wrong dtype: model.layers.3.input_layernorm.weight has dtype F64, not F32 or F16 or BF16, "
        "model.norm.weight has dtype I8, not F32 or F16 or BF16",
        "unexpected for this architecture: medusa0.weight, medusa1.weight, medusa10.weight, medusa11.weight, "
        "medusa12.weight, medusa13.weight, medusa14.weight, medusa15.weight, and 12 more",
    ]


def test_a_configuration_of_a_much_larger_model_is_refused_without_allocating_its_memory(model_dir: Path) -> None:
    change_config(model_dir, intermediate_size=2**40)
    with pytest.raises(ModelDirectoryError, match="too small: all files together have"):
        load(model_dir)
    change_config(model_dir, intermediate_size=2**13)
    with pytest.raises(ModelDirectoryError, match=r"not \[8192, 64\]"):
        load(model_dir)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures is .*MambaForCausalLM.*supported: .*LlamaForCausalLM"),
        ({"architectures": ...}, "architectures is"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"hidden_size": "wide"}, "config.json"),
        ({"num_hidden_layers": 0}, "at least 1"),
        ({"num_attention_heads": 0}, "config.json"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            "'hqq' is not supported; supported: awq, compressed-tensors",
        ),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
    ],
)
def test_a_configuration_that_cannot_be_run_is_refused(
    model_dir: Path, changes: dict[str, object], message: str
) -> None:
    change_config(model_dir, **changes)
    with pytest.raises(ModelDirectoryError, match=message):
        load(model_dir)


def test_an_eos_token_outside_the_vocabulary_is_refused_before_the_weights_are_read(model_dir: Path) -> None:
    (model_dir / "generation_config.json").write_text('{"eos_token_id": [2, 512]}')
    (model_dir / WEIGHTS).unlink()
    with pytest.raises(ModelDirectoryError, match=r"generation_config\.json: eos_token_id is \[2, 512\].* 512 tokens"):
        load(model_dir)


def test_older_names_of_rope_parameters_are_read(model_dir: Path) -> None:
    expected = logits_of(load(model_dir))
    change_config(model_dir, rope_parameters=..., rope_theta=10000.0, rope_scaling=None)
    assert torch.equal(logits_of(load(model_dir)), expected)
    change_config(model_dir, rope_parameters=..., rope_theta=10000.0, rope_scaling={"type": "linear", "factor": 2.0})
    assert not torch.equal(logits_of(load(model_dir)), expected)


def test_a_truncated_file_is_refused(model_dir: Path) -> None:
    path = model_dir / WEIGHTS
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ModelDirectoryError, match=WEIGHTS):
        load(model_dir)


def test_a_truncated_shard_is_refused(model_dir: Path) -> None:
    split_into_shards(model_dir)
    path = model_dir / "model-2.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelDirectoryError, match=path.name):
        load(model_dir)


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b'\x08\0\0\0\0\0\0\0{"a": {}'])
def test_a_file_that_is_not_safetensors_is_refused(model_dir: Path, content: bytes) -> None:
    (model_dir / WEIGHTS).write_bytes(content)
    with pytest.raises(ModelDirectoryError, match=WEIGHTS):
        load(model_dir)


@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "tokenizer.json"])
def test_a_missing_file_is_refused(model_dir: Path, name: str) -> None:
    (model_dir / name).unlink()
    with pytest.raises(ModelDirectoryError, match=name):
        load(model_dir)


def test_an_index_that_lists_a_tensor_that_no_file_has_is_refused(model_dir: Path) -> None:
    split_into_shards(model_dir)
    index = json.loads((model_dir / INDEX).read_text())
    index["weight_map"]["model.ghost.weight"] = "model-0.safetensors"
    (model_dir / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelDirectoryError, match=r"disagree about tensor model\.ghost\.weight"):
        load(model_dir)


def test_a_tensor_in_two_files_is_refused(model_dir: Path) -> None:
    split_into_shards(model_dir)
    tensors = load_file(model_dir / "model-0.safetensors")
    other = load_file(model_dir / "model-1.safetensors")
    name = next(iter(tensors))
    save_file({**other, name: tensors[name]}, model_dir / "model-1.safetensors")
    with pytest.raises(ModelDirectoryError, match="is also in another file"):
        load(model_dir)


def test_a_missing_shard_is_refused_by_name(model_dir: Path) -> None:
    split_into_shards(model_dir)
    (model_dir / "model-1.safetensors").unlink()
    with pytest.raises(ModelDirectoryError, match=r"files are missing: model-1\.safetensors$"):
        load(model_dir)


@pytest.mark.parametrize("value", [{}, [], None, {"a": "../weights.safetensors"}, {"a": "/etc/weights.safetensors"}])
def test_an_index_without_usable_file_names_is_refused(model_dir: Path, value: object) -> None:
    (model_dir / INDEX).write_text(json.dumps({"weight_map": value}))
    with pytest.raises(ModelDirectoryError, match=INDEX):
        load(model_dir)
