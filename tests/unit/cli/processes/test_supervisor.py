"""When processes are restarted and which are killed: decisions only, on a clock that the test advances."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from services.cli.processes.supervisor import Action, Kill, RestartPolicy, StartDomain, Supervisor

GROUP = ("worker 0.0", "worker 0.1")
ALL = (*GROUP, "scheduler")
# Exact in binary, so that times can be compared.
TICK_S = 0.125


class Cell:
    """A supervised cell: a group of two workers and a scheduler. A restarted process answers when the test lets it."""

    def __init__(
        self,
        *,
        health_kill_s: float = 30.0,
        max_delay_s: float = 30.0,
        max_failed_starts: int | None = None,
        domain_to_max_delay_s: Mapping[str, float] = MappingProxyType({}),
        more_domains: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        domains = {"worker 0": GROUP, "scheduler": ["scheduler"], **(more_domains or {})}
        self._processes = [process for some in domains.values() for process in some]
        policy = RestartPolicy(health_kill_s, max_delay_s, max_failed_starts, domain_to_max_delay_s)
        self.supervisor = Supervisor(domains, policy)
        self.now = 1000.0
        self.answering: set[str] = set()
        self.started = self.supervisor.on_time(self.now)

    def serve(self) -> Cell:
        """Let every process answer from now on."""
        self.answering = set(self._processes)
        self._hear_answers()
        return self

    def exit(self, process: str) -> float | None:
        """Let a process exit; returns the delay until it is restarted."""
        self.answering.discard(process)
        return self.supervisor.on_exit(process, self.now)

    def drain(self, drain_s: float) -> None:
        """Begin to drain; the cell's tokenizer is what ends."""
        self.supervisor.begin_drain("tokenizer", self.now, drain_s, {"scheduler"})
        self.answering.discard("tokenizer")

    def pass_time(self, seconds: float) -> Iterator[tuple[float, Action]]:
        """The actions of the next seconds, each with its time from now."""
        begin = self.now
        while self.now < begin + seconds:
            due = self.supervisor.next_time(self.now)
            self.now += TICK_S
            self._hear_answers()
            actions = self.supervisor.on_time(self.now)
            assert not actions or due <= self.now, "the action is due before the next wakeup"
            for action in actions:
                yield self.now - begin, action

    def _hear_answers(self) -> None:
        for process in self.answering:
            self.supervisor.on_answer(process, self.now, is_serving=True)


def test_a_healthy_cell_is_checked_once_a_second() -> None:
    cell = Cell().serve()
    assert list(cell.pass_time(5.0)) == []
    assert cell.supervisor.next_time(cell.now) == cell.now + 1.0


def test_a_killed_process_that_has_not_exited_yet_is_not_polled_busily() -> None:
    cell = Cell(health_kill_s=4.0).serve()
    cell.answering.clear()
    kills = [action for _, action in cell.pass_time(10.0)]
    assert [action.process for action in kills if isinstance(action, Kill)] == list(ALL)
    assert cell.supervisor.next_time(cell.now) == cell.now + 1.0


def test_at_first_all_domains_are_started_in_order() -> None:
    assert Cell().started == [StartDomain("worker 0"), StartDomain("scheduler")]


def test_an_exit_before_the_cell_has_served_ends_it() -> None:
    cell = Cell()
    for process in GROUP:
        cell.supervisor.on_answer(process, cell.now, is_serving=True)

    assert not cell.supervisor.has_served
    assert cell.exit("worker 0.0") is None


def test_a_number_of_failed_starts_is_tried_again_before_the_cell_has_served() -> None:
    cell = Cell(max_failed_starts=3)

    assert [exit_and_restart(cell, "scheduler", is_ready=False) for _ in range(2)] == [0.5, 1.0]
    assert cell.exit("scheduler") is None


def test_failed_starts_are_counted_in_a_row_and_once_for_a_domain() -> None:
    cell = Cell(max_failed_starts=2).serve()
    for _ in range(3):
        # The first exit follows readiness, and only the second is a failed start.
        exit_and_restart(cell, "scheduler", is_ready=False)
        exit_and_restart(cell, "scheduler", is_ready=True)
    for process in GROUP:
        cell.exit(process)
    assert StartDomain("worker 0") in [action for _, action in cell.pass_time(1)]

    assert [cell.exit(process) for process in GROUP] == [0.5, 0.5]
    assert StartDomain("worker 0") in [action for _, action in cell.pass_time(1)]
    assert cell.exit(GROUP[0]) is None


def test_a_cell_serves_while_every_process_does() -> None:
    cell = Cell()
    assert not cell.supervisor.is_serving
    cell.serve()
    assert cell.supervisor.is_serving
    cell.supervisor.on_answer("scheduler", cell.now, is_serving=False)
    assert not cell.supervisor.is_serving
    cell.serve()
    cell.exit("scheduler")
    assert not cell.supervisor.is_serving


def exit_and_restart(cell: Cell, process: str, *, is_ready: bool) -> float:
    """Let a process exit, and let it become ready again if `is_ready`; returns the delay until its restart."""
    cell.exit(process)
    [(delay_s, action)] = cell.pass_time(40)
    assert action == StartDomain(process)
    if is_ready:
        cell.serve()
    return delay_s


def test_a_ready_process_is_restarted_three_times_at_once_and_then_after_five_seconds() -> None:
    cell = Cell().serve()
    delays = []
    for _ in range(5):
        delays.append(cell.exit("scheduler"))
        assert StartDomain("scheduler") in [action for _, action in cell.pass_time(6)]
        cell.serve()

    assert delays == [0.0, 0.0, 0.0, 5.0, 5.0]


def test_a_ready_process_that_dies_occasionally_is_always_restarted_at_once() -> None:
    cell = Cell().serve()

    assert [exit_and_restart(cell, "scheduler", is_ready=True) for _ in range(6)] == [TICK_S] * 6


def test_the_restart_delay_of_a_process_that_exits_before_it_is_ready_doubles_up_to_its_limit() -> None:
    cell = Cell(max_delay_s=5.0).serve()

    delays = [exit_and_restart(cell, "scheduler", is_ready=False) for _ in range(6)]

    assert delays == [TICK_S, 0.5, 1.0, 2.0, 4.0, 5.0]


def test_a_domain_may_have_a_shorter_limit_of_its_restart_delay() -> None:
    policy = RestartPolicy(max_delay_s=30.0, domain_to_max_delay_s={"scheduler": 2.0, "worker 0": 60.0})
    assert [policy.longest_s(domain) for domain in ("scheduler", "worker 0", "tokenizer")] == [2.0, 30.0, 30.0]
    cell = Cell(max_delay_s=30.0, domain_to_max_delay_s={"scheduler": 2.0}).serve()
    assert [exit_and_restart(cell, "scheduler", is_ready=False) for _ in range(6)] == [TICK_S, 0.5, 1.0, 2.0, 2.0, 2.0]


def test_the_restart_delay_is_reset_once_a_process_was_ready() -> None:
    cell = Cell().serve()
    for _ in range(3):
        exit_and_restart(cell, "scheduler", is_ready=False)
    exit_and_restart(cell, "scheduler", is_ready=True)

    assert exit_and_restart(cell, "scheduler", is_ready=False) == TICK_S
    assert exit_and_restart(cell, "scheduler", is_ready=False) == 0.5


def test_a_domain_is_restarted_when_all_of_its_processes_have_exited() -> None:
    cell = Cell().serve()

    cell.exit("worker 0.1")
    assert list(cell.pass_time(1)) == []
    cell.exit("worker 0.0")

    assert list(cell.pass_time(10)) == [(TICK_S, StartDomain("worker 0"))]


def test_the_rest_of_a_domain_is_killed_once_after_two_seconds() -> None:
    cell = Cell().serve()

    cell.exit("worker 0.0")

    assert list(cell.pass_time(10)) == [(2.0, Kill("worker 0.1", "another process of its failure domain had exited"))]
    cell.exit("worker 0.1")
    assert list(cell.pass_time(10)) == [(TICK_S, StartDomain("worker 0"))]


def test_domains_do_not_fail_together() -> None:
    cell = Cell().serve()

    cell.exit("worker 0.0")
    cell.exit("worker 0.1")
    cell.exit("scheduler")

    assert {action for _, action in cell.pass_time(10)} == {StartDomain("worker 0"), StartDomain("scheduler")}


def test_a_restarted_domain_can_fail_again_before_it_serves() -> None:
    cell = Cell().serve()
    for process in GROUP:
        cell.exit(process)
    list(cell.pass_time(1))

    assert cell.exit("worker 0.1") == 0.5
    assert [action for _, action in cell.pass_time(2)] == [
        Kill("worker 0.0", "another process of its failure domain had exited")
    ]


def test_a_process_that_stops_answering_is_killed_once() -> None:
    cell = Cell(health_kill_s=8.0).serve()

    cell.answering.discard("scheduler")

    assert list(cell.pass_time(20)) == [(8.0, Kill("scheduler", "it had not answered its health check for 8 s"))]


def test_an_answer_counts_even_if_the_process_is_not_serving() -> None:
    cell = Cell(health_kill_s=8.0).serve()
    cell.answering.discard("scheduler")
    for _ in range(10):
        cell.supervisor.on_answer("scheduler", cell.now, is_serving=False)
        assert list(cell.pass_time(5)) == []


def test_a_starting_process_may_be_silent_for_longer() -> None:
    cell = Cell(health_kill_s=8.0).serve()
    cell.exit("scheduler")
    list(cell.pass_time(TICK_S))

    assert [time for time, _ in cell.pass_time(100)] == [80.0]


def test_a_paused_supervisor_kills_no_process() -> None:
    cell = Cell(health_kill_s=8.0).serve()
    list(cell.pass_time(1))

    cell.now += 600.0

    assert list(cell.pass_time(1)) == []


def test_serving_is_reported_once_per_start() -> None:
    cell = Cell().serve()

    assert not cell.supervisor.on_answer("scheduler", cell.now, is_serving=True)
    cell.exit("scheduler")
    list(cell.pass_time(1))
    assert not cell.supervisor.on_answer("scheduler", cell.now, is_serving=False)
    assert cell.supervisor.on_answer("scheduler", cell.now, is_serving=True)


def make_draining_cell(*, start_s: float = 8.0, drain_s: float = 20.0, num_replicas: int = 1) -> Cell:
    """A cell with a tokenizer that drains, whose start took `start_s`."""
    replicas = {f"worker {number}": [f"worker {number}.0"] for number in range(1, num_replicas)}
    cell = Cell(more_domains={**replicas, "tokenizer": ["tokenizer"]})
    list(cell.pass_time(start_s))
    cell.serve()
    cell.drain(drain_s)
    return cell


def end_group(cell: Cell) -> list[float | None]:
    return [cell.exit(process) for process in GROUP]


def test_in_a_drain_the_scheduler_is_restarted_however_long_its_start_takes() -> None:
    cell = make_draining_cell(start_s=60.0)

    assert cell.exit("scheduler") == 0.0
    assert list(cell.pass_time(1)) == [(TICK_S, StartDomain("scheduler"))]
    assert not cell.supervisor.has_failed


def test_in_a_drain_a_worker_is_restarted_if_its_last_start_fits_the_time_left() -> None:
    cell = make_draining_cell()
    list(cell.pass_time(12.0))

    assert end_group(cell) == [0.0, 0.0]
    assert StartDomain("worker 0") in [action for _, action in cell.pass_time(1)]
    # There is no time for another start.
    assert end_group(cell) == [None, None]
    assert cell.supervisor.has_failed
    assert list(cell.pass_time(30)) == []


def test_a_drain_goes_on_while_another_replica_serves() -> None:
    cell = make_draining_cell(start_s=60.0, num_replicas=2)

    assert end_group(cell) == [None, None]
    assert not cell.supervisor.has_failed
    assert cell.exit("worker 1.0") is None
    assert cell.supervisor.has_failed


def test_a_drain_ends_at_once_if_the_only_worker_is_not_ready_in_time() -> None:
    for drain_s, has_failed in ((8.0, False), (7.0, True)):
        cell = Cell(more_domains={"tokenizer": ["tokenizer"]})
        list(cell.pass_time(8.0))
        cell.serve()
        end_group(cell)
        list(cell.pass_time(TICK_S))
        cell.drain(drain_s)
        assert cell.supervisor.has_failed is has_failed


def test_a_replica_that_is_ready_in_time_after_all_counts() -> None:
    cell = Cell(more_domains={"worker 1": ["worker 1.0"], "tokenizer": ["tokenizer"]})
    list(cell.pass_time(60.0))
    cell.serve()
    end_group(cell)
    list(cell.pass_time(TICK_S))
    cell.drain(20.0)
    cell.answering |= set(GROUP)
    list(cell.pass_time(1))

    assert cell.exit("worker 1.0") is None
    assert not cell.supervisor.has_failed


def test_the_process_that_ends_with_the_drain_is_neither_killed_nor_restarted() -> None:
    cell = make_draining_cell(drain_s=600.0)

    assert list(cell.pass_time(100)) == []


def test_in_a_drain_what_was_asked_to_end_is_restarted_only_if_the_drain_goes_on() -> None:
    cell = make_draining_cell()

    assert cell.supervisor.on_exit("scheduler", cell.now, was_asked=True) == 1.0
