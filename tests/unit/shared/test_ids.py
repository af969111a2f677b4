"""Handles of a request's choices."""

from __future__ import annotations

from shared.ids import RequestHandle, choice_handles


def test_choices_have_consecutive_handles() -> None:
    assert choice_handles(RequestHandle(7), 3) == [7, 8, 9]
