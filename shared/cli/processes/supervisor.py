"""Decides when a cell's processes are killed and restarted. Sans-I/O.

Processes that depend on each other form a failure domain: when one exits, all of them end and restart together. Until
the cell has first served nothing is restarted, since a wrong flag is wrong every time, unless the policy allows a
number of failed starts. After that, a domain that was ready restarts at once, with a delay only if it fails repeatedly.
One that fails earlier waits twice as long each time:

    first exit         last exit                              start           all serve
    |--- up to 2 s ----|--- delay_s --------------------------|--- loading ---|--- ready --->
      the others end,    was ready: 0 s, if repeated 5 s
      then are killed    not yet ready: 0.5 s, 1 s, 2 s, ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shared.backoff import Backoff
from shared.network.heartbeat import OwnPause

_FIRST_DELAY_S = 0.5
# The other processes of a domain notice the exit and end, unless they are stuck in a collective or stopped.
_LEAVE_S = 2.0
# A domain that was ready restarts at once this many times within this period, and with a delay after that.
_NUM_AT_ONCE = 3
_AT_ONCE_WITHIN_S = 60.0
_LATER_DELAY_S = 5.0
# A process does not answer while it imports its libraries, which takes long on a busy machine.
_START_FACTOR = 10.0
# A launcher that did not run for this long (stopped or starved) missed answers, which is not the processes' fault.
_ABSENCE_S = 2.0
_MAX_PAUSE_S = _ABSENCE_S / 2


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The supervisor's timeouts."""

    health_kill_s: float = 30.0
    """A process that answers no health check for this long is killed."""
    max_delay_s: float = 30.0
    """The longest restart delay, up to which it doubles."""
    max_failed_starts: int | None = None
    """The cell ends after this many starts in a row of one domain that failed before it was ready. None: after the
    first exit if the cell has not served yet, and never later."""


@dataclass(frozen=True, slots=True)
class StartDomain:
    """Start a domain, of which nothing is running."""

    domain: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill a process; `on_exit` is called for it later."""

    process: str
    reason: str


Action = StartDomain | Kill


@dataclass(slots=True)
class _Process:
    heard_at: float
    """Its last answer or, before that, its start."""
    is_running: bool = True
    has_answered: bool = False
    has_served: bool = False
    is_serving: bool = False
    """Whether its last answer said so."""
    is_condemned: bool = False


@dataclass(slots=True)
class _Domain:
    names: Sequence[str]
    start_at: float | None
    """When to start it; None while it runs."""
    backoff: Backoff
    """The delays after failures before it was ready."""
    processes: dict[str, _Process] = field(default_factory=dict)
    delay_s: float = 0.0
    """The delay of the next start."""
    is_ready: bool = False
    """Whether all processes serve since their start."""
    has_served: bool = False
    """Whether it was ever ready."""
    num_failed_starts: int = 0
    """In a row, before it was ready."""
    fell_at: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_AT_ONCE))
    """The last few failures after it was ready."""
    kill_rest_at: float | None = None
    """When to kill what is left after a failure."""

    def start(self, now: float) -> None:
        self.start_at = self.kill_rest_at = None
        self.is_ready = False
        self.processes = {name: _Process(now) for name in self.names}

    def watched(self) -> dict[str, _Process]:
        return {name: one for name, one in self.processes.items() if one.is_running and not one.is_condemned}

    def break_up(self, now: float) -> None:
        """Choose the restart delay after the first exit."""
        self.kill_rest_at = now + _LEAVE_S
        if not self.is_ready:
            self.num_failed_starts += 1
            self.delay_s = self.backoff.next_delay_s()
            return
        self.num_failed_starts = 0
        self.backoff.reset()
        is_often = len(self.fell_at) == _NUM_AT_ONCE and now - self.fell_at[0] <= _AT_ONCE_WITHIN_S
        self.delay_s = min(_LATER_DELAY_S, self.backoff.longest_s) if is_often else 0.0
        self.fell_at.append(now)


class Supervisor:
    """Decides for one cell's processes, by name.

    Report every exit and answer; call `on_time` at `next_time` and after every exit.
    """

    def __init__(self, domain_to_processes: Mapping[str, Sequence[str]], policy: RestartPolicy) -> None:
        """Nothing runs yet: `on_time` starts the domains in this order."""
        self._policy = policy
        self._domains = {
            # Nothing random: a launcher waits for nothing that others wait for too.
            name: _Domain(processes, start_at=0.0, backoff=Backoff(_FIRST_DELAY_S, policy.max_delay_s, jitter=0.0))
            for name, processes in domain_to_processes.items()
        }
        self._process_to_domain = {process: domain for domain in self._domains.values() for process in domain.names}
        self._own_pause = OwnPause(0.0, _ABSENCE_S)

    @property
    def has_served(self) -> bool:
        """Whether every domain has once been ready; from then on processes are restarted."""
        return all(domain.has_served for domain in self._domains.values())

    @property
    def is_serving(self) -> bool:
        """Whether every process runs, and said last that it serves."""
        return all(
            len(domain.processes) == len(domain.names)
            and all(one.is_running and one.is_serving for one in domain.processes.values())
            for domain in self._domains.values()
        )

    def on_answer(self, process: str, now: float, *, is_serving: bool) -> bool:
        """Record a health answer; True if it is the first since the start that says serving."""
        domain = self._process_to_domain[process]
        state = domain.processes[process]
        state.heard_at, state.has_answered, state.is_serving = now, True, is_serving
        if not is_serving or state.has_served:
            return False
        state.has_served = True
        if all(other.has_served for other in domain.processes.values()):
            domain.is_ready = domain.has_served = True
        return True

    def on_exit(self, process: str, now: float) -> float | None:
        """Record an exit, by a kill or otherwise.

        Returns:
            Seconds from the domain's last exit to its restart; None if the cell must end.
        """
        domain = self._process_to_domain[process]
        domain.processes[process].is_running = False
        if domain.kill_rest_at is None:
            domain.break_up(now)
        if self._must_end(domain):
            return None
        if not any(other.is_running for other in domain.processes.values()):
            domain.start_at = now + domain.delay_s
        return domain.delay_s

    def on_time(self, now: float) -> list[Action]:
        """The actions that are due."""
        self._extend_deadlines(self._own_pause.note(now), now)
        actions: list[Action] = []
        for name, domain in self._domains.items():
            if domain.start_at is not None and now >= domain.start_at:
                domain.start(now)
                actions.append(StartDomain(name))
            else:
                actions += self._kills(domain, now)
        return actions

    def next_time(self, now: float) -> float:
        """When to call `on_time` next, within a second: a longer pause counts as the launcher's own."""
        times = [now + _MAX_PAUSE_S]
        for domain in self._domains.values():
            if domain.start_at is not None:
                times.append(domain.start_at)
            for process in domain.watched().values():
                times.append(process.heard_at + self._patience_s(process))
                if domain.kill_rest_at is not None:
                    times.append(domain.kill_rest_at)
        return max(now, min(times))

    def _must_end(self, domain: _Domain) -> bool:
        if self._policy.max_failed_starts is None:
            return not self.has_served
        return domain.num_failed_starts >= self._policy.max_failed_starts

    def _extend_deadlines(self, pause_s: float, now: float) -> None:
        """Ignore the last `pause_s`, in which this process did not run."""
        if pause_s:
            for domain in self._domains.values():
                for process in domain.processes.values():
                    process.heard_at = min(now, process.heard_at + pause_s)

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
