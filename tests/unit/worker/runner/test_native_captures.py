"""Decode steps of the `native` backend, captured and eager: the same bits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.config import WorkerSettings
from services.worker.layout import RankLayout
from services.worker.models.loader import load_model
from services.worker.ops import load_ops
from services.worker.runner.cache_memory import KvCacheSize
from services.worker.runner.graphs.graph_runner import GraphSettings
from services.worker.runner.model_runner import Execution, ModelRunner
from services.worker.runner.start.build import build_model_runner
from shared.request.sampling_params import SamplingOptions
from shared.step.step import Step
from tests.support.models.parity import make_prompts
from tests.support.models.small_models import build_small_model, write_small_model
from tests.support.worker.worker_steps import decode_step, make_enter, mixed_step, prefill_step

BLOCK_SIZE, BLOCKS_PER_ROW = 16, 8
PROMPTS = make_prompts([5, 60, 1, 33])
ALL_SIZES = list(range(1, 9))


def build(model_dir: Path, **flags: Any) -> ModelRunner:
    settings = WorkerSettings(model_dir=model_dir, ops_backend="native", kv_cache_num_blocks=64, num_threads=2, **flags)
    runner = build_model_runner(settings, lambda _: None)
    runner.attach(block_size=BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=256)
    return runner


def steps() -> list[Step]:
    """Decodes of one to four rows whose contexts grow over blocks and windows, some of them beside a prefill."""
    enters = [
        make_enter(
            row,
            prompt,
            range(row * BLOCKS_PER_ROW, (row + 1) * BLOCKS_PER_ROW),
            temperature=row % 2,
            seed=row,
            options=SamplingOptions(min_p=0.05) if row == 1 else None,
        )
        for row, prompt in enumerate(PROMPTS)
    ]
    return [
        prefill_step(*enters[:2]),
        *[decode_step()] * 20,
        mixed_step(enters[2]),
        *[decode_step(rows=[2, 0])] * 3,
        prefill_step(enters[3]),
        *[decode_step()] * 20,
        *[decode_step(leave=[1])],
        *[decode_step()] * 5,
    ]


def tokens_of(runner: ModelRunner) -> list[list[int]]:
    return [runner.run_step(step).token_ids.tolist() for step in steps()]


def write_model(tmp_path: Path, architecture: str, variant: str) -> Path:
    return write_small_model(build_small_model(architecture, variant), tmp_path)


@pytest.mark.parametrize(
    ("architecture", "variant"),
    [
        ("LlamaForCausalLM", "biases"),
        ("LlamaForCausalLM", "dynamic-rope"),
        ("MistralForCausalLM", "window-across-blocks"),
        ("Qwen2ForCausalLM", "layer-types"),
        ("Qwen3ForCausalLM", "windows-in-later-layers"),
        ("Gemma3ForCausalLM", "published-pattern"),
        ("Qwen3_5ForConditionalGeneration", "plain"),
    ],
)
@pytest.mark.parametrize(
    "flags", [{"quantization": "none"}, {"quantization": "int8", "kv_cache_dtype": "int8"}], ids=["floats", "int8"]
)
def test_captured_steps_give_the_tokens_of_eager_ones(
    tmp_path: Path, architecture: str, variant: str, flags: dict[str, Any]
) -> None:
    model_dir = write_model(tmp_path, architecture, variant)
    eager, captured = build(model_dir, enforce_eager=True, **flags), build(model_dir, **flags)
    assert (eager.graph_batch_sizes, captured.graph_batch_sizes) == ((), tuple(ALL_SIZES))
    expected = tokens_of(eager)
    assert tokens_of(captured) == expected
    # Another epoch, with the captures of the one before.
    captured.attach(block_size=BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=128)
    assert tokens_of(captured) == expected
    # Other blocks, and other captures.
    captured.attach(block_size=BLOCK_SIZE * 2, max_num_seqs=4, max_num_batched_tokens=256)
    assert captured.graph_batch_sizes == (1, 2, 3, 4)
    eager.attach(block_size=BLOCK_SIZE * 2, max_num_seqs=4, max_num_batched_tokens=256)
    assert tokens_of(captured) == tokens_of(eager)


@pytest.mark.parametrize("sizes", [(3,), (2, 8)])
def test_batches_are_padded_to_the_sizes_that_are_asked_for(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    model_dir = write_model(tmp_path, "LlamaForCausalLM", "plain")
    flags: dict[str, Any] = {"quantization": "none"}
    captured = build(model_dir, graph_batch_sizes=sizes, **flags)
    assert captured.graph_batch_sizes == sizes
    assert tokens_of(captured) == tokens_of(build(model_dir, enforce_eager=True, **flags))


def test_ranks_that_exchange_tensors_run_eagerly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model_dir, ops = write_model(tmp_path, "LlamaForCausalLM", "plain"), load_ops("native")
    loaded = load_model(model_dir, ops, torch.float32, lambda _: None)
    capture = ops.make_capture(loaded.device, loaded.model.kv_cache_spec.layers)
    assert capture is not None
    execution, size = Execution(GraphSettings(capture, (8,))), KvCacheSize(0, 64)
    for layout in (RankLayout(tp_size=2), RankLayout(dp_size=2, has_expert_parallel=True)):
        runner = ModelRunner(loaded, ops, size, layout=layout, execution=execution)
        with caplog.at_level(logging.INFO):
            runner.attach(block_size=BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=256)
        assert runner.graph_batch_sizes == ()
    reasons = [vars(record)["reason"] for record in caplog.records if record.message == "decode steps are not captured"]
    assert reasons == ["ranks exchange tensors"] * 2


def test_a_model_with_experts_runs_eagerly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model_dir = write_model(tmp_path, "MixtralForCausalLM", "window")
    with caplog.at_level(logging.INFO):
        runner = build(model_dir)
    assert runner.graph_batch_sizes == ()
    reasons = [vars(record)["reason"] for record in caplog.records if record.message == "decode steps are not captured"]
    assert len(reasons) == 1
    assert "torch computes aten" in reasons[0]
    expected = tokens_of(build(model_dir, enforce_eager=True))
    assert tokens_of(runner) == expected
