"""The parent's side of a `grammar_trial` process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.tokenizer.grammar.grammar_source import FormOptions
from services.tokenizer.trial_limits import cpu_problem, wall_clock_s, was_out_of_cpu
from shared.process.parent import leave_end_to_parent

_MODULE = "services.tokenizer.grammar.grammar_trial"
_START_TIMEOUT_S = 60.0


class GrammarRefusedError(Exception):
    """The grammar cannot be used; the message tells the client why."""

    def __init__(self, message: str, *, is_too_complex: bool) -> None:
        super().__init__(message)
        self.is_too_complex = is_too_complex


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """What trying one grammar may cost."""

    cpu_s: float
    """A worker that compiles a grammar just within the limit stalls its batch for about as long."""
    memory_bytes: int
    """Address space; 220 MiB are in use before the first grammar."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What is tried."""

    kind: str
    text: str
    """A form as `grammar_source` takes it."""
    options: FormOptions
    around: str = ""
    """A grammar that names the form's by `@form`; empty if the form is the whole text."""
    skipped_ids: tuple[int, ...] = ()
    """Tokens that come before what is followed."""


@dataclass(frozen=True, slots=True)
class TriedGrammar:
    """A grammar that passed its trial."""

    source: str
    """The grammar in the library's form."""
    not_held: tuple[str, ...]
    """The keywords of a schema that the grammar does not hold, as JSON pointers."""
    shortest_bytes: int
    """A lower bound on the bytes of any text that fits."""


class GrammarChild:
    """A process that tries one grammar at a time."""

    def __init__(self, process: subprocess.Popen[bytes], limits: TrialLimits) -> None:
        self._process = process
        self._limits = limits
        self._is_spent = True

    @classmethod
    async def start(cls, model_dir: Path, limits: TrialLimits) -> GrammarChild:
        """Start a process, and wait until it has loaded the model's tokenizer.

        Only from the main thread: the child is killed when the thread that started it ends.

        Raises:
            RuntimeError: the process ended; stderr says why.
        """
        command = [
            sys.executable,
            "-m",
            _MODULE,
            f"--model-dir={model_dir}",
            f"--memory-bytes={limits.memory_bytes}",
            f"--cpu-s={limits.cpu_s}",
            f"--parent-pid={os.getpid()}",
        ]
        # Not through the event loop: uvloop forks, and gRPC's fork handlers kill one child in twenty. This blocks for
        # a millisecond.
        with leave_end_to_parent():
            process = subprocess.Popen(  # noqa: ASYNC220
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # BLAS threads would only use up address space.
                env={"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"},
            )
        child = cls(process, limits)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                if await asyncio.to_thread(child._ask, b"") is None:
                    raise RuntimeError(f"the grammar trial process ended with {process.wait()}")
        except BaseException:
            child.kill()
            raise
        child._is_spent = False
        return child

    @property
    def is_usable(self) -> bool:
        """Whether the process is running and idle."""
        return not self._is_spent and self._process.poll() is None

    async def try_grammar(self, trial: Trial) -> TriedGrammar:
        """Compile and follow a form's grammar. The caller then kills the process unless it `is_usable`.

        Raises:
            GrammarRefusedError: the grammar is malformed, no text fits it, or it costs too much.
            TimeoutError: the trial exceeded a wall-clock limit far above `cpu_s`.
            RuntimeError: the process failed.
        """
        self._is_spent = True
        request = json.dumps(asdict(trial)).encode() + b"\n"
        async with asyncio.timeout(wall_clock_s(self._limits.cpu_s)):
            answer = await asyncio.to_thread(self._ask, request)
        if answer is None:
            raise self._cause_of_death()
        self._is_spent = answer["is_last"]
        if "problem" in answer:
            raise GrammarRefusedError(answer["problem"], is_too_complex=answer["is_too_complex"])
        return TriedGrammar(answer["grammar"], tuple(answer["not_held"]), answer["shortest_bytes"])

    def kill(self) -> None:
        """Kill the process; threads that wait for its answer return."""
        self._is_spent = True
        self._process.kill()
        # In a thread: freeing a lot of memory can delay the end of the process.
        threading.Thread(target=self._bury).start()

    def _bury(self) -> None:
        # Closing the pipe flushes what is still buffered, which fails when the process is gone.
        with contextlib.suppress(BrokenPipeError), self._process:
            pass

    def _ask(self, request: bytes) -> dict[str, Any] | None:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        # If the process has ended, the read below notices.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(request)
            process.stdin.flush()
        line = process.stdout.readline()
        if not line.endswith(b"\n"):
            process.wait()
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _cause_of_death(self) -> Exception:
        returncode = self._process.wait()
        if was_out_of_cpu(returncode):
            return GrammarRefusedError(cpu_problem(self._limits.cpu_s), is_too_complex=True)
        if returncode < 0:
            limit_mib = self._limits.memory_bytes // 2**20
            return GrammarRefusedError(f"it takes more than {limit_mib} MiB of memory", is_too_complex=True)
        return RuntimeError(f"the grammar trial process ended with {returncode}")
