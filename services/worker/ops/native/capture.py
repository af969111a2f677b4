"""Captures of decode steps on a CPU: the calls of their kernels, which a replay makes again without Python.

See kernels/recording.h. A call's arguments are addresses, so its results stay in memory of the capture's own.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from services.worker.forward.capture import Capture, NotRepeatableError
from services.worker.ops.native.results import Renewable, Results

# The kernels of a larger batch take so long that the time between their calls hardly counts.
_MAX_ROWS = 64


class NativeCapture(Capture):
    """See `Capture`. A batch is captured as it is: its kernels would also compute rows of padding."""

    batch_sizes = tuple(range(1, _MAX_ROWS + 1))
    is_ahead = False
    is_recorded = True
    has_device = False
    holds_collectives = False

    def __init__(self, library: ctypes.CDLL, results: Results) -> None:
        """`results` are those of the backend whose calls are captured."""
        self._library = library
        self._results = results
        self._memory = ReplayMemory(_MAX_ROWS)

    def begin(self) -> None:
        """See `Capture`. Memory stays for what is captured next."""

    @override
    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        recording, plans = Recording(self._library), list[Renewable]()
        only_kernels = _OnlyKernels()  # type: ignore[no-untyped-call]
        with self._results.kept(self._memory.empty, plans), only_kernels, recording.of_this_thread():
            result = compute()
        return _Replay(recording, plans, result, self._memory)


@dataclass(frozen=True, slots=True)
class _Replay:
    recording: Recording
    plans: list[Renewable]
    result: Tensor
    memory: ReplayMemory
    """The memory has results, too, that are tensors no longer, but are written again."""

    def __call__(self) -> Tensor:
        for plan in self.plans:
            plan.renew()
        self.recording.replay()
        return self.result


class Recording:
    """Calls of kernels, to be made again."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.ls_new_recording.restype = ctypes.c_void_p
        self._library = library
        self._address = ctypes.c_void_p(library.ls_new_recording())
        weakref.finalize(self, library.ls_delete_recording, self._address)

    @contextmanager
    def of_this_thread(self) -> Iterator[None]:
        """Record the calls that this thread makes in the body."""
        self._library.ls_record(self._address)
        try:
            yield
        finally:
            self._library.ls_record(None)

    def replay(self) -> None:
        """Make the calls again, in their order."""
        self._library.ls_replay(self._address)


class ReplayMemory:
    """Memory of the results of captured calls, of all batch sizes: only one replay runs at a time.

    A tensor's memory is given to another one when it is freed, as it would be without a capture: a step's results stay
    in the processor's caches.
    """

    def __init__(self, max_rows: int) -> None:
        """Keep memory for batches of up to `max_rows`; larger ones get memory that smaller ones do not use."""
        self._max_rows = max_rows
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A new tensor [num_rows, ...]."""
        num_rows, *widths = shape
        num_bytes = math.prod(widths) * dtype.itemsize
        free = self._free[num_bytes * max(num_rows, self._max_rows)]
        block = free.pop() if free else torch.empty(num_bytes * max(num_rows, self._max_rows), dtype=torch.uint8)
        # The tensor and its views hold this array, and nothing else does.
        memory = block[: num_rows * num_bytes].numpy()
        weakref.finalize(memory, free.append, block)
        return torch.from_numpy(memory).view(dtype).view(shape)


class _OnlyKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what torch computes, which a replay would leave out."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from loading its compiler, 70 MiB, to keep that out of a body that nothing compiles."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not func.is_view and func is not torch.ops.aten.empty.memory_format:
            raise NotRepeatableError(f"torch computes {func}")
        return func(*args, **(kwargs or {}))
