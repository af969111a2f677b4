"""Every order of a stop and a death: which answers end whole, and how the launcher ends.

What is asked to end is the launcher (Ctrl-C), all processes (systemd), or all but the launcher. A process dies before
that, or while the answers drain. What is not said to be cut ends whole.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.cells.cell import REFERENCE, start_cell
from tests.support.cells.planned_stops import (
    Asked,
    ask_all,
    begin_answers,
    contents,
    expect_answers,
    launcher_first,
    launcher_last,
    only_launcher,
    only_services,
    wait_until_draining,
)
from tests.support.clients.client import connect
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model

FAMILY = "Qwen3MoeForCausalLM"
# What the launcher says of a tokenizer that it has not asked to end.
DEATH_SEEN = "exited; restarting role=tokenizer"


@dataclass(frozen=True)
class Layout:
    """A cell's ranks."""

    flags: tuple[str, ...]
    leader: str
    """A worker that every step waits for."""
    other: str
    """The worker that dies."""


LAYOUTS = {
    "alone": Layout((), "worker", "worker"),
    "tp": Layout(("--tp=2",), "worker 0.0", "worker 0.1"),
    "coupled": Layout(("--dp=2", "--ep"), "worker 0.0", "worker 1.0"),
}
ASKED: tuple[Asked, ...] = (only_launcher, launcher_first, launcher_last, only_services)


@dataclass(frozen=True)
class Order:
    """A row of the table."""

    layout: str
    asked: Asked
    death: str
    """The role of the process that dies."""
    dies_before: bool

    def __str__(self) -> str:
        return f"{self.layout}, {self.death} dies {'before' if self.dies_before else 'after'} {self.asked.__name__}"

    @property
    def is_cut(self) -> bool:
        """Whether the answers end early: those of a tokenizer do so with it."""
        return self.death == "tokenizer"

    @property
    def exit_code(self) -> int:
        """That of the launcher, which says when its tokenizer did not end the answers as it was asked to."""
        return int(self.is_cut and not self.dies_before and self.asked is not only_services)


def rows() -> list[Any]:
    """All rows; the fast suite has the one that had not been thought of, and rows that are like others are proofs."""
    params = []
    deaths = ("scheduler", "worker", "tokenizer")
    for layout, asked, death, dies_before in itertools.product(LAYOUTS, ASKED, deaths, (True, False)):
        order = Order(layout, asked, death, dies_before)
        mark: tuple[pytest.MarkDecorator, ...] = (pytest.mark.proof,)
        if asked is launcher_first and death == "scheduler":
            mark = () if layout == "alone" and dies_before else (pytest.mark.slow,)
        elif layout == "alone" and asked is only_services:
            mark = (pytest.mark.slow,)
        params.append(pytest.param(order, id=str(order), marks=mark))
    return params


@pytest.fixture(scope="module")
def experts_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose ranks can be coupled."""
    model_dir = tmp_path_factory.mktemp("experts")
    write_small_model(build_model(FAMILY, dict(next(iter(SMALL_CONFIGS[FAMILY].values())))), model_dir)
    return model_dir


@pytest.mark.parametrize("order", rows())
async def test_answers_end_whole_whatever_is_asked_to_end_and_whatever_dies(
    order: Order, tiny_model: Path, request: pytest.FixtureRequest
) -> None:
    layout = LAYOUTS[order.layout]
    model_dir = request.getfixturevalue("experts_model") if order.layout == "coupled" else tiny_model
    victim = layout.other if order.death == "worker" else order.death
    # Longer than any test may take: nothing may wait for its end.
    with start_cell(model_dir, REFERENCE, "--drain-s=3600", *layout.flags) as cell:
        async with connect(cell) as client:
            expected = await expect_answers(client)
            answers = await begin_answers(cell, client, layout.leader)
            if order.dies_before:
                cell.kill(victim)
                if order.is_cut:
                    # One whose death is only seen at the stop has not ended as it was asked to.
                    await asyncio.to_thread(cell.wait_for_log, DEATH_SEEN)
                ask_all(order.asked(cell.launcher.pid))
            else:
                ask_all(order.asked(cell.launcher.pid))
                await wait_until_draining(cell, answers)
                cell.kill(victim)
            if victim != layout.leader:
                cell.send_signal(layout.leader, signal.SIGCONT)
            ends = await asyncio.gather(*answers, return_exceptions=True)
        if order.asked is only_services:
            if order.is_cut:
                await asyncio.to_thread(cell.wait_for_log, DEATH_SEEN)
            exit_code = await asyncio.to_thread(cell.stop)
        else:
            exit_code = await asyncio.to_thread(cell.wait)
        log = cell.log()

    if order.is_cut:
        assert all(isinstance(end, grpc.RpcError) for end in ends)
    else:
        assert not [end for end in ends if isinstance(end, BaseException)]
        assert contents(ends) == contents(expected)  # type: ignore[arg-type]
    assert exit_code == order.exit_code
    assert "Traceback" not in log
