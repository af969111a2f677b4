"""What checks of Python clients share. It runs in their environments, so it needs the standard library only."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable
from typing import Any, TypeVar

_Error = TypeVar("_Error", bound=Exception)

_POLL_S = 0.02


def error_of(kind: type[_Error], call: Callable[[], Any]) -> _Error:
    """The error that a call raises; fails if it is of another kind, or if there is none."""
    try:
        value = call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised, but {value!r} returned")


def wait_until_running(cell: Any, num_requests: int) -> None:
    """Wait until the cell computes so many requests."""
    line = re.compile(rf"^lockstep_cell_num_requests_running {num_requests}\.0$", re.MULTILINE)
    while True:
        with urllib.request.urlopen(f"{cell.url}/metrics") as answer:
            if line.search(answer.read().decode()):
                return
        time.sleep(_POLL_S)
