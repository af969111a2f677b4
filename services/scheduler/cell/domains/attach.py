"""The attach protocol of a failure domain: one epoch for all its groups, offered anew until each runs under it.

Sans-I/O. Epochs are the only fence between schedulers: a worker runs only steps of its current epoch, which never
falls. So a lost, late or repeated message only costs another round.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields

from services.scheduler.cell.events import DomainAttached, DomainLost, Exit
from services.scheduler.core.policy import CellTopology
from services.scheduler.core.worker_facts import MAY_DIFFER, WorkerFacts
from shared.ids import DpRank
from shared.network.heartbeat import LEASE_S

# Mean delay between two rounds. A worker takes seconds to restart.
RETRY_DELAY_S = 0.5

# How long a standby leaves a group that has just started to the scheduler that held it: that one offers in every round,
# so the crash of a worker does not move its cell to another scheduler.
HEAD_START_S = 3.0

# How long a group has for its answer to an offer; it may take 10 s to notice that it is stuck. A group that prepares
# its steps for longer (capturing graphs can take minutes) is offered the next epoch, and accepts one when it is ready.
OFFER_TIMEOUT_S = 15.0

# Not a real epoch: offering it only asks a group which scheduler holds it.
QUESTION = 0


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
        """These groups are not there any more."""
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


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """A group's place in its cell, as reported."""

    dp_rank: DpRank | None
    """None if it fits any place of a cell that is not coupled; `dp_size` is then 1."""
    dp_size: int
    tp_size: int
    is_coupled: bool


@dataclass(frozen=True, slots=True)
class Accepted:
    """A group holds the offered epoch, and has an empty batch."""

    group: int
    epoch: int
    facts: WorkerFacts
    place: GroupPlace
    last_step: tuple[int, int] = (0, 0)
    """Epoch and id of the last step launched before; (0, 0) if none since it started."""
    is_stuck: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """A group did not take the offered epoch, or did not answer."""

    group: int
    epoch: int
    reason: str
    held_epoch: int | None = None
    """None when it did not answer; it may then have taken the offered epoch."""
    holder: str = ""
    """The scheduler that holds the group; empty for none."""
    is_ready: bool = True
    """False while the group loads, and once it leaves."""


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """A group accepts the epoch's steps."""

    group: int
    epoch: int


@dataclass(frozen=True, slots=True)
class StreamBroken:
    """A group's stream ended or was never opened; `held_epoch` and `holder` are as in `Refused`."""

    group: int
    epoch: int
    held_epoch: int | None = None
    holder: str = ""


@dataclass(frozen=True, slots=True)
class Dropped:
    """The engine gave up an attached epoch."""

    epoch: int
    retry_s: float | None = None
    """After how many seconds to begin another round; None means as after any other."""
    is_released: bool = False
    """Whether the groups were drained, and no scheduler needs them."""


@dataclass(frozen=True, slots=True)
class RetryDue:
    """The time of the last `RetryAt` has come. Also the first event."""


AttachEvent = Accepted | Refused | StreamOpened | StreamBroken | Dropped | RetryDue


@dataclass(frozen=True, slots=True)
class Offer:
    """Offer an epoch, or query the group with `QUESTION`; one `Accepted` or `Refused` follows."""

    group: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Restart:
    """Ask a group's leader to end its processes."""

    group: int
    epoch: int


@dataclass(frozen=True, slots=True)
class OpenStreams:
    """Open each group's step stream."""

    epoch: int


@dataclass(frozen=True, slots=True)
class CloseStreams:
    """End the epoch's streams, including those being opened."""

    epoch: int
    is_last: bool = False
    """Whether to tell the groups that no scheduler needs them any more."""


@dataclass(frozen=True, slots=True)
class RetryAt:
    """Begin another round at `when`; `reason` is for the log."""

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
