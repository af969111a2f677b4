"""`lockstep ranks` before it starts anything; tests/integration/command/test_ranks.py runs it."""

from __future__ import annotations

import pytest

from services.cli.commands import run
from services.cli.processes.service_command import ServiceCommand
from services.cli.ranks import RanksCollector


def test_restarts_are_counted_for_each_rank() -> None:
    commands = [ServiceCommand("worker", (), "unix:x", "ranks", rank) for rank in ("1.0", "1.1")]
    [metric] = RanksCollector(commands, {"worker 1.0": 2, "worker 1.1": 0}).collect()
    assert {sample.labels["rank"]: sample.value for sample in metric.samples} == {"1.0": 2, "1.1": 0}


def test_an_only_rank_has_a_name() -> None:
    [metric] = RanksCollector([ServiceCommand("worker", (), "unix:x", "ranks")], {"worker": 1}).collect()
    assert [sample.labels["rank"] for sample in metric.samples] == ["0.0"]


def test_help_names_the_flags_and_their_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["ranks", "--help"])
    output = capsys.readouterr().out
    assert "--node-rank N" in output
    assert "--worker.X" in output
