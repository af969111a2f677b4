"""Decides when a cell's processes are killed and restarted. Sans-I/O.

Processes that depend on each other form a failure domain: when one exits, all of them end and restart together. Until
the cell has first served nothing is restarted, since a wrong flag is wrong every time, unless the policy allows a
number of failed starts. After that, a domain that was ready restarts at once, with a delay only if it fails repeatedly.
One that fails earlier waits twice as long each time:

    first exit         last exit                              start           all serve
    |--- up to 2 s ----|--- delay_s --------------------------|--- loading ---|--- ready --->
      the others end,    was ready: 0 s, if repeated 5 s
      then are killed    not yet ready: 0.5 s, 1 s, 2 s, ...

While the cell drains, the same holds for what its answers need; a worker is restarted only if it is expected to be
ready before the drain ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from shared.backoff import Backoff
from shared.network.heartbeat import OwnPause

FIRST_DELAY_S = 0.5
"""The restart delay after a first failure before readiness."""
# The other processes of a domain notice the exit and end, unless they are stuck in a collective or stopped.
_LEAVE_S = 2.0
# A domain that was ready restarts at once this many times within this period, and with a delay after that.
_NUM_AT_ONCE = 3
_AT_ONCE_WITHIN_S = 60.0
_LATER_DELAY_S = 5.0
# In a drain, a process that ends as if it was asked to may have noticed the drain's end before this launcher.
_END_OF_DRAIN_S = 1.0
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
    domain_to_max_delay_s: Mapping[str, float] = field(default_factory=dict)
    """The longest restart delay of the domains for which it is shorter."""

    def longest_s(self, domain: str) -> float:
        """The longest restart delay of a domain."""
        return min(self.max_delay_s, self.domain_to_max_delay_s.get(domain, self.max_delay_s))


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
    name: str
    names: Sequence[str]
    """Its processes."""
    start_at: float | None
    """When to start it; None while it runs."""
    backoff: Backoff
    """The delays after failures before it was ready."""
    processes: dict[str, _Process] = field(default_factory=dict)
    delay_s: float = 0.0
    """The delay of the next start."""
    is_ready: bool = False
    """Whether all processes serve since their start."""
    last_start_s: float | None = None
    """How long its last complete start took, up to readiness; None if it was never ready."""
    num_failed_starts: int = 0
    """In a row, before it was ready."""
    fell_at: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_AT_ONCE))
    """The last few failures after it was ready."""
    kill_rest_at: float | None = None
    """When to kill what is left after a failure."""
    started_at: float = 0.0
    """Its last start."""
    is_given_up: bool = False
    """Whether it is never started again."""

    @property
    def has_served(self) -> bool:
        """Whether it was ever ready."""
        return self.last_start_s is not None

    def start(self, now: float) -> None:
        self.start_at = self.kill_rest_at = None
        self.is_ready = False
        self.started_at = now
        self.processes = {name: _Process(now) for name in self.names}

    @property
    def is_well(self) -> bool:
        """Whether it is ready and none of its processes has exited since."""
        return self.is_ready and self.start_at is None and self.kill_rest_at is None

    def next_start_at(self, now: float) -> float:
        """When the start that makes it ready begins, or has begun."""
        if self.start_at is not None:
            return self.start_at
        return self.started_at if self.kill_rest_at is None else now + self.delay_s

    def give_up(self) -> None:
        self.is_given_up, self.start_at = True, None

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


@dataclass(frozen=True, slots=True)
class _Drain:
    deadline_at: float
    always_started: frozenset[str]
    """Domains that are restarted however little time is left."""

    def has_time_for(self, domain: _Domain, start_at: float) -> bool:
        if domain.name in self.always_started:
            return True
        return domain.last_start_s is not None and start_at + domain.last_start_s <= self.deadline_at


class Supervisor:
    """Decides for one cell's processes, by name.

    Report every exit and answer; call `on_time` at `next_time` and after every exit.
    """

    def __init__(self, domain_to_processes: Mapping[str, Sequence[str]], policy: RestartPolicy) -> None:
        """Nothing runs yet: `on_time` starts the domains in this order."""
        self._policy = policy
        self._domains = {
            # Nothing random: a launcher waits for nothing that others wait for too.
            name: _Domain(name, processes, 0.0, Backoff(FIRST_DELAY_S, policy.longest_s(name), jitter=0.0))
            for name, processes in domain_to_processes.items()
        }
        self._process_to_domain = {process: domain for domain in self._domains.values() for process in domain.names}
        self._own_pause = OwnPause(0.0, _ABSENCE_S)
        self._drain: _Drain | None = None
        self.has_failed = False
        """Whether the cell must end: nothing that could still become ready would make it serve."""

    def begin_drain(self, ending: str, now: float, drain_s: float, always_started: AbstractSet[str]) -> None:
        """The cell was asked to end, and lets its answers finish; `has_failed` says whether it can.

        Args:
            ending: The domain whose end is the drain's end. It is neither watched nor restarted any more.
            drain_s: When the drain ends at the latest, from `now`.
            always_started: Domains that are restarted whenever they exit. Of the others one is enough, and one is
                restarted if its last start took no longer than the time that is left.
        """
        self._drain = _Drain(now + drain_s, frozenset(always_started))
        self._domains[ending].give_up()
        self._domains[ending].processes.clear()
        for domain in self._domains.values():
            if not domain.is_given_up and not domain.is_well:
                self._give_up_if_hopeless(domain, domain.next_start_at(now))

    @property
    def is_draining(self) -> bool:
        """Whether `begin_drain` was called."""
        return self._drain is not None

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
            domain.is_ready, domain.is_given_up = True, False
            domain.last_start_s = now - domain.started_at
        return True

    def on_exit(self, process: str, now: float, *, was_asked: bool = False) -> float | None:
        """Record an exit, by a kill or otherwise.

        Args:
            was_asked: Whether it ended as it does when it is asked to.

        Returns:
            Seconds from the domain's last exit to its restart; None if it is not restarted, and `has_failed` says
            whether the cell must end.
        """
        domain = self._process_to_domain[process]
        domain.processes[process].is_running = False
        if domain.kill_rest_at is None:
            domain.break_up(now)
            if self._drain is not None and was_asked:
                domain.delay_s = max(domain.delay_s, _END_OF_DRAIN_S)
            self._give_up_if_hopeless(domain, now + domain.delay_s)
        if domain.is_given_up:
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

    def _give_up_if_hopeless(self, domain: _Domain, start_at: float) -> None:
        if self._drain is None:
            if self._is_hopeless(domain):
                domain.give_up()
                self.has_failed = True
        elif not self._drain.has_time_for(domain, start_at):
            domain.give_up()
            always_started = self._drain.always_started
            self.has_failed = all(one.is_given_up for one in self._domains.values() if one.name not in always_started)

    def _is_hopeless(self, domain: _Domain) -> bool:
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
