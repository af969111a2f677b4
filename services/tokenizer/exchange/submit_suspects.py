"""Finds the request that kills schedulers, among those that were submitted just before a death.

Pure: no I/O, and no clock; times are passed in, in seconds of one monotonic clock. Requests are identified by handle.
"""

from __future__ import annotations

from shared.bisection import Bisection
from shared.ids import RequestHandle

# A request that the scheduler has had for longer than this is not the cause of its death.
SUSPICION_S = 10.0

_MIN_ACCUSATIONS = 2


class SubmitSuspects:
    """Holds requests responsible for the deaths of schedulers that they had just been submitted to.

    A submit is open until its request gets a token or ends, for at most `SUSPICION_S`. A death accuses the requests
    whose submits were open. Requests that two deaths in a row accuse are suspects. They are tried in halves (see
    `Bisection`): one group is submitted, and all other requests of this replica wait. If their submits close, they are
    innocent, and the next group is tried. The guilty request is found after at most 3 + ⌈log2(suspects)⌉ deaths.

                  open at the death    accused twice    on trial next
        death 1       A B C D          -                -
        death 2       A B C D          A B C D          A B
        death 3       A B              A B              A
        death 4       A                A                A
        death 5       A                A: guilty        B, then C D

    Deaths with other causes only cost time, as long as a token arrives between one death and the next.

    Invariant: suspects are waiting to be tried only while others are on trial.
    """

    def __init__(self) -> None:
        self._handle_to_submitted_at: dict[RequestHandle, float] = {}
        self._handle_to_num_accusations: dict[RequestHandle, int] = {}
        self._waiting: Bisection[RequestHandle] = Bisection()
        self._trial: set[RequestHandle] = set()
        self._has_changed = False

    @property
    def num_suspects(self) -> int:
        """The number of suspects: on trial, or waiting for their trial."""
        return len(self._trial) + sum(len(group.suspects) for group in self._waiting)

    @property
    def is_trying(self) -> bool:
        """Whether a trial is running, and the other requests must wait."""
        return bool(self._trial)

    def may_submit(self, handle: RequestHandle) -> bool:
        """Whether a request may be submitted now."""
        return not self._trial or handle in self._trial

    def open(self, handle: RequestHandle, now: float) -> None:
        """A request is submitted."""
        self._handle_to_submitted_at[handle] = now

    def close(self, handle: RequestHandle) -> None:
        """A request has received a token since its submit, or has ended: it is cleared."""
        self._handle_to_submitted_at.pop(handle, None)
        self._handle_to_num_accusations.pop(handle, None)
        self._waiting.clear({handle})
        if handle in self._trial:
            self._trial.remove(handle)
            if not self._trial:
                self._try_next()

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

    def accuse(self, died_at: float) -> RequestHandle | None:
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
        self._waiting.put_back([handle for handle in self._trial if handle not in suspects], died_at)
        guilty = self._waiting.crash(suspects, died_at)
        self._try_next()
        return guilty

    def take_change(self) -> bool:
        """Whether the set of requests that may be submitted has changed since the last call."""
        has_changed, self._has_changed = self._has_changed, False
        return has_changed

    def _try_next(self) -> None:
        """Put the next group of suspects on trial; if there is none, all requests may be submitted."""
        self._trial = set(self._waiting.take().suspects) if self._waiting.next_group else set()
        self._has_changed = True
