"""How one choice of a traced request spends its time.

Pure: `now` is passed in, in seconds of one monotonic clock. Nothing is noted of requests that are not traced.
"""

from __future__ import annotations

from typing import NamedTuple

QUEUE = "queue"
PREFILL = "prefill"
DECODE = "decode"
RESUME = "resume"
UNTOLD = "queue_or_prefill"
"""The phase of a choice that ended before its first token, and of which the scheduler said nothing."""


class Phase(NamedTuple):
    """What a choice did from one moment to another."""

    name: str
    began_at: float
    ended_at: float


class ChoiceTimes:
    """Divides a choice's time, from its submission on, into phases.

    A loss before the first token is a resume that ends when the choice is queued again, and one after it a resume from
    the last token before to the first token after:

        |- queue -|- prefill -|- decode -|--- resume ---|- decode -|
        submit                t  t  t  t                t  t  t  t

    Invariant: `phases` are in order and do not overlap.
    """

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.queue_s: float | None = None
        """Time in the queues of its last scheduler, in total; None if that is not known."""
        self._queue_before_first_s: float | None = None
        self._prefill_s: float | None = None
        # The end of what `phases` tell; None before the submission.
        self._told_until: float | None = None
        # When its last tokens left for the client.
        self._last_at: float | None = None
        self._is_paused = False

    def note_submission(self, now: float) -> None:
        """It was submitted; any submission but the first resumes it."""
        if self._told_until is None:
            self._told_until = now
        else:
            self.note_resume(now)

    def note_resume(self, now: float) -> None:
        """It was lost, and is queued again."""
        if self._last_at is not None:
            self._is_paused = True
        else:
            self._tell(RESUME, now)

    def note_start(self, queue_s: float | None, prefill_s: float | None) -> None:
        """Its first tokens are about to arrive; the scheduler says how long it was queued and then prefilled."""
        self.queue_s = self._queue_before_first_s = queue_s
        self._prefill_s = prefill_s

    def note_tokens(self, now: float) -> None:
        """Some of its tokens leave for the client."""
        if self._last_at is None:
            self._tell_first(now)
        elif self._is_paused:
            self._tell_decode(now)
        self._last_at, self._is_paused = now, False

    def note_end(self, queue_s: float) -> None:
        """The scheduler ended it, and says how long it was queued in all."""
        self.queue_s = queue_s

    def close(self, now: float) -> None:
        """Nothing follows: its request has ended. Called once."""
        if self._told_until is None:
            return
        if self._last_at is not None:
            self._tell_decode(now)
        elif self._queue_before_first_s is not None or self._prefill_s is not None:
            self._tell_first(now)
        elif self.queue_s is not None:
            self._tell(QUEUE, min(now, self._told_until + self.queue_s))
        else:
            self._tell(UNTOLD, now)

    def duration_s(self, name: str) -> float:
        """The sum of its phases of one name."""
        return sum(phase.ended_at - phase.began_at for phase in self.phases if phase.name == name)

    def _tell_first(self, now: float) -> None:
        """What came before the first tokens, which leave now; the rest of the time they were on their way."""
        assert self._told_until is not None
        prefill_s = now - self._told_until if self._prefill_s is None else self._prefill_s
        if self._queue_before_first_s is not None:
            # After a resume its time in the queue includes what `phases` tell already.
            latest = max(self._told_until, now - prefill_s) if self._prefill_s is not None else now
            self._tell(QUEUE, min(latest, self._told_until + self._queue_before_first_s))
        self._tell(PREFILL, min(now, self._told_until + prefill_s))
        self._told_until = now

    def _tell_decode(self, now: float) -> None:
        assert self._last_at is not None
        if self._told_until != self._last_at:
            self._tell(DECODE, self._last_at)
        if self._is_paused:
            self._tell(RESUME, now)

    def _tell(self, name: str, until: float) -> None:
        assert self._told_until is not None
        self.phases.append(Phase(name, self._told_until, until))
        self._told_until = until
