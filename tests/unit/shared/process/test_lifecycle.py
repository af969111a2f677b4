from __future__ import annotations

import os
import signal

from shared.process.lifecycle import StopRequest, run_service


def test_the_first_signal_asks_for_an_end_and_the_second_for_one_at_once() -> None:
    async def serve(stop: StopRequest) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        assert not stop.is_urgent.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        await stop.is_urgent.wait()
        return 7

    assert run_service(serve) == 7
