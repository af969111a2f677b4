"""A scheduler's claim to its workers, beside other schedulers of its cell."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from services.scheduler.cell.domains.attach_events import Refused
from shared.network.heartbeat import LEASE_S

# How long a standby leaves a group that has just started to the scheduler that held it: that one offers in every round,
# so the crash of a worker does not move its cell to another scheduler.
HEAD_START_S = 3.0

# How long a group has for its answer to an offer; it may take 10 s to notice that it is stuck. A group that prepares
# its steps for longer (capturing graphs can take minutes) is offered the next epoch, and accepts one when it is ready.
OFFER_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class Rival:
    """Another scheduler, named as live holder in every answer of a group since `since`."""

    instance_id: str
    since: float


@dataclass(slots=True)
class SchedulerClaim:
    """A scheduler's claim to its workers, shared by the domains of a cell.

    A scheduler that has never held a domain takes nothing while another one holds any group that answers. If it has met
    another one, it is a standby: it offers nothing to a domain in which a group is not ready, or became ready less than
    `HEAD_START_S` ago, or was not held since another scheduler offered it an epoch, unless no further offer followed in
    time.

    One that has held a domain offers at once. It exits when a rival has held one of its groups for longer than the
    lease, under a higher epoch than any of its own (ties go by instance id). So of two schedulers that each hold part
    of a cell, exactly one exits.
    """

    instance_id: str
    draw: Callable[[], float]
    """Uniform from 0 to 1."""
    has_held: bool = False
    domain_to_epoch: dict[int, int] = field(default_factory=dict)
    """Includes those whose streams are being opened."""
    groups: set[int] = field(default_factory=set)
    """Groups that it knows. They may change while it runs: each is asked before any is taken."""
    group_to_rival: dict[int, Rival | None] = field(default_factory=dict)
    """The rival in the last answer of each group asked."""
    has_met_rival: bool = False
    group_to_free_at: dict[int, float] = field(default_factory=dict)
    """When a standby may take each group that is not held; never, while the group is not ready."""
    group_to_epoch: dict[int, int] = field(default_factory=dict)
    """The epoch of each group, from its last answer."""

    def note_answer(self, answer: Refused, now: float) -> None:
        """Record whether a group that was asked is ready, and whether a scheduler is just taking it."""
        group, epoch = answer.group, answer.held_epoch
        if epoch is None or not answer.is_ready:
            self.group_to_free_at[group] = math.inf
            return
        last_epoch = self.group_to_epoch.get(group, epoch)
        self.group_to_epoch[group] = epoch
        was_ready = self.group_to_free_at.get(group, math.inf) < math.inf
        if answer.holder:
            self.group_to_free_at.pop(group, None)
        elif epoch == 0 and (last_epoch or not was_ready):
            self.group_to_free_at[group] = now + HEAD_START_S
        elif epoch != last_epoch:
            # It was offered an epoch and prepares its steps; no stream is open yet that would name a holder. While it
            # prepares them, a scheduler that lives offers it one epoch after another.
            self.group_to_free_at[group] = now + OFFER_TIMEOUT_S + HEAD_START_S
        elif not was_ready:
            self.group_to_free_at.pop(group, None)

    def forget(self, groups: Iterable[int]) -> None:
        """Forget groups that are not there any more."""
        for group in groups:
            self.groups.discard(group)
            self.group_to_rival.pop(group, None)
            self.group_to_free_at.pop(group, None)
            self.group_to_epoch.pop(group, None)

    def note_holder(self, group: int, holder: str, now: float) -> None:
        """Record the live holder that a group named; empty for none or no answer."""
        rival = self.group_to_rival.get(group)
        if holder in ("", self.instance_id):
            self.group_to_rival[group] = None
        elif rival is None or rival.instance_id != holder:
            self.group_to_rival[group] = Rival(holder, now)
            self.has_met_rival = True

    def find_obstacle(self, groups: Iterable[int], now: float) -> str | None:
        """Say why it may not offer these groups an epoch yet; None when it may."""
        if self.has_held:
            return None
        for group, rival in self.group_to_rival.items():
            if rival is not None:
                return f"scheduler {rival.instance_id} holds group {group}"
        if self.groups - self.group_to_rival.keys():
            return "not every group has been asked"
        for group in groups:
            if self.has_met_rival and now < self.group_to_free_at.get(group, now):
                return f"group {group} is not ready, has just started or was offered: it is left to its former holder"
        return None

    def find_lasting_rivals(self, groups: Iterable[int], now: float) -> dict[int, str]:
        """The rivals that these groups have named for longer than the lease."""
        rivals = ((group, self.group_to_rival.get(group)) for group in groups)
        return {
            group: rival.instance_id for group, rival in rivals if rival is not None and now - rival.since > LEASE_S
        }

    def is_below(self, epoch: int, rival: str) -> bool:
        """Whether to yield to a rival that holds a group under `epoch`."""
        own_epoch = max(self.domain_to_epoch.values(), default=0)
        return self.has_held and (own_epoch, self.instance_id) < (epoch, rival)
