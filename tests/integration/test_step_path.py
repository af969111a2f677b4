"""The script that counts what a request passes through."""

from __future__ import annotations

from tests.support.tables.step_path import STRETCHES, measure


def test_every_stretch_of_a_request_is_found() -> None:
    stretch_to_touched = measure()
    assert tuple(stretch_to_touched) == STRETCHES
    roles = {
        "RPC to queue": {"tokenizer", "scheduler"},
        "plan to forward": {"scheduler", "worker"},
        "forward itself": {"worker"},
        "forward to result": {"worker", "scheduler"},
        "result to text": {"scheduler", "tokenizer"},
    }
    for stretch, touched in stretch_to_touched.items():
        assert {path.split("/")[1] for path in touched.files if path.startswith("services/")} == roles[stretch], stretch
