"""Rare sampling options through the runner: they affect only their own sequence, in any batch."""

from __future__ import annotations

import numpy as np
import pytest
from llguidance import LLMatcher

from services.worker.drafts.drafter import Drafting
from services.worker.drafts.ngram_drafts import NgramProposer
from services.worker.models.loader import LoadedModel
from services.worker.runner.graphs.graph_runner import GraphSettings
from services.worker.runner.model_runner import Execution
from shared.request.sampling_params import SamplingOptions
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.models.tiny_tokenizer import IM_END_ID
from tests.support.worker.graphs import CountingCapture
from tests.support.worker.worker_driver import Answer, Request, WorkerDriver, scores_of
from tests.support.worker.worker_runner import generate_alone, load_exact, make_runner
from tests.support.worker.worker_steps import decode_step, make_enter, prefill_step

PROMPT = [5, 9, 2, 44, 17]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_exact(write_tiny_llama(tmp_path_factory.mktemp("model"), changes={"num_hidden_layers": 2}))


def tokens_of(loaded: LoadedModel, *requests: Request, drafting: Drafting | None = None) -> list[list[int]]:
    driver = WorkerDriver(make_runner(loaded, num_blocks=200, drafting=drafting))
    return [answer.tokens for answer in driver.generate(requests)]


def test_a_bias_changes_only_its_own_sequence(loaded: LoadedModel) -> None:
    plain = generate_alone(loaded, PROMPT, 6)
    biased = Request(PROMPT, 6, options=SamplingOptions(logit_bias=((7, 100.0),)))
    assert tokens_of(loaded, Request(PROMPT, 6), biased, Request(PROMPT, 6)) == [plain, [7] * 6, plain]


def test_a_resumed_sequence_draws_what_it_would_have_drawn(loaded: LoadedModel) -> None:
    options = SamplingOptions(
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        bad_words=((9, 2), (44,)),
        min_tokens=8,
        num_logprobs=2,
        logprob_token_ids=(60, 3),
    )
    whole = Request(PROMPT, 12, temperature=0.9, seed=5, options=options, stop_token_ids=(IM_END_ID,))
    driver = WorkerDriver(make_runner(loaded))
    (answer,) = driver.generate([whole])
    for num_known in (1, 5, 11):
        known = tuple(answer.tokens[:num_known])
        resumed = Request(**{**whole.__dict__, "known": known})
        (again,) = WorkerDriver(make_runner(loaded), max_chunk=3).generate([resumed])
        assert again.tokens == answer.tokens
        assert again.logprobs == {index: answer.logprobs[index] for index in range(num_known, 12)}


def test_a_grammar_is_followed_with_and_without_drafts_and_after_a_resume(loaded: LoadedModel) -> None:
    grammar = LLMatcher.grammar_from_regex("(ab){3,9}c")
    request = Request(PROMPT, 16, temperature=1.5, seed=3, options=SamplingOptions(grammar=grammar))
    plain = Request(PROMPT, 16)
    (tokens, beside) = tokens_of(loaded, request, plain)
    assert beside == generate_alone(loaded, PROMPT, 16)
    # After the end of the text, no other token is allowed.
    assert tokens[-1] == IM_END_ID
    assert tokens_of(loaded, request, plain, drafting=Drafting(NgramProposer(), 4)) == [tokens, beside]
    resumed = Request(PROMPT, 16, temperature=1.5, seed=3, options=request.options, known=tuple(tokens[:3]))
    assert tokens_of(loaded, resumed) == [tokens]


def test_a_grammar_that_does_not_compile_ends_only_its_own_text(loaded: LoadedModel) -> None:
    broken = Request(PROMPT, 3, options=SamplingOptions(grammar="start: ((("))
    assert tokens_of(loaded, broken, Request(PROMPT, 5)) == [[IM_END_ID] * 3, generate_alone(loaded, PROMPT, 5)]


def test_log_probabilities_are_indexed_by_the_tokens_of_the_step(loaded: LoadedModel) -> None:
    runner = make_runner(loaded)
    runner.attach(block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    options = SamplingOptions(num_logprobs=1)
    output = runner.run_step(
        prefill_step(make_enter(0, PROMPT, range(4)), make_enter(1, PROMPT, range(4, 8), options=options))
    )
    assert output.logprobs is not None
    ((index, (ranks, entries, values)),) = scores_of(output.logprobs).items()
    token_id = int(output.token_ids[1])
    assert (index, ranks, entries) == (1, [1], [token_id, token_id])
    assert values[0] == values[1] < 0
    assert runner.run_step(decode_step(rows=[0])).logprobs is None


@pytest.mark.parametrize("execution", [Execution(), Execution(GraphSettings(CountingCapture(), (1, 4)))])
@pytest.mark.parametrize("drafting", [None, Drafting(NgramProposer(), 3)], ids=["no drafts", "drafts"])
def test_requested_tokens_have_the_values_and_ranks_that_they_have_among_the_likeliest(
    loaded: LoadedModel, drafting: Drafting | None, execution: Execution
) -> None:
    def generate(*all_options: SamplingOptions) -> list[Answer]:
        runner = make_runner(loaded, num_blocks=200, drafting=drafting, execution=execution)
        return WorkerDriver(runner).generate([Request(PROMPT * 2, 9, options=options) for options in all_options])

    (likeliest,) = generate(SamplingOptions(num_logprobs=20))
    requested = tuple(likeliest.logprobs[4][1][3:7])
    alone, beside = generate(
        SamplingOptions(logprob_token_ids=requested),
        SamplingOptions(logprob_token_ids=requested[:1] * 2, num_logprobs=1),
    )
    assert alone.logprobs[4][0][1:] == [3, 4, 5, 6]
    for index, (ranks, (own, *tops), (own_value, *values)) in likeliest.logprobs.items():
        (own_rank, *found_ranks), entries, (found_value, *found_values) = alone.logprobs[index]
        assert ([own_rank], entries, found_value) == (ranks, [own, *requested], own_value)
        for token_id, rank, value in zip(requested, found_ranks, found_values, strict=True):
            is_among = (tops[rank - 1], values[rank - 1]) == (token_id, value) if rank <= 20 else token_id not in tops
            assert is_among
        rank, value, first = found_ranks[0], found_values[0], requested[0]
        twice = [own_rank, rank, rank], [own, first, first, tops[0]], [own_value, value, value, values[0]]
        assert beside.logprobs[index] == twice


def test_penalties_include_a_cached_prefix(loaded: LoadedModel) -> None:
    prompt = [*PROMPT, 60, 33, 21, 4]
    options = SamplingOptions(repetition_penalty=2.0)
    expected = tokens_of(loaded, Request(prompt, 4, options=options))[0]
    runner = make_runner(loaded)
    runner.attach(block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    runner.run_step(prefill_step(make_enter(0, prompt, range(4))))
    enter = make_enter(1, prompt[8:], [0, 1, 10, 11], num_cached_tokens=8, cached_token_ids=prompt[:8], options=options)
    outputs = [runner.run_step(prefill_step(enter)), *(runner.run_step(decode_step(rows=[1])) for _ in range(3))]
    assert np.concatenate([output.token_ids for output in outputs]).tolist() == expected
    assert not set(expected) & set(prompt)
