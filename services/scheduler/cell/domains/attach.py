"""The attach protocol of a failure domain: one epoch for all its groups, offered anew until each runs under it.

Sans-I/O. Epochs are the only fence between schedulers: a worker runs only steps of its current epoch, which never
falls. So a lost, late or repeated message only costs another round.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import fields

from services.scheduler.cell.domains.attach_events import (
    QUESTION,
    Accepted,
    AttachEvent,
    CloseStreams,
    Command,
    Dropped,
    GroupPlace,
    Offer,
    OpenStreams,
    Refused,
    Restart,
    RetryAt,
    RetryDue,
    StreamBroken,
    StreamOpened,
)
from services.scheduler.cell.domains.scheduler_claim import SchedulerClaim
from services.scheduler.cell.events import DomainAttached, DomainLost, Exit
from services.scheduler.core.policy import CellTopology
from services.scheduler.core.worker_facts import MAY_DIFFER, WorkerFacts
from shared.ids import DpRank

# Mean delay between two rounds. A worker takes seconds to restart.
RETRY_DELAY_S = 0.5


class _Phase(enum.Enum):
    WAITING = enum.auto()
    ASKING = enum.auto()
    OFFERING = enum.auto()
    OPENING = enum.auto()
    ATTACHED = enum.auto()
    GONE = enum.auto()


class DomainAttach:
    """The scheduler's side of attaching one domain.

    A round offers one epoch to all groups; another round follows unless all accept:

        epoch      5                  6                                      7
        group 0    accepts            accepts  ═══ steps ═══════════╡        accepts  ═══ steps ═══
        group 1    refuses            accepts  ═══ steps ═══ breaks          accepts  ═══ steps ═══
                            0.5 s              │                   │ 0.5 s            │
                                               DomainAttached      DomainLost         DomainAttached

    Between `DomainAttached` and `DomainLost` every group holds the epoch. A scheduler that has never held a domain
    begins each round by asking which scheduler holds the groups.

    Invariant: an epoch is offered again only if every group refused it; answers from earlier rounds are ignored.
    """

    def __init__(self, domain: int, topology: CellTopology, claim: SchedulerClaim) -> None:
        self._domain = domain
        self._topology = topology
        self._claim = claim
        self._groups = topology.ranks_of(domain)
        claim.groups.update(self._groups)
        self._phase = _Phase.WAITING
        # The epoch of the current round, or of the last one.
        self._epoch = 0
        self._answers: dict[int, Accepted | Refused] = {}
        self._opened: set[int] = set()
        # Rivals named for longer than the lease when the round began: the next refusal naming them is the last.
        self._lasting_rivals: dict[int, str] = {}
        # The highest epoch that any group may have.
        self._highest_epoch = 0

    def on_event(self, event: AttachEvent, now: float) -> list[Command]:
        """Handle an event at `now` (monotonic seconds); returns the commands, in order."""
        match event:
            case RetryDue() if self._phase is _Phase.WAITING:
                return self._offer(now) if self._claim.has_held else self._ask(now)
            case Accepted() | Refused() if self._is_asked and event.epoch == self._epoch:
                return self._on_answer(event, now)
            case StreamOpened() if self._phase is _Phase.OPENING and event.epoch == self._epoch:
                return self._on_opened(event.group)
            case StreamBroken() if self._has_streams and event.epoch == self._epoch:
                return self._on_broken(event, now)
            case Dropped(epoch, retry_s) if self._phase is _Phase.ATTACHED and epoch == self._epoch:
                retry = self._retry(now, "the epoch was given up", retry_s)
                return [CloseStreams(epoch, is_last=event.is_released), retry]
        return []

    @property
    def is_first_start(self) -> bool:
        """Whether this scheduler has not held any group yet."""
        return not self._claim.has_held

    def end(self) -> None:
        """The groups are not there any more; no event may follow."""
        self._phase = _Phase.GONE
        self._claim.domain_to_epoch.pop(self._domain, None)
        self._claim.forget(self._groups)

    @property
    def _is_asked(self) -> bool:
        return self._phase in (_Phase.ASKING, _Phase.OFFERING)

    @property
    def _has_streams(self) -> bool:
        return self._phase in (_Phase.OPENING, _Phase.ATTACHED)

    def _ask(self, now: float) -> list[Command]:
        return self._begin_round(_Phase.ASKING, QUESTION, now)

    def _offer(self, now: float) -> list[Command]:
        return self._begin_round(_Phase.OFFERING, self._highest_epoch + 1, now)

    def _begin_round(self, phase: _Phase, epoch: int, now: float) -> list[Command]:
        self._phase, self._epoch = phase, epoch
        self._answers.clear()
        self._opened.clear()
        self._lasting_rivals = self._claim.find_lasting_rivals(self._groups, now)
        return [Offer(group, epoch) for group in self._groups]

    def _on_answer(self, answer: Accepted | Refused, now: float) -> list[Command]:
        self._answers.setdefault(answer.group, answer)
        if isinstance(answer, Accepted):
            self._note_holder(answer.group, answer.epoch, "", now)
        else:
            self._note_holder(answer.group, answer.held_epoch, answer.holder, now)
            if answer.epoch == QUESTION:
                self._claim.note_answer(answer, now)
            if self._is_last_refusal(answer):
                return [self._exit(answer.holder)]
        return self._conclude(now) if len(self._answers) == len(self._groups) else []

    def _note_holder(self, group: int, epoch: int | None, holder: str, now: float) -> None:
        """`epoch` is None when the group did not answer."""
        self._highest_epoch = max(self._highest_epoch, self._epoch if epoch is None else epoch)
        self._claim.note_holder(group, holder, now)

    def _is_last_refusal(self, refusal: Refused) -> bool:
        """Whether two refusals, more than the lease apart, named a live rival to yield to.

        The later one was requested after the lease had run out, so the rival was alive when the earlier one was given.
        """
        if refusal.held_epoch is None or refusal.holder != self._lasting_rivals.get(refusal.group):
            return False
        return self._claim.is_below(refusal.held_epoch, refusal.holder)

    def _conclude(self, now: float) -> list[Command]:
        if self._phase is _Phase.ASKING:
            obstacle = self._claim.find_obstacle(self._groups, now)
            return self._offer(now) if obstacle is None else [self._retry(now, obstacle)]
        answers = [self._answers[group] for group in self._groups]
        accepted = [answer for answer in answers if isinstance(answer, Accepted)]
        reason = _find_reason_to_restart(accepted)
        if reason is not None:
            return [*(Restart(answer.group, self._epoch) for answer in accepted), self._retry(now, reason)]
        refusals = (answer.reason for answer in answers if isinstance(answer, Refused))
        reason = next(refusals, None) or self._find_disagreement(accepted)
        if reason is not None:
            return [self._retry(now, reason)]
        self._phase = _Phase.OPENING
        self._claim.domain_to_epoch[self._domain] = self._epoch
        return [OpenStreams(self._epoch)]

    def _find_disagreement(self, accepted: list[Accepted]) -> str | None:
        for answer in accepted:
            expected = self._expected_place(answer, accepted[0].place.tp_size)
            if answer.place != expected:
                return f"group {answer.group} reports {answer.place}, expected {expected}"
            first = accepted[0]
            own, common = answer.facts.context_length, first.facts.context_length
            if own != common:
                return (
                    f"group {answer.group} serves a context of {own} tokens, group {first.group} one of {common}: "
                    "all need the same --max-model-len"
                )
            name = next(_differing_facts(answer.facts, first.facts), None)
            if name is not None:
                return f"{name} of group {answer.group} differs from that of group {first.group}"
        return None

    def _expected_place(self, answer: Accepted, tp_size: int) -> GroupPlace:
        """An endpoint's place changes with its neighbours, so one that is discovered must not name any."""
        topology = self._topology
        if topology.is_dynamic or (answer.place.dp_rank is None and not topology.is_coupled):
            return GroupPlace(None, 1, tp_size, is_coupled=False)
        return GroupPlace(DpRank(answer.group), topology.dp_size, tp_size, topology.is_coupled)

    def _on_opened(self, group: int) -> list[Command]:
        self._opened.add(group)
        if len(self._opened) < len(self._groups):
            return []
        self._phase = _Phase.ATTACHED
        self._claim.has_held = True
        answers = (self._answers[group] for group in self._groups)
        return [DomainAttached(self._domain, tuple(answer.facts for answer in answers if isinstance(answer, Accepted)))]

    def _on_broken(self, event: StreamBroken, now: float) -> list[Command]:
        commands: list[Command] = [CloseStreams(self._epoch)]
        if self._phase is _Phase.ATTACHED:
            commands.append(DomainLost(self._domain, self._epoch))
        if event.held_epoch is not None:
            self._note_holder(event.group, event.held_epoch, event.holder, now)
        return [*commands, self._retry(now, f"the stream to group {event.group} broke")]

    def _retry(self, now: float, reason: str, retry_s: float | None = None) -> RetryAt:
        self._phase = _Phase.WAITING
        self._claim.domain_to_epoch.pop(self._domain, None)
        # Randomised, so that two schedulers do not keep taking the groups from each other.
        mean_s = RETRY_DELAY_S if retry_s is None else retry_s
        return RetryAt(now + mean_s * (0.5 + self._claim.draw()), reason)

    def _exit(self, holder: str) -> Exit:
        self._phase = _Phase.GONE
        return Exit(f"scheduler {holder} holds the workers of domain {self._domain}")


def _find_reason_to_restart(accepted: list[Accepted]) -> str | None:
    """A stuck group waits in a collective for ever; if the last steps differ, the groups' collectives do not match."""
    for answer in accepted:
        if answer.is_stuck:
            return f"group {answer.group} is stuck"
    if len({answer.last_step for answer in accepted}) > 1:
        return "the groups' last launched steps differ"
    return None


def _differing_facts(facts: WorkerFacts, others: WorkerFacts) -> Iterator[str]:
    must_agree = (each.name for each in fields(WorkerFacts) if not each.metadata[MAY_DIFFER])
    return (name for name in must_agree if getattr(facts, name) != getattr(others, name))
