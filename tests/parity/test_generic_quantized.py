"""Quantised checkpoints of families that run transformers' code: the readers are those of all other families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from services.worker.layout import RankLayout
from services.worker.models.loader import LoadOptions, load_model
from services.worker.ops import Ops, load_ops
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.parallel.communicator import SINGLE, Parallel
from shared.model_files.model_dir import CONFIG, ModelDirectoryError
from tests.support.models.generic_configs import GENERIC_CONFIGS
from tests.support.models.packing_ops import PackingOps
from tests.support.models.paged_model import PagedModel
from tests.support.models.published_formats import PUBLISHED
from tests.support.models.quantized_checkpoints import SCHEMES, Scheme, write_quantized
from tests.support.models.small_models import build_model, write_small_model
from tests.support.pairwise import some_of
from tests.support.ranks.thread_ranks import run_ranks

PROMPT = [5, 9, 100, 4, 77, 31, 31, 8]
# Joined projections; norms over all heads; experts one by one, under the names of two publishers, beside shared ones.
ARCHITECTURES = ("Phi3ForCausalLM", "Olmo2ForCausalLM", "Qwen2MoeForCausalLM", "MiniMaxM2ForCausalLM")
NAMES = (
    "fp8, blocks",
    "fp8, channels",
    "compressed fp8, channels",
    "compressed fp8, tensor",
    "compressed int8, W8A8",
    "compressed int4, groups",
    "awq",
    "gptq",
    "gptq, activation order",
)


def scheme_of(name: str) -> Scheme:
    return SCHEMES[name] if name in SCHEMES else PUBLISHED[name]


def write(directory: Path, architecture: str, name: str) -> tuple[Path, Path]:
    """A quantised checkpoint, and a plain one with its values."""
    model = build_model(architecture, GENERIC_CONFIGS[architecture])
    return write_quantized(write_small_model(model, directory / "plain"), directory, scheme_of(name))


def our_logits(model_dir: Path, ops: Ops, parallel: Parallel = SINGLE) -> Tensor:
    loaded = load_model(model_dir, ops, torch.float32, lambda _: None, parallel=parallel)
    assert loaded.model.implementation == "transformers"
    paged = PagedModel(loaded.model, ops, num_blocks=8)
    return paged.prefill_all(paged.add(PROMPT))


@torch.no_grad()
def their_logits(model_dir: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, experts_implementation="eager")
    logits: Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits


# One of each method, and of each architecture.
FAST = [
    ("MiniMaxM2ForCausalLM", "fp8, blocks", True),
    ("Olmo2ForCausalLM", "awq", True),
    ("Phi3ForCausalLM", "gptq", False),
    ("Qwen2MoeForCausalLM", "compressed int4, groups", True),
]


@some_of(FAST, architecture=ARCHITECTURES, name=NAMES, is_packed=(True, False))
def test_a_quantised_checkpoint_computes_what_its_values_do(
    tmp_path: Path, architecture: str, name: str, is_packed: bool
) -> None:
    quantized, values = write(tmp_path, architecture, name)
    ops = PackingOps() if is_packed else load_ops("cpu")
    expected = their_logits(values)
    torch.testing.assert_close(our_logits(quantized, ops), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    if isinstance(ops, PackingOps):
        assert set(ops.counts) > {None}, "matrices stay in their format"


@pytest.mark.parametrize("architecture", ["Phi3ForCausalLM", "Qwen2MoeForCausalLM"])
def test_a_rank_reads_its_part_of_what_is_quantised(tmp_path: Path, architecture: str) -> None:
    quantized, values = write(tmp_path, architecture, "compressed int4, groups")
    layouts = [RankLayout(tp_rank=rank, tp_size=2) for rank in range(2)]
    ours = run_ranks(layouts, lambda parallel: our_logits(quantized, PackingOps(), parallel), is_exact=False)
    assert torch.equal(*ours)
    expected = their_logits(values)
    torch.testing.assert_close(ours[0], expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def refusal_of(model_dir: Path, **options: Any) -> str:
    with pytest.raises(ModelDirectoryError) as error:
        load_model(model_dir, load_ops("cpu"), torch.float32, lambda _: None, options=LoadOptions(**options))
    return str(error.value)


def test_a_checkpoint_that_is_quantised_is_not_quantised_again(tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, "Phi3ForCausalLM", "gptq")
    ops, options = PackingOps(), LoadOptions(quantization=MatrixFormat.INT8)
    loaded = load_model(quantized, ops, torch.float32, lambda _: None, options=options)
    assert loaded.packed_formats == {MatrixFormat.INT4}


def test_a_method_that_nobody_reads_is_named(tmp_path: Path) -> None:
    model = build_model("Phi3ForCausalLM", GENERIC_CONFIGS["Phi3ForCausalLM"])
    directory = write_small_model(model, tmp_path)
    config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    for method, reason in (
        ("gguf", "GGUF's blocks are not read for transformers' code"),
        ("bitsandbytes", "quant_method 'bitsandbytes' is not supported"),
    ):
        config["quantization_config"] = {"quant_method": method}
        (directory / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        assert reason in refusal_of(directory)
        assert reason in refusal_of(directory, implementation="transformers")
