from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.internal.v1 import worker_pb2, worker_pb2_grpc
from shared.network.rpc import make_channel, make_server
from shared.process.lifecycle import StopRequest, run_service, stop_signals
from tests.support.system.patience import PATIENCE_S
from tests.support.system.processes import ROOT, module_environment

POLL_S = 0.05
# The interpreter takes its own handlers away when it ends, before it clears the modules.
ENDED = """
import os
import sys

from shared.process.lifecycle import run_service

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=int(sys.argv[1])):
        kill(pid, number)

async def serve(stop):
    return 7

late = Late()
sys.exit(run_service(serve))
"""


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Signals have their handlers again after a service has run here."""
    handlers = [(number, signal.getsignal(number)) for number in stop_signals()]
    yield
    for number, handler in handlers:
        signal.signal(number, handler)


class SlowEnd(worker_pb2_grpc.WorkerServiceServicer):
    """Needs many turns of the event loop to end a call that is cancelled."""

    def __init__(self) -> None:
        self.has_ended = False

    def add_to(self, server: Any) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

    async def Execute(self, request_iterator: Any, context: Any) -> AsyncIterator[worker_pb2.StepResult]:
        yield worker_pb2.StepResult(step_id=1)
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(100):
                await asyncio.sleep(0)
            self.has_ended = True


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


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_the_interpreter_ends_does_not_replace_the_exit_code(number: signal.Signals) -> None:
    command = [sys.executable, "-c", ENDED, str(number.value)]
    run = subprocess.run(
        command, cwd=ROOT, env=module_environment(), stderr=subprocess.PIPE, timeout=PATIENCE_S, check=False
    )
    assert (run.returncode, run.stderr) == (7, b"")


def test_a_process_ends_after_the_handlers_of_calls_that_its_stop_has_cut_short(tmp_path: Path) -> None:
    address, servicer = f"unix:{tmp_path}/socket", SlowEnd()

    async def serve(_: StopRequest) -> int:
        server = make_server(address, [servicer], internal=True)
        await server.start()
        async with make_channel(address, internal=True) as channel:
            await worker_pb2_grpc.WorkerServiceStub(channel).Execute().read()
            await server.stop(None)
        return 7

    assert run_service(serve) == 7
    assert servicer.has_ended
