"""The times of one choice as its client sees them."""

from __future__ import annotations

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.answer.request_totals import RequestTotals
from services.tokenizer.tracing.choice_times import ChoiceTimes


class ChoiceClock:
    """Counts a choice's times and tokens in the replica's totals, and notes them where its request is traced.

    `now` is in seconds of `time.monotonic`.
    """

    def __init__(
        self, arrived_at: float, num_prompt_tokens: int, totals: RequestTotals, times: ChoiceTimes | None
    ) -> None:
        """Make the clock of one choice.

        Args:
            arrived_at: When its call arrived.
            num_prompt_tokens: Tokens that are counted with its first ones: 0 for all choices of a prompt but one.
            totals: What is counted.
            times: None unless the request is traced.
        """
        self.ttft_s: float | None = None
        """Seconds from the call's arrival to its first tokens; None before that."""
        self.times = times
        self._arrived_at = arrived_at
        self._num_prompt_tokens = num_prompt_tokens
        self._totals = totals
        # When the last tokens were taken.
        self._taken_at = 0.0

    def start(self, queue_s: float | None, prefill_s: float | None) -> None:
        """Its first tokens are about to arrive; the scheduler may know how long it was queued, and then prefilled."""
        if queue_s is not None:
            self._totals.queue_s.observe(queue_s)
        if self.times is not None:
            self.times.note_start(queue_s, prefill_s)

    def leave(self, now: float, num_tokens: int) -> None:
        """That many tokens leave for the client; 0 if the answer has none."""
        if self.ttft_s is not None:
            self._totals.itl_s.observe(now - self._taken_at)
        else:
            self.ttft_s = now - self._arrived_at
            self._totals.ttft_s.observe(self.ttft_s)
            self._totals.num_prompt_tokens += self._num_prompt_tokens
        self._taken_at = now
        self._totals.num_generation_tokens += num_tokens
        if self.times is not None:
            self.times.note_tokens(now)

    def finish(self, now: float, finish: tokenizer_pb2.Finish, usage: common_pb2.Usage) -> None:
        """It has finished: set the finish's times, and count it."""
        total_s = now - self._arrived_at
        ttft_s = total_s if self.ttft_s is None else self.ttft_s
        finish.ttft.FromNanoseconds(round(ttft_s * 1e9))
        num_gaps = usage.num_completion_tokens - 1
        if num_gaps > 0:
            finish.mean_tpot.FromNanoseconds(round((total_s - ttft_s) / num_gaps * 1e9))
        self._totals.count_finish(finish.reason, total_s, usage)
