"""Traces of steps, for performance work."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from shared.errors import InternalError, ProfilingUnavailableError

if TYPE_CHECKING:
    # The RPC server answers before torch is imported.
    from torch.profiler import profile

logger = logging.getLogger(__name__)


class StepProfiler:
    """Records the next steps of the thread that launches them, and writes their trace. Belongs to that thread."""

    def __init__(self, directory: Path | None, name: str) -> None:
        """Traces get names that begin with `name`; without a directory nothing can be recorded."""
        self._directory = directory
        self._name = name
        self._recording: Future[str] | None = None
        self._profile: profile | None = None
        self._num_left = 0

    def begin(self, num_steps: int, recording: Future[str]) -> None:
        """Record the next `num_steps` steps, at least one; `recording` then completes with the trace's file name.

        Raises:
            ProfilingUnavailableError: steps are being recorded, or there is no directory for traces.
        """
        if self._directory is None:
            raise ProfilingUnavailableError("the worker was started without --profile-dir")
        if self._recording is not None:
            raise ProfilingUnavailableError("another profile is being recorded")
        from torch.profiler import profile  # noqa: PLC0415 - see above

        started = profile()
        started.start()
        self._profile, self._recording, self._num_left = started, recording, num_steps

    def abandon(self, recording: Future[str]) -> None:
        """Drop a recording whose caller has gone."""
        if self._recording is recording:
            self._take().stop()

    def count_launch(self) -> None:
        """A step was launched. After the last one this waits for the device, and for the file."""
        if self._recording is None:
            return
        self._num_left -= 1
        if self._num_left:
            return
        recording, recorded = self._recording, self._take()
        if not recording.set_running_or_notify_cancel():
            recorded.stop()
            return
        try:
            recording.set_result(self._write(recorded))
        except (OSError, RuntimeError):
            # The step itself is well.
            logger.exception("cannot write a trace")
            recording.set_exception(InternalError("cannot write the trace"))

    def _take(self) -> profile:
        assert self._profile is not None, "nothing is being recorded"
        recorded, self._profile, self._recording = self._profile, None, None
        return recorded

    def _write(self, recorded: profile) -> str:
        """The new file's name."""
        assert self._directory is not None, "there is no directory for traces"
        recorded.stop()
        path = self._directory / f"{self._name}-{time.time_ns() // 1_000_000}.json"
        self._directory.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(path))
        logger.info("wrote a trace", extra={"path": str(path)})
        return path.name
