"""Look-ahead admission: a prompt enters only if the running sequences are expected to keep room to grow."""

from __future__ import annotations

import enum

INITIAL_RATIO = 0.7
MIN_RATIO = 0.1
DECAY_STEPS = 600
_DECAY = (INITIAL_RATIO - MIN_RATIO) / DECAY_STEPS

# Steps for which room is reserved after a retraction, as SGLANG_RETRACT_DECODE_STEPS.
LOOK_AHEAD_STEPS = 20


class AdmissionPolicy(enum.Enum):
    """When a waiting sequence may enter: once its blocks are free, or once there is room to grow as well."""

    PLAIN = "plain"
    LOOK_AHEAD = "look_ahead"


class NewTokenRatio:
    """The fraction of max_tokens that sequences are expected to generate.

    It starts at 0.7 and falls by 0.001 with each decode step, down to 0.1. A retraction shows that it was too low, and
    sets it from what the sequences still running have generated:

        min(1, (generated + 20 * running) / (sum of their max_tokens + 1)), and at least 0.1

    Source: SGLang, `NewTokenRatioTracker` (srt/managers) and `PrefillAdder` (srt/managers/schedule_policy.py). Unlike
    there, the ratio applies to the candidate too, and max_tokens is not clipped to 4096.

    Invariant: `value` is from 0.1 to 1.
    """

    def __init__(self) -> None:
        self.value = INITIAL_RATIO

    def on_decode_step(self) -> None:
        """Lower the ratio by one decode step."""
        self.value = max(self.value - _DECAY, MIN_RATIO)

    def on_retraction(self, num_generated_tokens: int, num_max_tokens: int, num_running: int) -> None:
        """Totals are over the sequences still running."""
        num_expected = num_generated_tokens + LOOK_AHEAD_STEPS * num_running
        self.value = min(max(num_expected / (num_max_tokens + 1), MIN_RATIO), 1.0)

    def fits(self, *, num_free_tokens: int, num_needed_tokens: int, num_remaining_tokens: int) -> bool:
        """Whether a candidate may enter: needed + value * remaining <= free.

        Call it only while sequences are running: an idle rank must admit by the plain rule, or a candidate expected to
        exceed the pool would wait for ever.

        Args:
            num_free_tokens: Capacity of the free blocks.
            num_needed_tokens: What the candidate takes of it at once, including cached blocks.
            num_remaining_tokens: max_tokens - generated, over the running sequences and the candidate.
        """
        return num_needed_tokens + self.value * num_remaining_tokens <= num_free_tokens
