"""What every benchmark prints and writes: a table for people, rows of JSON for comparisons."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

ArgumentT = TypeVar("ArgumentT")


@dataclass(frozen=True, slots=True)
class Row:
    """One measured figure, and what it is held against.

    `ratio` is value / reference. `target` bounds the ratio where there is a reference, else the value; `met` says
    whether it holds. All three are None where there is nothing to compare with.
    """

    metric: str
    value: float
    unit: str
    reference: float | None = None
    ratio: float | None = None
    target: float | None = None
    met: bool | None = None


def compare(
    metric: str,
    value: float,
    unit: str,
    *,
    reference: float,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Row:
    """A figure beside its reference; with `at_least` or `at_most` the ratio has a target."""
    ratio = value / reference
    if at_most is not None:
        return Row(metric, value, unit, reference, ratio, at_most, ratio <= at_most)
    return Row(metric, value, unit, reference, ratio, at_least, None if at_least is None else ratio >= at_least)


def limit(metric: str, value: float, unit: str, *, at_most: float) -> Row:
    """A figure that stands alone and has a bound."""
    return Row(metric, value, unit, target=at_most, met=value <= at_most)


def run_sections(
    sections: Mapping[str, Callable[[ArgumentT], Iterable[Row]]], names: Iterable[str], argument: ArgumentT
) -> list[Row]:
    """Run sections of a benchmark, each announced on stderr; returns their rows."""
    rows: list[Row] = []
    for name in names:
        print(f"{name} …", file=sys.stderr)
        rows += sections[name](argument)
    return rows


def report(rows: Sequence[Row], json_path: Path | None) -> None:
    """Print the rows, and write them to a file where one is named."""
    print_table(rows)
    if json_path is not None:
        write_json(rows, json_path)


def print_table(rows: Sequence[Row]) -> None:
    """Write the rows to stdout, one a line."""
    width = max(len(row.metric) for row in rows)
    print(f"{'metric':<{width}} {'value':>10} {'unit':<10} {'reference':>10} {'ratio':>7} {'target':>7}  met")
    for row in rows:
        met = {True: "yes", False: "NO", None: ""}[row.met]
        print(
            f"{row.metric:<{width}} {_number(row.value):>10} {row.unit:<10} {_number(row.reference):>10} "
            f"{_number(row.ratio):>7} {_number(row.target):>7}  {met}"
        )


def write_json(rows: Sequence[Row], path: Path) -> None:
    """Write the rows as a list of objects."""
    path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
