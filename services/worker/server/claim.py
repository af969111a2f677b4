"""Who holds the group, and what may be launched: the rules of the epoch, without streams, futures or a clock.

The whole interface, which tests/simulation model-checks together with the scheduler's side:

    ClaimLedger()                               nobody holds it: epoch 0
    offer(epoch, scheduler_instance_id, now)    Attach: fences what is older, or raises and changes nothing; epoch 0 is
                                                above none, and so only asks who holds the group
    hear(stream, epoch, scheduler_instance_id, now)
                                                a heartbeat on an Execute stream: its first message is one
    launch(stream, epoch, step_id, now)         a step on an Execute stream: the device gets it when this returns
    end_stream(stream)                          the stream has ended, however it did
    check_restart(epoch, scheduler_instance_id) Restart: raises unless the caller may end the process
    is_open, epoch, holder, last_launched       what it knows

Streams are numbers that the caller gives out, each once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shared.errors import GroupHeldError, StaleEpochError, StepMismatchError
from shared.heartbeat import LEASE_S


class LaunchedStep(NamedTuple):
    """A step that was given to the device; both are 0 where there is none."""

    epoch: int
    step_id: int


NOTHING_LAUNCHED = LaunchedStep(0, 0)


@dataclass(slots=True)
class ClaimLedger:
    """One epoch at a time, from its offer until the stream of its steps ends or a later offer supersedes it.

    Invariant: the epoch never falls, and steps are launched under the present one only, in order, from one stream.
    """

    epoch: int = 0
    holder: str = ""
    # What was launched last, under any epoch.
    last_launched: LaunchedStep = NOTHING_LAUNCHED
    # Whether steps of the epoch may come.
    is_open: bool = False
    # An opened stream says nothing about its epoch: the first that brings a heartbeat of the holder is the epoch's.
    stream: int | None = None
    heard_at: float = 0.0
    next_step_id: int = 1

    def offer(self, epoch: int, scheduler_instance_id: str, now: float) -> None:
        """Begin an epoch; nothing older is launched from now on.

        Raises:
            StaleEpochError: it is not above the present one, as 0 never is; nothing has changed.
            GroupHeldError: another scheduler has a live stream and was heard within the lease; nothing has changed.
        """
        if epoch <= self.epoch:
            raise self.stale("the epoch offered is not above the group's own", now)
        # A holder's own new epoch supersedes its old one, whose end may not have reached us yet.
        if self.live_holder(now) not in ("", scheduler_instance_id):
            raise self._held("another scheduler holds this group", now)
        self.epoch, self.holder = epoch, scheduler_instance_id
        self.is_open, self.stream, self.next_step_id = True, None, 1

    def hear(self, stream: int, epoch: int, scheduler_instance_id: str, now: float) -> None:
        """The holder lives; `stream` is the epoch's from its first heartbeat on.

        The epoch alone does not tell whose the stream is: a group that was restarted may give out a number again.

        Raises:
            StaleEpochError: another epoch's or another scheduler's, or the epoch's stream has ended.
            GroupHeldError: another stream is the epoch's.
        """
        if (epoch, scheduler_instance_id) != (self.epoch, self.holder) or not self.is_open:
            raise self.stale("a heartbeat of another epoch", now)
        if self.stream not in (None, stream):
            raise self._held("this is not the stream of the epoch's steps", now)
        self.stream, self.heard_at = stream, now

    def launch(self, stream: int, epoch: int, step_id: int, now: float) -> None:
        """Count a step as launched.

        Raises:
            StaleEpochError: another epoch's, or the epoch's stream has ended.
            GroupHeldError: the stream is not the epoch's.
            StepMismatchError: it is not the epoch's next step.
        """
        if epoch != self.epoch or not self.is_open:
            raise self.stale("a step of another epoch", now)
        if stream != self.stream:
            raise self._held("this is not the stream of the epoch's steps", now)
        self.heard_at = now
        if step_id != self.next_step_id:
            raise StepMismatchError("not the next step", step_id=step_id, expected=self.next_step_id)
        self.next_step_id += 1
        self.last_launched = LaunchedStep(epoch, step_id)

    def end_stream(self, stream: int) -> None:
        """A stream has ended; the epoch's own ends the claim at once."""
        if self.stream == stream:
            self.is_open = False

    def check_restart(self, epoch: int, scheduler_instance_id: str) -> None:
        """Whether the caller may end the process.

        Raises:
            StaleEpochError: it does not hold the group under this epoch.
        """
        if not epoch or (epoch, scheduler_instance_id) != (self.epoch, self.holder):
            raise StaleEpochError("the caller does not hold the group under this epoch", epoch=self.epoch)

    def live_holder(self, now: float) -> str:
        """The scheduler that keeps others out; empty when none does, since its stream has ended or it is silent."""
        is_live = self.is_open and self.stream is not None and now - self.heard_at <= LEASE_S
        return self.holder if is_live else ""

    def stale(self, message: str, now: float) -> StaleEpochError:
        """The error that names the present epoch, and its holder while that is live."""
        return StaleEpochError(message, epoch=self.epoch, holder=self.live_holder(now))

    def _held(self, message: str, now: float) -> GroupHeldError:
        return GroupHeldError(message, epoch=self.epoch, holder=self.live_holder(now))
