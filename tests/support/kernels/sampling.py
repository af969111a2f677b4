"""Rows to sample, and a bigram model small enough to sample from 20,000 times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.worker.forward.staging import to_device
from services.worker.ops import Ops, load_ops
from services.worker.sampling.logprobs import make_logprobs
from services.worker.sampling.row_options import RowOptions
from services.worker.sampling.runs import DeviceRuns, Runs, SampledTokens
from services.worker.sampling.sampler import Sampler
from services.worker.sampling.sampling_rows import SamplingRows
from services.worker.sampling.sampling_state import GrammarMatcher, SamplingState
from shared.request.sampling_params import NO_OPTIONS, SamplingOptions
from shared.step.columns import Int32Column
from tests.support.worker.worker_steps import column

# Called with a sequence's index and its tokens; returns its drafts.
Propose = Callable[[int, list[int]], Sequence[int]]


@dataclass(frozen=True)
class Recipe:
    """The sampling parameters of one sequence."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 77
    choice: int = 0
    options: SamplingOptions | None = None
    stop_token_ids: tuple[int, ...] = ()
    make_matcher: Callable[[], GrammarMatcher] | None = None
    eos_token_ids: tuple[int, ...] = ()

    def make_state(self, prompt: Sequence[int], logits_width: int) -> SamplingState | None:
        """The sampling state after the prompt; None for a recipe without options."""
        if self.options is None:
            return None
        state = SamplingState(
            self.options,
            stop_token_ids=column(self.stop_token_ids),
            num_prompt_tokens=len(prompt),
            logits_width=logits_width,
            matcher=None if self.make_matcher is None else self.make_matcher(),
            eos_token_ids=self.eos_token_ids,
        )
        state.extend(column(prompt))
        return state


class AlternatingMatcher:
    """A grammar of alternating even and odd tokens, even first; after a wrong token it allows only token 0."""

    has_failed = False

    def __init__(self, logits_width: int) -> None:
        self._is_even: npt.NDArray[np.bool_] = np.arange(logits_width) % 2 == 0
        self._wants_even = True
        self._is_dead = False

    def mask(self) -> npt.NDArray[np.bool_]:
        allowed = self._is_even if self._wants_even else ~self._is_even
        if self._is_dead:
            allowed = np.arange(len(self._is_even)) == 0
        return allowed

    def advance(self, token_id: int) -> None:
        self._is_dead |= (token_id % 2 == 0) is not self._wants_even
        self._wants_even = not self._wants_even

    def prepare(self) -> None:
        pass


def make_state(
    options: SamplingOptions = NO_OPTIONS,
    *,
    prompt: Sequence[int] = (0,),
    completion: Sequence[int] = (),
    stop_token_ids: Sequence[int] = (),
    logits_width: int = 40,
    matcher: GrammarMatcher | None = None,
) -> SamplingState:
    """A sampling state that contains these tokens."""
    state = SamplingState(
        options,
        stop_token_ids=column(stop_token_ids),
        num_prompt_tokens=len(prompt),
        logits_width=logits_width,
        matcher=matcher,
    )
    state.extend(column((*prompt, *completion)))
    return state


@dataclass(frozen=True, slots=True)
class RowsWithDrafts:
    """Rows, and where their logits are."""

    rows: SamplingRows
    runs: Runs
    has_drafts: bool

    @classmethod
    def single(cls, rows: SamplingRows) -> RowsWithDrafts:
        """Rows without drafts."""
        return cls(rows, Runs.of(len(rows.position), None, column()), has_drafts=False)


def make_rows(
    recipes: Sequence[Recipe],
    positions: Sequence[int],
    *,
    states: dict[int, SamplingState] | None = None,
    drafts: Sequence[Sequence[int]] | None = None,
) -> RowsWithDrafts:
    """One row per recipe, each with its drafts if any are given."""
    rows = SamplingRows(
        temperature=np.array([recipe.temperature for recipe in recipes], np.float32),
        top_k=column([recipe.top_k for recipe in recipes]),
        top_p=np.array([recipe.top_p for recipe in recipes], np.float32),
        seed=np.array([recipe.seed for recipe in recipes], np.uint64),
        choice=np.array([recipe.choice for recipe in recipes], np.uint32),
        position=np.array(positions, np.int64),
        states=states or {},
    )
    counts = None if drafts is None else column([len(row) for row in drafts])
    runs = Runs.of(len(recipes), counts, column([token_id for row in drafts or () for token_id in row]))
    return RowsWithDrafts(rows, runs, has_drafts=drafts is not None)


def sample(logits: Tensor, rows: RowsWithDrafts) -> SampledTokens:
    """Sample on the CPU backend."""
    return sample_with(load_ops("cpu"), logits, rows)


def sample_with(ops: Ops, logits: Tensor, drafted: RowsWithDrafts) -> SampledTokens:
    """Sample as a step in an epoch with drafts does."""
    sampler, rows, runs = Sampler(ops, logits.device), drafted.rows, drafted.runs
    there = DeviceRuns(to_device(runs.firsts, logits.device), to_device(runs.wanted, logits.device))
    places, options = rows.by_place(runs), RowOptions.of(rows)
    is_edited = np.isin(runs.rows, options.edited)
    # Those that are drawn again cost as little as possible before.
    places = replace(places, temperature=np.where(is_edited, np.float32(0), places.temperature))
    draws = places.draw_rows(logits.device)
    drawn = sampler.draw_runs(logits, draws, there) if drafted.has_drafts else sampler.draw(logits, draws)
    failed_rows = np.empty(0, np.int64)
    if len(options.edited):
        drawn, there, failed_rows = sampler.redraw_runs(logits, drawn, rows, runs, options.edited)
    counts = ops.accept(drawn, there.wanted, there.firsts)[0] if drafted.has_drafts else None
    both = (drawn if counts is None else torch.cat((drawn, counts))).cpu().numpy()
    num_places = len(runs.wanted)
    sampled = runs.sampled(both[:num_places], None if counts is None else both[num_places:])
    sampled = replace(sampled, failed_grammar_rows=failed_rows.astype(np.int32))
    scored = options.scored_places(runs, runs.lengths())
    is_good = scored.is_counted(sampled.counts) & np.isin(
        runs.rows[scored.places], sampled.not_finite_rows, invert=True
    )
    if not is_good.any():
        return sampled
    scores = [values.cpu().numpy()[is_good] for values in sampler.score(logits, drawn, scored.places, scored.wanted)]
    logprobs = make_logprobs(scores, scored.indexes(sampled.counts)[is_good], scored.wanted.of_rows(is_good))
    return replace(sampled, logprobs=logprobs)


def tokens_of_rows(sampled: SampledTokens, num_rows: int) -> list[list[int]]:
    """Each row's tokens."""
    counts: Int32Column = np.ones(num_rows, np.int32) if sampled.counts is None else sampled.counts
    return [part.tolist() for part in np.split(sampled.token_ids, np.cumsum(counts)[:-1])]


def walk(
    table: Tensor, recipes: Sequence[Recipe], num_tokens: int, *, propose: Propose | None = None
) -> tuple[list[list[int]], int]:
    """Sample sequences in batches from a bigram model whose logits after token t are `table[t]`.

    Args:
        table: [vocabulary, vocabulary], float32.
        recipes: The sequences; each prompt is token 0, three times.
        num_tokens: Completion tokens of each.
        propose: Returns the drafts; None means no drafts.

    Returns:
        The completions, and the number of steps.
    """
    prompt = [0, 0, 0]
    known = [list(prompt) for _ in recipes]
    states = [recipe.make_state(prompt, len(table)) for recipe in recipes]
    num_steps = 0
    while active := [n for n, tokens in enumerate(known) if len(tokens) < len(prompt) + num_tokens]:
        drafts = None if propose is None else [list(propose(n, known[n])) for n in active]
        inputs = [[known[n][-1], *(drafts[row] if drafts else ())] for row, n in enumerate(active)]
        rows = make_rows(
            [recipes[n] for n in active],
            [len(known[n]) for n in active],
            states={row: state for row, n in enumerate(active) if (state := states[n]) is not None},
            drafts=drafts,
        )
        sampled = sample(table[torch.tensor([token_id for row in inputs for token_id in row])], rows)
        for n, tokens in zip(active, tokens_of_rows(sampled, len(active)), strict=True):
            known[n] += tokens
        num_steps += 1
    return [tokens[len(prompt) :][:num_tokens] for tokens in known], num_steps


def chi_squared(seen: npt.NDArray[np.integer], shares: npt.NDArray[np.float64]) -> float:
    """Pearson's statistic of counts under expected shares; inf if anything with share 0 was seen."""
    expected = shares * seen.sum()
    possible = expected > 0
    if seen[~possible].any():
        return np.inf
    return float(((seen[possible] - expected[possible]) ** 2 / expected[possible]).sum())


def chi_squared_limit(shares: npt.NDArray[np.float64]) -> float:
    """The value that the statistic exceeds with probability 1/1000 if these shares are the true ones.

    Source: Wilson and Hilferty, "The distribution of chi-square", PNAS 17 (1931).
    """
    degrees = int(np.count_nonzero(shares)) - 1
    share = 2 / (9 * degrees)
    return degrees * float(1 - share + 3.0902 * share**0.5) ** 3
