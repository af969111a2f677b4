"""The turns that were typed into `lockstep chat`, kept from one conversation to the next as a shell keeps its lines."""

from __future__ import annotations

import contextlib
from pathlib import Path

from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from shared.process.encoding import is_text


class _KeptHistory(FileHistory):
    """A turn that cannot be kept is no reason to end the conversation."""

    def store_string(self, string: str) -> None:
        """Write a turn to the file, if that is possible."""
        if is_text(string):
            with contextlib.suppress(OSError):
                super().store_string(string)


def find_history_path() -> Path | None:
    """The user's file; None if the user has no home."""
    try:
        return Path.home() / ".local" / "state" / "lockstep" / "chat_history"
    except RuntimeError:
        return None


def open_history(path: Path | None) -> History:
    """The history in a file that only its user can read; of this conversation alone if there can't be one."""
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        with path.open("r+b"):
            return _KeptHistory(str(path))
    except OSError:
        return InMemoryHistory()
