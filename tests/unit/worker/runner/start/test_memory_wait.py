"""A worker waits for memory that a driver still has to free, and never for memory that others keep."""

from __future__ import annotations

import logging

import pytest
import torch

from services.worker.runner.start.memory_wait import CurrentGpu, wait_for_memory

GIB = 1024**3
TOTAL = 80 * GIB


class PlayedGpu:
    """A GPU of 80 GiB that frees memory at set moments, and a clock that only sleeping moves. See `MemoryGauge`."""

    def __init__(self, in_use_gib: float, *freed: tuple[float, float]) -> None:
        """`freed`: after how many seconds how many GiB more are free."""
        self.waited_s = 0.0
        self._in_use_gib = in_use_gib
        self._freed = freed

    def measure(self) -> tuple[int, int]:
        freed_gib = sum(gib for at, gib in self._freed if at <= self.waited_s)
        return TOTAL - int((self._in_use_gib - freed_gib) * GIB), TOTAL

    def now(self) -> float:
        return 1000.0 + self.waited_s

    def sleep(self, seconds: float) -> None:
        assert self.waited_s < 1000.0, "it waits for ever"
        self.waited_s += seconds


def wait(gpu: PlayedGpu, utilization: float = 0.9) -> float:
    """The seconds that it took."""
    wait_for_memory(utilization, lambda: None, gpu)
    return gpu.waited_s


@pytest.mark.parametrize(("in_use_gib", "utilization"), [(0.5, 0.9), (8.0, 0.9), (0.9, 1.0), (40.0, 0.5)])
def test_free_memory_takes_no_time_and_no_line(
    in_use_gib: float, utilization: float, caplog: pytest.LogCaptureFixture
) -> None:
    """At utilization 1 the process's own context is not taken for another's."""
    with caplog.at_level(logging.INFO):
        assert wait(PlayedGpu(in_use_gib), utilization) == 0
    assert not caplog.records


@pytest.mark.parametrize(
    "freed",
    [[(3.0, 70.0)], [(9.0, 20.0), (18.0, 20.0), (27.0, 30.0)], [(float(second), 1.5) for second in range(1, 51)]],
    ids=["at once", "in steps", "slowly"],
)
def test_memory_that_becomes_free_is_waited_for_and_no_longer(
    freed: list[tuple[float, float]], caplog: pytest.LogCaptureFixture
) -> None:
    enough_at = next(at for at, _ in freed if 72.0 - sum(gib for when, gib in freed if when <= at) <= 8.0)
    with caplog.at_level(logging.INFO):
        assert wait(PlayedGpu(72.0, *freed)) == enough_at
    (record,) = caplog.records
    assert (record.levelno, record.__dict__["waited_s"]) == (logging.INFO, enough_at)


@pytest.mark.parametrize("freed", [[], [(5.0, 20.0)]], ids=["all", "what is left"])
def test_memory_that_others_keep_is_named_once_nothing_more_becomes_free(
    freed: list[tuple[float, float]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert wait(PlayedGpu(60.0, *freed)) == (15.0 if freed else 10.0)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.__dict__["in_use_bytes"] == (40 if freed else 60) * GIB


def test_memory_that_others_take_and_give_is_not_waited_for_beyond_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    trickle = [(float(second), 0.001) for second in range(1, 999)]
    assert wait(PlayedGpu(60.0, *trickle)) == 60.0
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_less_memory_than_before_is_no_progress() -> None:
    assert wait(PlayedGpu(60.0, (4.0, -5.0), (8.0, 4.0))) == 10.0


def test_a_stop_ends_the_waiting() -> None:
    class StoppedError(Exception):
        pass

    def stop() -> None:
        if gpu.waited_s >= 2:
            raise StoppedError

    gpu = PlayedGpu(72.0)
    with pytest.raises(StoppedError):
        wait_for_memory(0.9, stop, gpu)
    assert gpu.waited_s == 2


def test_what_this_process_has_reserved_is_not_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (50 * GIB, TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 30 * GIB)
    gauge = CurrentGpu()
    assert gauge.measure() == (TOTAL, TOTAL)
    before = gauge.now()
    gauge.sleep(0)
    assert gauge.now() >= before
