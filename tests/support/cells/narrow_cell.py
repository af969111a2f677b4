"""A cell that one request fills, and that tells its load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.cells.cell import Cell, start_cell
from tests.support.system.ports import free_port

NUM_BLOCKS = 24
MAX_WAITING = 1


@dataclass(frozen=True, slots=True)
class NarrowCell:
    """A cell with an address of its own for everything.

    Attributes:
        cell: The cell.
        http_address: Where its tokenizer serves HTTP.
        scheduler_address: The address of its scheduler service for clients.
        scheduler_metrics: Where its scheduler serves metrics.
        tokenizer_metrics: Where its tokenizer serves metrics.
    """

    cell: Cell
    http_address: str
    scheduler_address: str
    scheduler_metrics: str
    tokenizer_metrics: str


@contextmanager
def start_narrow_cell(model_dir: Path) -> Iterator[NarrowCell]:
    """Start a cell that runs one request at a time and lets `MAX_WAITING` wait, on `NUM_BLOCKS` blocks."""
    http, scheduler, scheduler_metrics, tokenizer_metrics = (f"127.0.0.1:{free_port()}" for _ in range(4))
    flags = (
        f"--http-listen={http}",
        f"--scheduler-listen={scheduler}",
        f"--scheduler.manage-listen={scheduler_metrics}",
        f"--tokenizer.manage-listen={tokenizer_metrics}",
        f"--worker.kv-cache-num-blocks={NUM_BLOCKS}",
        "--scheduler.max-num-seqs=1",
        f"--scheduler.max-waiting-requests={MAX_WAITING}",
    )
    with start_cell(model_dir, *flags) as cell:
        yield NarrowCell(cell, http, scheduler, scheduler_metrics, tokenizer_metrics)
