"""Finds the request that kills schedulers, among those that were submitted just before a death.

Pure: no I/O, and no clock; times are passed in, in seconds of one monotonic clock. Requests are identified by handle.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from shared.bisection import Bisection
from shared.ids import RequestHandle

# A request that the scheduler has had for longer than this is not the cause of its death.
SUSPICION_S = 10.0

_MIN_ACCUSATIONS = 2
_SHORTEST_CONTROL_S = 2.0
_LONGEST_CONTROL_S = 10.0
_MAX_DEAD_CONTROLS = 3

_random = secrets.SystemRandom()


@dataclass(slots=True)
class _Accusations:
    num: int = 0
    longest_life_s: float = 0.0
    """The longest time to death among the schedulers that died of it, if it is guilty.

    From ready, or from when its trial could begin.
    """

    def add(self, life_s: float) -> None:
        self.num += 1
        self.longest_life_s = max(self.longest_life_s, life_s)


class SubmitSuspects:
    """Holds requests responsible for the deaths of schedulers that they had just been submitted to.

    A submit is open until its request gets a token or ends, for at most `SUSPICION_S`. A death accuses the requests
    whose submits were open. Requests that two deaths in a row accuse are suspects. They are tried in halves (see
    `Bisection`): one group is submitted, and all other requests of this replica wait. If their submits close, they are
    innocent, and the next group is tried.

    A scheduler may also die of something else, right after it was ready. So before one request is blamed there is a
    control: nothing is submitted, for at least twice the longest time from ready to death among the deaths that accuse
    it, from 2 to 10 s. If the scheduler dies, all suspects are cleared. If it lives, the request is submitted alone
    once more. A part of the time is random: controls of two replicas begin at the same death, and if they also ended
    together, a request of one replica could be blamed for what a request of the other does.

                  open at the death    accused twice    on trial next
        death 1       A B C D          -                -
        death 2       A B C D          A B C D          A B
        death 3       A B              A B              A
        death 4       A                A                A
        death 5       A                A                none: control
        death 6       A                A: guilty        B, then C D

    Another replica's trial would look the same as this one's: deaths that its request causes would be laid to ours. So
    the scheduler gives the trial to one replica at a time, if it can: until then nothing is submitted, and a death says
    nothing of the suspects.

    The guilty request is found after at most 4 + ⌈log2(suspects)⌉ deaths. Deaths with other causes only cost time, as
    long as a token arrives between one death and the next. If three controls in a row die, with no token in between,
    waiting is hopeless.

    Invariant: suspects are waiting to be tried only while others are on trial. During a control one of them is on
    trial.
    """

    def __init__(self, draw: Callable[[], float] = _random.random) -> None:
        """No request is suspected.

        Args:
            draw: Uniform from 0 to 1.
        """
        self._draw = draw
        self._handle_to_submitted_at: dict[RequestHandle, float] = {}
        self._handle_to_accusations: dict[RequestHandle, _Accusations] = {}
        self._waiting: Bisection[RequestHandle] = Bisection()
        self._trial: set[RequestHandle] = set()
        # When the scheduler was ready, or let this replica try its suspects.
        self._begun_at = 0.0
        self._has_trial = True
        # The control's duration; None while there is none.
        self._control_s: float | None = None
        # Whether the request on trial has been alone twice, and a control lived: one more death proves its guilt.
        self._is_last_trial = False
        self._num_dead_controls = 0
        self.has_changed = False
        """Whether the set of requests that may be submitted has changed since the last `take_change`."""

    @property
    def num_suspects(self) -> int:
        """The number of suspects: on trial, or waiting for their trial."""
        return len(self._trial) + sum(len(group.suspects) for group in self._waiting)

    @property
    def is_trying(self) -> bool:
        """Whether a trial or a control is running, and the other requests must wait."""
        return bool(self._trial)

    @property
    def is_controlling(self) -> bool:
        """Whether a control is running, and all requests must wait."""
        return self._control_s is not None

    @property
    def is_hopeless(self) -> bool:
        """Whether three controls in a row have died: schedulers die, and no request is to blame."""
        return self._num_dead_controls >= _MAX_DEAD_CONTROLS

    def may_submit(self, handle: RequestHandle) -> bool:
        """Whether a request may be submitted now."""
        return not self._trial or (handle in self._trial and self._has_trial and not self.is_controlling)

    def open(self, handle: RequestHandle, now: float) -> None:
        """A request is submitted."""
        self._handle_to_submitted_at[handle] = now

    def note_token(self, handle: RequestHandle) -> None:
        """A request has received a token since its submit: it is cleared, and schedulers do work."""
        self._num_dead_controls = 0
        self.close(handle)

    def close(self, handle: RequestHandle) -> None:
        """A request has ended, or its submit is an old one: it is cleared."""
        self._handle_to_submitted_at.pop(handle, None)
        self._handle_to_accusations.pop(handle, None)
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

    def begin_stream(self, now: float, *, waits_for_trial: bool = False) -> None:
        """A scheduler is ready: forget the open submits, without judging their requests; a control starts again.

        Args:
            now: The time.
            waits_for_trial: Whether suspects may be tried only after `give_trial`.
        """
        self._handle_to_submitted_at.clear()
        self._begun_at = now
        self._has_trial = not waits_for_trial

    def give_trial(self, now: float) -> None:
        """The scheduler lets this replica try its suspects; a second call changes nothing."""
        if not self._has_trial:
            self._has_trial, self._begun_at = True, now
            self.has_changed = True

    def note_alive(self, now: float) -> None:
        """The scheduler was heard. If that ends a control, the accused is tried alone for the last time."""
        if self._has_trial and self._control_s is not None and now >= self._begun_at + self._control_s:
            self._control_s, self._is_last_trial, self._num_dead_controls = None, True, 0
            self.has_changed = True

    def accuse(self, died_at: float) -> RequestHandle | None:
        """The scheduler has died, at `died_at` or soon after: accuse the requests with open submits.

        Returns:
            The guilty request, which the caller must end; None while it is not known.
        """
        if self._trial and not self._has_trial:
            return None
        if self.is_controlling:
            self._acquit_all()
            self._num_dead_controls += 1
            return None
        self.close_old(died_at)
        accused = list(self._handle_to_submitted_at)
        self._handle_to_submitted_at.clear()
        for handle in accused:
            self._handle_to_accusations.setdefault(handle, _Accusations()).add(died_at - self._begun_at)
        suspects = [handle for handle in accused if self._handle_to_accusations[handle].num >= _MIN_ACCUSATIONS]
        if not suspects:
            return None
        if self._is_last_trial:
            self._try_next()
            return suspects[0]
        self._waiting.put_back([handle for handle in self._trial if handle not in suspects], died_at)
        main_suspect = self._waiting.crash(suspects, died_at)
        if main_suspect is None:
            self._try_next()
        else:
            self._control(main_suspect)
        return None

    def forget_all(self) -> None:
        """All requests have ended."""
        self._handle_to_submitted_at.clear()
        self._acquit_all()
        self._num_dead_controls = 0

    def take_change(self) -> bool:
        """Whether the set of requests that may be submitted has changed since the last call."""
        has_changed, self.has_changed = self.has_changed, False
        return has_changed

    def _control(self, main_suspect: RequestHandle) -> None:
        """Submit nothing to the next scheduler, for longer than the accused took to kill one."""
        longest_life_s = self._handle_to_accusations[main_suspect].longest_life_s
        shortest_s = max(2 * longest_life_s, _SHORTEST_CONTROL_S)
        self._control_s = min(shortest_s * (1 + self._draw()), _LONGEST_CONTROL_S)
        self._trial = {main_suspect}
        self.has_changed = True

    def _acquit_all(self) -> None:
        self._handle_to_accusations.clear()
        self._waiting = Bisection()
        self._try_next()

    def _try_next(self) -> None:
        """Put the next group of suspects on trial; if there is none, all requests may be submitted."""
        self._trial = set(self._waiting.take().suspects) if self._waiting.next_group else set()
        self._control_s, self._is_last_trial = None, False
        self.has_changed = True
