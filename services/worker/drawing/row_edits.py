"""What options change in one row of logits before its token is drawn."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

_FloatRow = npt.NDArray[np.float32]
_TokenIds = npt.NDArray[np.int64]

_NO_IDS: _TokenIds = np.empty(0, np.int64)
_NO_VALUES: _FloatRow = np.empty(0, np.float32)
_LIMITS = np.finfo(np.float32)


@dataclass(frozen=True, slots=True)
class RowEdits:
    """The changes in the order in which they apply; no list of ids has one twice."""

    allowed: npt.NDArray[np.bool_] | None = None  # [vocabulary], not written; None allows all
    banned_ids: _TokenIds = field(default_factory=lambda: _NO_IDS)
    """Tokens that become -Inf, unless no other token were left then."""
    bias_ids: _TokenIds = field(default_factory=lambda: _NO_IDS)
    biases: _FloatRow = field(default_factory=lambda: _NO_VALUES)
    """Numbers that are added to the logits of `bias_ids`."""
    repeated_ids: _TokenIds = field(default_factory=lambda: _NO_IDS)
    """Positive logits are divided by `repetition_penalty`, negative ones multiplied."""
    repetition_penalty: float = 1.0
    drawn_ids: _TokenIds = field(default_factory=lambda: _NO_IDS)
    penalties: _FloatRow = field(default_factory=lambda: _NO_VALUES)
    """Subtracted from those of `drawn_ids`."""

    def apply(self, logits: _FloatRow) -> _FloatRow:
        """A new row with a finite largest entry; tokens that cannot be drawn are -Inf.

        `logits` [vocabulary] is not written; its largest entry is finite.
        """
        edited = self._masked(logits)
        if len(self.bias_ids):
            edited[self.bias_ids] += self.biases
        if len(self.repeated_ids):
            _penalize_repetition(edited, self.repeated_ids, self.repetition_penalty)
        if len(self.drawn_ids):
            edited[self.drawn_ids] -= self.penalties
        return edited

    def _masked(self, logits: _FloatRow) -> _FloatRow:
        """If neither mask nor bans leave a token, only the mask applies."""
        allowed = logits.copy() if self.allowed is None else _only(self.allowed, logits)
        if not len(self.banned_ids):
            return allowed
        values = allowed[self.banned_ids]
        allowed[self.banned_ids] = -np.inf
        if allowed.max() == -np.inf:
            allowed[self.banned_ids] = values
        return allowed


def _only(mask: npt.NDArray[np.bool_], logits: _FloatRow) -> _FloatRow:
    """A new row, -Inf for tokens not allowed; a mask that allows none is ignored."""
    allowed: _FloatRow = np.where(mask, logits, np.float32(-np.inf))
    if allowed.max() > -np.inf:
        return allowed
    # All allowed tokens have zero probability in the model: the grammar wins, and they become equally likely.
    return np.where(mask, np.float32(0), np.float32(-np.inf)) if mask.any() else logits.copy()


def _penalize_repetition(logits: _FloatRow, token_ids: _TokenIds, penalty: float) -> None:
    """Divide positive logits of these tokens and multiply negative ones, in place.

    Source: Keskar et al., arXiv:1909.05858, section 4.1, with the sign taken into account.
    """
    values = logits[token_ids].astype(np.float64)
    penalized = np.where(values > 0, values / penalty, values * penalty)
    # Keep finite entries finite: a row without any has no token to draw.
    bounded = np.clip(penalized, _LIMITS.min, _LIMITS.max)
    logits[token_ids] = np.where(values > -np.inf, bounded, values)
