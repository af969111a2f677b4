"""Ranks with experts spread over them, here threads, run decode steps from graphs: the tokens of eager steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.worker.layout import RankLayout
from services.worker.models.loader import LoadOptions, load_model
from services.worker.ops import load_ops
from services.worker.parallel.communicator import Parallel
from services.worker.runner.cache_memory import KvCacheSize
from services.worker.runner.graphs.graph_runner import GraphSettings
from services.worker.runner.model_runner import Execution, ModelRunner
from shared.step.step import Step
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.ranks.spread_experts import ep_layouts
from tests.support.ranks.thread_ranks import run_ranks
from tests.support.worker.graphs import CountingCapture
from tests.support.worker.worker_steps import decode_step, make_enter, prefill_step

PROMPTS = ([5, 9, 2, 44, 17], [3, 60], [8, 1, 60, 33])
SIZES = (2, 4)

Tokens = list[list[int]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    config = {**SMALL_CONFIGS["MixtralForCausalLM"]["window"], "architectures": ["MixtralForCausalLM"]}
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}), encoding="utf-8")
    return directory


def make_runner(
    model_dir: Path, parallel: Parallel, capture: CountingCapture | None, *, backend: str = "reference"
) -> ModelRunner:
    """A rank of `parallel`, in no epoch yet."""
    ops, options = load_ops(backend), LoadOptions(dummy_seed=1)
    loaded = load_model(model_dir, ops, torch.float32, lambda _: None, options=options, parallel=parallel)
    graphs = None if capture is None else GraphSettings(capture, SIZES)
    size = KvCacheSize(0, num_blocks=32)
    return ModelRunner(loaded, ops, size, layout=parallel.layout, execution=Execution(graphs))


def attach(runner: ModelRunner) -> None:
    runner.attach(block_size=4, max_num_seqs=4, max_num_batched_tokens=64)


def steps(dp_rank: int, *, has_graphs: bool) -> list[Step]:
    """Two sequences on rank 0 and one on rank 1, which is idle in the last step."""
    enters = [make_enter(slot, prompt, range(8 * slot, 8 * slot + 8)) for slot, prompt in enumerate(PROMPTS)]
    prefill = prefill_step(*(enters[:2] if dp_rank == 0 else enters[2:]))
    idle = replace(decode_step(leave=[2]), is_dummy=True)
    rows = [
        (prefill, (7, 4), 0),
        # The size that is captured first is not the one that runs.
        (decode_step(), (2, 1), 2),
        (decode_step(), (2, 1), 4),
        # Eager, as if another rank had too many rows for a graph.
        (decode_step(), (2, 1), 0),
        (decode_step(leave=[1]) if dp_rank == 0 else decode_step(), (1, 1), 2),
        (decode_step() if dp_rank == 0 else idle, (1, 1), 2),
    ]
    return [
        replace(step, num_tokens_across_dp=across, graph_batch_size=size if has_graphs else 0)
        for step, across, size in rows
    ]


def run_steps(runner: ModelRunner, *, has_graphs: bool) -> Tokens:
    dp_rank = runner.layout.dp_rank
    return [runner.run_step(step).token_ids.tolist() for step in steps(dp_rank, has_graphs=has_graphs)]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_coupled_ranks_draw_the_tokens_of_eager_steps(model_dir: Path, tp_size: int) -> None:
    def run(parallel: Parallel) -> tuple[Tokens, Tokens, list[int]]:
        capture = CountingCapture()
        eager, captured = (make_runner(model_dir, parallel, each) for each in (None, capture))
        for runner in (eager, captured):
            attach(runner)
        assert (eager.graph_batch_sizes, captured.graph_batch_sizes) == ((), SIZES)
        return run_steps(eager, has_graphs=False), run_steps(captured, has_graphs=True), capture.replays

    for rank, (expected, tokens, replays) in enumerate(run_ranks(ep_layouts(2, tp_size), run)):
        assert tokens == expected
        assert [len(row) for row in tokens] == ([2, 2, 2, 2, 1, 1] if rank < tp_size else [1, 1, 1, 1, 1, 0])
        # The larger size is captured first.
        assert replays == [1, 3]


def test_on_a_fast_backend_all_ranks_of_a_group_draw_the_same_tokens(model_dir: Path) -> None:
    def run(parallel: Parallel) -> Tokens:
        runner = make_runner(model_dir, parallel, CountingCapture(), backend="cpu")
        attach(runner)
        return run_steps(runner, has_graphs=True)

    tokens = run_ranks(ep_layouts(2, 2), run, is_exact=False)
    assert tokens[0] == tokens[1]
    assert tokens[2] == tokens[3]


def test_an_epoch_that_reaches_only_some_ranks_leaves_no_rank_waiting(model_dir: Path) -> None:
    """A capture computes, collectives included, so a rank must not capture alone."""

    def run(parallel: Parallel) -> tuple[Tokens, Tokens, int]:
        capture = CountingCapture()
        runner = make_runner(model_dir, parallel, capture)
        if parallel.layout.dp_rank == 0:
            attach(runner)
        attach(runner)
        first = run_steps(runner, has_graphs=True)
        # Rank 1 is attached for other limits than those that it had, rank 0 twice.
        if parallel.layout.dp_rank == 1:
            runner.attach(block_size=8, max_num_seqs=2, max_num_batched_tokens=64)
        attach(runner)
        return first, run_steps(runner, has_graphs=True), len(capture.replays)

    for first, second, num_captures in run_ranks(ep_layouts(2, 1), run):
        assert first == second
        assert num_captures == 2 * len(SIZES)


def test_the_ranks_of_one_group_capture_when_an_epoch_begins(model_dir: Path) -> None:
    def run(parallel: Parallel) -> tuple[Tokens, Tokens, list[int]]:
        capture = CountingCapture()
        eager, captured = (make_runner(model_dir, parallel, each) for each in (None, capture))
        enter = make_enter(0, PROMPTS[0], range(8))
        tokens = []
        for runner in (eager, captured):
            attach(runner)
            # An equal epoch keeps the graphs.
            attach(runner)
            outputs = [runner.run_step(step) for step in (prefill_step(enter), decode_step(), decode_step())]
            tokens.append([output.token_ids.tolist() for output in outputs])
        return tokens[0], tokens[1], capture.replays

    layouts = [RankLayout(tp_rank=rank, tp_size=2, has_expert_parallel=True) for rank in range(2)]
    for expected, tokens, replays in run_ranks(layouts, run):
        assert tokens == expected
        # The largest was replayed once, before draws were captured.
        assert replays == [1, 2]
