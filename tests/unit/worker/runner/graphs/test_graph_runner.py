"""Decode steps in static tensors of a captured batch size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typing_extensions import override

from services.worker.drafts.drafter import Drafting
from services.worker.drafts.ngram_drafts import LookupProposer, NgramProposer
from services.worker.models.loader import LoadedModel
from services.worker.ops import load_ops
from services.worker.runner.cache_memory import KvCacheSize
from services.worker.runner.graphs.graph_runner import GraphSettings, needed_sizes
from services.worker.runner.model_runner import Execution, ModelRunner
from shared.request.limits import GRAPH_BATCH_SIZES
from shared.step.columns import Int32Column
from shared.step.step import Step
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.worker.graphs import CountingCapture
from tests.support.worker.worker_runner import GIB, load_exact
from tests.support.worker.worker_steps import decode_step, make_enter, mixed_step, prefill_step

PROMPTS = ([5, 9, 2, 44, 17], [3], [8, 1, 60, 33, 21, 4, 4, 90, 12])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_exact(write_tiny_llama(tmp_path_factory.mktemp("model"), changes={"num_hidden_layers": 2}))


def make_runner(
    loaded: LoadedModel, capture: CountingCapture | None, *sizes: int, drafting: Drafting | None = None
) -> ModelRunner:
    graphs = None if capture is None else GraphSettings(capture, sizes)
    return ModelRunner(
        loaded, load_ops("reference"), KvCacheSize(GIB, 64), drafting=drafting, execution=Execution(graphs)
    )


def attach(runner: ModelRunner, *, block_size: int = 4, max_num_seqs: int = 8) -> ModelRunner:
    runner.attach(block_size=block_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=256)
    return runner


def steps() -> list[Step]:
    """Prefills, decodes of one to three rows, a step that mixes both, and a sequence that leaves."""
    enters = [make_enter(row, prompt, range(row * 8, row * 8 + 8)) for row, prompt in enumerate(PROMPTS)]
    late = make_enter(3, [7, 7, 7], range(24, 32))
    return [
        prefill_step(*enters[:2]),
        decode_step(),
        prefill_step(enters[2]),
        decode_step(),
        decode_step(rows=[2]),
        mixed_step(late),
        decode_step(),
        decode_step(leave=[1]),
        decode_step(),
    ]


def tokens_of(runner: ModelRunner) -> list[list[int]]:
    return [runner.run_step(step).token_ids.tolist() for step in steps()]


@pytest.mark.parametrize("sizes", [(1, 2, 4, 8), (3,), (8,), (1,)])
def test_padded_rows_change_no_token(loaded: LoadedModel, sizes: tuple[int, ...]) -> None:
    capture = CountingCapture()
    expected = tokens_of(attach(make_runner(loaded, None)))
    assert tokens_of(attach(make_runner(loaded, capture, *sizes))) == expected
    num_decodes = {(1, 2, 4, 8): 6, (3,): 5, (8,): 6, (1,): 1}[sizes]
    # A forward pass is replayed before the draws are captured, to see where its result is.
    assert (sum(capture.replays), sum(capture.drawings)) == (1 + num_decodes, num_decodes)


def test_layers_that_share_a_selection_take_that_of_the_replayed_step(tmp_path: Path) -> None:
    values = {**SMALL_CONFIGS["GlmMoeDsaForCausalLM"]["pattern"], "index_topk": 3}
    loaded = load_exact(write_small_model(build_model("GlmMoeDsaForCausalLM", values), tmp_path))
    capture = CountingCapture()
    expected = tokens_of(attach(make_runner(loaded, None)))
    assert tokens_of(attach(make_runner(loaded, capture, 4))) == expected
    assert sum(capture.drawings) == 6


def test_a_padded_row_writes_no_kv(loaded: LoadedModel) -> None:
    capture = CountingCapture()
    runner = attach(make_runner(loaded, capture, 8))
    runner.run_step(prefill_step(make_enter(0, [5, 9, 2], range(8, 16))))
    cache = runner._epochs.kv_cache
    assert cache is not None
    runner.run_step(decode_step())
    written = {int(block) for layer in cache.layers for tensor in layer for block in tensor.flatten(1).any(1).nonzero()}
    assert (capture.replays, capture.drawings) == ([2], [1])
    assert written == {8}


def test_an_equal_attach_keeps_the_graphs(loaded: LoadedModel) -> None:
    capture = CountingCapture()
    runner = attach(make_runner(loaded, capture, 1, 4))
    attach(runner)
    assert len(capture.replays) == 2
    attach(runner, max_num_seqs=2)
    assert len(capture.replays) == 4
    attach(runner, block_size=8, max_num_seqs=2)
    assert len(capture.replays) == 6


class CountingProposer(LookupProposer):
    """Proposes as many tokens as it may, each the one after the last; the tokens are wrong as often as not."""

    @override
    def look_up(self, token_ids: Int32Column, max_tokens: int) -> Int32Column:
        tokens: Int32Column = (token_ids[-1] + 1 + np.arange(max_tokens, dtype=np.int32)) % 100
        return tokens


@pytest.mark.parametrize("block_size", [1, 4])
def test_drafts_at_the_end_of_the_context_are_padded_past_it(loaded: LoadedModel, block_size: int) -> None:
    length = loaded.facts.context_length
    prompt = (PROMPTS[2] * length)[: length - 4]
    outputs = []
    capture = CountingCapture()
    for each in (None, capture):
        runner = ModelRunner(
            loaded,
            load_ops("reference"),
            KvCacheSize(GIB, 2 * length),
            drafting=Drafting(CountingProposer(), 6),
            execution=Execution(None if each is None else GraphSettings(each, (1,))),
        )
        runner.attach(block_size=block_size, max_num_seqs=1, max_num_batched_tokens=length)
        runner.run_step(prefill_step(make_enter(0, prompt, range(length // block_size))))
        steps = [runner.run_step(decode_step()) for _ in range(2)]
        outputs.append([(step.token_ids.tolist(), step.num_draft_tokens) for step in steps])
    assert outputs[0] == outputs[1]
    assert outputs[0][0][1] > 0
    assert capture.replays[0] == sum(num_drafts > 0 for _, num_drafts in outputs[1])


def test_no_graph_of_drafts_is_larger_than_a_step_may_be(loaded: LoadedModel) -> None:
    capture = CountingCapture()
    runner = make_runner(loaded, capture, 1, 2, 4, drafting=Drafting(NgramProposer(), 3))
    runner.attach(block_size=4, max_num_seqs=4, max_num_batched_tokens=9)
    # Drafts of one and two sequences, then decodes of up to four.
    assert len(capture.replays) == 2 + 3


@pytest.mark.parametrize(
    ("sizes", "max_num_seqs", "expected"),
    [
        (GRAPH_BATCH_SIZES, 8, [1, 2, 4, 8]),
        (GRAPH_BATCH_SIZES, 9, [1, 2, 4, 8, 16]),
        ((4, 2, 4), 3, [2, 4]),
        ((2, 4), 100, [2, 4]),
    ],
)
def test_only_sizes_that_a_batch_can_need_are_captured(
    sizes: tuple[int, ...], max_num_seqs: int, expected: list[int]
) -> None:
    assert needed_sizes(sizes, max_num_seqs) == expected
