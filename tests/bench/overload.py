"""The outcomes of floods of calls, health watches and reset streams: only OK and QUEUE_FULL are allowed.

    python -m tests.bench.overload models/smollm2-135m-instruct --json overload.json

It starts a cell, and floods its tokenizer and its scheduler in turn. Streams are reset by another process while this
one makes calls. No watch may be refused.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from tests.bench.parts.report import Row, limit, report
from tests.support.cells.cell import Cell, start_cell
from tests.support.clients.flood import (
    Outcomes,
    flood_with_calls,
    flood_with_posts,
    flood_with_resets,
    flood_with_watches,
)
from tests.support.system.ports import free_port


def main() -> None:
    """Flood, print the table, write the JSON."""
    args = _parse_args()
    with start_cell(args.model_dir, f"--http-listen=127.0.0.1:{free_port()}") as cell:
        rows = asyncio.run(_flood(cell, args.calls, args.resets, args.watches))
    report(rows, args.json)


async def _flood(cell: Cell, num_calls: int, num_resets: int, num_watches: int) -> list[Row]:
    rows = []
    for name, address in (("tokenizer", cell.address), ("scheduler", cell.scheduler_address)):
        is_scheduler = name == "scheduler"
        calls = await flood_with_calls(address, num_calls, is_scheduler=is_scheduler)
        rows += _describe(f"{name}, {num_calls} calls at once", calls)
        resets = await flood_with_resets(address, num_resets, is_scheduler=is_scheduler)
        rows += _describe(f"{name}, beside {num_resets} resets", resets)
        num_answered = (await flood_with_watches(address, num_watches)).counts["OK"]
        rows.append(limit(f"{name}, {num_watches} watches: not OK", num_watches - num_answered, "calls", at_most=0))
    async with cell.http_session() as session:
        rows += _describe(f"HTTP, {num_calls} posts at once", await flood_with_posts(session, num_calls))
    return rows


def _describe(name: str, outcomes: Outcomes) -> list[Row]:
    expected = [Row(f"{name}: {reason}", outcomes.counts[reason], "calls") for reason in ("OK", "QUEUE_FULL")]
    return [*expected, limit(f"{name}: anything else", sum(outcomes.unexpected.values()), "calls", at_most=0)]


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path, help="a model directory")
    parser.add_argument("--calls", type=int, default=2000, help="concurrent calls (default: %(default)s)")
    parser.add_argument("--resets", type=int, default=20_000, help="streams to reset (default: %(default)s)")
    parser.add_argument("--watches", type=int, default=3000, help="concurrent watches (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
