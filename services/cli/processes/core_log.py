"""Lines that gRPC's core writes to a process's stderr, as records of the log, and bounded in number.

The launcher does this, and not the process itself: what a process writes just before it crashes must arrive too.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_PERIOD_S = 60.0
_MAX_PER_PERIOD = 3

# Lines of level F are the last words of a process that crashes.
_LINE = re.compile(r"(?P<level>[IWE])\d{4} [\d:.]+ +\d+ (?P<source>[\w.-]+:\d+)\] (?P<message>.*)")
_LEVELS = {"I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR}


@dataclass(slots=True)
class _Period:
    begun_at: float
    num_lines: int = 0


class CoreLog:
    """Logs the lines of one process: at most three a minute from each place in the core's source."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`name` is the process's; `clock` returns seconds."""
        self._name = name
        self._clock = clock
        self._source_to_period: dict[str, _Period] = {}

    def try_add(self, line: bytes) -> bool:
        """Log the line, or count it if there were too many; False, without effect, if it is not of gRPC's core."""
        found = _LINE.fullmatch(line.decode(errors="backslashreplace"))
        if found is None:
            return False
        source, now = found["source"], self._clock()
        fields: dict[str, object] = {"process_name": self._name, "source": source}
        period = self._source_to_period.get(source)
        if period is None or now - period.begun_at >= _PERIOD_S:
            num_suppressed = 0 if period is None else period.num_lines - _MAX_PER_PERIOD
            if num_suppressed > 0:
                fields["num_suppressed"] = num_suppressed
            period = self._source_to_period[source] = _Period(now)
        period.num_lines += 1
        if period.num_lines <= _MAX_PER_PERIOD:
            logger.log(_LEVELS[found["level"]], "gRPC: %s", found["message"], extra=fields)
        return True
