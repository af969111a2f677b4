"""One key for all clients of a cell, without a file of keys: `--api-key` or LOCKSTEP_API_KEY.

The services get a file with the key's SHA-256 alone. The command line, which every user of the machine can read, has
the key from the process's start until this module has overwritten it; the environment, which the same user can read,
has it until the services start.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

API_KEY_VARIABLE = "LOCKSTEP_API_KEY"
# By which the settings know it too, as any other.
_SETTINGS_VARIABLE = "LOCKSTEP_SERVE_API_KEY"
_FLAG = "--api-key"
# Source: proc(5), /proc/PID/stat: arg_start and arg_end are fields 48 and 49; the first after the name is 3.
_ARG_START, _ARG_END = 48 - 3, 49 - 3


def take_api_key(argv: Sequence[str]) -> list[str]:
    """The arguments without a key, which the environment has instead: a process that takes this one over finds it."""
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        name, separator, key = word.partition("=")
        if name != _FLAG:
            rest.append(word)
            continue
        os.environ[API_KEY_VARIABLE] = key if separator else next(words, "")
    if len(rest) < len(argv):
        _overwrite_command_line()
    return rest


def forget_api_key() -> None:
    """Take the key from the environment, which child processes would inherit."""
    for name in (API_KEY_VARIABLE, _SETTINGS_VARIABLE):
        os.environ.pop(name, None)


def write_key_file(path: Path, key: str) -> None:
    """Make a file of clients' keys with one key, whose holder may do what anybody may where there are none.

    Raises:
        OSError: it cannot be written.
    """
    line = {"sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": "default"}
    path.touch(mode=0o600)
    path.write_text(json.dumps({**line, "max_priority": "HIGH", "is_operator": True}) + "\n", encoding="utf-8")


def _overwrite_command_line() -> None:
    """Put other letters in the place of the key, as far as the system lets a process do that."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
            memory.seek(start)
            words = memory.read(end - start).split(b"\0")
            memory.seek(start)
            memory.write(b"\0".join(_without_key(words)))
    except (OSError, ValueError, IndexError):
        # Not Linux, or a sandbox: then the key stays visible, as SECURITY.md says.
        return


def _without_key(words: Sequence[bytes]) -> list[bytes]:
    flag = _FLAG.encode()
    hidden = list(words)
    for index, word in enumerate(words):
        if word.startswith(flag + b"="):
            hidden[index] = flag + b"=" + b"x" * (len(word) - len(flag) - 1)
        elif index and words[index - 1] == flag:
            hidden[index] = b"x" * len(word)
    return hidden
