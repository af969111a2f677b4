"""Typed turns are kept for the next conversation."""

from __future__ import annotations

from pathlib import Path

from services.cli.clients.turn_history import open_history


def test_a_turn_is_there_in_the_next_conversation_and_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "chat_history"
    for turn in ("first", "two\nlines"):
        open_history(path).append_string(turn)

    assert list(open_history(path).load_history_strings()) == ["two\nlines", "first"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o077 == 0


def test_what_is_no_text_is_not_kept(tmp_path: Path) -> None:
    history = open_history(tmp_path / "chat_history")
    history.append_string("caf\udce9")
    assert history.get_strings() == ["caf\udce9"]
    history.append_string("next")
    assert list(open_history(tmp_path / "chat_history").load_history_strings()) == ["next"]


def test_where_no_file_can_be_a_conversation_has_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "chat_history", tmp_path, None):
        history = open_history(path)
        history.append_string("turn")
        assert history.get_strings() == ["turn"]
