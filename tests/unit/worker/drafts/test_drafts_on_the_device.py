"""Drafts of a model stay on the device: on one that computes late, they and the answers are what they are elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from torch import Tensor

from services.worker.drafts.draft_model import DraftModelProposer
from services.worker.drafts.drafter import ComputedTokens, Drafting, Observe
from services.worker.drafts.mtp_drafts import MtpProposer
from services.worker.models.loader import LoadedModel
from services.worker.ops import load_ops
from services.worker.runner.graphs.graph_runner import GraphSettings
from services.worker.runner.model_runner import Execution
from services.worker.runner.steps.step_job import StepJob
from services.worker.runner.steps.step_work import StepWork
from shared.errors import InternalError
from tests.support.models.drafting import (
    REQUESTS,
    CheckedProposer,
    drafts_of_model,
    drafts_of_mtp,
    num_accepted,
    with_mtp,
)
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.worker.graphs import CountingCapture
from tests.support.worker.late_stream import LateStream
from tests.support.worker.worker_driver import Answer, WorkerDriver
from tests.support.worker.worker_runner import load_exact, make_runner
from tests.support.worker.worker_steps import decode_step, make_enter, prefill_step

PROMPT = [5, 9, 2, 44, 17, 60, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    plain = load_exact(write_tiny_llama(tmp_path_factory.mktemp("model"), changes={"num_hidden_layers": 2}))
    return with_mtp(plain, 2)


@pytest.fixture(scope="module")
def undrafted(loaded: LoadedModel) -> list[Answer]:
    return WorkerDriver(make_runner(loaded, num_blocks=200)).generate(REQUESTS)


@pytest.fixture
def late() -> Iterator[LateStream]:
    stream = LateStream()
    yield stream
    stream.close()


def by_mtp(loaded: LoadedModel) -> CheckedProposer:
    """The MTP layers, whose drafts must equal their own from scratch."""
    assert loaded.model.mtp is not None
    return CheckedProposer(
        MtpProposer(loaded.model.mtp, load_ops("reference")),
        lambda token_ids, count: drafts_of_mtp(loaded.model, token_ids, count),
    )


def by_model(loaded: LoadedModel) -> CheckedProposer:
    """The model itself as a draft model, whose drafts must equal its own from scratch."""
    return CheckedProposer(
        DraftModelProposer(loaded.model, load_ops("reference")),
        lambda token_ids, count: drafts_of_model(loaded.model, token_ids, count),
    )


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("make_proposer", [by_mtp, by_model])
def test_a_late_device_drafts_the_same(
    loaded: LoadedModel,
    undrafted: list[Answer],
    late: LateStream,
    make_proposer: Callable[[LoadedModel], CheckedProposer],
    has_graphs: bool,
) -> None:
    graphs = GraphSettings(CountingCapture(), (1, 4, 16)) if has_graphs else None
    # The oracles compute on the host, where a late device must not compute at the same time.
    proposer = make_proposer(loaded)
    runner = make_runner(
        loaded, num_blocks=200, drafting=Drafting(proposer._proposer, 4), execution=Execution(graphs, late)
    )
    driver = WorkerDriver(runner, seed=5, max_chunk=7)
    assert driver.generate(REQUESTS) == undrafted
    assert num_accepted(driver) > 10
    runner = make_runner(loaded, num_blocks=200, drafting=Drafting(proposer, 4), execution=Execution(graphs))
    checked = WorkerDriver(runner, seed=5, max_chunk=7)
    assert checked.generate(REQUESTS) == undrafted
    # So each step had the same drafts.
    assert _accepted(driver) == _accepted(checked)


def _accepted(driver: WorkerDriver) -> list[tuple[list[int], int]]:
    return [
        ([] if output.counts is None else output.counts.tolist(), output.num_draft_tokens) for output in driver.outputs
    ]


def test_a_launch_waits_for_the_tokens_before_it_and_for_nothing_else(loaded: LoadedModel, late: LateStream) -> None:
    assert loaded.model.mtp is not None
    drafting = Drafting(MtpProposer(loaded.model.mtp, load_ops("reference")), 4)
    runner = make_runner(loaded, drafting=drafting, execution=Execution(stream=late))
    runner.attach(block_size=4, max_num_seqs=8, max_num_batched_tokens=256)
    pending = [runner.launch(prefill_step(make_enter(0, PROMPT, range(20), max_num_tokens=60)))]
    # Attach's work alone; the prefill's and what the proposer notes of it wait until they are needed.
    assert late.num_computed == 1
    for _ in range(3):
        before = late.num_computed
        pending.append(runner.launch(decode_step()))
        # What was noted of the step before that one, and the step itself.
        assert late.num_computed - before == (1 if len(pending) == 2 else 2)
    assert [len(step.finish().token_ids) >= 1 for step in pending] == [True] * 4


def test_a_count_of_the_step_before_is_seen_in_the_drafts(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    observe, earlier = StepWork.observe, list[Tensor]()

    def observe_with_earlier_counts(self: StepWork, job: StepJob, note: Observe) -> None:
        def note_earlier(computed: ComputedTokens) -> None:
            counts = computed.counts
            is_like = counts is not None and len(earlier) > 0 and len(earlier[-1]) == len(counts)
            earlier.extend([] if counts is None else [counts])
            note(replace(computed, counts=earlier[-2]) if is_like else computed)

        observe(self, job, note_earlier)

    monkeypatch.setattr(StepWork, "observe", observe_with_earlier_counts)
    runner = make_runner(loaded, num_blocks=200, drafting=Drafting(by_mtp(loaded), 4))
    runner.attach(block_size=4, max_num_seqs=8, max_num_batched_tokens=256)
    enters = [make_enter(row, PROMPT[row:], range(40 * row, 40 * row + 40), max_num_tokens=150) for row in range(4)]
    runner.run_step(prefill_step(*enters))
    results = (runner.run_step(decode_step()) for _ in range(25))
    with pytest.raises(InternalError) as raised:
        list(results)
    assert isinstance(raised.value.__cause__, AssertionError)
