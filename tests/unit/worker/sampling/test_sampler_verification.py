"""Drafts are accepted exactly as if tokens were drawn one by one, and the host never sees logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from typing_extensions import override

from services.worker.drawing.token_draw import TokenDraw
from services.worker.ops import DrawRows, load_ops
from services.worker.ops.reference.backend import ReferenceOps
from services.worker.sampling.sampling_state import SamplingState
from shared.request.sampling_params import SamplingOptions
from tests.support.kernels.meta_device import META, AnsweredReads, skip_kernels
from tests.support.kernels.sampling import (
    AlternatingMatcher,
    Recipe,
    make_rows,
    make_state,
    sample_with,
    tokens_of_rows,
)

WIDTH = 12
MOST_DRAFTS = 4
PENALTIES = SamplingOptions(repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2)


class BriefMatcher(AlternatingMatcher):
    """Fails after two tokens."""

    num_tokens = 0

    def mask(self) -> npt.NDArray[np.bool_]:
        self.has_failed = self.num_tokens >= 2
        return super().mask()

    def advance(self, token_id: int) -> None:
        self.num_tokens += 1
        super().advance(token_id)


RECIPES = (
    Recipe(temperature=0.0),
    Recipe(temperature=1.2, seed=2**64 - 1),
    Recipe(top_k=4, top_p=0.9, seed=2, choice=3),
    Recipe(seed=3, options=SamplingOptions(min_p=0.125, num_logprobs=1)),
    Recipe(temperature=0.0, options=PENALTIES),
    Recipe(temperature=0.7, top_k=5, seed=4, options=PENALTIES),
    Recipe(options=SamplingOptions(logit_bias=((3, 2.0), (5, -4.0)), bad_words=((2, 3), (7,)), min_tokens=3)),
    Recipe(seed=5, options=SamplingOptions(grammar="alternating"), make_matcher=partial(AlternatingMatcher, WIDTH)),
    Recipe(seed=6, options=SamplingOptions(grammar="brief"), make_matcher=partial(BriefMatcher, WIDTH)),
)


@st.composite
def some_runs(draw: st.DrawFn) -> list[tuple[Recipe, list[bool], int | None]]:
    """Rows: how each is drawn, which of its drafts are right, and perhaps a place whose logits are not finite."""
    are_right = st.lists(st.sampled_from([True, True, True, False]), max_size=MOST_DRAFTS)
    bad_place = st.one_of(st.none(), st.none(), st.integers(0, MOST_DRAFTS))
    return draw(st.lists(st.tuples(st.sampled_from(RECIPES), are_right, bad_place), min_size=1, max_size=6))


def draw_one_by_one(
    logits: npt.NDArray[np.float32],
    recipe: Recipe,
    state: SamplingState | None,
    position: int,
    are_right: Sequence[bool],
) -> tuple[list[int], list[int], bool]:
    """A run's drafts, of which those are right that are meant to be, its tokens, and whether its grammar failed."""
    draw = TokenDraw(
        temperature=float(np.float32(recipe.temperature)),
        top_k=recipe.top_k,
        top_p=float(np.float32(recipe.top_p)),
        min_p=0.0 if state is None else state.options.min_p,
        seed=recipe.seed,
        choice=recipe.choice,
    )
    drafts = [0] * len(are_right)
    tokens: list[int] = []
    for place, row in enumerate(logits):
        if not math.isfinite(row.max()):
            return drafts, tokens, False
        edited = row if state is None else state.process(row, position + place)
        tokens.append(draw.token(edited, position + place))
        has_failed = state is not None and state.has_failed
        if state is not None:
            state.append(tokens[-1])
        if place < len(are_right):
            drafts[place] = tokens[-1] if are_right[place] else (tokens[-1] + 1) % WIDTH
        if has_failed or place == len(are_right) or not are_right[place]:
            return drafts, tokens, has_failed
    raise AssertionError("a run has one more row of logits than drafts")


@pytest.mark.parametrize("draws_on_host", [True, False])
@settings(max_examples=60)
@given(runs=some_runs(), seed=st.integers(0, 2**32))
def test_drafts_are_accepted_as_if_tokens_were_drawn_one_by_one(
    draws_on_host: bool, runs: list[tuple[Recipe, list[bool], int | None]], seed: int
) -> None:
    ops = load_ops("reference")
    ops.draws_on_host = draws_on_host
    generator = torch.Generator().manual_seed(seed)
    parts, drafts, expected, states, others = [], [], [], {}, {}
    for row, (recipe, are_right, bad_place) in enumerate(runs):
        logits = (torch.randn(len(are_right) + 1, WIDTH, generator=generator) * 2).round() / 2
        if bad_place is not None and bad_place < len(logits):
            logits[bad_place, 5] = math.nan
        parts.append(logits)
        state, other = (recipe.make_state([0], WIDTH) for _ in range(2))
        its_drafts, *tokens_and_failure = draw_one_by_one(logits.numpy(), recipe, other, 1, are_right)
        drafts.append(its_drafts)
        expected.append(tokens_and_failure)
        if state is not None and other is not None:
            states[row], others[row] = state, other
    rows = make_rows([recipe for recipe, *_ in runs], [1] * len(runs), states=states, drafts=drafts)
    sampled = sample_with(ops, torch.cat(parts), rows)
    tokens = tokens_of_rows(sampled, len(runs))
    bad_rows = sampled.not_finite_rows.tolist()
    assert bad_rows == [row for row, (its_tokens, _) in enumerate(expected) if not its_tokens]
    assert [its for row, its in enumerate(tokens) if row not in bad_rows] == [its for its, _ in expected if its]
    assert sampled.failed_grammar_rows.tolist() == [row for row, (_, has_failed) in enumerate(expected) if has_failed]
    zeros = np.zeros(WIDTH, np.float32)
    for row, state in states.items():
        assert state.process(zeros, 1).tolist() == others[row].process(zeros, 1).tolist()


class CountingOps(ReferenceOps):
    """Counts the tokens that it draws with noise."""

    num_drawn = 0

    @override
    def draw(self, logits: Tensor, rows: DrawRows, drawn: Tensor, token_ids: Tensor) -> None:
        self.num_drawn += len(drawn)
        super().draw(logits, rows, drawn, token_ids)


@pytest.mark.parametrize(("num_right", "num_drawn"), [(0, 1), (2, 3), (4, 5)])
def test_where_the_host_draws_it_draws_only_what_counts(num_right: int, num_drawn: int) -> None:
    ops, logits = CountingOps(), torch.zeros(5, WIDTH)
    logits[torch.arange(5), torch.arange(5)] = 1000.0
    drafts = [place if place < num_right else WIDTH - 1 for place in range(4)]
    sampled = sample_with(ops, logits, make_rows([Recipe()], [1], drafts=[drafts]))
    assert len(sampled.token_ids) == ops.num_drawn == num_drawn


@torch.inference_mode()
def test_the_host_reads_tokens_but_never_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_kernels(monkeypatch)
    recipes = [Recipe(temperature=0.0), Recipe(top_p=0.9), Recipe(options=PENALTIES), Recipe(options=PENALTIES)]
    states = {row: make_state(PENALTIES, logits_width=WIDTH) for row in (2, 3)}
    # Reads give ones, so edited rows go on after drafts of 1, and each row's count is 1.
    rows = make_rows(recipes, [3] * 4, states=states, drafts=[[1], [1, 1], [1, 5], [1, 1, 1]])
    with AnsweredReads() as reads:
        sampled = sample_with(load_ops("triton"), torch.empty(12, WIDTH, device=META), rows)
    assert sampled.counts is not None
    assert sampled.counts.tolist() == [1, 1, 1, 1]
    # All places at once, those of the edited rows in order, and then the tokens with each row's count.
    assert reads.shapes == [(12,), (2,), (2,), (1,), (1,), (16,)]
