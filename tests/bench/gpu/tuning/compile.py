"""Compiles what the tune stage will launch, in processes of their own, into Triton's cache on disk.

The compiler takes a processor a second for a variant, and the stage has hundreds. A compilation that fails here fails
again when the variant is launched, which reports it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait

import torch

from tests.bench.gpu.tuning.subjects import Place, Subject
from tests.support.kernels.compile_kernels import TARGETS, compiling

_MOST_PROCESSES = 14


class Compilers:
    """Processes that compile the variants of subjects, in their order."""

    def __init__(self, subjects: Sequence[Subject], target: str, num_processes: int | None = None) -> None:
        """Begin.

        Args:
            target: A key of `TARGETS`; nothing is compiled ahead for another one.
            num_processes: By default as many as leave two processors to this one.
        """
        self._name_to_futures: dict[str, list[Future[None]]] = {}
        self._pool: ProcessPoolExecutor | None = None
        if target not in TARGETS:
            return
        count = num_processes or min(max((os.cpu_count() or 1) - 2, 1), _MOST_PROCESSES)
        # A fork would share this process's GPU context.
        self._pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"))
        for subject in subjects:
            numbers = range(-1, subject.num_variants)
            self._name_to_futures[subject.name] = [
                self._pool.submit(_compile, subject, number, target) for number in numbers
            ]

    def wait(self, name: str) -> None:
        """Wait until the variants of the subject of this name are compiled, or could not be."""
        wait(self._name_to_futures.pop(name, ()))

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _compile(subject: Subject, number: int, target: str) -> None:
    """Compile a variant of `subject`, or for -1 what is chosen without one."""
    variants = [variant for tried in subject.rounds for variant in tried]
    launches = subject.make(Place(torch.device("meta"), torch.bfloat16))
    with compiling(target):
        launches.launch(0, **({} if number < 0 else variants[number]))
