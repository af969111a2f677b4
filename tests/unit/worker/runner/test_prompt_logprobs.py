"""Prompts are scored chunk by chunk: every token but the first, exactly once, for any chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.worker.models.loader import LoadedModel
from services.worker.ops import load_ops
from services.worker.runner import prompt_logprobs
from shared.errors import StepMismatchError
from shared.request.sampling_params import SamplingOptions
from tests.support.models.paged_model import PagedModel
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.worker.worker_driver import Answer, Request, Scores, WorkerDriver
from tests.support.worker.worker_runner import load_exact, make_runner
from tests.support.worker.worker_steps import make_enter, prefill_step

PROMPT = [5, 9, 2, 44, 17, 60, 33, 21, 4, 4, 90, 12, 5, 9, 3]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_exact(write_tiny_llama(tmp_path_factory.mktemp("model"), changes={"num_hidden_layers": 2}))


def scored(num_top: int, prompt: list[int] = PROMPT, **rest: object) -> Request:
    return replace(
        Request(prompt, 3, options=SamplingOptions(num_prompt_logprobs=num_top)),
        **rest,  # type: ignore[arg-type]
    )


def score_alone(loaded: LoadedModel, request: Request, *, max_chunk: int = 1000) -> Answer:
    return WorkerDriver(make_runner(loaded), max_chunk=max_chunk).generate([request])[0]


@torch.inference_mode()
def expected_scores(loaded: LoadedModel, prompt: list[int], num_top: int) -> Scores:
    """The definition: log-softmax of the logits at each token but the last."""
    paged = PagedModel(loaded.model, load_ops("reference"))
    logprobs = paged.prefill_all(paged.add(prompt)).log_softmax(-1)
    scores: Scores = {}
    for position in range(1, len(prompt)):
        row, token = logprobs[position - 1], prompt[position]
        top = row.argsort(descending=True, stable=True)[:num_top].tolist()
        entries = [token, *top]
        scores[position] = ([1 + int((row > row[token]).sum())], entries, row[entries].tolist())
    return scores


def assert_same(actual: Scores, expected: Scores) -> None:
    assert sorted(actual) == sorted(expected)
    for position, (ranks, entries, values) in expected.items():
        assert actual[position][:2] == (ranks, entries)
        np.testing.assert_allclose(actual[position][2], values, atol=1e-5)


@pytest.mark.parametrize("num_top", [0, 4])
def test_each_token_but_the_first_gets_its_log_probability(loaded: LoadedModel, num_top: int) -> None:
    answer = score_alone(loaded, scored(num_top))
    assert_same(answer.prompt_logprobs, expected_scores(loaded, PROMPT, num_top))


def test_a_prompt_in_chunks_gets_the_same_as_whole(loaded: LoadedModel) -> None:
    whole = score_alone(loaded, scored(2))
    requests = [scored(2), scored(2, seed=1), Request(PROMPT, 3), scored(2)]
    for seed, max_chunk in enumerate((1, 2, 5)):
        driver = WorkerDriver(make_runner(loaded), seed=seed, max_chunk=max_chunk)
        answers = driver.generate(requests)
        assert [answers[index] for index in (0, 1, 3)] == [whole] * 3
        assert answers[2] == Answer(whole.tokens)


def test_more_tokens_than_a_slice_holds_are_all_scored(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = score_alone(loaded, scored(1))
    for size in (1, 4, len(PROMPT) - 1):
        monkeypatch.setattr(prompt_logprobs, "_MAX_ROWS", size)
        assert score_alone(loaded, scored(1)) == whole


@pytest.mark.parametrize("max_chunk", [2, 1000])
def test_the_completion_of_a_resumed_sequence_is_not_scored(loaded: LoadedModel, max_chunk: int) -> None:
    request = scored(1, known=(7, 8, 9), max_tokens=5)
    assert score_alone(loaded, request, max_chunk=max_chunk).prompt_logprobs == (
        score_alone(loaded, scored(1)).prompt_logprobs
    )


def test_a_prompt_of_one_token_has_nothing_to_score(loaded: LoadedModel) -> None:
    driver = WorkerDriver(make_runner(loaded))
    assert driver.generate([scored(3, [5])])[0].prompt_logprobs == {}
    assert all(output.prompt_logprobs == () for output in driver.outputs)


def test_a_sequence_does_not_inherit_scores_from_its_slots_previous_one(loaded: LoadedModel) -> None:
    runner = make_runner(loaded)
    runner.attach(block_size=4, max_num_seqs=1, max_num_batched_tokens=64)
    options = SamplingOptions(num_prompt_logprobs=0)
    # It leaves in the middle of its prompt.
    runner.run_step(prefill_step(make_enter(0, [8, 9], range(8), num_later_tokens=5, options=options)))
    output = runner.run_step(prefill_step(make_enter(0, PROMPT, range(8), options=options), leave=[0]))
    ((slot, logprobs),) = output.prompt_logprobs
    assert slot == 0
    assert logprobs.indexes.tolist() == list(range(1, len(PROMPT)))
    expected = score_alone(loaded, scored(0)).prompt_logprobs
    assert logprobs.values.tolist() == [value for position in sorted(expected) for value in expected[position][2]]


def test_a_scored_prompt_with_cached_tokens_is_refused(loaded: LoadedModel) -> None:
    runner = make_runner(loaded)
    runner.attach(block_size=4, max_num_seqs=1, max_num_batched_tokens=64)
    enter = make_enter(0, [8], range(8), num_cached_tokens=4, options=SamplingOptions(num_prompt_logprobs=0))
    with pytest.raises(StepMismatchError):
        runner.run_step(prefill_step(enter))
