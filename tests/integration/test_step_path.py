"""The script that counts what a request passes through."""

from __future__ import annotations

import pytest

from tests.support.tables.step_path import Touched, measure


@pytest.fixture(scope="module")
def stretch_to_touched() -> dict[str, Touched]:
    return measure()


def test_each_stretch_is_of_the_services_that_it_joins(stretch_to_touched: dict[str, Touched]) -> None:
    roles = {
        "RPC to queue": {"tokenizer", "scheduler"},
        "plan to forward": {"scheduler", "worker"},
        "forward itself": {"worker"},
        "forward to result": {"worker", "scheduler"},
        "result to text": {"scheduler", "tokenizer"},
        "HTTP to queue": {"tokenizer", "scheduler"},
        "result to HTTP": {"scheduler", "tokenizer"},
    }
    for stretch, touched in stretch_to_touched.items():
        of_step = {stretch.partition(": ")[2]}
        found = {path.split("/")[1] for path in touched.files if path.startswith("services/")}
        assert found == roles.get(stretch, of_step), stretch


def test_a_drafted_step_is_drafted_and_a_decode_is_not(stretch_to_touched: dict[str, Touched]) -> None:
    assert _proposes(stretch_to_touched["drafted step: worker"])
    assert not _proposes(stretch_to_touched["decode: worker"])


def _proposes(touched: Touched) -> bool:
    return any(function.endswith("Proposer.propose") for function in touched.functions)
