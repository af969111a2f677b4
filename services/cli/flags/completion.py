"""`lockstep completion`: a script for a shell that completes commands, flags and files."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.cli import cache
from services.cli.clients import chat, embed, generate, rerank, top
from services.cli.extras import missing_packages
from services.cli.hub import pull
from services.cli.launcher_settings import flags_of_roles
from services.cli.processes.service_command import ROLES
from services.cli.ranks_settings import RanksSettings
from services.cli.serve_settings import ServeSettings
from shared.config import make_parser
from shared.flag_parser import FlagParser

_CHOICES = re.compile(r"\{([^{}]+)\}")
SHELLS = ("bash", "zsh", "fish")
_PLACES = """Where it goes:
  bash  lockstep completion bash > ~/.local/share/bash-completion/completions/lockstep
  zsh   lockstep completion zsh > DIR/_lockstep, where DIR is in $fpath
  fish  lockstep completion fish > ~/.config/fish/completions/lockstep.fish"""


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    args = _make_own_parser().parse_args(argv)
    if problem := missing_packages("completion", ["chat"]):
        print(f"error: {problem}", file=sys.stderr)
        return 2
    import shtab  # noqa: PLC0415 - an extra has it

    found = commands()
    for command in found.values():
        for action in command._actions:
            if action.type is Path or action.metavar in ("PATH", "FILE", "MODEL_DIR"):
                setattr(action, "complete", shtab.FILE)  # noqa: B010 - what the library reads
            elif choices := _CHOICES.fullmatch(str(action.metavar)):
                action.choices = choices[1].split(",")
    print(shtab.complete(make_command_parser(found), args.shell))
    return 0


def commands() -> Mapping[str, FlagParser]:
    """The parsers of all commands."""
    serve, ranks = make_parser(ServeSettings), make_parser(RanksSettings)
    for parser, roles in (serve, ROLES), (ranks, ("worker",)):
        for flag in flags_of_roles(roles):
            parser.add_argument(
                flag, help=argparse.SUPPRESS if ".no-" in flag else f"the {flag[2:].partition('.')[0]}'s"
            )
    return {
        "serve": serve,
        "ranks": ranks,
        "chat": chat.make_parser(),
        "generate": generate.make_parser(),
        "rerank": rerank.make_parser(),
        "embed": embed.make_parser(),
        "top": top.make_parser(),
        "pull": pull.make_parser(),
        "import": _make_import_parser(),
        "cache": cache.make_parser(),
        "config": make_parser(ServeSettings),
        "completion": _make_own_parser(),
    }


def make_command_parser(commands: Mapping[str, FlagParser]) -> FlagParser:
    """A parser of the command line with these commands, each of which in fact parses its own."""
    parser = FlagParser(prog="lockstep")
    parser.add_argument("--version", action="store_true", help="print the version")
    # The library would make the parsers itself.
    subparsers = parser.add_subparsers(dest="command")
    for name, command in commands.items():
        subparsers.choices[name] = command
        description = (command.description or "").partition("\n")[0].partition(". ")[0]
        subparsers._choices_actions.append(subparsers._ChoicesPseudoAction(name, (), description))
    return parser


def _make_import_parser() -> FlagParser:
    # The importer's own parser is in the worker, which the command does not import.
    parser = FlagParser(prog="lockstep import", description="Make a model directory from a GGUF file")
    parser.add_argument("source", type=Path)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--dequantize", action="store_true")
    return parser


def _make_own_parser() -> FlagParser:
    parser = FlagParser(
        prog="lockstep completion",
        description=f"Print a script that completes commands, flags and files.\n\n{_PLACES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS, metavar="|".join(SHELLS))
    return parser
