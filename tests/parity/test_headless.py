"""Base classes, served for vectors: every family's hidden states after the last norm are transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.worker.models.loader import LoadOptions, load_model
from services.worker.ops import load_ops
from tests.support.models.paged_model import PagedModel
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.small_models import build_small_model, write_small_model
from tests.support.tokenizer.embedders import make_base_class
from tests.support.worker.worker_runner import WrappedModel

PROMPT = [5, 9, 2, 44, 17, 60, 33, 21]
# The most common variant of each family that has a base class of its own name.
VARIANTS = [(name, next(iter(variants))) for name, variants in SMALL_CONFIGS.items() if name.endswith("ForCausalLM")]


class Bare(WrappedModel):
    """Shows its hidden states as logits."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "variant"), VARIANTS)
def test_a_base_class_has_the_hidden_states_of_transformers(architecture: str, variant: str, tmp_path: Path) -> None:
    theirs = build_small_model(architecture, variant)
    write_small_model(theirs, tmp_path / "model")
    make_base_class(tmp_path / "model")
    ops = load_ops("reference")
    options = LoadOptions(task="embed")
    loaded = load_model(tmp_path / "model", ops, torch.float32, lambda _: None, options=options)
    paged = PagedModel(Bare(loaded.model), ops)
    with torch.inference_mode():
        expected = theirs.model(torch.tensor([PROMPT])).last_hidden_state[0]
    torch.testing.assert_close(paged.prefill_all(paged.add(PROMPT)), expected, atol=1e-4, rtol=0)
