"""What a moment of the attach protocol consists of: immutable, so that it is found again when it comes about anew."""

from __future__ import annotations

from typing import NamedTuple

from services.scheduler.cell.attach import Accepted, Refused, StreamBroken, StreamOpened

# What a stream brings first: its opening, and who opened it. Then come steps by their numbers, from 1.
OPENING = 0


ReplyEvent = Accepted | Refused | StreamOpened | StreamBroken


class Bounds(NamedTuple):
    """How far a search goes."""

    max_epoch: int
    max_steps: int
    max_faults: int
    max_lives: int


class Request(NamedTuple):
    """An offer, or a wish that the group restarts, on its way to a group."""

    instance_id: str
    slot: int
    group: int
    epoch: int
    is_restart: bool


class Reply(NamedTuple):
    """An event on its way to a scheduler, and whether the holder that it names lived when it was sent."""

    instance_id: str
    slot: int
    event: ReplyEvent
    is_holder_alive: bool


class Stream(NamedTuple):
    """An epoch's stream to a group: what is still on its way there, and whether the scheduler has closed its end."""

    instance_id: str
    slot: int
    group: int
    epoch: int
    items: tuple[int, ...]
    is_closed: bool

    @property
    def number(self) -> int:
        """What the group knows it by."""
        return 100 * self.epoch + int(self.instance_id)


Message = Request | Reply | Stream


class State(NamedTuple):
    """One moment: the schedulers by slot and the groups by the numbers of their states, and what is on its way.

    `lives` counts the processes that a slot had before its present one.
    """

    schedulers: tuple[int, ...]
    lives: tuple[int, ...]
    groups: tuple[int, ...]
    messages: frozenset[Message]
    num_faults: int


class Move(NamedTuple):
    """A state that may follow, and what leads there: what happens to whom. A fault is nothing that has to happen."""

    what: str
    whom: object
    state: State
    is_fault: bool = False
