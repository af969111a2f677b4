"""Where compiled kernels lie."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from services.worker.process.private_home import make_home_private


def test_a_home_that_is_missing_is_made_for_its_user_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    make_home_private()
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o700


def test_a_home_that_exists_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    tmp_path.chmod(0o750)
    make_home_private()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o750


def test_a_home_that_cannot_be_made_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "missing" / "home"))
    make_home_private()
    assert not (tmp_path / "missing").exists()
