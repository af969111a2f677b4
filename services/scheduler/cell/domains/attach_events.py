"""What is asked of the groups of a failure domain, and what comes back, while it is attached."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.cell.events import DomainAttached, DomainLost, Exit
from services.scheduler.core.worker_facts import WorkerFacts
from shared.ids import DpRank

# Not a real epoch: offering it only asks a group which scheduler holds it.
QUESTION = 0


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
