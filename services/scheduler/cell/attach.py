"""How a failure domain is attached: one epoch for all its groups, offered anew until each of them runs under it.

What happened goes in with the moment, what is to be done comes out. The epoch is the only fence between schedulers, so
whatever can be lost, late or repeated on the way only costs another round. DESIGN section 7, "The epoch", is the source
of its rules.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from services.scheduler.cell.events import DomainAttached, DomainLost, Exit
from services.scheduler.core.policy import CellTopology
from services.scheduler.core.worker_facts import WorkerFacts
from shared.heartbeat import LEASE_S

# Between one round and the next, on average: a worker that restarts takes seconds.
RETRY_DELAY_S = 0.5

# Offered to no group: it asks which scheduler holds it.
QUESTION = 0


@dataclass(frozen=True, slots=True)
class Rival:
    """Another scheduler that a group has named as its live holder in every answer since a moment."""

    instance_id: str
    since: float


@dataclass(slots=True)
class ClaimStanding:
    """What a scheduler is among those that want its workers; the domains of a cell share one.

    One that never held a domain takes nothing while another scheduler holds any group that answers. One that did goes
    when another scheduler has held one of its groups for the lease, and holds it under a higher epoch than any that it
    holds itself: of two that each hold a part of a cell exactly one goes.
    """

    instance_id: str
    num_groups: int
    draw: Callable[[], float]
    """Returns numbers from 0 to 1, drawn uniformly."""
    has_held: bool = False
    """Whether it ever held a domain."""
    domain_to_epoch: dict[int, int] = field(default_factory=dict)
    """The epochs that it holds now, those whose streams are being opened included."""
    group_to_rival: dict[int, Rival | None] = field(default_factory=dict)
    """By group that has been asked: the rival that its last answer named."""

    def note_holder(self, group: int, holder: str, now: float) -> None:
        """A group has answered, or cannot be reached; `holder` is the live holder that it named, or empty."""
        rival = self.group_to_rival.get(group)
        if holder in ("", self.instance_id):
            self.group_to_rival[group] = None
        elif rival is None or rival.instance_id != holder:
            self.group_to_rival[group] = Rival(holder, now)

    def find_obstacle(self) -> str | None:
        """Why it has to wait before it offers; None when it may offer."""
        if self.has_held:
            return None
        for group, rival in self.group_to_rival.items():
            if rival is not None:
                return f"scheduler {rival.instance_id} holds group {group}"
        return "not every group has been asked" if len(self.group_to_rival) < self.num_groups else None

    def find_lasting_rivals(self, groups: Iterable[int], now: float) -> dict[int, str]:
        """The rivals that some of these groups have named for longer than the lease, by group."""
        rivals = ((group, self.group_to_rival.get(group)) for group in groups)
        return {
            group: rival.instance_id for group, rival in rivals if rival is not None and now - rival.since > LEASE_S
        }

    def is_below(self, epoch: int, rival: str) -> bool:
        """Whether it has to go for a rival that holds a group under an epoch."""
        own_epoch = max(self.domain_to_epoch.values(), default=0)
        return self.has_held and (own_epoch, self.instance_id) < (epoch, rival)


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

    `held_epoch` is its own epoch, and `holder` the scheduler that holds it now, empty when none does. `held_epoch` is
    None where it gave no answer, and may have taken the epoch.
    """

    group: int
    epoch: int
    reason: str
    held_epoch: int | None = None
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
    held_epoch: int | None = None
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
    """Offer a group an epoch, or ask it with `QUESTION`; exactly one `Accepted` or `Refused` follows."""

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
    ASKING = enum.auto()
    OFFERING = enum.auto()
    OPENING = enum.auto()
    ATTACHED = enum.auto()
    GONE = enum.auto()


class DomainAttach:
    """The scheduler's half of one domain's attach; the worker's half is its claim.

    A round offers one epoch to all groups and waits for all answers. It ends with streams to all groups, or with
    another round later. `DomainAttached` and `DomainLost` of an epoch alternate; between them every group holds it. A
    scheduler that never held a domain begins each round by asking.

    Invariant: an epoch is offered again only if every group has refused it, and what comes back from an earlier round
    is ignored.
    """

    def __init__(self, domain: int, topology: CellTopology, standing: ClaimStanding) -> None:
        self._domain = domain
        self._topology = topology
        self._standing = standing
        self._groups = topology.ranks_of(domain)
        self._phase = _Phase.WAITING
        # Of the present round, or of the last one.
        self._epoch = 0
        self._answers: dict[int, Accepted | Refused] = {}
        self._opened: set[int] = set()
        # Those named by earlier answers when the round began: the next answer that names one is the last.
        self._lasting_rivals: dict[int, str] = {}
        # The highest that a group may have.
        self._highest_epoch = 0

    def on_event(self, event: AttachEvent, now: float) -> list[Command]:
        """Take in what happened at `now` (seconds of a monotonic clock); returns what is to be done, in order."""
        match event:
            case RetryDue() if self._phase is _Phase.WAITING:
                return self._offer(now) if self._standing.has_held else self._ask(now)
            case Accepted() | Refused() if self._is_asked and event.epoch == self._epoch:
                return self._on_answer(event, now)
            case StreamOpened() if self._phase is _Phase.OPENING and event.epoch == self._epoch:
                return self._on_opened(event.group)
            case StreamBroken() if self._has_streams and event.epoch == self._epoch:
                return self._on_broken(event, now)
            case Dropped(epoch) if self._phase is _Phase.ATTACHED and epoch == self._epoch:
                return [CloseStreams(epoch), self._retry(now, "the epoch was given up")]
        return []

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
        self._lasting_rivals = self._standing.find_lasting_rivals(self._groups, now)
        return [Offer(group, epoch) for group in self._groups]

    def _on_answer(self, answer: Accepted | Refused, now: float) -> list[Command]:
        self._answers.setdefault(answer.group, answer)
        if isinstance(answer, Accepted):
            self._note_holder(answer.group, answer.epoch, "", now)
        else:
            self._note_holder(answer.group, answer.held_epoch, answer.holder, now)
            if self._is_last_refusal(answer):
                return [self._exit(answer.holder)]
        return self._conclude(now) if len(self._answers) == len(self._groups) else []

    def _note_holder(self, group: int, epoch: int | None, holder: str, now: float) -> None:
        """A group has told its epoch and its holder; without an epoch it gave no answer."""
        self._highest_epoch = max(self._highest_epoch, self._epoch if epoch is None else epoch)
        self._standing.note_holder(group, holder, now)

    def _is_last_refusal(self, refusal: Refused) -> bool:
        """Whether two refusals, more than the lease apart, have named a live rival that this scheduler goes for.

        The later one was asked for when the lease was over: the rival lived when the earlier one was given.
        """
        if refusal.held_epoch is None or refusal.holder != self._lasting_rivals.get(refusal.group):
            return False
        return self._standing.is_below(refusal.held_epoch, refusal.holder)

    def _conclude(self, now: float) -> list[Command]:
        """All groups have answered."""
        if self._phase is _Phase.ASKING:
            obstacle = self._standing.find_obstacle()
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
        self._standing.domain_to_epoch[self._domain] = self._epoch
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
        self._standing.has_held = True
        answers = (self._answers[group] for group in self._groups)
        return [DomainAttached(self._domain, tuple(answer.facts for answer in answers if isinstance(answer, Accepted)))]

    def _on_broken(self, event: StreamBroken, now: float) -> list[Command]:
        commands: list[Command] = [CloseStreams(self._epoch)]
        if self._phase is _Phase.ATTACHED:
            commands.append(DomainLost(self._domain, self._epoch))
        if event.held_epoch is not None:
            self._note_holder(event.group, event.held_epoch, event.holder, now)
        return [*commands, self._retry(now, f"the stream to group {event.group} broke")]

    def _retry(self, now: float, reason: str) -> RetryAt:
        self._phase = _Phase.WAITING
        self._standing.domain_to_epoch.pop(self._domain, None)
        # Drawn, so that two schedulers do not take the groups from each other for ever.
        return RetryAt(now + RETRY_DELAY_S * (0.5 + self._standing.draw()), reason)

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
