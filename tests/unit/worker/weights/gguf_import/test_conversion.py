"""What is imported for each architecture in GGUF files, and what is refused rather than lost."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from services.worker.models.loader import load_model
from services.worker.ops import load_ops
from services.worker.ops.block_types import BLOCK_TYPES
from services.worker.ops.matrices import IntMatrix
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.weights.checkpoint import CheckpointWeights
from services.worker.weights.gguf_import.conversion import UnimportableError, convert
from services.worker.weights.model_weights import WeightFormats
from services.worker.weights.quantization.config import QuantizationConfig
from services.worker.weights.weight_files import WeightFiles
from shared.model_files.model_dir import ModelDirectoryError
from tests.support.models.gguf_files import CONFIG, write_gguf
from tests.support.models.paged_model import PagedModel

# Those that `write_gguf` writes; `tests/parity/test_gguf.py` has all.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
INTEGERS = [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1]
BLOCKS = [Kind[name] for name in BLOCK_TYPES]
# Rows of whole blocks of 256.
WIDE = {**CONFIG, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
by_architecture = pytest.mark.parametrize(
    ("architecture", "kind"),
    [("llama", kind) for kind in (Kind.F32, Kind.F16, Kind.BF16, *BLOCKS)]
    + [(architecture, Kind.Q8_0) for architecture in ARCHITECTURES if architecture != "llama"],
    ids=lambda value: getattr(value, "name", value),
)


@by_architecture
def test_weights_are_the_values_in_the_file(tmp_path: Path, architecture: str, kind: Kind) -> None:
    expected = write_gguf(tmp_path / "tiny.gguf", architecture, config=WIDE, kind=kind)
    convert(tmp_path / "tiny.gguf", tmp_path / "model", keeps_formats=False)
    actual = load_file(tmp_path / "model" / "model.safetensors")
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    # Rows of a rotated head are reordered, which does not affect blocks within a row.
    assert not different


@by_architecture
def test_blocks_that_are_kept_have_the_same_bits(tmp_path: Path, architecture: str, kind: Kind) -> None:
    expected = write_gguf(tmp_path / "tiny.gguf", architecture, config=WIDE, kind=kind)
    convert(tmp_path / "tiny.gguf", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    with WeightFiles(tmp_path / "model") as files:
        matrices = [name.removesuffix(".weight") for name, values in expected.items() if values.dim() == 2]
        stored = {files.header(f"{name}{'.blocks' if kind in BLOCKS else '.weight'}") for name in matrices}
        dtype = "U8" if kind in BLOCKS else kind.name
        assert {header and header.dtype for header in stored} == {dtype}
        weights = CheckpointWeights(files, torch.float32, QuantizationConfig.from_json(config))
        for name, values in expected.items():
            if values.dim() == 2:
                rows, columns = values.shape
                layer = name.removesuffix(".weight")
                assert torch.equal(weights.dense(layer, (rows, columns)), values)
                part = weights.dense(layer, (rows, columns), rows=slice(1, rows), columns=slice(5, columns - 3))
                assert torch.equal(part, values[1:, 5 : columns - 3])
            else:
                weights.read(name, tuple(values.shape))
        weights.check_complete()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_imported_model_computes_the_same_as_transformers(tmp_path: Path, architecture: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", architecture, kind=Kind.Q8_0)
    convert(tmp_path / "tiny.gguf", tmp_path / "model")
    convert(tmp_path / "tiny.gguf", tmp_path / "dequantized", keeps_formats=False)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["architectures"] == [ARCHITECTURES[architecture]]
    assert (config["head_dim"], config["rms_norm_eps"]) == (CONFIG["head_dim"], 1e-5)
    assert config["rope_parameters"]["rope_theta"] == 100000.0
    ops = load_ops("cpu")
    paged = PagedModel(load_model(tmp_path / "model", ops, torch.float32, lambda _: None).model, ops, num_blocks=8)
    prompt = [5, 9, 300, 4, 77, 12]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "dequantized", dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(paged.prefill_all(paged.add(prompt)), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("keeps_formats", [True, False])
def test_no_tensor_is_in_memory_as_a_whole(tmp_path: Path, keeps_formats: bool) -> None:
    config = {**CONFIG, "intermediate_size": 1 << 16, "num_hidden_layers": 1}
    write_gguf(tmp_path / "wide.gguf", "llama", config=config, kind=Kind.F16)
    tensor_bytes = 2 * config["intermediate_size"] * config["hidden_size"]
    tracemalloc.start()
    try:
        convert(tmp_path / "wide.gguf", tmp_path / "model", keeps_formats=keeps_formats)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < tensor_bytes / 2


def test_qwens_tokenizer_splits_digits_words_and_marks(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "qwen2")
    convert(tmp_path / "tiny.gguf", tmp_path / "model")
    split = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json")).pre_tokenizer
    assert [text for text, _ in split.pre_tokenize_str("It's 2024: x  y")] == [
        *("It", "'s", "Ġ", "2", "0", "2", "4", ":", "Ġx", "Ġ", "Ġy")
    ]


@pytest.mark.parametrize(
    ("architecture", "more", "message"),
    [
        ("llama", {"rope.scaling.type": "longrope"}, r"rope\.scaling\.type 'longrope', .*; supported: linear, yarn$"),
        ("llama", {"rope.scaling.type": "yarn"}, r"lacks rope\.scaling\.factor$"),
        ("llama", {"rope_freqs.weight": torch.full((16,), 2.5)}, "rope_freqs.weight that are not Llama 3's"),
        ("llama", {"attention.sliding_window": 4096}, r"a newer one may: attention\.sliding_window = 4096$"),
        ("llama", {"expert_count": 8}, "lacks expert_used_count$"),
        ("llama", {"final_logit_softcapping": 30.0}, r"a newer one may: final_logit_softcapping = 30\.0$"),
        (
            "qwen3",
            {"rope.dimension_count": 16},
            r"rope\.dimension_count 16, but only whole heads, of 32, are supported$",
        ),
        ("llama", {"blk.0.attn_q.bias": torch.ones(128)}, r"unexpected tensors: blk\.0\.attn_q\.bias$"),
        ("qwen3moe", {"blk.0.ffn_up_shexp.weight": torch.ones(32, 64)}, "unexpected tensors: blk.0.ffn_up_shexp"),
    ],
)
def test_unsupported_metadata_and_tensors_are_refused_by_name(
    tmp_path: Path, architecture: str, more: dict[str, Any], message: str
) -> None:
    write_gguf(tmp_path / "tiny.gguf", architecture, more=more)
    with pytest.raises(UnimportableError, match=message):
        convert(tmp_path / "tiny.gguf", tmp_path / "model")


def test_a_model_in_parts_is_that_of_one_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "qwen3")
    write_gguf(tmp_path / "tiny.gguf", "qwen3", tensors_per_file=8)
    parts = sorted(path.name for path in tmp_path.glob("tiny-*.gguf"))
    assert parts == ["tiny-00001-of-00003.gguf", "tiny-00002-of-00003.gguf", "tiny-00003-of-00003.gguf"]
    assert convert(tmp_path / parts[0], tmp_path / "parts") == convert(tmp_path / "tiny.gguf", tmp_path / "one")
    with pytest.raises(UnimportableError, match=r"it is part 2 of 3: give the first, tiny-00001-of-00003\.gguf$"):
        convert(tmp_path / parts[1], tmp_path / "model")
    (tmp_path / parts[0]).rename(tmp_path / "other.gguf")
    with pytest.raises(UnimportableError, match=r"first of 3 parts, .* called like other-00001-of-00003\.gguf$"):
        convert(tmp_path / "other.gguf", tmp_path / "model")
    (tmp_path / "other.gguf").rename(tmp_path / parts[0])
    (tmp_path / parts[1]).rename(tmp_path / parts[2])
    with pytest.raises(UnimportableError, match=r"parts are missing beside it: tiny-00002-of-00003\.gguf$"):
        convert(tmp_path / parts[0], tmp_path / "model")
    (tmp_path / parts[1]).write_bytes((tmp_path / parts[2]).read_bytes())
    with pytest.raises(UnimportableError, match=r"tiny-00003-of-00003\.gguf has split\.no 1 .*, as no such part$"):
        convert(tmp_path / parts[0], tmp_path / "model")


def test_an_unknown_architecture_is_refused_with_a_list_of_the_supported_ones(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "mamba")
    with pytest.raises(
        UnimportableError,
        match=r"'mamba', which .*; supported: deepseek2, .*, qwen2, .*, qwen3vlmoe; .* alone$",
    ):
        convert(tmp_path / "tiny.gguf", tmp_path / "model")


def test_a_file_without_a_required_size_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_block_count(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnimportableError, match="lacks context_length, embedding_length"):
        convert(tmp_path / "tiny.gguf", tmp_path / "model")


def test_tensors_that_do_not_have_the_configured_sizes_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "qwen3", more={"output.weight": torch.ones(7, 64)})
    with pytest.raises(UnimportableError, match=r"has output.weight of shape \[7, 64\], not \[420, 64\]"):
        convert(tmp_path / "tiny.gguf", tmp_path / "model")


@pytest.mark.parametrize(
    ("blocks", "problem"),
    [
        (torch.zeros(4, 2, 18, dtype=torch.uint8), r"has shape \[4, 2, 18\], not \[4, 2, 34\]"),
        (torch.zeros(4, 1, 34, dtype=torch.uint8), r"has shape \[4, 1, 34\], not \[4, 2, 34\]"),
        (torch.zeros(4, 2, 34, dtype=torch.int8), "has dtype I8, not U8"),
        (torch.full((4, 2, 34), 0x7E, dtype=torch.uint8), "not finite"),
    ],
)
def test_malformed_blocks_are_refused(tmp_path: Path, blocks: Tensor, problem: str) -> None:
    save_file({"a_proj.blocks": blocks}, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "gguf", "layers": {"Q8_0": ["a_proj"]}}}
    with WeightFiles(tmp_path) as files:
        weights = CheckpointWeights(files, torch.float32, QuantizationConfig.from_json(config))
        weights.linear("a_proj", (4, 64))
        with pytest.raises(ModelDirectoryError, match=problem):
            weights.check_complete()


@pytest.mark.parametrize("kind", INTEGERS, ids=lambda kind: kind.name)
def test_a_backend_with_kernels_gets_the_codes_of_whole_blocks(tmp_path: Path, kind: Kind) -> None:
    expected = write_gguf(tmp_path / "tiny.gguf", "llama", kind=kind)
    convert(tmp_path / "tiny.gguf", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    layer = "model.layers.0.mlp.down_proj"
    values = expected[f"{layer}.weight"]
    rows, columns = values.shape
    formats = WeightFormats(kept=frozenset(MatrixFormat))
    with WeightFiles(tmp_path / "model") as files:
        weights = CheckpointWeights(files, torch.float32, QuantizationConfig.from_json(config), formats=formats)
        whole = weights.linear(layer, (rows, columns))
        part = weights.linear(layer, (rows, columns), rows=slice(3, 20), columns=slice(32, 64))
        for matrix, part_values in ((whole, values), (part, values[3:20, 32:64])):
            assert isinstance(matrix, IntMatrix)
            assert (matrix.num_bits, matrix.group_size) == (8 if kind is Kind.Q8_0 else 4, 32)
            # An offset is a rounded sum, of at most 8 times the scale.
            torch.testing.assert_close(matrix.to_dense(torch.float32), part_values, rtol=1e-6, atol=1e-6)
        # Parts that cut a block, as of a rank, are dequantised.
        cut = weights.linear(layer, (rows, columns), columns=slice(16, 48))
        assert isinstance(cut, Tensor)
        assert torch.equal(cut, values[:, 16:48])
