"""A grammar that begins after reasoning: the same tokens as if it allowed any text there, without its masks."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from services.worker.sampling.reasoning import Reasoning
from services.worker.sampling.sampling_state import SamplingState
from shared.request.sampling_params import SamplingOptions
from tests.support.kernels.sampling import AlternatingMatcher, Recipe, make_rows, make_state, sample, walk
from tests.support.worker.worker_steps import column

WIDTH = 12
EOS = 11
CLOSE = (7, 9)
OPENED = SamplingOptions(grammar="alternating", reasoning_end=CLOSE)
OPENING = SamplingOptions(grammar="alternating", reasoning_begin=(4, 5), reasoning_end=CLOSE)


class TellingMatcher(AlternatingMatcher):
    """Remembers the tokens that it took, and how many masks it gave."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.taken: list[int] = []
        self.num_masks = 0

    def mask(self) -> np.typing.NDArray[np.bool_]:
        self.num_masks += 1
        return super().mask()

    def advance(self, token_id: int) -> None:
        self.taken.append(token_id)
        super().advance(token_id)


def make_reasoning_state(
    options: SamplingOptions, completion: tuple[int, ...] = ()
) -> tuple[SamplingState, TellingMatcher]:
    matcher = TellingMatcher()
    state = SamplingState(
        options,
        stop_token_ids=column([]),
        num_prompt_tokens=1,
        logits_width=WIDTH,
        matcher=matcher,
        eos_token_ids=(EOS,),
    )
    state.extend(column([0, *completion]))
    return state, matcher


def drawable(state: SamplingState) -> list[int]:
    """The tokens that may come next."""
    return np.flatnonzero(state.process(np.zeros(WIDTH, np.float32), 1) > -np.inf).tolist()


EVEN, ODD = [0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]


def test_anything_but_the_end_may_come_until_the_reasoning_is_closed() -> None:
    state, matcher = make_reasoning_state(OPENED)
    for token_id in (9, 7, 3, 7, 7, 9):
        assert drawable(state) == list(range(EOS))
        assert state.is_free
        state.append(token_id)
    # The grammar took what closed the reasoning, and none of the rest.
    assert (matcher.taken, matcher.num_masks, state.is_free) == ([7, 9], 0, False)
    assert drawable(state) == [0]


def test_the_grammar_may_open_the_reasoning() -> None:
    state, matcher = make_reasoning_state(OPENING)
    assert (drawable(state), state.is_free) == (EVEN, False)
    state.append(4)
    assert (drawable(state), state.is_free) == (ODD, False)
    state.append(5)
    assert (drawable(state), state.is_free, matcher.taken) == (list(range(EOS)), True, [4, 5])


@pytest.mark.parametrize("begins", [(6,), (4, 7), (4, 3, 4, 5)])
def test_an_answer_without_reasoning_follows_its_grammar(begins: tuple[int, ...]) -> None:
    state, matcher = make_reasoning_state(OPENING)
    for token_id in begins:
        state.append(token_id)
    state.append(4 if len(begins) % 2 == 0 else 5)
    assert not state.is_free
    assert matcher.taken[:-1] == list(begins)


@pytest.mark.parametrize("num_known", range(9))
def test_a_resumed_sequence_finds_where_it_is(num_known: int) -> None:
    completion = (4, 5, 7, 1, 7, 9, 2, 3, 6)
    state, matcher = make_reasoning_state(OPENING)
    resumed, other = make_reasoning_state(OPENING, completion[:num_known])
    for token_id in completion[:num_known]:
        state.append(token_id)
    for token_id in completion[num_known:]:
        assert (drawable(resumed), resumed.is_free) == (drawable(state), state.is_free)
        state.append(token_id)
        resumed.append(token_id)
    assert matcher.taken == other.taken == [4, 5, 7, 9, 2, 3, 6]


def test_other_options_still_apply_in_reasoning() -> None:
    options = SamplingOptions(grammar="alternating", reasoning_end=CLOSE, bad_words=((3,),), logit_bias=((2, 1.0),))
    state, _ = make_reasoning_state(options)
    assert 3 not in drawable(state)
    # Its edits are not the same everywhere.
    assert not state.is_free


def test_allowed_tokens_are_those_of_the_request_and_the_grammar() -> None:
    allowed = SamplingOptions(allowed_token_ids=(1, 2, 5, 8))
    assert drawable(make_state(allowed, logits_width=WIDTH)) == [1, 2, 5, 8]
    both = SamplingOptions(grammar="alternating", allowed_token_ids=(1, 2, 5, 8))
    state = make_state(both, logits_width=WIDTH, matcher=AlternatingMatcher(WIDTH))
    assert drawable(state) == [2, 8]
    # The grammar wins where the request allows none of its tokens.
    odd = SamplingOptions(grammar="alternating", allowed_token_ids=(1, 5))
    assert drawable(make_state(odd, logits_width=WIDTH, matcher=AlternatingMatcher(WIDTH))) == EVEN


def recipes() -> list[Recipe]:
    """With and without the opening, greedy and not, with options that edit every place."""
    matcher = partial(AlternatingMatcher, WIDTH)
    penalized = SamplingOptions(grammar="alternating", reasoning_end=(7,), frequency_penalty=0.5, num_logprobs=1)
    scored = SamplingOptions(grammar="alternating", reasoning_end=(7,), num_logprobs=2)
    begun = SamplingOptions(grammar="alternating", reasoning_begin=(4,), reasoning_end=(3, 3))
    return [
        Recipe(temperature=temperature, seed=seed, options=options, make_matcher=matcher, eos_token_ids=(EOS,))
        for seed, options in enumerate((scored, begun, penalized))
        for temperature in (0.0, 1.4)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_drafts_change_no_token(seed: int) -> None:
    table = (torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)) * 2).round() / 2
    plain, _ = walk(table, recipes(), 24)
    random = np.random.default_rng(seed)

    def half_right(number: int, known: list[int]) -> list[int]:
        right = plain[number][len(known) - 3 :][: random.integers(9)]
        return [token_id if random.random() < 0.8 else int(random.integers(WIDTH)) for token_id in right]

    drafted, num_steps = walk(table, recipes(), 24, propose=half_right)
    assert drafted == plain
    assert num_steps < 24
    # Reasoning of several lengths, and answers after it.
    assert any(7 in tokens[:20] for tokens in plain)


def test_drafts_of_reasoning_are_checked_at_once() -> None:
    state, matcher = make_reasoning_state(OPENED)
    logits = torch.zeros(6, WIDTH)
    for place, token_id in enumerate((3, 3, 7, 9, 4, 6)):
        logits[place, token_id], logits[place, EOS] = 5.0, 9.0
    rows = make_rows([Recipe(temperature=0.0)], [1], states={0: state}, drafts=[[3, 3, 7, 9, 4]])
    sampled = sample(logits, rows)
    # What closes the reasoning is odd, so the grammar's next token is 0; the last two come from its masks.
    assert sampled.token_ids.tolist()[:4] == [3, 3, 7, 9]
    assert matcher.num_masks == 1
    assert matcher.taken[:2] == [7, 9]


def test_a_place_without_finite_logits_ends_a_run_of_reasoning() -> None:
    state, _ = make_reasoning_state(OPENED)
    logits = torch.zeros(4, WIDTH)
    logits[:, 3] = 5.0
    logits[2, 0] = torch.nan
    rows = make_rows([Recipe(temperature=0.0)], [1], states={0: state}, drafts=[[3, 3, 3]])
    assert sample(logits, rows).token_ids.tolist() == [3, 3]


def test_a_marker_that_repeats_its_beginning_is_found() -> None:
    reasoning = Reasoning((), (7, 7, 9))
    assert [reasoning.advance(token_id) for token_id in (7, 7, 7, 9)] == [False, False, False, True]
    assert not reasoning.is_open
