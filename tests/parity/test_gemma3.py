"""Gemma 3 in bfloat16: what is rounded, and where, decides what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.worker.layers.norm import RmsNorm
from services.worker.layers.shard import Shard
from services.worker.models.gemma3 import Gemma3Model, read_offset_norm
from services.worker.models.loader import load_model
from services.worker.ops import BACKEND_NAMES, load_ops
from services.worker.weights.checkpoint import CheckpointWeights
from services.worker.weights.weight_files import WeightFiles
from tests.support.models.paged_model import PagedModel
from tests.support.models.parity import make_prompts
from tests.support.models.small_models import build_small_model, write_small_model

ARCHITECTURE = "Gemma3ForCausalLM"
[PROMPT] = make_prompts((150,))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in float32, whose norms no bfloat16 holds."""
    return write_small_model(build_small_model(ARCHITECTURE, "plain"), tmp_path_factory.mktemp("gemma3"))


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_embeddings_are_scaled_and_rounded_as_by_transformers(model_dir: Path, backend: str) -> None:
    theirs = build_small_model(ARCHITECTURE, "plain").bfloat16().model.embed_tokens
    model = load_model(model_dir, load_ops(backend), torch.bfloat16, lambda _: None).model
    assert isinstance(model, Gemma3Model)
    token_ids = torch.tensor(PROMPT)
    assert torch.equal(model.embed(token_ids), theirs(token_ids))
    # Nothing has been scaled in the table itself, which is also the head's.
    assert torch.equal(model.embed(token_ids), theirs(token_ids))


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_norms_multiply_by_one_plus_the_weight_as_transformers_does(model_dir: Path, backend: str) -> None:
    theirs = build_small_model(ARCHITECTURE, "plain").bfloat16().model.norm
    ops = load_ops(backend)
    with WeightFiles(model_dir, lambda _: None) as files:
        weight = read_offset_norm(Shard(ops, CheckpointWeights(files, torch.bfloat16)), "model.norm", 96)
    assert torch.equal(weight, 1.0 + theirs.weight.float())
    x = torch.randn(200, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    ours = RmsNorm(ops, weight, theirs.eps)(x)
    torch.testing.assert_close(ours, theirs(x), atol=0, rtol=2**-7)
    # The mean is added up in another order, which hardly ever shows.
    assert (ours != theirs(x)).float().mean() < 0.002


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_logits_in_bfloat16_are_as_near_to_float32_as_those_of_transformers(model_dir: Path, backend: str) -> None:
    exact = logits_of_transformers(torch.float32)
    theirs = (logits_of_transformers(torch.bfloat16) - exact).square().mean().sqrt()
    ops = load_ops(backend)
    paged = PagedModel(load_model(model_dir, ops, torch.bfloat16, lambda _: None).model, ops, num_blocks=64)
    ours = (paged.prefill_all(paged.add(PROMPT)) - exact).square().mean().sqrt()
    assert 0 < ours < 1.1 * theirs


@torch.no_grad()
def logits_of_transformers(dtype: torch.dtype) -> Tensor:
    logits: Tensor = build_small_model(ARCHITECTURE, "plain").to(dtype)(torch.tensor([PROMPT])).logits[0]
    return logits.float()
