"""How a failure domain is attached: one epoch for all its groups, offered anew until each of them runs under it.

What happened goes in with the moment, what is to be done comes out. The epoch is the only fence between schedulers, so
whatever can be lost, late or repeated on the way only costs another round. DESIGN section 7, "The epoch", is the source
of its rules.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace

from services.scheduler.events import DomainAttached, DomainLost, Exit, WorkerFacts
from services.scheduler.policy import CellTopology

# Between one round of offers and the next: a worker that restarts takes seconds.
RETRY_DELAY_S = 0.5


@dataclass(slots=True)
class Standing:
    """What a scheduler is among those that want its workers; the domains of a cell share one.

    `held_epoch` is the highest that any group has answered to hold for it, 0 while none ever did. Of two schedulers
    that both held groups the one with the lower goes, whichever groups they meet at: a cell is never shared for long.
    """

    instance_id: str
    held_epoch: int = 0

    def is_below(self, epoch: int, holder: str) -> bool:
        """Whether it has to go for a scheduler that holds a group; who never held one may wait."""
        is_other = holder not in ("", self.instance_id)
        return is_other and self.held_epoch > 0 and (self.held_epoch, self.instance_id) < (epoch, holder)


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Where a group says that it stands in its cell."""

    dp_rank: int
    dp_size: int
    tp_size: int
    is_coupled: bool


@dataclass(frozen=True, slots=True)
class Accepted:
    """A group holds the epoch that it was offered, and an empty batch.

    `last_step` is the epoch and the number of the last step that it launched before; (0, 0) is none since it started.
    """

    group: int
    epoch: int
    facts: WorkerFacts
    place: GroupPlace
    last_step: tuple[int, int] = (0, 0)
    is_stuck: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """A group did not take the epoch that it was offered, or gave no answer.

    `held_epoch` and `holder` are what it holds and for which scheduler, where it says so.
    """

    group: int
    epoch: int
    reason: str
    held_epoch: int = 0
    holder: str = ""


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """A group lets the epoch's steps come."""

    group: int
    epoch: int


@dataclass(frozen=True, slots=True)
class StreamBroken:
    """A group's stream of an epoch ended, or was never opened; `held_epoch` and `holder` are as with `Refused`."""

    group: int
    epoch: int
    held_epoch: int = 0
    holder: str = ""


@dataclass(frozen=True, slots=True)
class Dropped:
    """The engine has given an attached epoch up."""

    epoch: int


@dataclass(frozen=True, slots=True)
class RetryDue:
    """The moment of the last `RetryAt` has come; also the first event of all."""


AttachEvent = Accepted | Refused | StreamOpened | StreamBroken | Dropped | RetryDue


@dataclass(frozen=True, slots=True)
class Offer:
    """Offer a group an epoch; exactly one `Accepted` or `Refused` follows."""

    group: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Restart:
    """Ask a group's leader to end its processes; whether it is heard shows with the next offer."""

    group: int
    epoch: int


@dataclass(frozen=True, slots=True)
class OpenStreams:
    """Open the step stream of each group of the domain."""

    epoch: int


@dataclass(frozen=True, slots=True)
class CloseStreams:
    """End the epoch's streams, those that are only being opened too."""

    epoch: int


@dataclass(frozen=True, slots=True)
class RetryAt:
    """Begin another round at a moment; `reason` is for people."""

    when: float
    reason: str


Command = Offer | Restart | OpenStreams | CloseStreams | RetryAt | DomainAttached | DomainLost | Exit


class _Phase(enum.Enum):
    WAITING = enum.auto()
    OFFERING = enum.auto()
    OPENING = enum.auto()
    ATTACHED = enum.auto()
    GONE = enum.auto()


class DomainAttach:
    """The scheduler's half of one domain's attach; the worker's half is its claim.

    A round offers one epoch to all groups and waits for all answers. It ends with streams to all groups, or with
    another round later. `DomainAttached` and `DomainLost` of an epoch alternate; between them every group holds it.

    Invariant: no two rounds of a scheduler offer the same epoch, and what comes back from an earlier one is ignored.
    """

    def __init__(self, domain: int, topology: CellTopology, standing: Standing) -> None:
        self._domain = domain
        self._topology = topology
        self._standing = standing
        self._groups = topology.ranks_of(domain)
        self._phase = _Phase.WAITING
        # Of the present round, or of the last one.
        self._epoch = 0
        self._highest_epoch = 0
        self._answers: dict[int, Accepted | Refused] = {}
        self._opened: set[int] = set()

    def on_event(self, event: AttachEvent, now: float) -> list[Command]:
        """Take in what happened at `now` (seconds of a monotonic clock); returns what is to be done, in order."""
        match event:
            case RetryDue() if self._phase is _Phase.WAITING:
                return self._offer()
            case Accepted() | Refused() if self._phase is _Phase.OFFERING and event.epoch == self._epoch:
                return self._on_answer(event, now)
            case StreamOpened() if self._phase is _Phase.OPENING and event.epoch == self._epoch:
                return self._on_opened(event.group)
            case StreamBroken() if self._has_streams and event.epoch == self._epoch:
                return self._on_broken(event, now)
            case Dropped(epoch) if self._phase is _Phase.ATTACHED and epoch == self._epoch:
                return [CloseStreams(epoch), self._retry(now, "the epoch was given up")]
        return []

    @property
    def _has_streams(self) -> bool:
        return self._phase in (_Phase.OPENING, _Phase.ATTACHED)

    def _offer(self) -> list[Command]:
        self._epoch = self._highest_epoch = self._highest_epoch + 1
        self._phase = _Phase.OFFERING
        self._answers.clear()
        self._opened.clear()
        return [Offer(group, self._epoch) for group in self._groups]

    def _on_answer(self, answer: Accepted | Refused, now: float) -> list[Command]:
        self._answers.setdefault(answer.group, answer)
        if isinstance(answer, Accepted):
            self._standing.held_epoch = max(self._standing.held_epoch, answer.epoch)
        elif self._standing.is_below(answer.held_epoch, answer.holder):
            return [self._exit(answer.holder)]
        else:
            self._highest_epoch = max(self._highest_epoch, answer.held_epoch)
        return self._conclude(now) if len(self._answers) == len(self._groups) else []

    def _conclude(self, now: float) -> list[Command]:
        """All groups have answered."""
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
        return [OpenStreams(self._epoch)]

    def _find_disagreement(self, accepted: list[Accepted]) -> str | None:
        """Why the groups cannot be this domain; None when they can."""
        for answer in accepted:
            expected = GroupPlace(
                answer.group, self._topology.dp_size, accepted[0].place.tp_size, self._topology.is_coupled
            )
            if answer.place != expected:
                return f"group {answer.group} says that it is {answer.place}, not {expected}"
            name = next(_differing_facts(answer.facts, accepted[0].facts), None)
            if name is not None:
                return f"{name} of group {answer.group} is not that of group {accepted[0].group}"
        return None

    def _on_opened(self, group: int) -> list[Command]:
        self._opened.add(group)
        if len(self._opened) < len(self._groups):
            return []
        self._phase = _Phase.ATTACHED
        answers = (self._answers[group] for group in self._groups)
        return [DomainAttached(self._domain, tuple(answer.facts for answer in answers if isinstance(answer, Accepted)))]

    def _on_broken(self, event: StreamBroken, now: float) -> list[Command]:
        commands: list[Command] = [CloseStreams(self._epoch)]
        if self._phase is _Phase.ATTACHED:
            commands.append(DomainLost(self._domain, self._epoch))
        if self._standing.is_below(event.held_epoch, event.holder):
            return [*commands, self._exit(event.holder)]
        return [*commands, self._retry(now, f"the stream to group {event.group} broke")]

    def _retry(self, now: float, reason: str) -> RetryAt:
        self._phase = _Phase.WAITING
        return RetryAt(now + RETRY_DELAY_S, reason)

    def _exit(self, holder: str) -> Exit:
        self._phase = _Phase.GONE
        return Exit(f"scheduler {holder} holds the workers of domain {self._domain}")


def _find_reason_to_restart(accepted: list[Accepted]) -> str | None:
    """Why groups that hold the epoch can run nothing before they are restarted; None when they can.

    A stuck group waits in a collective for ever. Groups that launched different steps are not of one mind about what
    their collectives carry: one of them may have been restarted, or have missed a step.
    """
    for answer in accepted:
        if answer.is_stuck:
            return f"group {answer.group} is stuck"
    if len({answer.last_step for answer in accepted}) > 1:
        return "the groups' last launched steps differ"
    return None


def _differing_facts(facts: WorkerFacts, others: WorkerFacts) -> Iterator[str]:
    """The names of facts that ranks must share, and do not; pool sizes and numerics are each rank's own."""
    comparable = replace(facts, num_blocks=others.num_blocks, numerics_fingerprint=others.numerics_fingerprint)
    return (name for name in WorkerFacts.__slots__ if getattr(comparable, name) != getattr(others, name))
