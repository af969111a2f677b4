"""A cell in one process whose calls are noted: `python profiled_cell.py ROOT < CELLS`.

Tokenizer, scheduler and worker run as they do in processes of their own, each with its event loop and its threads, on
unix sockets. The services are those of the PYTHONPATH, whose checkout is ROOT, so nothing of `tests` is imported. One
cell after the other is read from stdin as a line of JSON: `model_dir`, `folder` of the sockets, `worker_flags`,
`requests` by their names in `_SENDERS`. Each line of the output is a request that was answered: its `name`, and as
`parts` the calls and returns of functions of `services` and `shared`, each as its role, `call` or `return`, and the
function, in order. The first part is before the first forward pass, the next one from its beginning to that of the next
one, and so on.

A forward pass is held at its beginning until nothing else runs, so that a part holds the same however busy the machine
is. Waiting is no call, heartbeats never come, and nothing is logged.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import queue
import re
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import grpc
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lockstep.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from services.scheduler.__main__ import serve as serve_scheduler
from services.scheduler.config import SchedulerSettings
from services.tokenizer.config import TokenizerSettings
from services.tokenizer.http.streams import event_stream
from services.tokenizer.request.model import load_model
from services.tokenizer.service import serve as serve_tokenizer
from services.worker.config import WorkerSettings
from services.worker.process.device_loop import DeviceLoop
from services.worker.process.exits import DomainEnd
from services.worker.process.rpc_thread import RpcThread
from services.worker.runner.start.build import build_model_runner
from services.worker.server.leader import Leader
from shared.config import load_settings
from shared.network.heartbeat import next_beat_at
from shared.process.lifecycle import StopRequest

_FORWARD = re.compile(r"services/worker/models/\S+ \w+\.forward")
_TIMEOUT_S = 300.0
# Heartbeats, and the first sign of life of a stream, come at any moment, and would be noted.
_NEVER_S = 1e6

_Event = tuple[str, str, str]


class _Recorder:
    """Notes what all threads call while it is on, and holds each forward pass at its beginning."""

    def __init__(self, root: str) -> None:
        self.is_on = False
        self.events: list[_Event] = []
        self.held: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """True for each forward pass that is held, False when the answer has come."""
        self._release = threading.Semaphore(0)
        self._root = root
        self._of_thread = threading.local()
        self._code_to_function: dict[CodeType, str] = {}

    def release(self) -> None:
        """Let the forward pass go on."""
        self._release.release()

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """The profiler of each thread."""
        if event not in ("call", "return") or not (function := self._function_of(frame.f_code)):
            return
        role = self._role_of(function)
        if not self.is_on:
            return
        self.events.append((role, event, function))
        if event == "call" and _FORWARD.fullmatch(function):
            self.held.put(True)
            self._release.acquire()

    def _function_of(self, code: CodeType) -> str:
        """Its file and its qualified name; empty if it is not ours."""
        function = self._code_to_function.get(code)
        if function is None:
            path = os.path.relpath(code.co_filename, self._root)
            is_ours = path.startswith(("services/", "shared/"))
            function = self._code_to_function[code] = f"{path} {code.co_qualname}" if is_ours else ""
        return function

    def _role_of(self, function: str) -> str:
        """The service whose thread this is, which is the first one that it has called; empty before."""
        role: str = getattr(self._of_thread, "role", "")
        if not role and function.startswith("services/"):
            role = self._of_thread.role = function.split("/")[1]
        return role


class _Cell:
    """A running cell. It ends with the process."""

    def __init__(self, recorder: _Recorder, model_dir: str, folder: str, worker_flags: list[str]) -> None:
        self.address, self.http_path = f"unix:{folder}/tokenizer", f"{folder}/http"
        self._recorder = recorder
        worker, cell, scheduler = (f"unix:{folder}/{name}" for name in ("worker", "cell", "scheduler"))
        model = f"--model-dir={model_dir}"
        _start_worker([f"--listen={worker}", model, *worker_flags])
        flags = [f"--listen={scheduler}", f"--cell-listen={cell}", f"--workers={worker}"]
        scheduler_settings = load_settings(SchedulerSettings, flags)
        _serve(lambda: serve_scheduler(scheduler_settings, StopRequest()))
        flags = [f"--listen={self.address}", f"--http-listen=unix:{self.http_path}", f"--scheduler={cell}", model]
        tokenizer_settings = load_settings(TokenizerSettings, [*flags])
        served_model = load_model(tokenizer_settings)
        served_model.prompts.warm_up()
        _serve(lambda: serve_tokenizer(tokenizer_settings, served_model, StopRequest()))
        self._wait_until_serving()

    def record(self, send: Callable[[_Cell], None]) -> list[list[_Event]]:
        """Send a request, and return its parts once it was answered."""
        recorder = self._recorder
        recorder.events, recorder.is_on, cuts = [], True, [0]
        with ThreadPoolExecutor(1) as executor:
            sent = executor.submit(send, self)
            sent.add_done_callback(lambda _: recorder.held.put(False))
            while recorder.held.get():
                self._settle()
                # The call of the forward pass is the first one of its part, though others may have come since.
                cuts.append(len(recorder.events))
                recorder.release()
            sent.result()
        self._settle()
        recorder.is_on = False
        return [recorder.events[begin:end] for begin, end in itertools.pairwise([*cuts, len(recorder.events)])]

    def _settle(self) -> None:
        """Return when every thread sleeps, and waits for a forward pass or for the client.

        Between two looks at all threads that find them asleep, and none of them woken in between, there is a moment in
        which nothing runs. Nothing will then: what one of them has written to a socket wakes its reader at once.
        """
        before = None
        while (now := _look_at_threads()) is None or now != before:
            before = now

    def _wait_until_serving(self) -> None:
        with grpc.insecure_channel(self.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch
            for response in watch(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S, wait_for_ready=True):
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return


def _look_at_threads() -> dict[str, tuple[str, ...]] | None:
    """How often each other thread of this process has slept so far; None if one of them does not sleep now."""
    thread_to_counts = {}
    for folder in Path("/proc/self/task").iterdir():
        if folder.name == str(threading.get_native_id()):
            continue
        try:
            status = (folder / "status").read_text(encoding="utf-8")
        except (FileNotFoundError, ProcessLookupError):
            # It has just ended.
            return None
        if "\nState:\tS" not in status:
            return None
        thread_to_counts[folder.name] = tuple(re.findall(r"ctxt_switches:\t(\d+)", status))
    return thread_to_counts


def _serve(make_service: Callable[[], Coroutine[Any, Any, int]]) -> None:
    """Run a service on a thread of its own. A `StopRequest` belongs to the event loop."""

    async def run() -> None:
        await make_service()

    threading.Thread(target=lambda: uvloop.run(run()), daemon=True).start()


def _start_worker(flags: list[str]) -> None:
    settings = load_settings(WorkerSettings, flags)
    device = DeviceLoop()
    end = DomainEnd(device)
    rpc = RpcThread(settings.bind_address, Leader(settings, device, end), end, reflection=False, manage_listen=None)
    rpc.start()
    meeting = rpc.meet()
    rpc.announce(build_model_runner(settings, lambda part: None, meeting.result()))
    threading.Thread(target=device.run, daemon=True).start()


def _generate(cell: _Cell, text: str, sampling: common_pb2.SamplingParams) -> None:
    with grpc.insecure_channel(cell.address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        request = tokenizer_pb2.GenerateRequest(text=text, sampling=sampling)
        responses = list(stub.Generate(request, timeout=_TIMEOUT_S))
        assert responses[-1].HasField("finish")


def _ask_one_token(cell: _Cell) -> None:
    sampling = common_pb2.SamplingParams(max_tokens=1, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True)
    _generate(cell, "How far is it?", sampling)


def _ask_tokens(cell: _Cell) -> None:
    sampling = common_pb2.SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True)
    _generate(cell, "How far is it?", sampling)


def _ask_draftable_tokens(cell: _Cell) -> None:
    _generate(cell, "How far is it?", common_pb2.SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))


def _ask_over_http(cell: _Cell) -> None:
    connection = http.client.HTTPConnection("localhost", timeout=_TIMEOUT_S)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(cell.http_path)
    fields = {"prompt": "How far is it?", "max_tokens": 1, "temperature": 0.8, "top_p": 0.9, "seed": 7}
    body = json.dumps({**fields, "ignore_eos": True, "stream": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    events = connection.getresponse().read().decode()
    connection.close()
    assert events.rstrip().endswith("data: [DONE]"), events


_SENDERS = {
    "one token": _ask_one_token,
    "one token over HTTP": _ask_over_http,
    "tokens": _ask_tokens,
    "draftable tokens": _ask_draftable_tokens,
}


def main() -> None:
    """Answer all requests of all cells."""
    next_beat_at.__defaults__ = (_NEVER_S,)
    event_stream.FIRST_TOKEN_S = _NEVER_S
    recorder = _Recorder(sys.argv[1])
    threading.setprofile(recorder.note)
    for line in sys.stdin:
        plan = json.loads(line)
        cell = _Cell(recorder, plan["model_dir"], plan["folder"], plan["worker_flags"])
        for name in plan["requests"]:
            parts = cell.record(_SENDERS[name])
            sys.stdout.write(json.dumps({"name": name, "parts": parts}) + "\n")
    sys.stdout.flush()
    # The cells' threads serve on.
    os._exit(0)


if __name__ == "__main__":
    main()
