"""Which scheduler holds the group, and which steps it may run: the epoch rules, without streams or a clock.

tests/simulation model-checks them together with the scheduler's side. Streams are numbers chosen by the caller, each
used once. Epochs over time:

    epoch   0 ── offer(1, A) ───────────────────────────────── offer(2, B) ──────────────────────
    holder  ""   A                                             B
    stream       none ── heartbeat on 7 ── admit ───┐          none ── heartbeat on 8 ── admit ───
    is_open      yes                                │ no       yes
                                                    └ end_stream(7): nothing is admitted until the next offer

B's offer is refused (GroupHeldError) while stream 7 is open and was heard within the lease; A's own is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shared.errors import GroupHeldError, NotReadyError, StaleEpochError, StepMismatchError
from shared.network.heartbeat import LEASE_S


class AdmittedStep(NamedTuple):
    """A step that the ledger admitted; both fields are 0 if there is none."""

    epoch: int
    step_id: int


NOTHING_ADMITTED = AdmittedStep(0, 0)


@dataclass(slots=True)
class ClaimLedger:
    """Holds one epoch at a time, from its offer until its step stream ends or a later offer supersedes it.

    Invariant: the epoch never decreases; steps are admitted under the current one only, in order, from one stream.
    """

    epoch: int = 0
    holder: str = ""
    last_admitted: AdmittedStep = NOTHING_ADMITTED
    """The last step admitted, under any epoch."""
    is_leaving: bool = False
    """Whether the group was asked to end; no scheduler may claim it any more."""
    is_open: bool = False
    """Whether steps of the epoch are admitted."""
    stream: int | None = None
    """The first stream with a heartbeat of the holder, since opening one names no epoch."""
    heard_at: float = 0.0
    next_step_id: int = 1

    def offer(self, epoch: int, scheduler_instance_id: str, now: float) -> None:
        """Begin an epoch (Attach); steps of older ones are no longer admitted.

        Changes nothing if it raises. Offering epoch 0 only asks which scheduler holds the group.

        Raises:
            NotReadyError: the group is leaving.
            StaleEpochError: the epoch is not above the current one.
            GroupHeldError: another scheduler has a live stream and was heard within the lease.
        """
        if self.is_leaving:
            raise NotReadyError("the group was asked to end")
        if epoch <= self.epoch:
            raise self.stale("the offered epoch is not above the group's current one", now)
        # A holder's new epoch supersedes its old one; the end of the old stream may not have reached us yet.
        if self.live_holder(now) not in ("", scheduler_instance_id):
            raise self._held("another scheduler holds this group", now)
        self.epoch, self.holder = epoch, scheduler_instance_id
        self.is_open, self.stream, self.next_step_id = True, None, 1

    def on_heartbeat(self, stream: int, epoch: int, scheduler_instance_id: str, now: float) -> None:
        """Record a heartbeat; the first one makes its stream the epoch's.

        An epoch alone does not identify its scheduler: after a restart of the group a number may be used again.

        Raises:
            StaleEpochError: it is from another epoch or scheduler, or the epoch's stream has ended.
            GroupHeldError: the epoch has another stream.
        """
        if (epoch, scheduler_instance_id) != (self.epoch, self.holder) or not self.is_open:
            raise self.stale("the heartbeat belongs to another epoch", now)
        if self.stream not in (None, stream):
            raise self._held("the epoch's steps come on another stream", now)
        self.stream, self.heard_at = stream, now

    def admit(self, stream: int, epoch: int, step_id: int, now: float) -> None:
        """Record a step; it may be given to the device only if this returns.

        Raises:
            StaleEpochError: it is from another epoch, or the epoch's stream has ended.
            GroupHeldError: the epoch has another stream.
            StepMismatchError: it is not the epoch's next step.
        """
        if epoch != self.epoch or not self.is_open:
            raise self.stale("the step belongs to another epoch", now)
        if stream != self.stream:
            raise self._held("the epoch's steps come on another stream", now)
        self.heard_at = now
        if step_id != self.next_step_id:
            raise StepMismatchError("the step is out of order", step_id=step_id, expected=self.next_step_id)
        self.next_step_id += 1
        self.last_admitted = AdmittedStep(epoch, step_id)

    def end_stream(self, stream: int) -> None:
        """The end of the epoch's stream ends the claim at once."""
        if self.stream == stream:
            self.is_open = False

    def check_restart(self, epoch: int, scheduler_instance_id: str) -> None:
        """Let only the holder restart the process.

        Raises:
            StaleEpochError: the caller does not hold the group under this epoch.
        """
        if not epoch or (epoch, scheduler_instance_id) != (self.epoch, self.holder):
            raise StaleEpochError("the caller does not hold the group under this epoch", epoch=self.epoch)

    def live_holder(self, now: float) -> str:
        """The scheduler that keeps others out; empty if its stream has ended or its lease has run out."""
        is_live = self.is_open and self.stream is not None and now - self.heard_at <= LEASE_S
        return self.holder if is_live else ""

    def stale(self, message: str, now: float) -> StaleEpochError:
        """Make an error that names the current epoch and its live holder."""
        return StaleEpochError(message, epoch=self.epoch, holder=self.live_holder(now))

    def _held(self, message: str, now: float) -> GroupHeldError:
        return GroupHeldError(message, epoch=self.epoch, holder=self.live_holder(now))
