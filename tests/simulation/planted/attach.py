"""Bugs in the attach protocol that the model checker must detect: each removes one of its rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from services.scheduler.cell.domains import attach
from services.scheduler.cell.domains.attach import DomainAttach
from services.scheduler.cell.domains.attach_events import Accepted, AttachEvent, Command, Refused
from services.scheduler.cell.domains.scheduler_claim import SchedulerClaim
from services.worker.server.claim import AdmittedStep, ClaimLedger
from shared.errors import StaleEpochError
from tests.simulation.attach.search import FAULTS, ONE_GROUP, SPLIT, SUCCESSION, TAKEN_GROUP, Search

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True)
class AttachBug:
    """A bug, its effect, and the search that must detect it."""

    name: str
    breaks: str
    search: Search
    plant: Callable[[Patch], None]


ATTACH_BUGS: list[AttachBug] = []


def planted(search: Search) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Register a function that plants a bug; its docstring becomes `breaks`."""

    def enter(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        ATTACH_BUGS.append(AttachBug(plant.__name__.strip("_"), plant.__doc__ or "", search, plant))
        return plant

    return enter


@planted(FAULTS)
def _no_fence(patch: Patch) -> None:
    """A step is admitted even if the group holds a newer epoch."""

    def admit(self: ClaimLedger, stream: int, epoch: int, step_id: int, now: float) -> None:
        self.last_admitted = AdmittedStep(epoch, step_id)

    patch.setattr(ClaimLedger, "admit", admit)


@planted(FAULTS)
def _equal_epochs_are_accepted(patch: Patch) -> None:
    """Two schedulers hold groups of one domain under the same epoch, and each believes that it owns the domain."""
    offer = ClaimLedger.offer

    def accept(self: ClaimLedger, epoch: int, scheduler_instance_id: str, now: float) -> None:
        if epoch == self.epoch > 0:
            self.epoch -= 1
        offer(self, epoch, scheduler_instance_id, now)

    patch.setattr(ClaimLedger, "offer", accept)


@planted(FAULTS)
def _streams_are_not_asked_whose_they_are(patch: Patch) -> None:
    """After a group's restart another scheduler may hold it under the epoch that the first one still uses."""
    on_heartbeat = ClaimLedger.on_heartbeat

    def believe(self: ClaimLedger, stream: int, epoch: int, scheduler_instance_id: str, now: float) -> None:
        on_heartbeat(self, stream, epoch, self.holder, now)

    patch.setattr(ClaimLedger, "on_heartbeat", believe)


@planted(SUCCESSION)
def _claims_outlive_their_streams(patch: Patch) -> None:
    """A claim ends neither with its stream nor after silence, so the group of a dead scheduler is never released."""
    patch.setattr(ClaimLedger, "live_holder", lambda self, _: self.holder if self.stream is not None else "")


@planted(FAULTS)
def _last_steps_are_not_compared(patch: Patch) -> None:
    """Groups that launched different steps continue together, each in a different collective."""

    def only_stuck(accepted: list[Accepted]) -> str | None:
        return "stuck" if any(answer.is_stuck for answer in accepted) else None

    patch.setattr(attach, "_find_reason_to_restart", only_stuck)


@planted(ONE_GROUP)
def _refusals_teach_nothing(patch: Patch) -> None:
    """The scheduler keeps offering epochs that are too old for the group."""
    on_event = DomainAttach.on_event

    def offer_again(self: DomainAttach, event: AttachEvent, now: float) -> list[Command]:
        self._highest_epoch = 0
        return on_event(self, replace(event, held_epoch=0) if isinstance(event, Refused) else event, now)

    patch.setattr(DomainAttach, "on_event", offer_again)


@planted(SPLIT)
def _no_scheduler_gives_way(patch: Patch) -> None:
    """Two schedulers that each hold a part of a cell keep it forever."""
    patch.setattr(SchedulerClaim, "is_below", lambda *_: False)


@planted(SUCCESSION)
def _the_dead_are_named_as_holders(patch: Patch) -> None:
    """A claimant waits forever for a scheduler whose stream has ended."""
    patch.setattr(
        ClaimLedger,
        "stale",
        lambda self, message, now: StaleEpochError(message, epoch=self.epoch, holder=self.holder),
    )


@planted(SPLIT)
def _a_standby_offers(patch: Patch) -> None:
    """A standby scheduler takes a group as soon as it can, although another one serves the cell."""
    patch.setattr(DomainAttach, "_ask", DomainAttach._offer)


@planted(TAKEN_GROUP)
def _refusals_raise_the_epoch(patch: Patch) -> None:
    """A refused scheduler retries with a higher epoch each time, and wins over one that holds more groups."""
    offer = DomainAttach._offer

    def raise_epoch(self: DomainAttach, now: float) -> list[Command]:
        self._highest_epoch = max(self._highest_epoch, self._epoch)
        return offer(self, now)

    patch.setattr(DomainAttach, "_offer", raise_epoch)


@planted(TAKEN_GROUP)
def _the_first_refusal_ends_a_scheduler(patch: Patch) -> None:
    """A scheduler exits in favour of a rival that has died, so none is left."""

    def is_last(self: DomainAttach, refusal: Refused) -> bool:
        is_named = refusal.holder not in ("", self._claim.instance_id)
        return is_named and self._claim.is_below(refusal.held_epoch or 0, refusal.holder)

    patch.setattr(DomainAttach, "_is_last_refusal", is_last)


@planted(FAULTS)
def _streams_stay_open_when_one_breaks(patch: Patch) -> None:
    """A scheduler continues on the remaining streams of a domain."""
    patch.setattr(DomainAttach, "_on_broken", lambda *_: [])
