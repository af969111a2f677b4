"""Draws the tokens of a step's rows, each only from its own logits, parameters, options and noise.

A draft is accepted exactly when it would have been drawn without it: drafts change when tokens arrive, never which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt
from torch import Tensor

from services.worker.drawing.token_draw import GREEDY_TEMPERATURE
from services.worker.forward.staging import to_device
from services.worker.ops import Ops
from services.worker.sampling.logprobs import join_logprobs, token_logprobs
from services.worker.sampling.sampling_rows import EditedRows, SamplingRows
from shared.step.columns import Int32Column
from shared.step.logprobs import Logprobs

SAMPLING_VERSION = 1
"""Raised with every change after which equal logits, parameters, options and noise may draw other tokens."""

_NO_TOKENS: Int32Column = np.empty(0, np.int32)
_ALL = slice(None)
# Draws one token at each of some places; also says which of these have a grammar that could not be followed.
_DrawPlaces = Callable[[npt.NDArray[np.int64]], tuple[Int32Column, list[int]]]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens drawn in a step."""

    token_ids: Int32Column  # [sum of counts], row after row; meaningless in a row that is not finite
    not_finite_rows: Int32Column
    """Rows with NaN, +Inf or nothing above -Inf in their first logits."""
    counts: Int32Column | None = None  # [num_rows], at least 1: accepted drafts and one more; None means one each
    logprobs: Logprobs | None = None
    """Log-probabilities of finite rows that ask for them; `indexes` are places in `token_ids`."""
    failed_grammar_rows: Int32Column = field(default_factory=lambda: _NO_TOKENS)
    """Rows with a grammar that cannot be followed further; their last token is meaningless."""


class Sampler:
    """Draws with the backend. The host learns every token, but never sees the logits."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def sample(self, logits: Tensor, rows: SamplingRows) -> SampledTokens:
        """Draw each row's tokens, and add them to its state if that changes logits.

        Args:
            logits: [num_rows + num_drafts, vocabulary], float32; not written. Row after row: those at the row's
                `position`, then those after each of its drafts.
            rows: At least one.
        """
        token_ids, runs, failed = self._draw(logits, rows)
        not_finite_rows = np.flatnonzero(~runs.is_good).astype(np.int32)
        counts = None if rows.draft_counts is None else runs.counts(token_ids)
        sampled = SampledTokens(token_ids if counts is None else runs.cut(token_ids, counts), not_finite_rows, counts)
        if not rows.states:
            return sampled
        return replace(
            sampled,
            logprobs=self._logprobs(logits, rows, runs, sampled),
            failed_grammar_rows=np.array(failed, np.int32),
        )

    def _draw_edited(
        self, logits: Tensor, rows: SamplingRows, edited: npt.NDArray[np.int64]
    ) -> tuple[Int32Column, list[int]]:
        """The tokens of the rows `edited`, and which of these have a grammar that could not be followed."""
        edited_rows = rows.edit(edited)
        token_ids = self._sample_edited(logits, rows, edited_rows)
        edited_rows.append(token_ids)
        return token_ids, edited[edited_rows.has_failed].tolist()

    def _sample_edited(self, logits: Tensor, rows: SamplingRows, edited: EditedRows) -> Int32Column:
        """Draw the edited rows from copies of their logits."""
        own_logits = logits.index_select(0, to_device(edited.numbers, logits.device))
        self._ops.edit_logits(own_logits, edited.edits)
        drawn, _ = self._ops.sample(own_logits, rows.draw_rows(logits.device, edited.numbers))
        token_ids: Int32Column = drawn.cpu().numpy().astype(np.int32)
        return token_ids

    def _draw(self, logits: Tensor, rows: SamplingRows) -> tuple[Int32Column, _Runs, list[int]]:
        """A token for each of the logits of each row; meaningless after the first that differs from its draft.

        Only a state that changes logits makes a token depend on those before it, unless the completion reasons. All
        others are drawn at once, and need only be compared with their drafts; but where the host draws, too many would
        be drawn needlessly.
        """
        has_drafts = rows.draft_counts is not None
        places = _by_place(rows) if has_drafts else rows
        is_edited = _changes_logits(places)
        is_costly = (places.temperature >= GREEDY_TEMPERATURE) & (has_drafts and self._ops.draws_on_host)
        is_drawn_in_order = is_edited | is_costly
        # A greedy draw costs least.
        temperature = np.where(is_drawn_in_order, np.float32(0), places.temperature)
        drawn, is_finite = self._ops.sample(logits, places.draw_rows(logits.device, temperature=temperature))
        token_ids = drawn.cpu().numpy().astype(np.int32)
        runs = _Runs.make(rows, is_finite=is_finite.cpu().numpy())
        first = runs.first[runs.is_good]
        unedited, edited = first[(is_drawn_in_order & ~is_edited)[first]], first[is_edited[first]]
        if has_drafts and len(edited):
            free = [place for place in edited[~is_costly[edited]].tolist() if places.states[place].is_free]
            begun = self._draw_free(logits, places, np.array(free, np.int64), runs, token_ids) if free else []
            edited = np.union1d(np.setdiff1d(edited, free), begun).astype(np.int64)
        runs.draw_in_order(unedited, token_ids, draw=partial(self._draw_unedited, logits, places))
        failed = runs.draw_in_order(edited, token_ids, draw=partial(self._draw_edited, logits, places))
        return token_ids, runs, (runs.first.searchsorted(np.sort(failed), side="right") - 1).tolist()

    def _draw_free(
        self, logits: Tensor, places: SamplingRows, free: npt.NDArray[np.int64], runs: _Runs, token_ids: Int32Column
    ) -> list[int]:
        """Draw the runs of completions that reason at once, since the edits of all their places are equal.

        Args:
            free: At least one run's first place; a run's state is that of each of its places.
            token_ids: [num_logits]; the tokens are written into their places.

        Returns:
            For each run whose reasoning ends inside it, the place after that, from which it is drawn in order.
        """
        unwanted = np.flatnonzero(runs.wanted < 0)
        ends = unwanted[unwanted.searchsorted(free)] + 1
        drawn = np.concatenate([np.arange(*run) for run in zip(free, ends, strict=True)])
        token_ids[drawn] = self._sample_edited(logits, places, places.edit(drawn))
        begun = []
        for first, end in zip(free.tolist(), ends.tolist(), strict=True):
            state, place = places.states[first], first
            while state.is_free:
                state.append(int(token_ids[place]))
                place += 1
                if place == end or token_ids[place - 1] != runs.wanted[place - 1]:
                    break
            else:
                begun.append(place)
            state.prepare()
        return begun

    def _draw_unedited(
        self, logits: Tensor, rows: SamplingRows, drawn: npt.NDArray[np.int64]
    ) -> tuple[Int32Column, list[int]]:
        """The tokens of the rows `drawn`; see `_draw_edited`."""
        own_logits = logits.index_select(0, to_device(drawn, logits.device))
        token_ids, _ = self._ops.sample(own_logits, rows.draw_rows(logits.device, drawn))
        return token_ids.cpu().numpy().astype(np.int32), []

    def _logprobs(self, logits: Tensor, rows: SamplingRows, runs: _Runs, sampled: SampledTokens) -> Logprobs | None:
        counts = np.ones(len(runs.first), np.int32) if sampled.counts is None else sampled.counts
        starts = np.cumsum(counts, dtype=np.int32) - counts
        parts = []
        for row, state in sorted(rows.states.items()):
            num_top, requested = state.options.num_top, state.options.logprob_token_ids
            if num_top is None or not runs.is_good[row]:
                continue
            first, start, count = int(runs.first[row]), int(starts[row]), int(counts[row])
            indexes = np.arange(start, start + count, dtype=np.int32)
            token_ids = sampled.token_ids[indexes]
            own_logits = logits[first : first + count]
            parts.append(
                token_logprobs(self._ops, own_logits, token_ids, indexes, num_top=num_top, requested=requested)
            )
        return join_logprobs(parts) if parts else None


@dataclass(frozen=True, slots=True)
class _Runs:
    """Where each row's logits are, and which drawn tokens let the row continue with its next logits."""

    first: npt.NDArray[np.int64]  # [num_rows], each row's first logits
    is_good: npt.NDArray[np.bool_]  # [num_rows], whether those are finite
    wanted: npt.NDArray[np.int32]  # [num_logits]
    """The draft that the row's next logits were computed with, which must be drawn here for them to be valid.
    -1 if there is no such draft, if these or the next logits are not finite, or once a grammar has failed here.
    """

    @classmethod
    def make(cls, rows: SamplingRows, is_finite: npt.NDArray[np.bool_]) -> _Runs:
        wanted = np.full(len(is_finite), -1, np.int32)
        if rows.draft_counts is None:
            return cls(np.arange(len(is_finite)), is_finite, wanted)
        last = np.cumsum(rows.draft_counts + 1, dtype=np.int64) - 1
        first = last - rows.draft_counts
        has_draft = np.ones(len(is_finite), np.bool_)
        has_draft[last] = False
        wanted[has_draft] = rows.draft_token_ids
        wanted[~is_finite] = -1
        wanted[:-1][~is_finite[1:]] = -1
        return cls(first, is_finite[first], wanted)

    def counts(self, token_ids: Int32Column) -> Int32Column:
        """How many drawn tokens each row gets: up to and including the first unwanted one."""
        ends = np.flatnonzero(token_ids != self.wanted)
        counts: npt.NDArray[np.int64] = ends[ends.searchsorted(self.first)] - self.first + 1
        return counts.astype(np.int32)

    def draw_in_order(self, places: npt.NDArray[np.int64], token_ids: Int32Column, *, draw: _DrawPlaces) -> list[int]:
        """Draw from the first logits of some rows on, one token of each at a time, while they equal their drafts.

        Args:
            places: [n], where those logits are.
            token_ids: [num_logits]; the tokens are written into their places.

        Returns:
            The places with a grammar that could not be followed further.
        """
        all_failed: list[int] = []
        while len(places):
            token_ids[places], failed = draw(places)
            all_failed += failed
            self.wanted[failed] = -1
            places = places[token_ids[places] == self.wanted[places]] + 1
        return all_failed

    def cut(self, token_ids: Int32Column, counts: Int32Column) -> Int32Column:
        """The first `counts` tokens of each row, row after row."""
        starts = np.cumsum(counts, dtype=np.int64) - counts
        places = np.repeat(self.first - starts, counts) + np.arange(counts.sum())
        kept: Int32Column = token_ids[places]
        return kept


def _by_place(rows: SamplingRows) -> SamplingRows:
    """A row for each of the logits, without drafts."""
    assert rows.draft_counts is not None, "rows without drafts are their own places"
    counts = rows.draft_counts + 1
    row = np.repeat(np.arange(len(counts)), counts)
    num_before = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    return SamplingRows(
        temperature=rows.temperature[row],
        top_k=rows.top_k[row],
        top_p=rows.top_p[row],
        seed=rows.seed[row],
        choice=rows.choice[row],
        position=rows.position[row] + num_before,
        states={place: rows.states[its_row] for place, its_row in enumerate(row.tolist()) if its_row in rows.states},
    )


def _changes_logits(rows: SamplingRows) -> npt.NDArray[np.bool_]:
    """[num_rows], whether the row's state does."""
    changes_logits = np.zeros(len(rows.temperature), np.bool_)
    changes_logits[[row for row, state in rows.states.items() if state.changes_logits]] = True
    return changes_logits
