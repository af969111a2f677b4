from __future__ import annotations

import asyncio
import os
import signal

from shared.process.lifecycle import StopRequest, run_service

POLL_S = 0.05


def test_the_first_signal_asks_for_an_end_and_one_more_than_two_seconds_later_for_one_at_once() -> None:
    seconds = iter([100.0, 100.5, 102.0, 102.125])

    async def serve(stop: StopRequest) -> int:
        stop.on_signal()
        assert stop.is_set()
        for _ in range(2):
            stop.on_signal()
        assert not stop.is_urgent.is_set()
        stop.on_signal()
        assert stop.is_urgent.is_set()
        return 7

    assert asyncio.run(serve(StopRequest(lambda: next(seconds)))) == 7


def test_signals_of_the_system_reach_the_service() -> None:
    async def serve(stop: StopRequest) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        while not stop.is_urgent.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(POLL_S)
        return 7

    assert run_service(serve) == 7
