"""Rows that ask for the host: what edits their logits depends on the tokens before, drafts among them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from services.worker.drawing.token_draw import GREEDY_TEMPERATURE
from services.worker.sampling.runs import Runs
from services.worker.sampling.sampling_rows import EditedRows, SamplingRows

_Numbers = npt.NDArray[np.int64]
_DrawEdited = Callable[[EditedRows], _Numbers]


class EditedRuns:
    """Draws the runs of edited rows, and adds each token that counts to its row's state.

    Only a state that changes logits makes a token depend on those before it, unless the completion reasons: then all
    places have the same edits, and are drawn at once.
    """

    def __init__(
        self, places: SamplingRows, runs: Runs, drawn: _Numbers, draw: _DrawEdited, *, draws_in_order: bool
    ) -> None:
        """Begin with what was drawn without edits, which says what is finite.

        Args:
            places: [num_places], from `SamplingRows.by_place`.
            drawn: [num_places], -1 where logits are not finite; written in place.
            draw: Draws places from their edited logits.
            draws_in_order: Whether a token that is not greedy costs too much to be drawn needlessly.
        """
        self._places = places
        self._runs = runs
        self._draw = draw
        self._draws_in_order = draws_in_order
        self.drawn = drawn
        """[num_places], the tokens; meaningless after the first of a run that is not wanted."""
        self.wanted = runs.wanted.copy()
        """As in `Runs`; -1 also if the next logits are not finite, or once a grammar has failed here."""
        self.wanted[:-1][drawn[1:] < 0] = -1
        self._failed: list[int] = []

    def draw_rows(self, rows: _Numbers) -> None:
        """Draw the runs of these rows."""
        firsts = self._runs.firsts[rows]
        firsts = firsts[self.drawn[firsts] >= 0]
        has_drafts = len(self.drawn) > len(self._runs.firsts)
        free = [place for place in firsts.tolist() if has_drafts and self._is_free(place)]
        if free:
            begun = self._draw_free(np.array(free, np.int64))
            firsts = np.union1d(np.setdiff1d(firsts, free), begun).astype(np.int64)
        while len(firsts):
            firsts = self._draw_next(firsts)

    def failed_rows(self) -> _Numbers:
        """The rows with a grammar that could not be followed further."""
        return self._runs.rows[np.sort(self._failed).astype(np.int64)]

    def _is_free(self, place: int) -> bool:
        is_costly = self._draws_in_order and self._places.temperature[place] >= GREEDY_TEMPERATURE
        return self._places.states[place].is_free and not is_costly

    def _draw_next(self, places: _Numbers) -> _Numbers:
        """Draw one place of each of some runs; the next places of those that go on."""
        edited = self._places.edit(places)
        self.drawn[places] = self._draw(edited)
        edited.append(self.drawn[places])
        failed = places[edited.has_failed]
        self._failed += failed.tolist()
        self.wanted[failed] = -1
        going_on: _Numbers = places[self.drawn[places] == self.wanted[places]] + 1
        return going_on

    def _draw_free(self, firsts: _Numbers) -> list[int]:
        """Draw the runs of completions that reason at once, since the edits of all their places are equal.

        Args:
            firsts: At least one run's first place; a run's state is that of each of its places.

        Returns:
            For each run whose reasoning ends inside it, the place after that, from which it is drawn in order.
        """
        unwanted = np.flatnonzero(self.wanted < 0)
        ends = unwanted[unwanted.searchsorted(firsts)] + 1
        places = np.concatenate([np.arange(*run) for run in zip(firsts, ends, strict=True)])
        self.drawn[places] = self._draw(self._places.edit(places))
        begun = []
        for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
            state, place = self._places.states[first], first
            while state.is_free:
                state.append(int(self.drawn[place]))
                place += 1
                if place == end or self.drawn[place - 1] != self.wanted[place - 1]:
                    break
            else:
                begun.append(place)
            state.prepare()
        return begun
