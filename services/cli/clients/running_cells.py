"""The cells that `lockstep serve` is running on this machine, for commands without an address.

Each launcher locks a file in its private directory; the kernel drops the lock with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc

from shared.network.statuses import reason_of, status_from_rpc_error

# The name prefix of the launchers' private directories.
DIRECTORY_PREFIX = "lockstep-"
_NAME = "cell.json"


@dataclass(frozen=True, slots=True)
class RunningCell:
    """A cell of this user: its model's directory name, its tokenizer's address and its scheduler's for the cell."""

    model: str
    address: str
    cell_address: str


@dataclass(frozen=True, slots=True)
class Target:
    """An address that a command calls."""

    address: str
    advice: str = ""
    """What to say if nothing answers there; empty if the user gave the address."""
    model: str = ""
    """The model's name; empty if it is not known to be a cell that is running here."""


class NoCellError(Exception):
    """Nothing answers where a command looked for a cell; the message says what to do."""


@contextlib.contextmanager
def publish_cell(directory: Path, cell: RunningCell) -> Iterator[None]:
    """Let `find_cells` find the cell inside the `with` block."""
    path = directory / _NAME
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        json.dump(asdict(cell), file)
        file.flush()
        yield


def find_cells() -> list[RunningCell]:
    """This user's running cells, newest first.

    Raises:
        OSError: there is no usable temporary directory, for example because it is full.
    """
    paths = Path(tempfile.gettempdir()).glob(f"{DIRECTORY_PREFIX}*/{_NAME}")
    found = [(started_at, cell) for started_at, cell in map(_read, paths) if cell is not None]
    return [cell for _, cell in sorted(found, key=lambda pair: pair[0], reverse=True)]


def find_target(given: str | None, address_of: Callable[[RunningCell], str], default: str) -> Target:
    """Where a command finds its cell: at the address given, else the newest cell that is running here, else `default`.

    Other running cells are listed on stderr, or why none can be found.

    Args:
        address_of: The address of a cell that the command calls.
    """
    if given is not None:
        return Target(given, model=_find_model(given, address_of))
    advice = (
        f"nothing answers at {default}: start a cell with `lockstep serve MODEL`, or give a cell's address as --target"
    )
    try:
        cells = find_cells()
    except OSError as error:
        print(f"note: the cells that are running here are not known: {error}; trying {default}", file=sys.stderr)
        return Target(default, advice)
    if not cells:
        return Target(default, f"no `lockstep serve` cell is running here, and {advice}")
    for cell in cells[1:]:
        print(f"note: {cell.model} is running here too: --target={address_of(cell)}", file=sys.stderr)
    address = address_of(cells[0])
    model = cells[0].model
    return Target(address, f"the cell of {model} does not answer at {address}: it may still be starting", model)


@contextlib.asynccontextmanager
async def explain_no_cell(target: Target) -> AsyncIterator[None]:
    """Explain a call that failed because nothing answers at an address that the user did not give.

    Raises:
        NoCellError: nothing does.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        # A cell that answers gives a reason.
        has_answered = error.code() is not grpc.StatusCode.UNAVAILABLE or reason_of(status_from_rpc_error(error))
        if has_answered or not target.advice:
            raise
        raise NoCellError(target.advice) from None


def _find_model(address: str, address_of: Callable[[RunningCell], str]) -> str:
    with contextlib.suppress(OSError):
        return next((cell.model for cell in find_cells() if address_of(cell) == address), "")
    return ""


def _read(path: Path) -> tuple[float, RunningCell | None]:
    """None if the file is another user's or its launcher is gone."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        # Other users cannot write into a private directory of this one.
        if path.parent.lstat().st_uid == os.geteuid():
            with path.open(encoding="utf-8") as file:
                if _is_locked(file.fileno()):
                    return os.fstat(file.fileno()).st_mtime, RunningCell(**json.load(file))
    return 0.0, None


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
