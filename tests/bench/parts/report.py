"""The output of every benchmark: a table to read, and JSON rows for comparisons."""

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
    """One measured figure, with its reference and target if it has any."""

    metric: str
    value: float
    unit: str
    reference: float | None = None
    ratio: float | None = None
    """value / reference."""
    target: float | None = None
    """A bound on `ratio` if there is a reference, else on `value`."""
    met: bool | None = None
    """Whether `target` is met; None without a target."""


def compare(
    metric: str,
    value: float,
    unit: str,
    *,
    reference: float,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Row:
    """A figure with its reference; `at_least` or `at_most` sets a target for the ratio."""
    ratio = value / reference
    if at_most is not None:
        return Row(metric, value, unit, reference, ratio, at_most, ratio <= at_most)
    return Row(metric, value, unit, reference, ratio, at_least, None if at_least is None else ratio >= at_least)


def limit(metric: str, value: float, unit: str, *, at_most: float) -> Row:
    """A figure with a bound but no reference."""
    return Row(metric, value, unit, target=at_most, met=value <= at_most)


def run_sections(
    sections: Mapping[str, Callable[[ArgumentT], Iterable[Row]]], names: Iterable[str], argument: ArgumentT
) -> list[Row]:
    """Run sections of a benchmark, announcing each on stderr; returns their rows."""
    rows: list[Row] = []
    for name in names:
        print(f"{name} …", file=sys.stderr)
        rows += sections[name](argument)
    return rows


def report(rows: Sequence[Row], json_path: Path | None) -> None:
    """Print the rows, and write them to `json_path` if given."""
    print_table(rows)
    if json_path is not None:
        write_json(rows, json_path)


def print_table(rows: Sequence[Row]) -> None:
    """Write the rows to stdout, one per line."""
    width = max(len(row.metric) for row in rows)
    print(f"{'metric':<{width}} {'value':>10} {'unit':<10} {'reference':>10} {'ratio':>7} {'target':>7}  met")
    for row in rows:
        met = {True: "yes", False: "NO", None: ""}[row.met]
        print(
            f"{row.metric:<{width}} {_number(row.value):>10} {row.unit:<10} {_number(row.reference):>10} "
            f"{_number(row.ratio):>7} {_number(row.target):>7}  {met}"
        )


def write_json(rows: Sequence[Row], path: Path) -> None:
    """Write the rows as a JSON list of objects."""
    path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
