"""A process that tries grammars, as its parent sees it: see `grammar_trial`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.tokenizer.trial_limits import cpu_problem, wall_clock_s, was_out_of_cpu

_MODULE = "services.tokenizer.grammar.grammar_trial"
_START_TIMEOUT_S = 60.0


class GrammarRefusedError(Exception):
    """The grammar cannot be used; the message says why."""

    def __init__(self, message: str, *, is_too_complex: bool) -> None:
        super().__init__(message)
        self.is_too_complex = is_too_complex


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """What one grammar may cost.

    A worker that compiles a grammar keeps its whole batch waiting for about `cpu_s`. The memory is that of the whole
    process, whose beginnings take 220 MiB.
    """

    cpu_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class TriedGrammar:
    """A grammar in the library's form, and how many bytes each of its texts has at least."""

    source: str
    shortest_bytes: int


class GrammarChild:
    """A running process, which tries one grammar at a time."""

    def __init__(self, process: subprocess.Popen[bytes], limits: TrialLimits) -> None:
        self._process = process
        self._limits = limits
        self._is_spent = True

    @classmethod
    async def start(cls, model_dir: Path, limits: TrialLimits) -> GrammarChild:
        """Start a process and have it read the model's tokenizer. From the main thread: its end is the child's.

        Raises:
            RuntimeError: it does not get ready; why is on stderr.
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
        # Not by the event loop: uvloop forks, and one in twenty children dies of gRPC's handlers of forks. This waits
        # for a millisecond.
        process = subprocess.Popen(  # noqa: ASYNC220
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Threads for mathematics would only take address space.
            env={"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"},
        )
        child = cls(process, limits)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                if await asyncio.to_thread(child._ask, b"") is None:
                    raise RuntimeError(f"the process that tries grammars ended with {process.wait()}")
        except BaseException:
            child.kill()
            raise
        child._is_spent = False
        return child

    @property
    def is_usable(self) -> bool:
        """Whether it runs, and is not in the middle of anything."""
        return not self._is_spent and self._process.poll() is None

    async def try_grammar(self, kind: str, text: str) -> TriedGrammar:
        """Compile the grammar of a form; see `grammar_source`.

        Afterwards the process may not be usable; then it is to be killed.

        Raises:
            GrammarRefusedError: it is malformed, no text fits it, or it costs too much.
            TimeoutError: there is no answer although the wall clock gives it far more time than it may use.
            RuntimeError: the process failed.
        """
        self._is_spent = True
        request = json.dumps({"kind": kind, "text": text}).encode() + b"\n"
        async with asyncio.timeout(wall_clock_s(self._limits.cpu_s)):
            answer = await asyncio.to_thread(self._ask, request)
        if answer is None:
            raise self._cause_of_death()
        self._is_spent = answer["is_last"]
        if "problem" in answer:
            raise GrammarRefusedError(answer["problem"], is_too_complex=answer["is_too_complex"])
        return TriedGrammar(answer["grammar"], answer["shortest_bytes"])

    def kill(self) -> None:
        """End the process, if it has not ended; threads that wait for its answer return."""
        self._is_spent = True
        self._process.kill()
        # It may have much memory to give back first.
        threading.Thread(target=self._bury).start()

    def _bury(self) -> None:
        # Closing a pipe writes what is left for it.
        with contextlib.suppress(BrokenPipeError), self._process:
            pass

    def _ask(self, request: bytes) -> dict[str, Any] | None:
        """Send a request and wait for the answer; None when the process has ended."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        # If it has ended, reading tells the same.
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
        return RuntimeError(f"the process that tries grammars ended with {returncode}")
