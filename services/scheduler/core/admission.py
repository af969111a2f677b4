"""Admission that looks ahead: a prompt enters only while what runs is expected to have room to grow."""

from __future__ import annotations

import enum

INITIAL_RATIO = 0.7
MIN_RATIO = 0.1
DECAY_STEPS = 600
_DECAY = (INITIAL_RATIO - MIN_RATIO) / DECAY_STEPS

# Steps for which room is expected to be needed after a retraction: SGLANG_RETRACT_DECODE_STEPS.
LOOK_AHEAD_STEPS = 20


class AdmissionPolicy(enum.Enum):
    """When a waiting sequence may enter: when its blocks are free, or when there is room to grow as well."""

    PLAIN = "plain"
    LOOK_AHEAD = "look_ahead"


class NewTokenRatio:
    """The part of max_tokens that sequences are expected to generate.

    It starts at 0.7 and falls by 0.001 with each decode step, down to 0.1. A retraction shows that it was too low,
    and sets it from what the sequences that still run have generated so far:

        min(1, (generated + 20 * running) / (their max_tokens summed + 1)), and at least 0.1

    Source: SGLang, `NewTokenRatioTracker` (srt/managers) and `PrefillAdder` (srt/managers/schedule_policy.py). There
    the candidate counts with all of its max_tokens, and each sequence with 4096 at most; here the ratio holds for
    the candidate too, and nothing is clipped.

    Invariant: `value` is from 0.1 to 1.
    """

    def __init__(self) -> None:
        self.value = INITIAL_RATIO

    def on_decode_step(self) -> None:
        """Expect a little less: a decode step was sent, and nothing had to be retracted for it."""
        self.value = max(self.value - _DECAY, MIN_RATIO)

    def on_retraction(self, num_generated_tokens: int, num_max_tokens: int, num_running: int) -> None:
        """Expect of all what those that still run, after the last victim of a step has left, have shown.

        Args:
            num_generated_tokens: Their completion tokens, summed.
            num_max_tokens: Their max_tokens, summed.
            num_running: How many they are.
        """
        num_expected = num_generated_tokens + LOOK_AHEAD_STEPS * num_running
        self.value = min(max(num_expected / (num_max_tokens + 1), MIN_RATIO), 1.0)

    def fits(self, *, num_free_tokens: int, num_needed_tokens: int, num_remaining_tokens: int) -> bool:
        """Whether a candidate may enter: needed + value * remaining <= free.

        Ask only while something runs. An empty machine admits by the plain rule, or a candidate that expects more
        than the pool would wait for ever.

        Args:
            num_free_tokens: Room in the blocks that no table holds.
            num_needed_tokens: Of that, what the candidate takes at once: new blocks, and cached ones it revives.
            num_remaining_tokens: max_tokens - generated, summed over those that run and the candidate.
        """
        return num_needed_tokens + self.value * num_remaining_tokens <= num_free_tokens
