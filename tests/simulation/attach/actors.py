"""The schedulers and groups of the attach protocol, as the model checker moves them: by state number.

Their rules are the real classes of the services. This module adds what the surrounding code does with an answer, and in
each group a record of the steps that its device received, which the rules do not see.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable, Iterable
from dataclasses import replace
from types import FunctionType
from typing import Any, Generic, TypeVar

from services.scheduler.cell.domains.attach import DomainAttach
from services.scheduler.cell.domains.attach_events import (
    Accepted,
    AttachEvent,
    Command,
    GroupPlace,
    Offer,
    Refused,
    RetryAt,
    StreamBroken,
    StreamOpened,
)
from services.scheduler.cell.domains.scheduler_claim import SchedulerClaim
from services.scheduler.cell.events import DomainAttached, DomainLost, Exit
from services.scheduler.core.policy import CellTopology
from services.scheduler.core.worker_facts import WorkerFacts
from services.worker.server.claim import ClaimLedger
from shared.errors import ServiceError, StaleEpochError
from shared.ids import DpRank
from shared.network.heartbeat import LEASE_S

T = TypeVar("T")

# A step that a device received: (scheduler instance id, epoch, step id).
Launch = tuple[str, int, int]

# A time so long ago that a lease from then is over. All else happens at 0.
_LONG_AGO = -LEASE_S - 1.0


class ProtocolError(AssertionError):
    """The protocol did something that must never happen."""


class States(Generic[T]):
    """Numbers the states of one kind of actor, and caches the effect of each call in each state.

    A call is a method name with arguments; the method changes the actor and returns what it sends. Each call runs once
    per state, on a copy of the actor, since a search of millions of moves repeats most calls.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._actors: list[T] = []
        self._moves: dict[tuple[int, tuple[Any, ...]], tuple[int, Any]] = {}

    def number_of(self, actor: T) -> int:
        """The number of an actor's state; equal states have the same number."""
        number = self._numbers.setdefault(_freeze(actor), len(self._actors))
        if number == len(self._actors):
            self._actors.append(actor)
        return number

    def __getitem__(self, number: int) -> T:
        """An actor in that state, which must not be changed."""
        return self._actors[number]

    def call(self, number: int, *call: Any) -> tuple[int, Any]:
        """The number of the state after a call, and the call's return value."""
        move = self._moves.get((number, call))
        if move is None:
            actor = _copy(self._actors[number], {})
            returned = getattr(actor, call[0])(*call[1:])
            move = self._moves[number, call] = (self.number_of(actor), returned)
        return move


class SchedulerActor:
    """A scheduler's process: one `DomainAttach` per domain, and the steps that it sends while a domain is attached."""

    def __init__(self, instance_id: str, topology: CellTopology) -> None:
        self.instance_id = instance_id
        self._claim = SchedulerClaim(instance_id, _draw_nothing)
        self._attaches = [DomainAttach(domain, topology, self._claim) for domain in range(topology.num_domains)]
        # By domain: the attached epoch, and the number of steps sent in it.
        self.attached: dict[int, int] = {}
        self.num_sent: dict[int, int] = {}
        # By domain: the last offered epoch, the groups whose answers are awaited, and whether another round is due.
        self.epochs = [0] * topology.num_domains
        self.awaited: list[frozenset[int]] = [frozenset()] * topology.num_domains
        self.is_retry_due = [True] * topology.num_domains
        self.has_exited = False
        self.has_attached = False
        # By domain: the highest epoch that its groups hold or may hold, as far as the scheduler knows.
        self.known_epochs = [0] * topology.num_domains
        # By group: the rival that its last answer named, and whether the rival was already dead when first named.
        self._named: dict[int, tuple[str, bool]] = {}

    def handle(self, domain: int, event: AttachEvent, is_holder_alive: bool = False) -> tuple[Command, ...]:
        """Pass an event to a domain's `DomainAttach`, record the effects on this scheduler, and return the commands.

        Raises:
            ProtocolError: It makes a forbidden offer, or exits in favour of a dead rival.
        """
        if isinstance(event, Accepted | Refused) and event.epoch == self.epochs[domain]:
            if event.group in self.awaited[domain]:
                self._hear(domain, event, is_holder_alive)
            self.awaited[domain] -= {event.group}
        elif isinstance(event, StreamBroken) and self._is_refusal(domain, event):
            self._hear(domain, event, is_holder_alive)
        commands = tuple(self._attaches[domain].on_event(event, 0.0))
        for command in commands:
            self._check(domain, event, command)
            self._note(domain, command)
        return commands

    def pass_lease(self) -> None:
        """Let every rival named so far have held its group for longer than the lease, and every head start end.

        The first has no effect on a scheduler that never attached a domain, the second on one that did.
        """
        if not self.has_attached:
            for group, free_at in self._claim.group_to_free_at.items():
                self._claim.group_to_free_at[group] = free_at if math.isinf(free_at) else _LONG_AGO
            return
        for group, rival in self._claim.group_to_rival.items():
            if rival is not None:
                self._claim.group_to_rival[group] = replace(rival, since=_LONG_AGO)

    def send_step(self, domain: int) -> int:
        """Send a step of the attached epoch; returns its number."""
        self.num_sent[domain] += 1
        return self.num_sent[domain]

    def exit(self) -> None:
        """End the process."""
        self.has_exited = True
        self.attached.clear()
        self.num_sent.clear()

    def _is_refusal(self, domain: int, event: StreamBroken) -> bool:
        is_present = event.epoch == self.epochs[domain] and not self.is_retry_due[domain]
        return is_present and event.held_epoch is not None

    def _hear(self, domain: int, answer: Accepted | Refused | StreamBroken, is_holder_alive: bool) -> None:
        epoch = answer.epoch if isinstance(answer, Accepted) else answer.held_epoch
        self.known_epochs[domain] = max(self.known_epochs[domain], self.epochs[domain] if epoch is None else epoch)
        holder = "" if isinstance(answer, Accepted) else answer.holder
        if holder in ("", self.instance_id):
            self._named.pop(answer.group, None)
        elif self._named.get(answer.group, ("", False))[0] != holder:
            self._named[answer.group] = (holder, not is_holder_alive)

    def _check(self, domain: int, event: AttachEvent, command: Command) -> None:
        match command:
            case Offer(_, epoch) if epoch > self.known_epochs[domain] + 1:
                raise ProtocolError(f"scheduler {self.instance_id} raises its epoch to {epoch} on its own")
            case Offer(_, epoch) if epoch and self._named and not self.has_attached:
                raise ProtocolError(f"scheduler {self.instance_id} takes a group that it must wait for")
            case Exit() if not isinstance(event, Refused) or self._named[event.group][1]:
                raise ProtocolError(f"scheduler {self.instance_id} exits in favour of a dead rival")

    def _note(self, domain: int, command: Command) -> None:
        match command:
            case Offer(group, epoch):
                self.epochs[domain], self.is_retry_due[domain] = epoch, False
                self.awaited[domain] |= {group}
            case RetryAt():
                self.is_retry_due[domain], self.awaited[domain] = True, frozenset()
            case DomainAttached(_, facts):
                self.attached[domain], self.num_sent[domain] = facts[0].epoch, 0
                self.has_attached = True
            case DomainLost():
                del self.attached[domain], self.num_sent[domain]


class GroupActor:
    """A group's processes between two starts: the claim ledger, and the steps that the device received."""

    def __init__(self, group: int, topology: CellTopology) -> None:
        self._group = group
        self._place = GroupPlace(DpRank(group), topology.dp_size, 1, topology.is_coupled)
        self.ledger = ClaimLedger()
        self.launches: tuple[Launch, ...] = ()
        self._answered_epoch = 0

    def offer(self, epoch: int, instance_id: str, is_lease_over: bool) -> Accepted | Refused:
        """Answer an offer."""
        last = (self.ledger.last_admitted.epoch, self.ledger.last_admitted.step_id)
        try:
            self.ledger.offer(epoch, instance_id, LEASE_S + 1.0 if is_lease_over else 0.0)
        except ServiceError as error:
            return Refused(self._group, epoch, error.reason, *_held(error))
        self._answered_epoch = max(self._answered_epoch, epoch)
        return Accepted(self._group, epoch, WorkerFacts(epoch, "", 0, 0, (), 0), self._place, last)

    def open_stream(self, stream: int, epoch: int, instance_id: str) -> StreamOpened | StreamBroken:
        """Answer the first heartbeat of a stream."""
        try:
            self.ledger.on_heartbeat(stream, epoch, instance_id, 0.0)
        except ServiceError as error:
            return self._broken(epoch, error)
        return StreamOpened(self._group, epoch)

    def admit(self, step_id: int, stream: int, epoch: int, instance_id: str) -> StreamBroken | None:
        """Take a step; returns the end of the stream if the step is refused, else None.

        Raises:
            ProtocolError: The device received a step of an epoch older than one that the group has answered.
        """
        try:
            self.ledger.admit(stream, epoch, step_id, 0.0)
        except ServiceError as error:
            return self._broken(epoch, error)
        if epoch < self._answered_epoch:
            raise ProtocolError(f"a step of epoch {epoch} was launched after epoch {self._answered_epoch} was answered")
        self.launches = (*self.launches, (instance_id, epoch, step_id))
        return None

    def end_stream(self, stream: int) -> None:
        """Record the end of a stream."""
        self.ledger.end_stream(stream)

    def pass_lease(self) -> None:
        """Let the holder's lease run out."""
        self.ledger.heard_at = _LONG_AGO

    def is_restart_allowed(self, epoch: int, instance_id: str) -> bool:
        """Whether the processes end when asked to restart."""
        try:
            self.ledger.check_restart(epoch, instance_id)
        except StaleEpochError:
            return False
        return True

    def _broken(self, epoch: int, error: ServiceError) -> StreamBroken:
        return StreamBroken(self._group, epoch, *_held(error))


def _held(error: ServiceError) -> tuple[int, str]:
    return int(error.values.get("epoch", "0")), error.values.get("holder", "")


def _draw_nothing() -> float:
    return 0.0


def _copy(value: Any, copies: dict[int, Any]) -> Any:
    """Copy a value and all in it that can change, sooner than `copy.deepcopy` does.

    What is hashable is shared if it has no dictionary of its own, as are tuples: they hold nothing that can change.

    Args:
        copies: By the id of an original; what is found twice is copied once.
    """
    if isinstance(value, dict):
        return {key: _copy(item, copies) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item, copies) for item in value]
    if isinstance(value, set):
        return set(value)
    kind = type(value)
    if kind.__hash__ is None:
        names: Iterable[str] = kind.__slots__
    elif hasattr(value, "__dict__") and not isinstance(value, enum.Enum | FunctionType):
        names = vars(value)
    else:
        return value
    copied = copies.get(id(value))
    if copied is None:
        copied = copies[id(value)] = object.__new__(kind)
        for name in names:
            object.__setattr__(copied, name, _copy(getattr(value, name), copies))
    return copied


def _freeze(value: Any) -> Hashable:
    """Convert to a hashable value that is equal for equal contents."""
    if isinstance(value, dict):
        return tuple(sorted((_freeze(key), _freeze(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return tuple(map(_freeze, value))
    if isinstance(value, set):
        return frozenset(map(_freeze, value))
    if type(value).__hash__ is None:
        return tuple(_freeze(getattr(value, name)) for name in value.__slots__)
    if hasattr(value, "__dict__") and not isinstance(value, enum.Enum):
        return tuple(_freeze(item) for item in vars(value).values())
    hashable: Hashable = value
    return hashable
