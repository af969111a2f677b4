"""How many functions a request passes through: who raises a number says why in the commit."""

from __future__ import annotations

import pytest

from tests.support.tables.step_path import Touched, measure

# What `python -m tests.support.tables.step_path` prints. `--list` names the functions.
_NUM_FUNCTIONS = {
    "RPC to queue": 214,
    "plan to forward": 164,
    "forward itself": 31,
    "forward to result": 71,
    "result to text": 152,
    "HTTP to queue": 289,
    "result to HTTP": 190,
    "decode: scheduler": 84,
    "decode: worker": 108,
    "decode: tokenizer": 25,
    "drafted step: scheduler": 92,
    "drafted step: worker": 110,
    "drafted step: tokenizer": 25,
}


@pytest.fixture(scope="module")
def stretch_to_touched() -> dict[str, Touched]:
    return measure()


def test_a_request_passes_through_so_many_functions(stretch_to_touched: dict[str, Touched]) -> None:
    num_functions = {stretch: len(touched.functions) for stretch, touched in stretch_to_touched.items()}
    assert num_functions == _NUM_FUNCTIONS


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
