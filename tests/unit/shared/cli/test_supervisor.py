"""When processes are started again, and which are killed: decisions, with a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator

from shared.cli.supervisor import Action, Kill, RestartPolicy, StartDomain, Supervisor

GROUP = ("worker 0.0", "worker 0.1")
ALL = (*GROUP, "scheduler")
# Exact in binary, so that times can be compared.
TICK_S = 0.125


class Cell:
    """A supervised cell of a group of two workers and a scheduler. What is started again answers when it is told to."""

    def __init__(self, *, health_kill_s: float = 30.0, max_delay_s: float = 30.0) -> None:
        domains = {"worker 0": GROUP, "scheduler": ["scheduler"]}
        self.supervisor = Supervisor(domains, RestartPolicy(health_kill_s, max_delay_s))
        self.now = 1000.0
        self.answering: set[str] = set()
        self.started = self.supervisor.on_time(self.now)

    def serve(self) -> Cell:
        """Every process answers from now on."""
        self.answering = set(ALL)
        self._hear_answers()
        return self

    def exit(self, process: str) -> float | None:
        """A process exits; returns after how long it is started again."""
        self.answering.discard(process)
        return self.supervisor.on_exit(process, self.now)

    def pass_time(self, seconds: float) -> Iterator[tuple[float, Action]]:
        """What is done in the next seconds, each with how long after now."""
        begin = self.now
        while self.now < begin + seconds:
            due = self.supervisor.next_time(self.now)
            self.now += TICK_S
            self._hear_answers()
            actions = self.supervisor.on_time(self.now)
            assert not actions or due <= self.now, "nobody would have looked"
            for action in actions:
                yield self.now - begin, action

    def _hear_answers(self) -> None:
        for process in self.answering:
            self.supervisor.on_answer(process, self.now, is_serving=True)


def test_a_cell_that_is_well_is_looked_at_once_a_second() -> None:
    cell = Cell().serve()
    assert list(cell.pass_time(5.0)) == []
    assert cell.supervisor.next_time(cell.now) == cell.now + 1.0


def test_who_was_killed_and_is_not_gone_yet_is_not_waited_for_busily() -> None:
    cell = Cell(health_kill_s=4.0).serve()
    cell.answering.clear()
    kills = [action for _, action in cell.pass_time(10.0)]
    assert [action.process for action in kills if isinstance(action, Kill)] == list(ALL)
    assert cell.supervisor.next_time(cell.now) == cell.now + 1.0


def test_everything_is_started_at_first_in_order() -> None:
    assert Cell().started == [StartDomain("worker 0"), StartDomain("scheduler")]


def test_before_the_cell_served_an_exit_ends_it() -> None:
    cell = Cell()
    for process in GROUP:
        cell.supervisor.on_answer(process, cell.now, is_serving=True)

    assert not cell.supervisor.has_served
    assert cell.exit("worker 0.0") is None


def fall(cell: Cell, process: str, *, is_ready: bool) -> float:
    """Let a process exit, which is ready again afterwards or not; returns after how long it was started again."""
    cell.exit(process)
    [(delay_s, action)] = cell.pass_time(40)
    assert action == StartDomain(process)
    if is_ready:
        cell.serve()
    return delay_s


def test_what_was_ready_is_started_again_at_once_three_times_and_then_after_five_seconds() -> None:
    cell = Cell().serve()
    delays = []
    for _ in range(5):
        delays.append(cell.exit("scheduler"))
        assert StartDomain("scheduler") in [action for _, action in cell.pass_time(6)]
        cell.serve()

    assert delays == [0.0, 0.0, 0.0, 5.0, 5.0]


def test_what_was_ready_and_dies_once_in_a_while_is_always_started_again_at_once() -> None:
    cell = Cell().serve()

    assert [fall(cell, "scheduler", is_ready=True) for _ in range(6)] == [TICK_S] * 6


def test_the_delay_of_what_exits_before_it_is_ready_doubles_up_to_its_limit() -> None:
    cell = Cell(max_delay_s=5.0).serve()

    delays = [fall(cell, "scheduler", is_ready=False) for _ in range(6)]

    assert delays == [TICK_S, 0.5, 1.0, 2.0, 4.0, 5.0]


def test_what_became_ready_begins_with_the_shortest_delay_again() -> None:
    cell = Cell().serve()
    for _ in range(3):
        fall(cell, "scheduler", is_ready=False)
    fall(cell, "scheduler", is_ready=True)

    assert fall(cell, "scheduler", is_ready=False) == TICK_S
    assert fall(cell, "scheduler", is_ready=False) == 0.5


def test_a_domain_starts_again_when_all_of_it_has_exited() -> None:
    cell = Cell().serve()

    cell.exit("worker 0.1")
    assert list(cell.pass_time(1)) == []
    cell.exit("worker 0.0")

    assert list(cell.pass_time(10)) == [(TICK_S, StartDomain("worker 0"))]


def test_what_is_left_of_a_domain_is_killed_once_after_two_seconds() -> None:
    cell = Cell().serve()

    cell.exit("worker 0.0")

    assert list(cell.pass_time(10)) == [(2.0, Kill("worker 0.1", "another process of its failure domain had exited"))]
    cell.exit("worker 0.1")
    assert list(cell.pass_time(10)) == [(TICK_S, StartDomain("worker 0"))]


def test_domains_do_not_fall_with_each_other() -> None:
    cell = Cell().serve()

    cell.exit("worker 0.0")
    cell.exit("worker 0.1")
    cell.exit("scheduler")

    assert {action for _, action in cell.pass_time(10)} == {StartDomain("worker 0"), StartDomain("scheduler")}


def test_a_started_domain_can_fall_again_before_it_serves() -> None:
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


def test_an_answer_counts_when_it_says_that_the_process_does_not_serve() -> None:
    cell = Cell(health_kill_s=8.0).serve()
    cell.answering.discard("scheduler")
    for _ in range(10):
        cell.supervisor.on_answer("scheduler", cell.now, is_serving=False)
        assert list(cell.pass_time(5)) == []


def test_a_process_that_starts_may_be_silent_for_longer() -> None:
    cell = Cell(health_kill_s=8.0).serve()
    cell.exit("scheduler")
    list(cell.pass_time(TICK_S))

    assert [time for time, _ in cell.pass_time(100)] == [80.0]


def test_a_supervisor_that_was_not_run_itself_blames_nobody() -> None:
    cell = Cell(health_kill_s=8.0).serve()
    list(cell.pass_time(1))

    cell.now += 600.0

    assert list(cell.pass_time(1)) == []


def test_serving_is_told_once_for_each_start() -> None:
    cell = Cell().serve()

    assert not cell.supervisor.on_answer("scheduler", cell.now, is_serving=True)
    cell.exit("scheduler")
    list(cell.pass_time(1))
    assert not cell.supervisor.on_answer("scheduler", cell.now, is_serving=False)
    assert cell.supervisor.on_answer("scheduler", cell.now, is_serving=True)
