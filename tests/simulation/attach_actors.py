"""The schedulers and the groups of the attach protocol, as the model checker moves them: by the number of their state.

Their rules are those of the classes that the services run. Around them stands what the shells do with an answer, and
in each group a record of what its device was given, which the rules do not see.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, Generic, TypeVar

from services.scheduler.cell.attach import (
    Accepted,
    AttachEvent,
    ClaimStanding,
    Command,
    DomainAttach,
    GroupPlace,
    Offer,
    Refused,
    RetryAt,
    StreamBroken,
    StreamOpened,
)
from services.scheduler.cell.events import DomainAttached, DomainLost, Exit
from services.scheduler.core.policy import CellTopology
from services.scheduler.core.worker_facts import WorkerFacts
from services.worker.server.claim import ClaimLedger
from shared.errors import ServiceError, StaleEpochError
from shared.heartbeat import LEASE_S

T = TypeVar("T")

# A step that a device got: who sent it, and its numbers.
Launch = tuple[str, int, int]

# A moment for which the lease is over. All else happens at 0.
_LONG_AGO = -LEASE_S - 1.0


class ProtocolError(AssertionError):
    """What must never happen has happened."""


class States(Generic[T]):
    """Numbers the states of one kind of actor, and remembers what each call does in each of them.

    A call names a method, which changes the actor and returns what leaves it. An actor is copied before it changes, and
    asked once: a search of millions of moves looks most of them up.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._actors: list[T] = []
        self._moves: dict[tuple[int, tuple[Any, ...]], tuple[int, Any]] = {}

    def number_of(self, actor: T) -> int:
        """The number of an actor's state; equal states have one."""
        number = self._numbers.setdefault(_freeze(actor), len(self._actors))
        if number == len(self._actors):
            self._actors.append(actor)
        return number

    def __getitem__(self, number: int) -> T:
        """An actor in that state, to be looked at only."""
        return self._actors[number]

    def call(self, number: int, *call: Any) -> tuple[int, Any]:
        """What a call in a state makes of it, and what it returns."""
        move = self._moves.get((number, call))
        if move is None:
            actor = copy.deepcopy(self._actors[number])
            returned = getattr(actor, call[0])(*call[1:])
            move = self._moves[number, call] = (self.number_of(actor), returned)
        return move


class SchedulerActor:
    """A scheduler's process: one attach for each domain, and the steps that it sends while a domain is attached."""

    def __init__(self, instance_id: str, topology: CellTopology) -> None:
        self.instance_id = instance_id
        self._standing = ClaimStanding(instance_id, topology.dp_size, _draw_nothing)
        self._attaches = [DomainAttach(domain, topology, self._standing) for domain in range(topology.num_domains)]
        # By domain: the epoch that is attached, and the steps sent under it.
        self.attached: dict[int, int] = {}
        self.num_sent: dict[int, int] = {}
        # By domain: the epoch offered last, the groups whose answers are awaited, and whether another round is due.
        self.epochs = [0] * topology.num_domains
        self.awaited: list[frozenset[int]] = [frozenset()] * topology.num_domains
        self.is_retry_due = [True] * topology.num_domains
        self.has_exited = False
        self.has_attached = False
        # By domain: the highest epoch that its groups are known to hold, or may hold.
        self.known_epochs = [0] * topology.num_domains
        # By group: the other scheduler that its last answer named, and whether that was dead when it was named first.
        self._named: dict[int, tuple[str, bool]] = {}

    def handle(self, domain: int, event: AttachEvent, is_holder_alive: bool = False) -> tuple[Command, ...]:
        """Hand an event to a domain's attach; returns its commands, and does those that concern nobody else.

        Raises:
            ProtocolError: it offers what it must not, or goes for a rival that was dead.
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
        """So much time passes that whoever was named as a holder has been for longer than the lease.

        That matters to no scheduler that never held a domain.
        """
        if not self.has_attached:
            return
        for group, rival in self._standing.group_to_rival.items():
            if rival is not None:
                self._standing.group_to_rival[group] = replace(rival, since=_LONG_AGO)

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
                raise ProtocolError(f"scheduler {self.instance_id} raises its epoch to {epoch} by itself")
            case Offer(_, epoch) if epoch and self._named and not self.has_attached:
                raise ProtocolError(f"scheduler {self.instance_id} takes what it only has to wait for")
            case Exit() if not isinstance(event, Refused) or self._named[event.group][1]:
                raise ProtocolError(f"scheduler {self.instance_id} goes for a rival that was dead")

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
    """A group's processes between two starts: the claim, and what the device got."""

    def __init__(self, group: int, topology: CellTopology) -> None:
        self._place = GroupPlace(group, topology.dp_size, 1, topology.is_coupled)
        self.ledger = ClaimLedger()
        self.launches: tuple[Launch, ...] = ()
        self._answered_epoch = 0

    def offer(self, epoch: int, instance_id: str, is_lease_over: bool) -> Accepted | Refused:
        """Answer an offer."""
        last = (self.ledger.last_launched.epoch, self.ledger.last_launched.step_id)
        try:
            self.ledger.offer(epoch, instance_id, LEASE_S + 1.0 if is_lease_over else 0.0)
        except ServiceError as error:
            return Refused(self._place.dp_rank, epoch, error.reason, *_held(error))
        self._answered_epoch = max(self._answered_epoch, epoch)
        return Accepted(self._place.dp_rank, epoch, WorkerFacts(epoch, "", 0, 0, (), 0), self._place, last)

    def open_stream(self, stream: int, epoch: int, instance_id: str) -> StreamOpened | StreamBroken:
        """Answer the first heartbeat of a stream."""
        try:
            self.ledger.hear(stream, epoch, instance_id, 0.0)
        except ServiceError as error:
            return self._broken(epoch, error)
        return StreamOpened(self._place.dp_rank, epoch)

    def launch(self, step_id: int, stream: int, epoch: int, instance_id: str) -> StreamBroken | None:
        """Take a step; returns how the stream ends when it is refused.

        Raises:
            ProtocolError: the device got a step of an older epoch than the group has answered.
        """
        try:
            self.ledger.launch(stream, epoch, step_id, 0.0)
        except ServiceError as error:
            return self._broken(epoch, error)
        if epoch < self._answered_epoch:
            raise ProtocolError(f"a step of epoch {epoch} was launched after epoch {self._answered_epoch} was answered")
        self.launches = (*self.launches, (instance_id, epoch, step_id))
        return None

    def end_stream(self, stream: int) -> None:
        """A stream has ended."""
        self.ledger.end_stream(stream)

    def pass_lease(self) -> None:
        """So much time passes that a holder that gives no sign of life has lost the group."""
        self.ledger.heard_at = _LONG_AGO

    def is_restart_allowed(self, epoch: int, instance_id: str) -> bool:
        """Whether the processes end when they are asked so."""
        try:
            self.ledger.check_restart(epoch, instance_id)
        except StaleEpochError:
            return False
        return True

    def _broken(self, epoch: int, error: ServiceError) -> StreamBroken:
        return StreamBroken(self._place.dp_rank, epoch, *_held(error))


def _held(error: ServiceError) -> tuple[int, str]:
    """The epoch and the holder that a refusal names."""
    return int(error.values.get("epoch", "0")), error.values.get("holder", "")


def _draw_nothing() -> float:
    return 0.0


def _freeze(value: Any) -> Hashable:
    """Something hashable that is equal for equal values; objects that can change are taken by what they hold."""
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
