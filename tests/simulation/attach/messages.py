"""The parts of a state of the attach protocol: immutable and hashable, so that equal states are recognized."""

from __future__ import annotations

from typing import NamedTuple

from services.scheduler.cell.domains.attach_events import Accepted, Refused, StreamBroken, StreamOpened

# The first item of a stream, its opening; the other items are steps, by their ids from 1.
OPENING = 0


ReplyEvent = Accepted | Refused | StreamOpened | StreamBroken


class Bounds(NamedTuple):
    """The limits of a search."""

    max_epoch: int
    max_steps: int
    max_faults: int
    max_lives: int


class Request(NamedTuple):
    """An offer or a restart request in transit to a group."""

    instance_id: str
    slot: int
    group: int
    epoch: int
    is_restart: bool


class Reply(NamedTuple):
    """An event in transit to a scheduler; `is_holder_alive` is as of when it was sent."""

    instance_id: str
    slot: int
    event: ReplyEvent
    is_holder_alive: bool


class Stream(NamedTuple):
    """An epoch's stream to a group: the items in transit, and whether the scheduler has closed its end."""

    instance_id: str
    slot: int
    group: int
    epoch: int
    items: tuple[int, ...]
    is_closed: bool

    @property
    def number(self) -> int:
        """The number by which the group identifies it."""
        return 100 * self.epoch + int(self.instance_id)


Message = Request | Reply | Stream


class State(NamedTuple):
    """One state of the whole model.

    Schedulers and groups are given by the numbers of their states in `States`:

        schedulers  (17, 4)                  slot -> state number
        lives       (1, 0)                   slot -> processes before the current one
        groups      (9, 12)                  group -> state number
        messages    {Request, Stream, ...}   in transit
        num_faults  1                        so far
    """

    schedulers: tuple[int, ...]
    lives: tuple[int, ...]
    groups: tuple[int, ...]
    messages: frozenset[Message]
    num_faults: int


class Move(NamedTuple):
    """A possible next state, and the event that leads there: `what` happens to `subject`."""

    what: str
    subject: object
    state: State
    is_fault: bool = False
    """A fault may happen but need not, so fairness does not require it."""
