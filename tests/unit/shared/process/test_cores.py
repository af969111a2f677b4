"""How many cores a process counts, inside and outside of a container with a limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.process.cores import num_usable_cores

NUM_CORES = 8


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(NUM_CORES)))


def usable(tmp_path: Path, files: dict[str, str], own: str = "0::/\n") -> int:
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "own").write_text(own)
    return num_usable_cores(tmp_path / "cgroup", tmp_path / "own")


@pytest.mark.parametrize(
    ("cpu_max", "num_cores"),
    [
        ("max 100000\n", NUM_CORES),
        ("400000 100000\n", 4),
        ("250000 100000\n", 3),
        ("10000 100000\n", 1),
        ("9900000 100000\n", NUM_CORES),
        ("", NUM_CORES),
        ("nonsense\n", NUM_CORES),
    ],
)
def test_a_limit_counts_in_whole_cores(tmp_path: Path, cpu_max: str, num_cores: int) -> None:
    assert usable(tmp_path, {"cpu.max": cpu_max}) == num_cores


def test_the_tightest_limit_around_the_process_counts(tmp_path: Path) -> None:
    files = {"pod/cpu.max": "200000 100000\n", "pod/container/cpu.max": "max 100000\n", "other/cpu.max": "1 100000\n"}
    assert usable(tmp_path, files, "0::/pod/container\n") == 2


@pytest.mark.parametrize(("quota", "num_cores"), [("300000", 3), ("-1", NUM_CORES)])
def test_version_1_has_limits_too(tmp_path: Path, quota: str, num_cores: int) -> None:
    files = {"cpu/cpu.cfs_quota_us": f"{quota}\n", "cpu/cpu.cfs_period_us": "100000\n"}
    assert usable(tmp_path, files, "3:cpu,cpuacct:/\n") == num_cores


def test_without_control_groups_all_cores_count(tmp_path: Path) -> None:
    assert num_usable_cores(tmp_path / "none", tmp_path / "neither") == NUM_CORES
