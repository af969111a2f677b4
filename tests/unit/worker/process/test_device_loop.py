from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from services.worker.process.device_loop import DeviceLoop
from shared.errors import DrainingError


def fail() -> None:
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
