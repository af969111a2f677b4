"""A runner's tokens depend on no draft, and on no other decision outside the request."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from services.worker.drafts.drafter import Drafting
from services.worker.drafts.ngram_drafts import NgramProposer
from services.worker.models.loader import LoadedModel
from services.worker.runner.graphs.graph_runner import GraphSettings
from services.worker.runner.model_runner import Execution
from services.worker.runner.steps import step_work
from tests.support.models.drafting import CYCLE, REQUESTS, KnowingProposer
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.worker.graphs import CountingCapture
from tests.support.worker.worker_driver import Answer, Request, WorkerDriver
from tests.support.worker.worker_runner import WrappedModel, generate_alone, load_exact, make_runner
from tests.support.worker.worker_steps import decode_step, make_enter, prefill_step

PROMPT = [5, 9, 2, 44, 17]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_exact(write_tiny_llama(tmp_path_factory.mktemp("model"), changes={"num_hidden_layers": 2}))


@pytest.fixture(scope="module")
def undrafted(loaded: LoadedModel) -> list[Answer]:
    return WorkerDriver(make_runner(loaded, num_blocks=200)).generate(REQUESTS)


def test_requests_get_the_same_answers_alone_and_together(loaded: LoadedModel, undrafted: list[Answer]) -> None:
    runner = make_runner(loaded, num_blocks=200)
    assert [WorkerDriver(runner, max_chunk=1000).generate([request])[0] for request in REQUESTS] == undrafted


@pytest.mark.parametrize("num_draft_tokens", [1, 4, 8])
@pytest.mark.parametrize("share_right", [1.0, 0.7])
def test_right_and_wrong_drafts_change_no_answer(
    loaded: LoadedModel, undrafted: list[Answer], num_draft_tokens: int, share_right: float
) -> None:
    proposer = KnowingProposer(undrafted, share_right=share_right)
    runner = make_runner(loaded, num_blocks=200, drafting=Drafting(proposer, num_draft_tokens))
    driver = WorkerDriver(runner, seed=num_draft_tokens)
    assert driver.generate(REQUESTS) == undrafted
    assert sum(output.num_draft_tokens for output in driver.outputs) > 30


@pytest.mark.parametrize("max_chunk", [1, 2, 7, 100])
@pytest.mark.parametrize("drafting", [None, Drafting(NgramProposer(), 3)], ids=["plain", "drafts"])
def test_resumed_sequences_get_the_rest_of_their_completion(
    loaded: LoadedModel, max_chunk: int, drafting: Drafting | None
) -> None:
    completion = generate_alone(loaded, PROMPT, 40)
    requests = [Request(PROMPT, 40, known=tuple(completion[:count])) for count in (1, 5, 30)]
    driver = WorkerDriver(make_runner(loaded, num_blocks=200, drafting=drafting), seed=max_chunk, max_chunk=max_chunk)
    assert [answer.tokens for answer in driver.generate(requests)] == [completion] * 3


@pytest.mark.parametrize("sizes", [(1, 2, 4, 16), (16,)])
def test_drafts_computed_by_graphs_change_no_answer(
    loaded: LoadedModel, undrafted: list[Answer], sizes: tuple[int, ...]
) -> None:
    proposer, capture = KnowingProposer(undrafted, share_right=0.7), CountingCapture()
    execution = Execution(GraphSettings(capture, sizes))
    runner = make_runner(loaded, num_blocks=200, drafting=Drafting(proposer, 4), execution=execution)
    assert WorkerDriver(runner, seed=1).generate(REQUESTS) == undrafted
    # The graphs of steps with drafts were captured first.
    assert sum(capture.replays[: len(sizes)]) > 5


def test_drafts_looked_up_in_the_prompt_change_no_answer(loaded: LoadedModel, undrafted: list[Answer]) -> None:
    runner = make_runner(loaded, num_blocks=200, drafting=Drafting(NgramProposer(), 4))
    assert WorkerDriver(runner, seed=3).generate(REQUESTS) == undrafted


def test_places_are_scored_before_the_host_knows_which_of_them_count(
    loaded: LoadedModel, undrafted: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_work, "is_on_host", lambda _: False)
    proposer = KnowingProposer(undrafted, share_right=0.7)
    runner = make_runner(loaded, num_blocks=200, drafting=Drafting(proposer, 4))
    assert WorkerDriver(runner, seed=2).generate(REQUESTS) == undrafted


def test_a_step_stays_within_its_token_budget(loaded: LoadedModel, undrafted: list[Answer]) -> None:
    proposer = KnowingProposer(undrafted, share_right=1.0)
    runner = make_runner(loaded, num_blocks=200, drafting=Drafting(proposer, 8))
    # Nine rows, or fewer and chunks of at most two tokens: there is room for some drafts, but not for all of them.
    driver = WorkerDriver(runner, max_num_batched_tokens=18, max_chunk=2)
    assert driver.generate(REQUESTS) == undrafted
    assert max(output.num_draft_tokens for output in driver.outputs) > 4


def test_right_drafts_save_steps(loaded: LoadedModel, undrafted: list[Answer]) -> None:
    proposer = KnowingProposer(undrafted, share_right=1.0)
    runner = make_runner(loaded, num_blocks=200, drafting=Drafting(proposer, 8))
    driver = WorkerDriver(runner, max_chunk=1000)
    assert driver.generate([REQUESTS[2]]) == [undrafted[2]]
    # 17 tokens: the prompt's own, then 2, 4 and 8 drafts and one more each.
    counts = [output.counts.tolist() for output in driver.outputs if output.counts is not None]
    assert [count for count in counts if count != [0]] == [[3], [5], [8]]


def test_a_sequence_that_has_all_its_tokens_gets_no_more(loaded: LoadedModel) -> None:
    runner = make_runner(loaded, drafting=Drafting(NgramProposer(), 4))
    runner.attach(block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    enters = [make_enter(0, CYCLE * 2, range(4), max_num_tokens=14), make_enter(1, [8, 1, 8, 1], range(5, 10))]
    runner.run_step(prefill_step(*enters))
    runner.run_step(decode_step(rows=[0]))
    both = runner.run_step(decode_step())
    assert both.counts is not None
    assert both.counts.tolist() == [0, len(both.token_ids)]
    alone = runner.run_step(decode_step(rows=[0]))
    assert alone.counts is not None
    assert (alone.counts.tolist(), alone.token_ids.tolist(), alone.num_draft_tokens) == ([0], [], 0)
    assert len(runner.run_step(decode_step(rows=[1])).token_ids) >= 1


class NotFiniteRow(WrappedModel):
    """From some step on, has NaN in the logits of its last row."""

    is_broken = False

    @override
    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = super().compute_logits(hidden).clone()
        if self.is_broken:
            logits[-1] = torch.nan
        return logits


def test_a_non_finite_row_keeps_its_number_beside_a_full_one(loaded: LoadedModel) -> None:
    model = NotFiniteRow(loaded.model)
    runner = make_runner(replace(loaded, model=model), drafting=Drafting(NgramProposer(), 4))
    runner.attach(block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    enters = [
        make_enter(0, [8, 9], range(4), max_num_tokens=3),
        make_enter(1, [7, 8, 9], range(4, 10)),
        make_enter(2, [3], range(10, 12)),
    ]
    runner.run_step(prefill_step(*enters))
    model.is_broken = True
    output = runner.run_step(decode_step())
    assert output.not_finite_rows.tolist() == [2]
    assert output.counts is not None
    assert output.counts.tolist() == [0, 1, 1]
    model.is_broken = False
    assert runner.run_step(decode_step(rows=[1, 2])).not_finite_rows.tolist() == []


def test_drafts_do_not_change_the_fingerprint(loaded: LoadedModel) -> None:
    drafting = make_runner(loaded, drafting=Drafting(NgramProposer(), 4))
    assert drafting.numerics_fingerprint == make_runner(loaded).numerics_fingerprint
    assert (drafting.num_draft_tokens, make_runner(loaded).num_draft_tokens) == (4, 0)
