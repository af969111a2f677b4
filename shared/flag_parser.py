"""The parser of all commands' flags: of a mistake it says one line, with the names that are nearest."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from typing_extensions import override

_MOST_NAMES = 3


class FlagParser(argparse.ArgumentParser):
    """Prints no usage with an error, and names the flags that are like an unknown one."""

    more_flags: Sequence[str] = ()
    """Flags that are no actions of this parser, since others read them."""

    @override
    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        known, unknown = self.parse_known_args(None if args is None else list(args), namespace)
        if unknown:
            self.error(explain_unknown(unknown, [*_flags_of(self), *self.more_flags]))
        return known

    @override
    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith("?") else ";"
        self.exit(2, f"error: {message}{end} `{self.prog} --help` lists the flags\n")


def explain_unknown(unknown: Sequence[str], flags: Iterable[str]) -> str:
    """What to say of arguments that no parser knows; `flags` are those that there are, some as `--ROLE.NAME`."""
    found = find_like(next((word for word in unknown if word.startswith("-")), ""), flags)
    advice = f"; did you mean {' or '.join(found)}?" if found else ""
    return f"unrecognized arguments: {' '.join(unknown)}{advice}"


def find_like(word: str, flags: Iterable[str]) -> list[str]:
    """The flags that are most like what was typed, at most three; a role's prefix may be left out."""
    typed = word.partition("=")[0].lstrip("-").replace("_", "-").lower()
    name_to_flags: dict[str, list[str]] = {}
    for flag in flags:
        name = flag.lstrip("-")
        for form in dict.fromkeys((name, name.rpartition(".")[2])):
            name_to_flags.setdefault(form, []).append(flag)
    if typed in name_to_flags:
        return name_to_flags[typed][:_MOST_NAMES]
    like = get_close_matches(typed, name_to_flags, n=_MOST_NAMES, cutoff=0.7)
    return list(dict.fromkeys(flag for name in like for flag in name_to_flags[name]))[:_MOST_NAMES]


def _flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            yield from (flag for flag in action.option_strings if flag.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _flags_of(each)
