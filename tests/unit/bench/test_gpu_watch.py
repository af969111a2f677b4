"""What is counted while steps run."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import triton

from services.worker.layers.moe import Router
from services.worker.models.loader import LoadOptions, load_model
from services.worker.ops import load_ops
from tests.bench.gpu.configs import CONFIGS
from tests.bench.gpu.watch import Choices, watched, watched_choices
from tests.support.models.paged_model import PagedModel


def test_compilations_captures_and_replays_count_within_the_body_only() -> None:
    runtime = triton.knobs.runtime
    before = runtime.jit_post_compile_hook, torch.cuda.CUDAGraph.replay
    with watched() as counts:
        runtime.jit_post_compile_hook(key="", repr="", fn=None, compile={}, is_manual_warmup=False)
        assert counts.num_compiled == 1
    assert (runtime.jit_post_compile_hook, torch.cuda.CUDAGraph.replay) == before
    assert (counts.num_captures, counts.replays_s) == (0, [])


def test_experts_count_that_the_last_tokens_of_prompts_choose() -> None:
    first_step = [torch.tensor([[0, 1], [2, 3], [9, 9], [2, 4]]), torch.tensor([[5, 5], [0, 1], [5, 5], [0, 1]])]
    second_step = [torch.tensor([[9, 9], [3, 5]]), torch.tensor([[5, 5], [0, 1]])]
    # Layer 0: 2, 3, 4 and 5; layer 1: 0 and 1.
    assert Choices([*first_step, *second_step]).num_touched(2, every=2) == 3.0


def test_routers_are_watched(tmp_path: Path) -> None:
    config = CONFIGS["tiny-experts"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    ops, route = load_ops("cpu"), Router.__call__
    loaded = load_model(tmp_path, ops, torch.float32, lambda _: None, options=LoadOptions(dummy_seed=0))
    paged = PagedModel(loaded.model, ops, num_blocks=4)
    with watched_choices() as choices:
        paged.prefill_all(paged.add([1, 2, 3]))
    assert [ids.shape for ids in choices.expert_ids] == [(3, 2), (3, 2)]
    assert Router.__call__ is route
