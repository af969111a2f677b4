"""Rows with drafts and with options draw the same tokens as without drafts, and as alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.worker.ops import load_ops
from services.worker.sampling.logprobs import token_logprobs
from shared.request.sampling_params import SamplingOptions
from tests.support.kernels.sampling import (
    AlternatingMatcher,
    Recipe,
    make_rows,
    make_state,
    sample,
    tokens_of_rows,
    walk,
)
from tests.support.worker.worker_steps import column

WIDTH = 12
GREEDY = Recipe(temperature=0.0)


def make_table(seed: int = 0) -> Tensor:
    """The logits after each token; rounded, so that there are ties."""
    return (torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)) * 2).round() / 2


def some_recipes() -> list[Recipe]:
    """Plain and rare options, alone and together."""
    matcher = partial(AlternatingMatcher, WIDTH)
    biased = SamplingOptions(logit_bias=((3, 2.0), (5, -4.0)), min_p=0.05, num_logprobs=2)
    penalized = SamplingOptions(repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2)
    worded = SamplingOptions(bad_words=((1,), (2, 3), (4, 5, 6), (7, 7)), min_tokens=6)
    everything = SamplingOptions(
        min_p=0.02, repetition_penalty=0.9, frequency_penalty=0.5, logit_bias=((2, 1.0),), bad_words=((2, 1),),
        min_tokens=4, num_logprobs=3, grammar="alternating",
    )  # fmt: skip
    return [
        *(Recipe(temperature=temperature, seed=1, options=options, stop_token_ids=(0, 9))
          for temperature in (0.0, 1.2) for options in (None, biased, penalized, worded)),
        Recipe(top_k=4, top_p=0.9, seed=2, choice=3),
        Recipe(top_k=5, seed=3, options=penalized),
        Recipe(temperature=1.7, top_p=0.8, seed=4, options=everything, stop_token_ids=(8,), make_matcher=matcher),
        Recipe(temperature=0.0, options=everything, stop_token_ids=(8,), make_matcher=matcher),
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_tokens_are_the_same_with_and_without_drafts(seed: int) -> None:
    table, recipes = make_table(seed), some_recipes()
    plain, num_steps = walk(table, recipes, 24)
    assert num_steps == 24
    random = np.random.default_rng(seed)

    def half_right(number: int, known: list[int]) -> list[int]:
        right = plain[number][len(known) - 3 :][: random.integers(9)]
        return [token_id if random.random() < 0.8 else int(random.integers(WIDTH)) for token_id in right]

    drafted, num_steps = walk(table, recipes, 24, propose=half_right)
    assert drafted == plain
    assert num_steps < 20


def test_right_drafts_save_their_steps() -> None:
    table, recipes = make_table(), some_recipes()
    plain, _ = walk(table, recipes, 24)
    drafted, num_steps = walk(table, recipes, 24, propose=lambda number, known: plain[number][len(known) - 3 :][:7])
    assert drafted == plain
    assert num_steps == 3


def test_tokens_are_the_same_alone_and_in_a_batch() -> None:
    table, recipes = make_table(), some_recipes()
    together, _ = walk(table, recipes, 12, propose=lambda _, known: known[-2:])
    assert [walk(table, [recipe], 12)[0][0] for recipe in recipes] == together


@given(
    drafts=st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_a_row_gets_the_drafts_that_were_drawn_and_one_more_token(
    drafts: list[list[int]], seed: int, temperature: float
) -> None:
    num_logits = len(drafts) + sum(map(len, drafts))
    logits = torch.randn(num_logits, 4, generator=torch.Generator().manual_seed(seed))
    recipes = [Recipe(temperature=temperature)] * len(drafts)
    sampled = sample(logits, make_rows(recipes, [5] * len(drafts), drafts=drafts))
    # Every position by itself, as a row without drafts.
    positions = [5 + offset for row in drafts for offset in range(len(row) + 1)]
    single = sample(logits, make_rows([Recipe(temperature=temperature)] * num_logits, positions)).token_ids.tolist()
    expected, start = [], 0
    for row in drafts:
        drawn = single[start : start + len(row) + 1]
        start += len(drawn)
        num_right = next((place for place, token_id in enumerate(row) if token_id != drawn[place]), len(row))
        expected.append(drawn[: num_right + 1])
    assert sampled.counts is not None
    assert sampled.counts.dtype == np.int32
    assert sampled.counts.tolist() == [len(tokens) for tokens in expected]
    assert tokens_of_rows(sampled, len(drafts)) == expected


def test_rows_without_drafts_have_no_counts() -> None:
    assert sample(make_table(), make_rows([GREEDY] * WIDTH, range(WIDTH))).counts is None


def forced_logits(token_ids: Sequence[int]) -> Tensor:
    """Logits that practically force the token at each place."""
    logits = torch.zeros(len(token_ids), WIDTH)
    logits[torch.arange(len(token_ids)), torch.tensor(token_ids)] = 1000.0
    return logits


@pytest.mark.parametrize("options", [None, SamplingOptions(frequency_penalty=0.1, num_logprobs=1)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_run_ends_before_non_finite_logits(bad: float, temperature: float, options: SamplingOptions | None) -> None:
    # Rows of 3, 1 and 2 drafts, all right; the last draft is what the row's non-finite logits would suggest.
    logits = forced_logits([1, 2, 3, 4, 5, 6, 7, 8, 9])
    logits[2, 0] = bad
    logits[6, 0] = bad
    recipes = [Recipe(temperature=temperature, options=options)] * 3
    states = {} if options is None else {row: make_state(options, logits_width=WIDTH) for row in range(3)}
    rows = make_rows(recipes, [1, 1, 1], states=states, drafts=[[1, 2, 3], [5], [0, 8]])
    sampled = sample(logits, rows)
    assert sampled.not_finite_rows.tolist() == [2]
    assert sampled.counts is not None
    assert sampled.counts.tolist() == [2, 2, 1]
    assert sampled.token_ids[:4].tolist() == [1, 2, 5, 6]
    if options is not None:
        assert sampled.logprobs is not None
        assert sampled.logprobs.indexes.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_state_includes_only_the_tokens_that_count(temperature: float) -> None:
    options = SamplingOptions(frequency_penalty=1.0)
    state = make_state(options, logits_width=WIDTH)
    logits = forced_logits([4, 4, 6, 7])
    rows = make_rows([Recipe(temperature=temperature)], [1], states={0: state}, drafts=[[4, 4, 5]])
    assert sample(logits, rows).token_ids.tolist() == [4, 4, 6]
    taken = -state.process(np.zeros(WIDTH, np.float32), 4)
    assert {token_id: taken[token_id] for token_id in np.flatnonzero(taken).tolist()} == {4: 2.0, 6: 1.0}


def test_min_tokens_apply_at_each_draft_position() -> None:
    state = make_state(SamplingOptions(min_tokens=2), stop_token_ids=[3], logits_width=WIDTH)
    logits = torch.zeros(4, WIDTH)
    logits[:, 3], logits[:, 5] = 9.0, 8.0
    sampled = sample(logits, make_rows([GREEDY], [1], states={0: state}, drafts=[[5, 5, 3]]))
    assert sampled.token_ids.tolist() == [5, 5, 3, 3]


class RecordingMatcher(AlternatingMatcher):
    """Records its calls."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.calls: list[str] = []

    def mask(self) -> npt.NDArray[np.bool_]:
        self.calls.append("mask")
        return super().mask()

    def advance(self, token_id: int) -> None:
        self.calls.append(f"advance {token_id}")
        super().advance(token_id)

    def prepare(self) -> None:
        self.calls.append("prepare")


def test_a_grammar_can_prepare_its_next_mask_as_soon_as_the_tokens_before_it_are_known() -> None:
    matcher = RecordingMatcher()
    # A resumed sequence: its completion goes through the grammar again.
    state = make_state(prompt=[1, 1], completion=[6, 9], logits_width=WIDTH, matcher=matcher)
    assert matcher.calls == ["advance 6", "advance 9", "prepare"]
    matcher.calls.clear()
    sampled = sample(forced_logits([4, 7, 2]), make_rows([GREEDY], [4], states={0: state}, drafts=[[4, 5]]))
    assert sampled.token_ids.tolist() == [4, 7]
    assert matcher.calls == ["mask", "advance 4", "prepare", "mask", "advance 7", "prepare"]


class ShortMatcher(AlternatingMatcher):
    """Fails after `num_tokens`."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(WIDTH)
        self._num_left = num_tokens

    def mask(self) -> npt.NDArray[np.bool_]:
        self.has_failed = not self._num_left
        return super().mask()

    def advance(self, token_id: int) -> None:
        self._num_left -= 1
        super().advance(token_id)

    def prepare(self) -> None:
        self.mask()


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3])
def test_a_row_fails_once_a_mask_that_it_draws_from_has_failed(num_tokens: int) -> None:
    state = make_state(logits_width=WIDTH, matcher=ShortMatcher(num_tokens))
    rows = make_rows([Recipe(temperature=0.0), GREEDY], [1, 1], states={0: state}, drafts=[[4, 7], []])
    sampled = sample(forced_logits([4, 7, 2, 5]), rows)
    assert sampled.failed_grammar_rows.tolist() == ([0] if num_tokens < 3 else [])
    assert sampled.token_ids.tolist()[-1] == 5


def test_logprobs_are_those_of_the_raw_logits_of_every_token_that_counts() -> None:
    logits = make_table()[:7]
    counted = SamplingOptions(num_logprobs=2, logit_bias=((0, 100.0),))
    recipes = [
        GREEDY,
        Recipe(temperature=0.0, options=counted),
        GREEDY,
        Recipe(options=SamplingOptions(num_logprobs=0)),
    ]
    states = {row: state for row, recipe in enumerate(recipes) if (state := recipe.make_state([0], WIDTH))}
    plain = int(logits[0].argmax())
    sampled = sample(logits, make_rows(recipes, [1] * 4, states=states, drafts=[[plain], [0, 0], [], []]))
    assert sampled.counts is not None
    assert sampled.counts.tolist() == [2, 3, 1, 1]
    logprobs = sampled.logprobs
    assert logprobs is not None
    assert logprobs.indexes.tolist() == [2, 3, 4, 6]
    assert logprobs.counts.tolist() == [3, 3, 3, 1]
    expected = token_logprobs(load_ops("cpu"), logits[2:5], column([0, 0, 0]), column([2, 3, 4]), num_top=2)
    assert logprobs.token_ids[:9].tolist() == expected.token_ids.tolist()
    assert logprobs.values[:9].tobytes() == expected.values.tobytes()
    assert logprobs.token_ids[9] == sampled.token_ids[6]


def test_requested_tokens_have_the_log_softmax_of_the_raw_logits_at_every_token_that_counts() -> None:
    logits = make_table()[:4]
    biased = SamplingOptions(logprob_token_ids=(4, 1, 4), logit_bias=((0, 100.0),))
    recipes = [Recipe(temperature=0.0, options=biased), Recipe(options=SamplingOptions(num_logprobs=2))]
    states = {row: state for row, recipe in enumerate(recipes) if (state := recipe.make_state([0], WIDTH))}
    sampled = sample(logits, make_rows(recipes, [1, 1], states=states, drafts=[[0, 0], []]))
    logprobs = sampled.logprobs
    assert logprobs is not None
    assert logprobs.requested_counts is not None
    assert (logprobs.counts.tolist(), logprobs.requested_counts.tolist()) == ([4, 4, 4, 3], [3, 3, 3, 0])
    entries, values = logprobs.token_ids[:12].reshape(3, 4), logprobs.values[:12].reshape(3, 4)
    assert entries.tolist() == [[0, 4, 1, 4]] * 3
    np.testing.assert_allclose(values, logits[:3].log_softmax(-1)[:, [0, 4, 1, 4]], rtol=2e-6)
    order = logits[:3].argsort(descending=True, stable=True).tolist()
    assert logprobs.ranks[:12].tolist() == [1 + row.index(token_id) for row in order for token_id in (0, 4, 1, 4)]


def test_rows_that_request_no_logprobs_get_none() -> None:
    states = {0: make_state(SamplingOptions(min_tokens=2), logits_width=WIDTH)}
    assert sample(make_table()[:2], make_rows([GREEDY] * 2, [1, 1], states=states)).logprobs is None


def test_logprobs_do_not_change_a_greedy_draw() -> None:
    logits = make_table()
    states = {row: make_state(SamplingOptions(num_logprobs=1), logits_width=WIDTH) for row in range(WIDTH)}
    sampled = sample(logits, make_rows([GREEDY] * WIDTH, [1] * WIDTH, states=states))
    assert sampled.token_ids.tolist() == logits.argmax(-1).tolist()
    assert sampled.logprobs is not None
    assert sampled.logprobs.ranks.tolist() == [1] * WIDTH
