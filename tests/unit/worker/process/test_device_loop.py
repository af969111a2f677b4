from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import pytest

from services.worker.process.device_loop import DeviceLoop, Launch
from shared.errors import DrainingError


def fail() -> NoReturn:
    raise ValueError("planted")


def test_jobs_run_in_order_on_one_thread(device: DeviceLoop) -> None:
    seen: list[tuple[int, int]] = []
    jobs = [device.submit(lambda n: seen.append((n, threading.get_ident())), number) for number in range(20)]
    for job in jobs:
        job.result()
    assert [number for number, _ in seen] == list(range(20))
    assert {ident for _, ident in seen} != {threading.get_ident()}
    assert len({ident for _, ident in seen}) == 1


def test_a_failing_job_fails_alone(device: DeviceLoop) -> None:
    with pytest.raises(ValueError, match="planted"):
        device.submit(fail).result()
    assert device.submit(lambda: 3).result() == 3


def test_a_cancelled_job_does_not_run_unless_it_has_started(device: DeviceLoop) -> None:
    started, release = threading.Event(), threading.Event()
    ran: list[str] = []

    def hold() -> str:
        started.set()
        release.wait()
        return "held"

    first, second = device.submit(hold), device.submit(ran.append, "second")
    started.wait()
    assert (first.cancel(), second.cancel()) == (False, True)
    release.set()
    assert first.result() == "held"
    device.submit(ran.append, "third").result()
    assert ran == ["third"]
    with pytest.raises(CancelledError):
        second.result()


def test_stopping_lets_the_running_job_return_and_cancels_the_others() -> None:
    loop = DeviceLoop()
    started, release = threading.Event(), threading.Event()

    def hold() -> str:
        started.set()
        release.wait()
        return "held"

    first, second = loop.submit(hold), loop.submit(lambda: "never")
    thread = threading.Thread(target=loop.run)
    thread.start()
    started.wait()
    loop.stop()
    release.set()
    thread.join()
    assert first.result() == "held"
    with pytest.raises(DrainingError):
        second.result()
    with pytest.raises(DrainingError):
        loop.submit(lambda: "too late")


@dataclass
class Late:
    """A launch that is computed when `is_done` is set."""

    result: int
    is_done: threading.Event = field(default_factory=threading.Event)
    is_computed = False

    def finish(self) -> int:
        self.is_done.wait()
        if self.result < 0:
            raise ValueError("planted")
        return self.result


def test_a_launch_lets_the_next_job_run_before_it_has_computed(device: DeviceLoop) -> None:
    late = Late(1)
    launched = device.put(Launch(lambda: late))
    assert device.submit(lambda: "runs").result() == "runs"
    assert not launched.done()
    late.is_done.set()
    assert launched.result() == 1


def test_launches_end_in_order_whether_they_are_computed_or_failed(device: DeviceLoop) -> None:
    ended: list[int] = []
    first, broken, last = Late(0), Late(-1), Late(3)
    broken.is_done.set()
    last.is_done.set()
    futures = [
        device.put(Launch(lambda: first)),
        device.put(Launch(lambda: broken)),
        device.put(Launch(fail)),
        device.put(Launch(lambda: last)),
    ]
    for number, future in enumerate(futures):
        future.add_done_callback(partial(lambda number, _: ended.append(number), number))
    device.submit(lambda: None).result()
    assert ended == []
    first.is_done.set()
    assert futures[3].result() == 3
    assert ended == [0, 1, 2, 3]
    for failed in futures[1:3]:
        with pytest.raises(ValueError, match="planted"):
            failed.result()


def test_stopping_finishes_what_was_launched() -> None:
    loop, late = DeviceLoop(), Late(5)
    thread = threading.Thread(target=loop.run)
    thread.start()
    launched = loop.put(Launch(lambda: late))
    loop.submit(lambda: None).result()
    loop.stop()
    late.is_done.set()
    thread.join()
    assert launched.result(timeout=0) == 5


def test_a_cancelled_launch_is_not_made(device: DeviceLoop) -> None:
    release = threading.Event()
    device.submit(release.wait)
    made: list[Late] = []

    def make() -> Late:
        made.append(Late(1))
        return made[-1]

    launched = device.put(Launch(make))
    assert launched.cancel()
    release.set()
    device.submit(lambda: None).result()
    assert made == []
