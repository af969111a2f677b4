"""A device that computes late, on its own thread, gives the results of one that computes at each launch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from torch import Tensor
from typing_extensions import override

from services.worker.drafts.drafter import Drafting
from services.worker.drafts.ngram_drafts import NgramProposer
from services.worker.forward.staging import PinnedStaging, Staging
from services.worker.models.loader import LoadedModel
from services.worker.runner.graphs.graph_runner import GraphSettings
from services.worker.runner.model_runner import Execution
from services.worker.runner.stream import HostStream, StagingPool
from shared.errors import InternalError
from shared.request.sampling_params import SamplingOptions
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.worker.graphs import CountingCapture
from tests.support.worker.late_stream import LateStream
from tests.support.worker.worker_driver import Answer, Request, WorkerDriver
from tests.support.worker.worker_runner import WrappedModel, generate_alone, load_exact, make_runner
from tests.support.worker.worker_steps import decode_step, make_enter, prefill_step

PROMPTS = ([5, 9, 2, 44, 17], [3], [8, 1, 60, 33, 21, 4, 4, 90, 12])
PLAIN = [
    *(Request(prompt, 24) for prompt in PROMPTS),
    Request([1, 2, 3, 4, 1, 2, 3, 4, 1], 20, temperature=0.9, seed=3),
    Request([7] * 11, 9, temperature=1.3, top_k=20, top_p=0.9, seed=2**64 - 1, choice=2),
    Request([5, 6], 30, temperature=0.8, seed=1, options=SamplingOptions(min_p=0.1)),
    *(Request([token, 9, token], 5 + token, temperature=1.0, seed=token) for token in range(12)),
]
RARE = [
    Request([5, 9, 2], 12, options=SamplingOptions(repetition_penalty=1.3, num_logprobs=2), temperature=0.7),
    Request([5, 9, 2, 8, 8], 8, options=SamplingOptions(num_prompt_logprobs=1)),
    Request([1, 2, 3, 1, 2, 3], 9, options=SamplingOptions(logprob_token_ids=(44, 2, 44))),
    Request([5, 9, 2], 10, known=(44, 7)),
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_exact(write_tiny_llama(tmp_path_factory.mktemp("model"), changes={"num_hidden_layers": 2}))


@pytest.fixture
def late() -> Iterator[LateStream]:
    stream = LateStream()
    yield stream
    stream.close()


def generate(
    loaded: LoadedModel, execution: Execution, requests: list[Request], seed: int, drafting: Drafting | None = None
) -> list[Answer]:
    runner = make_runner(loaded, num_blocks=400, drafting=drafting, execution=execution)
    return WorkerDriver(runner, seed=seed).generate(requests)


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_steps_launched_ahead_generate_the_same_tokens(
    loaded: LoadedModel, late: LateStream, seed: int, has_graphs: bool
) -> None:
    graphs = GraphSettings(CountingCapture(), (1, 4, 16)) if has_graphs else None
    expected = generate(loaded, Execution(), PLAIN, seed)
    assert generate(loaded, Execution(graphs, late), PLAIN, seed) == expected
    assert late.max_in_flight == 2


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("drafting", [None, Drafting(NgramProposer(), 3)], ids=["no drafts", "drafts"])
@pytest.mark.parametrize("seed", range(2))
def test_sequences_that_need_the_host_generate_the_same_beside_others(
    loaded: LoadedModel, late: LateStream, seed: int, drafting: Drafting | None, has_graphs: bool
) -> None:
    graphs = GraphSettings(CountingCapture(), (1, 4, 16)) if has_graphs else None
    requests = [*PLAIN[:5], *RARE]
    expected = generate(loaded, Execution(), requests, seed, drafting)
    assert generate(loaded, Execution(graphs, late), requests, seed, drafting) == expected


def test_a_step_computes_while_the_host_waits_for_the_tokens_before_it(loaded: LoadedModel, late: LateStream) -> None:
    grammar = LLMatcher.grammar_from_regex("(ab){3,9}c")
    options = SamplingOptions(grammar=grammar, presence_penalty=1.0)
    runner = make_runner(loaded, execution=Execution(stream=late))
    (expected,) = WorkerDriver(make_runner(loaded)).generate([Request(PROMPTS[0], 3, options=options)])
    runner.attach(block_size=4, max_num_seqs=8, max_num_batched_tokens=256)
    late.hold()
    pending = [runner.launch(prefill_step(make_enter(0, PROMPTS[0], range(4), options=options)))]
    with ThreadPoolExecutor(1) as launching:
        second = launching.submit(runner.launch, decode_step())
        # Those of Attach, of the prefill's forward pass and draw, and of the decode's forward pass.
        late.wait_until_enqueued(4)
        assert late.num_computed == 1
        late.release()
        pending.append(second.result())
    pending.append(runner.launch(decode_step()))
    assert [int(step.finish().token_ids[0]) for step in pending] == expected.tokens


def test_a_launch_needs_nothing_of_the_steps_before_it(loaded: LoadedModel, late: LateStream) -> None:
    runner = make_runner(loaded, execution=Execution(stream=late))
    runner.attach(block_size=4, max_num_seqs=8, max_num_batched_tokens=256)
    late.hold()
    pending = [
        runner.launch(prefill_step(*(make_enter(row, PROMPTS[row], range(8 * row, 8 * row + 8)) for row in range(3))))
    ]
    pending += [runner.launch(decode_step()) for _ in range(6)]
    assert runner.progress == 0
    late.release()
    rows = np.array([step.finish().token_ids for step in pending]).T.tolist()
    assert rows == [generate_alone(loaded, prompt, 7) for prompt in PROMPTS]
    assert runner.progress == 7


def test_the_device_time_is_that_of_the_launch(loaded: LoadedModel, late: LateStream) -> None:
    runner = make_runner(loaded, execution=Execution(stream=late))
    runner.attach(block_size=4, max_num_seqs=8, max_num_batched_tokens=256)
    steps = [prefill_step(make_enter(0, [5], range(3))), decode_step()]
    # Attach enqueued the first work, which each counts.
    assert [runner.launch(step).finish().device_time_us for step in steps] == [2, 3]


class TooEarlyPool(StagingPool):
    """Hands out what is still in use."""

    def __init__(self) -> None:
        self._only = PinnedStaging(torch.device("cpu"), is_pinned=False)

    @override
    def claim(self) -> PinnedStaging:
        return self._only


def test_staging_that_was_reused_too_early_would_change_tokens(loaded: LoadedModel) -> None:
    stream = LateStream(TooEarlyPool())
    runner = make_runner(loaded, execution=Execution(stream=stream))
    runner.attach(block_size=4, max_num_seqs=8, max_num_batched_tokens=256)
    pending = [
        runner.launch(prefill_step(make_enter(row, PROMPTS[row], range(8 * row, 8 * row + 8)))) for row in (0, 2)
    ]
    # The second launch overwrites the inputs of the first one.
    with pytest.raises(InternalError) as raised:
        pending[0].finish()
    assert isinstance(raised.value.__cause__, AssertionError | RuntimeError | IndexError)
    stream.close()


def test_staging_is_used_again_after_its_step(loaded: LoadedModel) -> None:
    claimed: list[Staging] = []

    class CountingPool(StagingPool):
        def claim(self) -> PinnedStaging:
            staging = super().claim()
            claimed.append(staging)
            return staging

    stream = LateStream(CountingPool(torch.device("cpu"), is_pinned=False))
    runner = make_runner(loaded, num_blocks=400, execution=Execution(stream=stream))
    assert len(WorkerDriver(runner).generate(PLAIN)) == len(PLAIN)
    stream.close()
    assert len({id(staging) for staging in claimed}) == 2 < len(claimed)


class NotFiniteModel(WrappedModel):
    """Has NaN in the first row's logits."""

    @override
    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = super().compute_logits(hidden).clone()
        logits[0] = torch.nan
        return logits


def test_a_row_that_is_not_finite_continues_with_token_0(loaded: LoadedModel, late: LateStream) -> None:
    broken = replace(loaded, model=NotFiniteModel(loaded.model))
    outputs = []
    for stream in (HostStream(), late):
        runner = make_runner(broken, execution=Execution(stream=stream))
        runner.attach(block_size=4, max_num_seqs=8, max_num_batched_tokens=256)
        enters = [make_enter(row, PROMPTS[row], range(8 * row, 8 * row + 8)) for row in range(2)]
        pending = [runner.launch(step) for step in (prefill_step(*enters), decode_step(), decode_step())]
        outputs.append([step.finish() for step in pending])
    for output in (*outputs[0], *outputs[1]):
        assert (output.not_finite_rows.tolist(), output.token_ids[0]) == ([0], 0)
    assert [output.token_ids.tolist() for output in outputs[0]] == [output.token_ids.tolist() for output in outputs[1]]


class FailingModel(WrappedModel):
    """Fails when it computes a token that tells it to."""

    @override
    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        if 99 in token_ids.tolist():
            raise RuntimeError("an illegal address")
        return super().forward(token_ids, positions)


def test_what_fails_on_the_device_is_reported_when_the_step_is_finished(
    loaded: LoadedModel, late: LateStream, caplog: pytest.LogCaptureFixture
) -> None:
    runner = make_runner(replace(loaded, model=FailingModel(loaded.model)), execution=Execution(stream=late))
    runner.attach(block_size=4, max_num_seqs=8, max_num_batched_tokens=256)
    pending = [runner.launch(prefill_step(make_enter(row, [token], [row]))) for row, token in enumerate((5, 99))]
    assert len(pending[0].finish().token_ids) == 1
    with pytest.raises(InternalError) as raised:
        pending[1].finish()
    assert str(raised.value.__cause__) == "an illegal address"
    assert [record.message for record in caplog.records] == ["step failed"]
