"""`lockstep cache`: lists and removes files of packed weights."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shared.flag_parser import FlagParser
from shared.model_files.packed_files import Entry, PackedDirectory, PackedFileError, default_packed_dir, read_header

_MIB = 1024**2


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    args = make_parser().parse_args(argv)
    try:
        directory = PackedDirectory(args.packed_dir or default_packed_dir(), create=False)
    except FileNotFoundError:
        return _refuse_missing(args.names) if args.action == "rm" else 0
    except (OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    with directory:
        return _list(directory) if args.action == "ls" else _remove(directory, args.names, removes_all=args.all)


def make_parser() -> FlagParser:
    """The command's flags."""
    parser = FlagParser(prog="lockstep cache", description="Files of packed weights, which workers keep.")
    actions = parser.add_subparsers(dest="action", required=True)
    listing = actions.add_parser("ls", help="list them: name, size in MiB, seconds since the last use, rank and model")
    removing = actions.add_parser("rm", help="remove some; workers that have read them go on")
    removing.add_argument("names", nargs="*", metavar="NAME", help="as `lockstep cache ls` shows it")
    removing.add_argument("--all", action="store_true", help="remove all")
    for action in (listing, removing):
        action.add_argument("--packed-dir", type=Path, help="the workers' --packed-dir, if it is set")
    return parser


def _list(directory: PackedDirectory) -> int:
    now = time.time()
    for entry in directory.entries():
        size, age = f"{entry.num_bytes / _MIB:.1f}", f"{max(now - entry.used_at, 0):.0f}"
        print(f"{entry.name}\t{size}\t{age}\t{_describe(directory, entry)}")
    return 0


def _describe(directory: PackedDirectory, entry: Entry) -> str:
    """What a file was made of, without control characters."""
    try:
        fd = directory.open(entry.name)
        try:
            _, header = read_header(fd)
        finally:
            os.close(fd)
    except (OSError, PackedFileError) as error:
        return f"damaged: {error}"
    labels = header["labels"]
    shown = f"tp {labels['tp']} ep {labels['ep']} {labels['quantization']} {labels['model_dir']}"
    return "".join(each if each.isprintable() else "?" for each in shown)


def _remove(directory: PackedDirectory, names: Sequence[str], *, removes_all: bool) -> int:
    there = [entry.name for entry in directory.entries()]
    if unknown := [name for name in names if name not in there]:
        return _refuse_missing(unknown)
    try:
        for name in there if removes_all else names:
            directory.remove(name)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _refuse_missing(names: Sequence[str]) -> int:
    """Say which files there are not; returns the exit code."""
    for name in names:
        print(f"error: no such file of packed weights: {name}", file=sys.stderr)
    return 1 if names else 0
