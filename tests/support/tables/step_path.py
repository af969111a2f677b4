"""How many functions and source files a request passes through: `python -m tests.support.tables.step_path`.

`lockstep serve` runs a tiny model on the `reference` backend, and each service has a profiler that notes every call of
a function of `services` or `shared`, in all threads, with the time. Requests of one token pass one at a time, so that
every step is alone: a stretch has what was called between its two boundaries in all processes. What is called in every
one of `_NUM_REQUESTS` requests counts, which leaves out heartbeats and whatever else runs meanwhile.

It does not see generated protos, libraries and C++, nor functions that a service calls in other processes (none for a
prompt of text). A function counts once, however often it is called. The step is a prefill. What a decode step adds is
not in the table, since its plan is made while the token before it is delivered.

`--root DIR` profiles the services of another checkout, which needs its generated stubs in `protos`; `--list` also
prints the functions.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from lockstep.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.system.patience import PATIENCE_S
from tests.support.system.ports import free_port
from tests.support.system.processes import ROOT, module_command, module_environment

_NUM_REQUESTS = 4
_COMMANDS = ("services.cli", "shared.cli")
_CALL, _RETURN = "call", "return"


class _Boundary(NamedTuple):
    """The first call or return of a function after the boundary before it, by its file and its qualified name."""

    event: str
    function: str


# All that is known of the services' insides. Names of other revisions are alternatives here.
_STRETCH_TO_END = {
    "RPC to queue": _Boundary(_RETURN, r"services/scheduler/core/\S+ Scheduler\.add(_sequence)?"),
    "(placed)": _Boundary(_CALL, r"services/scheduler/core/\S+ Scheduler\.(plan|schedule)"),
    "plan to forward": _Boundary(_CALL, r"services/worker/models/\S+ \w+\.forward"),
    "forward itself": _Boundary(_RETURN, r"services/worker/models/\S+ \w+\.forward"),
    "forward to result": _Boundary(_CALL, r"services/scheduler/core/\S+ Scheduler\.postprocess"),
}
_LAST_STRETCH = "result to text"
STRETCHES = (*(name for name in _STRETCH_TO_END if not name.startswith("(")), _LAST_STRETCH)

# The `sitecustomize` of the services. Its output is a line per event: the time, the event, the file and the function.
_PROFILER = """
import os, sys, threading, time

ROOT, FOLDER = {root!r}, {folder!r}
PLACES = tuple(os.path.join(ROOT, name, "") for name in ("services", "shared"))
ROLES = {{f"services.{{role}}" for role in ("tokenizer", "scheduler", "worker")}}

if ROLES & set(sys.orig_argv):
    out = os.open(os.path.join(FOLDER, str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    code_to_line = {{}}

    def note(frame, event, _):
        if event not in ("call", "return"):
            return
        code = frame.f_code
        line = code_to_line.get(code)
        if line is None:
            path = os.path.abspath(code.co_filename)
            is_ours = path.startswith(PLACES)
            line = f"{{path[len(ROOT) + 1:]}} {{code.co_qualname}}\\n" if is_ours else ""
            code_to_line[code] = line
        if line:
            os.write(out, f"{{time.monotonic_ns()}} {{event}} {{line}}".encode())

    threading.setprofile(note)
    sys.setprofile(note)
"""

# Comprehensions, whose frames Python 3.12 has no more.
_INLINED = re.compile(r"<(listcomp|setcomp|dictcomp|genexpr|module)>$")


class _Event(NamedTuple):
    at_ns: int
    event: str
    function: str
    """Its file and its qualified name."""


@dataclass(frozen=True)
class Touched:
    """What one stretch touches: functions, each as its file and its qualified name."""

    functions: frozenset[str]

    @property
    def files(self) -> frozenset[str]:
        """The files that have them."""
        return frozenset(function.split(" ")[0] for function in self.functions)

    def of(self, folder: str) -> Touched:
        """What of it is in a folder, whose path ends in a slash."""
        return Touched(frozenset(function for function in self.functions if function.startswith(folder)))


def measure(root: Path = ROOT) -> dict[str, Touched]:
    """Run requests through a cell of the checkout `root`; returns what each of `STRETCHES` touches.

    Raises:
        LookupError: a boundary was not passed, so its name has changed; the message says which one.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-path-") as temp_dir:
        folder = Path(temp_dir)
        spans = []
        with _profiled_cell(root, folder) as address, grpc.insecure_channel(address) as channel:
            stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
            # The first one meets what is made once.
            for number in range(_NUM_REQUESTS + 1):
                began_at = time.monotonic_ns()
                _generate(stub, number)
                spans.append((began_at, time.monotonic_ns()))
        events = _read_events(folder / "calls")
    runs = [_split(events, *span) for span in spans[1:]]
    return {stretch: Touched(frozenset.intersection(*(run[stretch] for run in runs))) for stretch in STRETCHES}


@contextmanager
def _profiled_cell(root: Path, folder: Path) -> Iterator[str]:
    """Run a cell whose services note their calls in `folder / "calls"`; gives its address."""
    hooks, calls = folder / "hooks", folder / "calls"
    hooks.mkdir()
    calls.mkdir()
    (hooks / "sitecustomize.py").write_text(_PROFILER.format(root=str(root), folder=str(calls)), encoding="utf-8")
    environment = module_environment(root)
    environment["PYTHONPATH"] = os.pathsep.join((str(hooks), environment["PYTHONPATH"]))
    environment["TMPDIR"] = str(folder)
    model_dir = write_tiny_llama(folder / "model", changes={"num_hidden_layers": 2})
    address = f"127.0.0.1:{free_port()}"
    flags = ("serve", str(model_dir), f"--listen={address}", "--worker.ops-backend=reference")
    command = module_command(next(name for name in _COMMANDS if _has_module(root, name)), *flags)
    log_path = folder / "log"
    with (
        log_path.open("w") as log,
        subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as launcher,
    ):
        assert launcher.stdout is not None
        try:
            if not any(line.startswith("ready") for line in launcher.stdout):
                raise RuntimeError(f"lockstep serve ended before it was ready:\n{log_path.read_text()}")
            yield address
            launcher.terminate()
            launcher.wait(PATIENCE_S)
        finally:
            # Its services end with it.
            launcher.kill()


def _has_module(root: Path, name: str) -> bool:
    return (root / name.replace(".", "/") / "__main__.py").exists()


def _generate(stub: Any, number: int) -> None:
    """Ask for one token after a prompt that no other request has."""
    request = tokenizer_pb2.GenerateRequest(
        text=f"{number} is the number of this request",
        sampling=common_pb2.SamplingParams(max_tokens=1, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True),
    )
    responses = list(stub.Generate(request, timeout=PATIENCE_S))
    assert responses[-1].HasField("finish")


def _read_events(folder: Path) -> list[_Event]:
    """The events of all processes, in the order of their times."""
    events = []
    for path in folder.iterdir():
        for line in path.read_text(encoding="utf-8").splitlines():
            at_ns, event, function = line.split(" ", 2)
            events.append(_Event(int(at_ns), event, function))
    return sorted(events)


def _split(events: Iterable[_Event], began_at: int, ended_at: int) -> dict[str, frozenset[str]]:
    """The functions called in each stretch of a request that took from `began_at` to `ended_at`."""
    events = [event for event in events if began_at <= event.at_ns <= ended_at]
    places = [0]
    for stretch, boundary in _STRETCH_TO_END.items():
        places.append(_find(events, boundary, places[-1], stretch))
    names = (*_STRETCH_TO_END, _LAST_STRETCH)
    stretch_to_functions = {
        name: frozenset(
            event.function
            for event in events[start:end]
            if event.event == _CALL and not _INLINED.search(event.function)
        )
        for name, (start, end) in zip(names, pairwise((*places, len(events))), strict=True)
    }
    # The result has left the worker, whose stream begins to wait for the next step: sometimes before the scheduler has
    # the result, sometimes after.
    stretch_to_functions[_LAST_STRETCH] = frozenset(
        function for function in stretch_to_functions[_LAST_STRETCH] if not function.startswith("services/worker/")
    )
    return stretch_to_functions


def _find(events: Sequence[_Event], boundary: _Boundary, start: int, stretch: str) -> int:
    pattern = re.compile(boundary.function)
    for place in range(start, len(events)):
        if events[place].event == boundary.event and pattern.fullmatch(events[place].function):
            return place
    raise LookupError(f"the end of {stretch!r} was not passed: no {boundary.event} of {boundary.function}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="count the functions and files that a request passes through")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout whose services are profiled")
    parser.add_argument("--list", action="store_true", help="print the functions of each stretch too")
    arguments = parser.parse_args()
    stretch_to_touched = measure(arguments.root.resolve())
    lines = [f"{'stretch':<20}{'functions':>10}{'files':>8}{'of worker':>16}{'files':>8}"]
    for stretch, touched in stretch_to_touched.items():
        own = touched.of("services/worker/")
        counts = f"{len(touched.functions):>10}{len(touched.files):>8}{len(own.functions):>16}{len(own.files):>8}"
        lines.append(f"{stretch:<20}{counts}")
    if arguments.list:
        for stretch, touched in stretch_to_touched.items():
            lines += ["", f"{stretch}:", *(f"  {function}" for function in sorted(touched.functions))]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
