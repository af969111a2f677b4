"""Loads a cell that runs one request, and tells when it is idle."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from typing import Any

from tests.clients.openai_python.asking import QUESTION, connect, say

_POLL_S = 0.05


def begin_endless(cell: Any, **extra: Any) -> Any:
    """A stream that goes on until it is closed; it has been submitted."""
    return connect(cell).chat.completions.create(
        model=cell.model, messages=say(QUESTION), stream=True, extra_body={"ignore_eos": True, **extra}
    )


def wait_until_idle(cell: Any) -> None:
    """Wait until the cell holds no request."""
    wait_until(cell, running=0, waiting=0)


def wait_until(cell: Any, **counts: int) -> None:
    """Wait until the cell runs, and lets wait, this many requests."""
    while {name: read_metric(cell, f"lockstep_cell_num_requests_{name}") for name in counts} != counts:
        time.sleep(_POLL_S)


def read_metric(cell: Any, name: str) -> float:
    """A metric's value."""
    with urllib.request.urlopen(f"{cell.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    [value] = [line.rpartition(" ")[2] for line in lines if line.startswith(f"{name} ")]
    return float(value)


def is_healthy(cell: Any) -> bool:
    """Whether the service takes requests."""
    try:
        with urllib.request.urlopen(f"{cell.url}/health"):
            return True
    except urllib.error.HTTPError:
        return False
