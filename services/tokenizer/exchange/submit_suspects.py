"""Finds the request that kills schedulers, by bisecting those that were submitted just before a death.

Pure: no I/O, and no clock; times are passed in, in seconds of one monotonic clock. Requests are identified by handle.
"""

from __future__ import annotations

# A request that the scheduler has had for longer than this is not the cause of its death.
SUSPICION_S = 10.0

_MIN_ACCUSATIONS = 2


class SubmitSuspects:
    """Holds requests responsible for the deaths of schedulers that they had just been submitted to.

    A submit is open until its request gets a token or ends, for at most `SUSPICION_S`. A death accuses the requests
    whose submits were open. Requests that two deaths in a row accuse are suspects and go on trial: half of them is
    submitted, and all other requests of this replica wait. If their submits close, they are innocent, and half of the
    remaining suspects is tried. If the scheduler dies first, they are the new suspects. A request that two deaths in a
    row leave as the only suspect is guilty, after at most 3 + log2(suspects) deaths in total.

                  open at the death    accused twice    on trial next
        death 1       A B C D          -                -
        death 2       A B C D          A B C D          A B
        death 3       A B              A B              A
        death 4       A                A                A
        death 5       A                A: guilty

    Deaths with other causes only cost time, as long as a token arrives between one death and the next.

    Invariant: `_trial` is a subset of `_suspects`, and empty exactly when `_suspects` is.

    Source: query-of-death accounting; halving is delta debugging, Zeller and Hildebrandt, TSE 28(2), 2002.
    """

    def __init__(self) -> None:
        self._handle_to_submitted_at: dict[int, float] = {}
        self._handle_to_num_accusations: dict[int, int] = {}
        self._suspects: list[int] = []
        self._trial: set[int] = set()
        # Deaths in a row that left a single suspect.
        self._num_deaths_alone = 0
        self._has_changed = False

    @property
    def num_suspects(self) -> int:
        """The number of suspects; one of them is guilty, if a request of this replica caused the deaths."""
        return len(self._suspects)

    @property
    def is_trying(self) -> bool:
        """Whether a trial is running, and the other requests must wait."""
        return bool(self._trial)

    def may_submit(self, handle: int) -> bool:
        """Whether a request may be submitted now."""
        return not self._trial or handle in self._trial

    def open(self, handle: int, now: float) -> None:
        """A request is submitted."""
        self._handle_to_submitted_at[handle] = now

    def close(self, handle: int) -> None:
        """A request has received a token since its submit, or has ended: it is cleared."""
        self._handle_to_submitted_at.pop(handle, None)
        self._handle_to_num_accusations.pop(handle, None)
        if handle in self._suspects:
            self._suspects.remove(handle)
            self._trial.discard(handle)
            if not self._trial:
                self._num_deaths_alone = 0
                self._try_half()

    def close_old(self, now: float) -> None:
        """Close submits after `SUSPICION_S`."""
        old = [handle for handle, since in self._handle_to_submitted_at.items() if now >= since + SUSPICION_S]
        for handle in old:
            self.close(handle)

    def next_closing(self) -> float | None:
        """The earliest time at which `close_old` advances the trial; None if it will not."""
        if not self._trial:
            return None
        times = [since for handle, since in self._handle_to_submitted_at.items() if handle in self._trial]
        return min(times) + SUSPICION_S if times else None

    def void(self) -> None:
        """The stream is a new one: forget the open submits, without judging their requests."""
        self._handle_to_submitted_at.clear()

    def accuse(self, died_at: float) -> int | None:
        """The scheduler has died, at `died_at` or soon after: accuse the requests with open submits.

        Returns:
            The guilty request, which the caller must end; None while it is not known.
        """
        self.close_old(died_at)
        accused = list(self._handle_to_submitted_at)
        self.void()
        for handle in accused:
            self._handle_to_num_accusations[handle] = self._handle_to_num_accusations.get(handle, 0) + 1
        suspects = [handle for handle in accused if self._handle_to_num_accusations[handle] >= _MIN_ACCUSATIONS]
        if not suspects:
            return None
        self._num_deaths_alone = self._num_deaths_alone + 1 if len(suspects) == 1 else 0
        if self._num_deaths_alone == _MIN_ACCUSATIONS:
            return suspects[0]
        self._suspects = suspects
        self._try_half()
        return None

    def take_change(self) -> bool:
        """Whether the set of requests that may be submitted has changed since the last call."""
        has_changed, self._has_changed = self._has_changed, False
        return has_changed

    def _try_half(self) -> None:
        """Put half of the suspects on trial, and at least one if there are any."""
        self._trial = set(self._suspects[: max(1, len(self._suspects) // 2)])
        self._has_changed = True
