"""The effect of options on one sequence's logits, compared with transformers' processors and plain definitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from services.worker.sampling.sampling_state import SamplingState
from shared.request.sampling_params import SamplingOptions
from tests.support.kernels.sampling import AlternatingMatcher, make_state
from tests.support.worker.worker_steps import column

WIDTH = 40
FloatRow = npt.NDArray[np.float32]

token_ids = st.integers(0, WIDTH - 1)
# Few distinct tokens, so that runs and repetitions are common.
completions = st.lists(st.integers(0, 3), max_size=12)
penalties = st.floats(-2, 2, width=32)
biases = st.dictionaries(token_ids, st.floats(-100, 100, width=32), max_size=5)
bad_words = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=4).map(tuple)


def random_logits(seed: int) -> FloatRow:
    return (np.random.default_rng(seed).normal(size=WIDTH) * 4).astype(np.float32)


def processed(state: SamplingState, logits: FloatRow, num_tokens: int) -> FloatRow:
    before = logits.copy()
    result = state.process(logits, num_tokens)
    assert np.array_equal(logits, before)
    assert result.dtype == np.float32
    assert np.isfinite(result.max())
    return result


def transformed(processor: LogitsProcessor, tokens: Sequence[int], logits: FloatRow) -> FloatRow:
    """The logits after these tokens, changed by a processor of transformers."""
    result: FloatRow = processor(torch.tensor([tokens]), torch.from_numpy(logits.copy())[None])[0].numpy()
    return result


@given(prompt=st.lists(token_ids, min_size=1), completion=completions, penalty=st.floats(0.125, 2.0, width=32))
def test_repetition_penalty_matches_transformers(prompt: list[int], completion: list[int], penalty: float) -> None:
    state = make_state(SamplingOptions(repetition_penalty=penalty), prompt=prompt, completion=completion)
    logits = random_logits(1)
    expected = transformed(RepetitionPenaltyLogitsProcessor(penalty), prompt + completion, logits)
    num_tokens = len(prompt) + len(completion)
    np.testing.assert_allclose(processed(state, logits, num_tokens), expected, rtol=1e-6)


@given(completion=completions, words=bad_words)
@settings(max_examples=200)
def test_bad_words_match_transformers(completion: list[int], words: tuple[tuple[int, ...], ...]) -> None:
    state = make_state(SamplingOptions(bad_words=words), completion=completion)
    logits = random_logits(2)
    expected = logits
    if words:
        # transformers looks at the prompt too, and skips runs longer than the input: a token of no run goes first.
        processor = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=None)
        expected = transformed(processor, [9] * 4 + completion, logits)
    assert np.array_equal(processed(state, logits, 1 + len(completion)), expected)


def test_bad_words_do_not_begin_in_the_prompt() -> None:
    logits = random_logits(2)
    options = SamplingOptions(bad_words=((5, 6),))
    assert np.isfinite(processed(make_state(options, prompt=[1, 5]), logits, 2)).all()
    banned = processed(make_state(options, prompt=[1, 5], completion=[5]), logits, 3)
    assert np.flatnonzero(banned == -np.inf).tolist() == [6]


@given(num_prompt=st.integers(1, 5), num_completion=st.integers(0, 8), min_tokens=st.integers(0, 8))
def test_min_tokens_match_transformers(num_prompt: int, num_completion: int, min_tokens: int) -> None:
    tokens = [9] * (num_prompt + num_completion)
    state = make_state(SamplingOptions(min_tokens=min_tokens), prompt=tokens[:num_prompt], stop_token_ids=[3, 8])
    logits = random_logits(3)
    processor = MinNewTokensLengthLogitsProcessor(num_prompt, min_tokens, eos_token_id=[3, 8], device="cpu")
    assert np.array_equal(processed(state, logits, len(tokens)), transformed(processor, tokens, logits))


@given(biases=biases)
def test_logit_bias_matches_transformers(biases: dict[int, float]) -> None:
    state = make_state(SamplingOptions(logit_bias=tuple(sorted(biases.items()))))
    logits = random_logits(4)
    expected = logits
    if biases:
        processor = SequenceBiasLogitsProcessor([[[token_id], bias] for token_id, bias in biases.items()])
        expected = transformed(processor, [9], logits)
    assert np.array_equal(processed(state, logits, 1), expected)


@given(prompt=st.lists(token_ids, min_size=1), completion=completions, presence=penalties, frequency=penalties)
def test_presence_and_frequency_penalties_count_the_completion(
    prompt: list[int], completion: list[int], presence: float, frequency: float
) -> None:
    options = SamplingOptions(presence_penalty=presence, frequency_penalty=frequency)
    state = make_state(options, prompt=prompt, completion=completion)
    logits = random_logits(5)
    expected = logits.astype(np.float64)
    for token_id, count in Counter(completion).items():
        expected[token_id] -= presence + frequency * count
    num_tokens = len(prompt) + len(completion)
    np.testing.assert_allclose(processed(state, logits, num_tokens), expected, rtol=1e-6, atol=1e-6)


options_of_all_kinds = st.builds(
    SamplingOptions,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    logit_bias=biases.map(lambda chosen: tuple(sorted(chosen.items()))),
    bad_words=bad_words,
    min_tokens=st.integers(0, 8),
)


def plainly_processed(
    options: SamplingOptions, logits: FloatRow, prompt: list[int], completion: list[int], stops: list[int]
) -> npt.NDArray[np.float64]:
    """All options in order, token by token, as a reader of the proto would implement them."""
    expected = logits.astype(np.float64)
    for word in options.bad_words:
        if len(completion) >= len(word) - 1 and (*completion, word[-1])[-len(word) :] == word:
            expected[word[-1]] = -np.inf
    if len(completion) < options.min_tokens:
        expected[stops] = -np.inf
    for token_id, bias in options.logit_bias:
        expected[token_id] += bias
    for token_id in {*prompt, *completion}:
        expected[token_id] *= options.repetition_penalty ** (-1 if expected[token_id] > 0 else 1)
    for token_id, count in Counter(completion).items():
        expected[token_id] -= options.frequency_penalty * count + options.presence_penalty
    return expected


@given(
    options=options_of_all_kinds,
    prompt=st.lists(token_ids, min_size=1),
    completion=completions,
    stops=st.lists(token_ids, max_size=3),
)
@settings(max_examples=300)
def test_options_together_apply_one_after_the_other(
    options: SamplingOptions, prompt: list[int], completion: list[int], stops: list[int]
) -> None:
    state = make_state(options, prompt=prompt, completion=completion, stop_token_ids=stops)
    logits = random_logits(6)
    expected = plainly_processed(options, logits, prompt, completion, stops)
    num_tokens = len(prompt) + len(completion)
    np.testing.assert_allclose(processed(state, logits, num_tokens), expected, rtol=1e-5, atol=1e-5)


@given(options=options_of_all_kinds, tokens=st.lists(token_ids, min_size=6, max_size=20), data=st.data())
@settings(max_examples=200)
def test_known_and_drawn_tokens_count_the_same_in_pieces_of_any_size(
    options: SamplingOptions, tokens: list[int], data: st.DataObject
) -> None:
    at_once = make_state(options, prompt=tokens[:5], completion=tokens[5:], matcher=AlternatingMatcher(WIDTH))
    num_drawn = data.draw(st.integers(0, len(tokens) - 5))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens) - num_drawn), max_size=4)))
    in_pieces = SamplingState(
        options,
        stop_token_ids=column([]),
        num_prompt_tokens=5,
        logits_width=WIDTH,
        matcher=AlternatingMatcher(WIDTH),
    )
    for piece in np.split(column(tokens[: len(tokens) - num_drawn]), cuts):
        in_pieces.extend(piece)
    for token_id in tokens[len(tokens) - num_drawn :]:
        in_pieces.append(token_id)
    logits = random_logits(7)
    expected = processed(at_once, logits, len(tokens))
    assert np.array_equal(processed(in_pieces, logits, len(tokens)), expected)


def test_a_grammar_allows_what_fits_after_the_completion() -> None:
    logits = random_logits(8)
    for completion in ([], [2], [2, 3]):
        state = make_state(prompt=[7, 7], completion=completion, matcher=AlternatingMatcher(WIDTH))
        allowed = processed(state, logits, 2 + len(completion)) > -np.inf
        assert np.flatnonzero(allowed).tolist() == list(range(len(completion) % 2, WIDTH, 2))


def test_a_grammar_overrides_bad_words_and_min_tokens_that_leave_nothing() -> None:
    # The token 5 violates the grammar, which then allows only its end: token 0.
    options = SamplingOptions(bad_words=((0,),), min_tokens=9, logit_bias=((0, 1.5),))
    logits = random_logits(9)
    state = make_state(options, completion=[5], stop_token_ids=[0], matcher=AlternatingMatcher(WIDTH))
    result = processed(state, logits, 2)
    assert np.flatnonzero(result > -np.inf).tolist() == [0]
    assert result[0] == logits[0] + np.float32(1.5)


def test_a_grammar_overrides_a_model_that_gives_allowed_tokens_no_probability() -> None:
    logits = random_logits(10)
    logits[::2] = -np.inf
    result = processed(make_state(matcher=AlternatingMatcher(WIDTH)), logits, 1)
    assert result[::2].tolist() == [0.0] * (WIDTH // 2)
    assert (result[1::2] == -np.inf).all()


class NothingMatcher:
    """A grammar whose end token is missing from the model."""

    has_failed = False

    def mask(self) -> npt.NDArray[np.bool_]:
        return np.zeros(WIDTH, np.bool_)

    def advance(self, token_id: int) -> None:
        pass

    def prepare(self) -> None:
        pass


def test_a_mask_that_allows_nothing_is_ignored() -> None:
    logits = random_logits(11)
    assert np.array_equal(processed(make_state(matcher=NothingMatcher()), logits, 1), logits)


def test_bad_words_that_leave_no_token_are_ignored() -> None:
    logits = random_logits(12)
    logits[3:] = -np.inf
    options = SamplingOptions(bad_words=((0,), (1,), (2,)))
    assert np.array_equal(processed(make_state(options), logits, 1), logits)


@pytest.mark.parametrize("penalty", [0.1, 2.0])
def test_a_penalty_keeps_finite_logits_finite(penalty: float) -> None:
    logits = np.full(WIDTH, np.finfo(np.float32).max)
    logits[::2] *= -1
    state = make_state(SamplingOptions(repetition_penalty=penalty), prompt=range(WIDTH))
    assert np.isfinite(processed(state, logits, WIDTH)).all()


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (SamplingOptions(num_logprobs=3, num_prompt_logprobs=2, min_p=0.3), False),
        (SamplingOptions(logprob_token_ids=(3, 1)), False),
        (SamplingOptions(min_tokens=1), True),
        (SamplingOptions(logit_bias=((1, 1.0),)), True),
        (SamplingOptions(bad_words=((1,),)), True),
        (SamplingOptions(repetition_penalty=1.1), True),
        (SamplingOptions(presence_penalty=0.1), True),
        (SamplingOptions(frequency_penalty=0.1), True),
    ],
)
def test_a_state_knows_whether_it_changes_logits(options: SamplingOptions, changes: bool) -> None:
    assert make_state(options).changes_logits is changes
    assert make_state(options, matcher=AlternatingMatcher(WIDTH)).changes_logits
