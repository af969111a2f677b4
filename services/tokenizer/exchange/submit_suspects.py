"""Which request kills the scheduler: those that it was sent just before it died are tried by halves.

Pure: no I/O, and no clock but the times it is passed, in seconds of one monotonic clock. A request goes by its handle.
"""

from __future__ import annotations

# A request that the scheduler has had for longer is not what it died of.
SUSPICION_S = 10.0

_MIN_ACCUSATIONS = 2


class SubmitSuspects:
    """Accuses requests of the deaths of schedulers, by what these had been sent.

    A submit is open until the request has got a token or has ended, for `SUSPICION_S` at most. A death accuses the
    requests whose submits were open. Those that two deaths in a row accuse are suspects, and are tried: half of them
    goes to the cell, and nothing else of this replica's. Once their submits are closed the other half is tried, in
    halves again; when the scheduler dies before, they are the suspects. The one that two deaths leave as the only
    suspect is found guilty, after at most 3 + log2(suspects) deaths in all. Deaths of other causes cost time alone, as
    long as a token comes between one and the next.

    Invariant: `_trial` is a part of `_suspects`, and empty exactly when they are.

    Source: query-of-death accounting; halving is delta debugging, Zeller and Hildebrandt, TSE 28(2), 2002.
    """

    def __init__(self) -> None:
        """Begin without a request; everything may be submitted."""
        self._handle_to_submitted_s: dict[int, float] = {}
        self._handle_to_num_accusations: dict[int, int] = {}
        self._suspects: list[int] = []
        self._trial: set[int] = set()
        # Deaths that left the only suspect as the only one.
        self._num_deaths_alone = 0
        self._has_changed = False

    @property
    def num_suspects(self) -> int:
        """Requests of which one is guilty, if the deaths have had a cause here."""
        return len(self._suspects)

    @property
    def is_trying(self) -> bool:
        """Whether there are suspects, and all but those on trial have to wait."""
        return bool(self._trial)

    def may_submit(self, handle: int) -> bool:
        """Whether a request need not wait for a trial to end."""
        return not self._trial or handle in self._trial

    def open(self, handle: int, now: float) -> None:
        """A request is sent to the scheduler."""
        self._handle_to_submitted_s[handle] = now

    def close(self, handle: int) -> None:
        """A request has got a token since it was sent, or has ended: it is above suspicion."""
        self._handle_to_submitted_s.pop(handle, None)
        self._handle_to_num_accusations.pop(handle, None)
        if handle in self._suspects:
            self._suspects.remove(handle)
            self._trial.discard(handle)
            if not self._trial:
                self._num_deaths_alone = 0
                self._try_half()

    def close_old(self, now: float) -> None:
        """Close what was opened too long ago."""
        old = [handle for handle, since in self._handle_to_submitted_s.items() if now >= since + SUSPICION_S]
        for handle in old:
            self.close(handle)

    def next_closing(self) -> float | None:
        """When `close_old` moves a trial on, at the earliest; None while there is no trial, or none of it was sent."""
        if not self._trial:
            return None
        times = [since for handle, since in self._handle_to_submitted_s.items() if handle in self._trial]
        return min(times) + SUSPICION_S if times else None

    def void(self) -> None:
        """The scheduler is another one, or a link to it is: whatever was open was sent to nobody."""
        self._handle_to_submitted_s.clear()

    def accuse(self, died_s: float) -> int | None:
        """A scheduler has died, at `died_s` or soon after; its submits are those that are open.

        Returns:
            The request that it died of, which is to be ended; None while that is not known.
        """
        self.close_old(died_s)
        accused = list(self._handle_to_submitted_s)
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
        """Whether others may be submitted than when this was asked last."""
        has_changed, self._has_changed = self._has_changed, False
        return has_changed

    def _try_half(self) -> None:
        """Put half of the suspects on trial; the only one where there is but one."""
        self._trial = set(self._suspects[: max(1, len(self._suspects) // 2)])
        self._has_changed = True
