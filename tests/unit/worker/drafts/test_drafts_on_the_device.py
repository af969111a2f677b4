"""Drafts of a model stay on the device: on one that computes late, they and the answers are what they are elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from services.worker.batch.decodes import DeviceDrafts, Drafts
from services.worker.drafts import device_passes
from services.worker.drafts.device_passes import DevicePasses
from services.worker.drafts.draft_model import DraftModelProposer
from services.worker.drafts.drafter import ComputedTokens, Drafting, DraftRows, Observe
from services.worker.drafts.mtp_drafts import MtpProposer
from services.worker.models.loader import LoadedModel, load_model
from services.worker.ops import SlotColumns, load_ops
from services.worker.runner.cache_memory import KvCacheSize
from services.worker.runner.graphs.graph_runner import GraphSettings
from services.worker.runner.model_runner import Execution, ModelRunner
from services.worker.runner.steps.step_job import StepJob
from services.worker.runner.steps.step_work import StepWork
from shared.errors import InternalError
from shared.step.columns import Int32Column
from shared.step.step import EnteringSequence
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
from tests.support.worker.worker_driver import Answer, Request, WorkerDriver
from tests.support.worker.worker_runner import generate_alone, load_exact, make_runner
from tests.support.worker.worker_steps import column, decode_step, make_enter, mixed_step, prefill_step

BLOCK_SIZE = 4
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


class LateProposer(CheckedProposer):
    """Notes the drafts of a device that is behind the host, to be compared once the tokens before them are known."""

    needs_tokens = False

    def __init__(self, checked: CheckedProposer) -> None:
        super().__init__(checked._proposer, checked._oracle)
        self.noted: list[NotedDrafts] = []

    @override
    def propose(self, rows: DraftRows) -> Drafts:
        drafts = self._proposer.propose(rows)
        if drafts.device is None:
            return drafts
        compute, slots = drafts.device.compute, torch.from_numpy(rows.slots.astype(np.int64))
        places = rows.tables.num_blocks[rows.slots] * BLOCK_SIZE

        def compute_noted(columns: SlotColumns) -> Tensor:
            num_known = (columns.position[slots] + 1).tolist()
            token_ids = compute(columns)
            for row, (tokens, known) in enumerate(zip(rows.token_ids, num_known, strict=True)):
                its_drafts, room = _of_row(token_ids.tolist(), drafts.counts, row), int(places[row]) - known
                self.noted.append(NotedDrafts(tokens.tolist(), known, its_drafts[: max(room, 0)]))
            return token_ids

        return replace(drafts, device=DeviceDrafts(compute_noted))

    def check(self, answers: Sequence[Answer]) -> int:
        """Compare what has room in its sequence's blocks; how many drafts that were."""
        texts = [request.prompt + answer.tokens for request, answer in zip(REQUESTS, answers, strict=True)]
        num_checked = 0
        for noted in self.noted:
            # Some requests begin alike.
            matching = [
                text for text in texts if text[: len(noted.told)] == noted.told and len(text) >= noted.num_known
            ]
            assert matching
            expected = [self._oracle(text[: noted.num_known], len(noted.drafts)) for text in matching]
            assert noted.drafts in expected
            num_checked += len(noted.drafts)
        return num_checked


class NotedDrafts(NamedTuple):
    """Drafts of a row."""

    told: list[int]
    """Its tokens that the host knew."""
    num_known: int
    """How many it had on the device."""
    drafts: list[int]


def _of_row(token_ids: list[int], counts: Int32Column, row: int) -> list[int]:
    end = int(counts[: row + 1].sum())
    return token_ids[end - int(counts[row]) : end]


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("make_proposer", [by_mtp, by_model])
@pytest.mark.parametrize("seed", [5, 6, 7])
def test_a_late_device_drafts_what_follows_from_the_tokens_that_only_it_knows(
    loaded: LoadedModel,
    undrafted: list[Answer],
    late: LateStream,
    make_proposer: Callable[[LoadedModel], CheckedProposer],
    has_graphs: bool,
    seed: int,
) -> None:
    graphs = GraphSettings(CountingCapture(), (1, 4, 16)) if has_graphs else None
    proposer = LateProposer(make_proposer(loaded))
    runner = make_runner(loaded, num_blocks=200, drafting=Drafting(proposer, 4), execution=Execution(graphs, late))
    driver = WorkerDriver(runner, seed=seed, max_chunk=7, block_size=BLOCK_SIZE)
    assert driver.generate(REQUESTS) == undrafted
    assert num_accepted(driver) > 10
    assert any(noted.num_known > len(noted.told) + 1 for noted in proposer.noted)
    assert proposer.check(undrafted) > 30


@pytest.mark.parametrize("make_proposer", [by_mtp, by_model])
def test_the_device_has_its_drafts_before_the_tokens_are_waited_for(
    loaded: LoadedModel, late: LateStream, make_proposer: Callable[[LoadedModel], CheckedProposer]
) -> None:
    drafting = Drafting(make_proposer(loaded)._proposer, 4)
    runner = make_runner(loaded, drafting=drafting, execution=Execution(stream=late))
    runner.attach(block_size=4, max_num_seqs=8, max_num_batched_tokens=256)
    pending = [runner.launch(prefill_step(make_enter(0, PROMPT, range(20), max_num_tokens=60)))]
    late.hold()
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            # What the proposer notes of the last step, and drafts after it.
            number = late.num_enqueued + 1
            launching = pool.submit(runner.launch, decode_step())
            late.wait_until_enqueued(number)
            assert not launching.done()
            late.release()
            pending.append(launching.result())
            late.hold()
        late.release()
    assert [len(step.finish().token_ids) >= 1 for step in pending] == [True] * 4


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
        # What was noted of the step before that one, its drafts, and the step itself.
        assert late.num_computed - before == (1 if len(pending) == 2 else 3)
    assert [len(step.finish().token_ids) >= 1 for step in pending] == [True] * 4


@pytest.mark.parametrize("make_proposer", [by_mtp, by_model])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_slot_that_leaves_while_its_step_is_computed_gets_none_of_its_tokens(
    loaded: LoadedModel, late: LateStream, make_proposer: Callable[[LoadedModel], CheckedProposer], is_late: bool
) -> None:
    prompts = [PROMPT, PROMPT[2:], PROMPT[4:]]
    alone = [generate_alone(loaded, prompt, 12) for prompt in prompts]
    proposer = make_proposer(loaded)._proposer
    execution = Execution(stream=late) if is_late else Execution()
    runner = make_runner(loaded, num_blocks=200, drafting=Drafting(proposer, 4), execution=execution)
    runner.attach(block_size=4, max_num_seqs=2, max_num_batched_tokens=256)

    def enter(slot: int, number: int) -> EnteringSequence:
        blocks, most = range(20 * number, 20 * number + 20), len(prompts[number]) + 12
        return make_enter(slot, prompts[number], blocks, max_num_tokens=most)

    first = [prefill_step(enter(0, 0), enter(1, 1)), decode_step(), decode_step()]
    # The new sequence has the slot of one whose tokens are not known yet.
    leaves = replace(mixed_step(enter(0, 2), rows=[1]), leave_slots=column([0]))
    steps = [*first, leaves, *[decode_step()] * 12]
    rows = [[0, 1], [0, 1], [0, 1], [1, 2], *[[1, 2]] * 12]
    pending = [runner.launch(step) for step in steps]
    texts: list[list[int]] = [[], [], []]
    for step, numbers in zip(pending, rows, strict=True):
        result = step.finish()
        counts = [1] * len(numbers) if result.counts is None else result.counts.tolist()
        tokens = iter(result.token_ids.tolist())
        for number, count in zip(numbers, counts, strict=True):
            texts[number] += [next(tokens) for _ in range(count)]
    assert texts[0] == alone[0][: len(texts[0])]
    assert texts[1:] == alone[1:]


@pytest.mark.slow
def test_kernels_that_are_told_bounds_draft_the_same(
    tmp_path: Path, late: LateStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = load_ops("triton-exact")
    model_dir = write_tiny_llama(tmp_path, changes={"num_hidden_layers": 1})
    loaded = load_model(model_dir, ops, torch.float32, lambda _: None)
    requests, size = [Request(PROMPT[: number + 2], 10) for number in range(3)], KvCacheSize(0, 100)
    undrafted = WorkerDriver(ModelRunner(loaded, ops, size)).generate(requests)
    monkeypatch.setattr(device_passes, "is_on_host", lambda _: False)
    drafting, execution = Drafting(DraftModelProposer(loaded.model, ops), 3), Execution(stream=late)
    driver = WorkerDriver(ModelRunner(loaded, ops, size, drafting=drafting, execution=execution))
    assert driver.generate(requests) == undrafted
    # The model is its own draft model, so it is always right.
    assert num_accepted(driver) == sum(output.num_draft_tokens for output in driver.outputs) > 10


def test_a_place_one_draft_late_is_seen_in_the_drafts(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    place = DevicePasses.place_tokens
    monkeypatch.setattr(DevicePasses, "place_tokens", lambda self, firsts, num: place(self, firsts + 1, num))
    runner = make_runner(loaded, num_blocks=200, drafting=Drafting(by_mtp(loaded), 4))
    driver = WorkerDriver(runner, seed=5, max_chunk=7)
    with pytest.raises(InternalError) as raised:
        driver.generate(REQUESTS)
    assert isinstance(raised.value.__cause__, AssertionError)


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
