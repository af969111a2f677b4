"""Value heads of GGUF files of Qwen3.5, which are tiled: their order is kept where another one would cut blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from services.worker.models.loader import load_model
from services.worker.ops import load_ops
from services.worker.weights.gguf_import.conversion import convert
from services.worker.weights.quantization.gguf_blocks import BLOCK_TYPES
from shared.model_files.model_dir import CONFIG, WEIGHTS, ModelDirectoryError
from tests.support.models.generation import Way, generate
from tests.support.models.gguf_export import export_gguf
from tests.support.models.parity import LOGIT_TOLERANCE, TransformersModel, load_paged, make_prompts, wrong_rows
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model
from tests.support.ranks.rank_pool import RankPool

DENSE, SPARSE = "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"
WIDTH, HIDDEN = 128, 256
PROMPTS = make_prompts((1, 90, 33))
NUM_TOKENS = 6


@dataclass(frozen=True)
class Import:
    """One file, and what became of it."""

    gguf: Path
    packed: Path
    plain: Path
    """All of it in float32, in Hugging Face's order."""
    num_keys: int
    num_values: int

    @property
    def config(self) -> dict[str, Any]:
        return dict(json.loads((self.packed / CONFIG).read_text()))


def make(
    directory: Path, num_keys: int, num_values: int, kind: Kind, *, architecture: str = DENSE, width: int = WIDTH
) -> Import:
    heads = {"linear_num_key_heads": num_keys, "linear_num_value_heads": num_values, "linear_value_head_dim": width}
    variant = next(iter(SMALL_CONFIGS[architecture].values()))
    values = {**variant, "hidden_size": HIDDEN, "head_dim": 64, **heads}
    write_small_model(build_model(architecture, values), directory / "small")
    export_gguf(directory / "small", directory / "small.gguf", attention_kind=kind)
    made = Import(directory / "small.gguf", directory / "packed", directory / "plain", num_keys, num_values)
    convert(made.gguf, made.packed)
    convert(made.gguf, made.plain, keeps_formats=False)
    return made


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Import:
    """A file of Q4_K whose heads are half as wide as a block; two ranks have two key heads each."""
    return make(tmp_path_factory.mktemp("cut"), 4, 12, Kind.Q4_K)


@pytest.fixture(scope="module")
def theirs(cut: Import) -> TransformersModel:
    return TransformersModel(AutoModelForCausalLM.from_pretrained(cut.plain))


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


def is_right(model_dir: Path, theirs: TransformersModel, backend: str = "cpu") -> bool:
    paged = load_paged(model_dir, backend)
    return all(wrong_rows(paged.prefill_all(paged.add(prompt)), theirs, prompt) == [] for prompt in PROMPTS)


@pytest.mark.parametrize(
    ("heads", "kind", "architecture", "width", "is_tiled"),
    [
        ((2, 2), Kind.Q4_K, DENSE, 128, False),
        ((2, 4), Kind.F16, DENSE, 128, False),
        ((2, 4), Kind.Q8_0, DENSE, 128, False),
        ((2, 4), Kind.Q8_0, DENSE, 16, True),
        ((1, 4), Kind.Q6_K, DENSE, 256, False),
        ((2, 6), Kind.Q5_K, SPARSE, 128, True),
        # No kernel has these blocks: weights become float32, in any order.
        ((2, 4), Kind.TQ2_0, DENSE, 128, False),
    ],
)
def test_the_order_is_kept_only_where_another_one_would_cut_blocks(
    tmp_path: Path, heads: tuple[int, int], kind: Kind, architecture: str, width: int, is_tiled: bool
) -> None:
    made = make(tmp_path, *heads, kind, architecture=architecture, width=width)
    assert made.config.get("linear_value_head_order") == ("tiled" if is_tiled else None)
    num_packed = [tensor.tensor_type for tensor in GGUFReader(made.gguf).tensors].count(kind)
    stored = [tensor.dtype for tensor in load_file(made.packed / WEIGHTS).values()]
    assert stored.count(torch.uint8) == (num_packed if kind.name in BLOCK_TYPES else 0)
    assert num_packed
    assert is_right(made.packed, TransformersModel(AutoModelForCausalLM.from_pretrained(made.plain)))


def test_blocks_stay_packed_and_a_file_as_small_as_it_was(cut: Import, caplog: pytest.LogCaptureFixture) -> None:
    config, stored = cut.config, load_file(cut.packed / WEIGHTS)
    assert config["linear_value_head_order"] == "tiled"
    layers = [layer for layer, kind in enumerate(config["layer_types"]) if kind == "linear_attention"]
    names = {f"model.layers.{layer}.linear_attn.tiled_out_proj" for layer in layers}
    assert names < set(config["quantization_config"]["layers"]["Q4_K"])
    for name in names:
        assert stored[f"{name}.blocks"].shape == (HIDDEN, cut.num_values * WIDTH // 256, 144)
    assert (cut.packed / WEIGHTS).stat().st_size / cut.gguf.stat().st_size < 1.01
    caplog.clear()
    convert(cut.gguf, cut.packed.with_name("again"))
    assert caplog.messages == []


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_tiled_model_says_what_transformers_says(cut: Import, theirs: TransformersModel, backend: str) -> None:
    assert is_right(cut.packed, theirs, backend)


def test_the_native_backend_says_it_of_floats(cut: Import, theirs: TransformersModel, tmp_path: Path) -> None:
    """It rounds the inputs of blocks."""
    config, tensors = cut.config, {}
    for name, tensor in load_file(cut.packed / WEIGHTS).items():
        layer, is_block = name.removesuffix(".blocks"), name.endswith(".blocks")
        tensors[f"{layer}.weight" if is_block else name] = (
            BLOCK_TYPES["Q4_K"].dequantize(tensor) if is_block else tensor
        )
    del config["quantization_config"]
    assert is_right(write_model(tmp_path / "floats", config, tensors, cut.packed), theirs, "native")


def write_model(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor], others: Path) -> Path:
    directory.mkdir()
    save_file(tensors, directory / WEIGHTS)
    (directory / CONFIG).write_text(json.dumps(config))
    for name in ("generation_config.json", "tokenizer.json"):
        (directory / name).write_bytes((others / name).read_bytes())
    return directory


def as_older_releases_wrote(made: Import, directory: Path) -> Path:
    """The import with value heads by key head, and with their projection in float32."""
    config, order = made.config, [number * made.num_keys + key for key, number in heads_of(made)]
    kinds, delta = config["quantization_config"]["layers"], ".linear_attn."
    keys = 2 * made.num_keys * config["linear_key_head_dim"]

    def grouped(rows: Tensor) -> Tensor:
        return rows.view(made.num_values, -1, *rows.shape[1:])[order].flatten(0, 1)

    tensors = {}
    for name, tensor in load_file(made.packed / WEIGHTS).items():
        layer, _, part = name.partition(delta)
        if part.startswith(("in_proj_qkv", "conv1d")):
            tensors[name] = torch.cat([tensor[:keys], grouped(tensor[keys:])])
        elif part.startswith(("in_proj_", "A_log", "dt_bias")):
            tensors[name] = grouped(tensor)
        elif part.startswith("tiled_out_proj"):
            floats = BLOCK_TYPES["Q4_K"].dequantize(tensor)
            tensors[f"{layer}{delta}out_proj.weight"] = grouped(floats.T).T.contiguous()
        else:
            tensors[name] = tensor
    kinds["Q4_K"] = [layer for layer in kinds["Q4_K"] if not layer.endswith("tiled_out_proj")]
    del config["linear_value_head_order"]
    return write_model(directory, config, tensors, made.packed)


def heads_of(made: Import) -> list[tuple[int, int]]:
    """Each value head by key head, and its number there."""
    return [(key, number) for key in range(made.num_keys) for number in range(made.num_values // made.num_keys)]


def test_an_older_import_goes_on_loading_and_is_another_model_to_the_cell(
    cut: Import, theirs: TransformersModel, tmp_path: Path
) -> None:
    older = as_older_releases_wrote(cut, tmp_path / "older")
    assert is_right(older, theirs)
    facts = [
        load_model(directory, load_ops("cpu"), torch.float32, lambda _: None).facts for directory in (older, cut.packed)
    ]
    # States of one are not those of the other, and neither are bits.
    assert facts[0].model_digest != facts[1].model_digest
    assert facts[0].weights_digest != facts[1].weights_digest


@pytest.mark.parametrize("num_keys", [4, 2], ids=["whole blocks", "cut blocks"])
def test_ranks_say_what_one_worker_says(ranks: RankPool, cut: Import, tmp_path: Path, num_keys: int) -> None:
    """A rank's runs of columns have whole blocks; or one head each, half a block, so that its part is in floats."""
    made = cut if num_keys == cut.num_keys else make(tmp_path, num_keys, 6, Kind.Q4_K)
    # A recurrent state makes up to ten times as much of what sums in another order differ by: measured, of the largest
    # logit, 4e-6 in `reference` and 3e-5 in `cpu`.
    for backend, share in (("reference", LOGIT_TOLERANCE / 5), ("cpu", LOGIT_TOLERANCE)):
        results = ranks.generate(made.packed, PROMPTS, NUM_TOKENS, tp_size=2, backend=backend)
        expected = generate(load_paged(made.packed, backend), PROMPTS, NUM_TOKENS, Way())
        assert [result.tokens for result in results] == [[each.completion for each in expected]] * 2
        for logits, alone in zip(results[0].logits, expected, strict=True):
            tolerance = share * float(alone.logits.abs().max())
            torch.testing.assert_close(logits, alone.logits, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "value"), [("Qwen3NextForCausalLM", "tiled"), (DENSE, "spiral"), (SPARSE, 1), (DENSE, ["tiled"])]
)
def test_an_order_that_is_not_computed_is_refused_by_name(tmp_path: Path, architecture: str, value: object) -> None:
    model_dir = write_small_model(build_model(architecture, SMALL_CONFIGS[architecture]["plain"]), tmp_path)
    config = json.loads((model_dir / CONFIG).read_text())
    (config.get("text_config") or config)["linear_value_head_order"] = value
    (model_dir / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ModelDirectoryError, match=r"config\.json: linear_value_head_order"):
        load_model(model_dir, load_ops("cpu"), torch.float32, lambda _: None)
