"""Recomputed completions: which tokens are compared with what, and at what cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from services.worker.batch import replay
from services.worker.models.loader import LoadedModel
from services.worker.ops import load_ops
from services.worker.runner.model_runner import ModelRunner
from services.worker.spec_decode.drafts import Drafting
from services.worker.spec_decode.ngram_drafts import NgramProposer
from services.worker.step import EnteringSequence, StepOutput
from shared.limits import SamplingOptions
from tests.support.models.paged_model import PagedModel
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.worker.worker_driver import Request, WorkerDriver
from tests.support.worker.worker_runner import WrappedModel, generate_alone, load_exact, make_runner
from tests.support.worker.worker_steps import decode_step, make_chunk, make_enter, prefill_step

PROMPT = [5, 9, 2, 44, 17]
BLOCKS = range(30)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_exact(write_tiny_llama(tmp_path_factory.mktemp("model"), changes={"num_hidden_layers": 2}))


@pytest.fixture(scope="module")
def completion(loaded: LoadedModel) -> list[int]:
    """The model's greedy completion, in which every token is the likeliest."""
    return generate_alone(loaded, PROMPT, 80)


class CountingModel(WrappedModel):
    """Counts the rows of logits computed by it."""

    num_rows = 0

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.compute_logits`."""
        self.num_rows += len(hidden)
        return super().compute_logits(hidden)


def attached(runner: ModelRunner) -> ModelRunner:
    runner.attach(block_size=4, max_num_seqs=8, max_num_batched_tokens=256)
    return runner


def resumed(
    slot: int, known: list[int], *, num_later_tokens: int = 0, num_prompt_tokens: int = len(PROMPT)
) -> EnteringSequence:
    """The prompt's sequence, resumed with a part of its completion; its blocks belong to its slot."""
    enter = make_enter(slot, [*PROMPT, *known], range(30 * slot, 30 * slot + 30), num_later_tokens=num_later_tokens)
    return replace(enter, num_prompt_tokens=num_prompt_tokens)


def replays(output: StepOutput) -> tuple[int, int]:
    return output.num_replayed_tokens, output.num_replay_mismatches


@torch.inference_mode()
def num_unlikely(loaded: LoadedModel, known: list[int]) -> int:
    """The definition: tokens of `known` after the prompt that are not the argmax of the logits before them."""
    paged = PagedModel(loaded.model, load_ops("reference"))
    likeliest = paged.prefill_all(paged.add([*PROMPT, *known])).argmax(-1).tolist()
    return sum(likeliest[len(PROMPT) - 1 + place] != token_id for place, token_id in enumerate(known))


@pytest.mark.parametrize("max_chunk", [1, 2, 7, 100])
@pytest.mark.parametrize("with_drafts", [False, True])
def test_an_exact_backend_reproduces_its_tokens(
    loaded: LoadedModel, completion: list[int], max_chunk: int, with_drafts: bool
) -> None:
    drafting = Drafting(NgramProposer(), 3) if with_drafts else None
    known = (1, 5, 30)
    requests = [Request(PROMPT, 40, known=tuple(completion[:count])) for count in known]
    requests += [Request(PROMPT, 10), Request(PROMPT, 10, temperature=0.8, known=tuple(completion[:3]))]
    driver = WorkerDriver(make_runner(loaded, num_blocks=200, drafting=drafting), seed=max_chunk, max_chunk=max_chunk)
    answers = driver.generate(requests)
    assert [answer.tokens for answer in answers[:3]] == [completion[:40]] * 3
    assert sum(output.num_replayed_tokens for output in driver.outputs) == sum(known)
    assert sum(output.num_replay_mismatches for output in driver.outputs) == 0


@pytest.mark.parametrize("max_chunk", [1, 3, 100])
def test_tokens_that_are_not_the_likeliest_are_counted(
    loaded: LoadedModel, completion: list[int], max_chunk: int
) -> None:
    known = [*completion[:4], 7, *completion[5:9], 8, 8, *completion[:3]]
    expected = num_unlikely(loaded, known)
    assert 0 < expected < len(known)
    driver = WorkerDriver(make_runner(loaded), max_chunk=max_chunk)
    driver.generate([Request(PROMPT, 20, known=tuple(known))])
    assert sum(output.num_replayed_tokens for output in driver.outputs) == len(known)
    assert sum(output.num_replay_mismatches for output in driver.outputs) == expected


def test_only_the_last_tokens_are_compared_and_no_other_logits_computed(
    loaded: LoadedModel, completion: list[int]
) -> None:
    model = CountingModel(loaded.model)
    runner = attached(make_runner(replace(loaded, model=model)))
    wrong_at_first = [completion[0] + 1, *completion[1:70]]
    # The wrong token is not among the last ones.
    assert replays(runner.run_step(prefill_step(resumed(0, wrong_at_first))))[0] == 64
    assert model.num_rows == 64 + 1


def test_sequences_without_a_greedy_completion_cost_no_logits(loaded: LoadedModel, completion: list[int]) -> None:
    model = CountingModel(loaded.model)
    runner = attached(make_runner(replace(loaded, model=model), num_blocks=200))
    known = completion[:6]
    biased, scored = SamplingOptions(logit_bias=((7, 1.0),)), SamplingOptions(num_logprobs=2)
    others = [
        resumed(0, known, num_prompt_tokens=len(PROMPT) + 6),
        replace(resumed(1, known), temperature=0.5),
        replace(resumed(2, known), options=biased),
    ]
    assert replays(runner.run_step(prefill_step(*others))) == (0, 0)
    assert model.num_rows == 3
    # Log-probabilities change no logits.
    assert replays(runner.run_step(prefill_step(replace(resumed(3, known), options=scored)))) == (6, 0)
    assert model.num_rows == 3 + 6 + 1
    assert replays(runner.run_step(decode_step())) == (0, 0)
    assert model.num_rows == 10 + 4


def test_cached_tokens_are_not_compared_since_they_are_not_recomputed(
    loaded: LoadedModel, completion: list[int]
) -> None:
    runner = attached(make_runner(loaded, num_blocks=200))
    runner.run_step(prefill_step(resumed(0, completion[:20])))
    # Two blocks of the 25 tokens are cached: the prompt and three tokens of the completion. The next token's logits
    # would come from the last cached one.
    again = make_enter(1, [*PROMPT, *completion[:20]][8:], [0, 1, *range(30, 40)], num_cached_tokens=8)
    output = runner.run_step(prefill_step(replace(again, num_prompt_tokens=len(PROMPT))))
    assert replays(output) == (20 - 3 - 1, 0)


def test_a_slots_next_sequence_is_not_compared_with_its_previous_one(
    loaded: LoadedModel, completion: list[int]
) -> None:
    runner = attached(make_runner(loaded, num_blocks=200))
    # It leaves while the likeliest next token is kept for its next chunk.
    runner.run_step(prefill_step(resumed(0, completion[:3], num_later_tokens=4)))
    plain = make_enter(0, PROMPT, range(40, 50))
    assert replays(runner.run_step(prefill_step(plain, leave=[0]))) == (0, 0)
    back = resumed(0, [completion[0]], num_later_tokens=2)
    assert replays(runner.run_step(prefill_step(back, leave=[0]))) == (1, 0)
    beside = make_enter(1, PROMPT, range(60, 70))
    output = runner.run_step(prefill_step(beside, chunks=[make_chunk(0, completion[1:3])]))
    assert replays(output) == (2, 0)


@pytest.mark.parametrize("size", [1, 4, 5])
def test_more_rows_than_are_scored_at_once_are_all_scored(
    loaded: LoadedModel, completion: list[int], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(replay, "_MAX_ROWS", size)
    runner = attached(make_runner(loaded, num_blocks=200))
    wrong = [*completion[:6], completion[6] + 1]
    output = runner.run_step(prefill_step(resumed(0, completion[:9]), resumed(1, wrong), resumed(2, completion[:1])))
    assert replays(output) == (9 + 7 + 1, 1)
