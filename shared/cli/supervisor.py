"""When a cell's processes are started again, and which are killed for it.

Sans-I/O: what happened and when it did go in, what to do comes out.

Processes that cannot go on without each other are one failure domain: when one of them exits, all leave and all start
again. Before the cell has served for the first time nothing is started again, since a wrong flag is wrong every time.
Later, what was ready can start: it does so at once, and only what dies again and again has to wait. What exits before
it is ready waits longer each time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MIN_DELAY_S = 0.5

# The others of a domain notice the exit, and leave by themselves; whoever cannot is stuck in a collective or stopped.
_LEAVE_S = 2.0
# What was ready is started again at once so many times within this time, and after a delay from then on.
_NUM_AT_ONCE = 3
_AT_ONCE_WITHIN_S = 60.0
_LATER_DELAY_S = 5.0
# A process answers nothing while it imports its libraries, which takes long on a busy machine.
_START_FACTOR = 10.0
# A launcher that was not run for so long (stopped, or starved) heard nobody: that is its own fault.
_ABSENCE_S = 2.0
_MAX_PAUSE_S = _ABSENCE_S / 2


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How patient the supervisor is, in seconds."""

    health_kill_s: float = 30.0
    """Who has not answered a health check for so long is killed."""
    max_delay_s: float = 30.0
    """The longest delay of a start; that of what exits before it is ready doubles from `MIN_DELAY_S`."""


@dataclass(frozen=True, slots=True)
class StartDomain:
    """Start every process of a domain; none of them runs."""

    domain: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End a process by force; its exit will follow."""

    process: str
    reason: str


Action = StartDomain | Kill


@dataclass(slots=True)
class _Process:
    """`heard_at` is its last answer, or its start."""

    heard_at: float
    is_running: bool = True
    has_answered: bool = False
    has_served: bool = False
    is_condemned: bool = False


@dataclass(slots=True)
class _Domain:
    """`is_ready` says whether all of its processes have served since their start; `delay_s` is that of this start."""

    names: Sequence[str]
    start_at: float | None
    processes: dict[str, _Process] = field(default_factory=dict)
    delay_s: float = 0.0
    is_ready: bool = False
    has_served: bool = False
    # That of the last start if it fell before it was ready, else 0.
    last_early_delay_s: float = 0.0
    # When it fell though it was ready: the last times.
    fell_at: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_AT_ONCE))
    kill_rest_at: float | None = None

    def start(self, now: float) -> None:
        self.start_at = self.kill_rest_at = None
        self.is_ready = False
        self.processes = {name: _Process(now) for name in self.names}

    def watched(self) -> dict[str, _Process]:
        """Those that run and were not killed."""
        return {name: one for name, one in self.processes.items() if one.is_running and not one.is_condemned}

    def break_up(self, now: float, max_delay_s: float) -> None:
        """The first of its processes has exited."""
        self.kill_rest_at = now + _LEAVE_S
        if not self.is_ready:
            self.delay_s = self.last_early_delay_s = min(max(2 * self.last_early_delay_s, MIN_DELAY_S), max_delay_s)
            return
        self.last_early_delay_s = 0.0
        is_often = len(self.fell_at) == _NUM_AT_ONCE and now - self.fell_at[0] <= _AT_ONCE_WITHIN_S
        self.delay_s = min(_LATER_DELAY_S, max_delay_s) if is_often else 0.0
        self.fell_at.append(now)


class Supervisor:
    """Decides for the processes of one cell, which are known by their names.

    Tell it of every exit and answer, and call `on_time` when `next_time` has come and after every exit.
    """

    def __init__(self, domain_to_processes: Mapping[str, Sequence[str]], policy: RestartPolicy) -> None:
        """Nothing runs yet: `on_time` says what to start, in this order."""
        self._policy = policy
        self._domains = {name: _Domain(processes, start_at=0.0) for name, processes in domain_to_processes.items()}
        self._process_to_domain = {process: domain for domain in self._domains.values() for process in domain.names}
        self._last_time: float | None = None

    @property
    def has_served(self) -> bool:
        """Whether every process has served, at any time: from then on they are started again."""
        return all(domain.has_served for domain in self._domains.values())

    def on_answer(self, process: str, now: float, *, is_serving: bool) -> bool:
        """A process answered its health check; returns whether it serves now for the first time since its start."""
        domain = self._process_to_domain[process]
        state = domain.processes[process]
        state.heard_at, state.has_answered = now, True
        if not is_serving or state.has_served:
            return False
        state.has_served = True
        if all(other.has_served for other in domain.processes.values()):
            domain.is_ready = domain.has_served = True
        return True

    def on_exit(self, process: str, now: float) -> float | None:
        """A process has exited, killed or by itself.

        Returns:
            How many seconds after the last exit of its domain it is started again; None: the cell is over, which has
            not served.
        """
        if not self.has_served:
            return None
        domain = self._process_to_domain[process]
        domain.processes[process].is_running = False
        if domain.kill_rest_at is None:
            domain.break_up(now, self._policy.max_delay_s)
        if not any(other.is_running for other in domain.processes.values()):
            domain.start_at = now + domain.delay_s
        return domain.delay_s

    def on_time(self, now: float) -> list[Action]:
        """What is due."""
        self._forgive_own_absence(now)
        actions: list[Action] = []
        for name, domain in self._domains.items():
            if domain.start_at is not None and now >= domain.start_at:
                domain.start(now)
                actions.append(StartDomain(name))
            else:
                actions += self._kills(domain, now)
        return actions

    def next_time(self, now: float) -> float:
        """When something may be due; a second from `now` at the latest, since a longer pause counts as an absence."""
        times = [now + _MAX_PAUSE_S]
        for domain in self._domains.values():
            if domain.start_at is not None:
                times.append(domain.start_at)
            for process in domain.watched().values():
                times.append(process.heard_at + self._patience_s(process))
                if domain.kill_rest_at is not None:
                    times.append(domain.kill_rest_at)
        return max(now, min(times))

    def _forgive_own_absence(self, now: float) -> None:
        absence_s = 0.0 if self._last_time is None else now - self._last_time
        self._last_time = now
        if absence_s < _ABSENCE_S:
            return
        for domain in self._domains.values():
            for process in domain.processes.values():
                process.heard_at = min(now, process.heard_at + absence_s)

    def _kills(self, domain: _Domain, now: float) -> list[Action]:
        is_breaking_up = domain.kill_rest_at is not None and now >= domain.kill_rest_at
        kills: list[Action] = []
        for name, process in domain.watched().items():
            patience_s = self._patience_s(process)
            if is_breaking_up:
                reason = "another process of its failure domain had exited"
            elif now - process.heard_at >= patience_s:
                reason = f"it had not answered its health check for {patience_s:g} s"
            else:
                continue
            process.is_condemned = True
            kills.append(Kill(name, reason))
        return kills

    def _patience_s(self, process: _Process) -> float:
        return self._policy.health_kill_s * (1.0 if process.has_answered else _START_FACTOR)
