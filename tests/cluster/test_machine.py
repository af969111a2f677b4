"""A machine within this one: what it changes is its own, and it ends with all its processes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from tests.support.kubernetes.machine import ADDRESS, CGROUP, own_machine, wait_until, why_no_machine
from tests.support.system.patience import PATIENCE_S

NO_MACHINE = why_no_machine()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(NO_MACHINE), reason=NO_MACHINE)]

SETTINGS = [Path("/proc/sys") / name for name in ("vm/overcommit_memory", "kernel/panic", "net/ipv4/ip_forward")]


def settings() -> list[str]:
    return [path.read_text(encoding="ascii") for path in SETTINGS]


def cgroups() -> list[Path]:
    return [*Path("/sys/fs/cgroup").glob(CGROUP), *Path("/sys/fs/cgroup").glob(f"*/{CGROUP}")]


def addresses() -> str:
    return subprocess.check_output(["ip", "address"], text=True)


def test_what_a_machine_changes_is_its_own(tmp_path: Path) -> None:
    before = settings()
    with own_machine(tmp_path) as machine:

        def run(text: str) -> str:
            return subprocess.check_output([*machine, "sh", "-c", text], text=True)

        run("echo 7 > /proc/sys/kernel/panic && mkdir /var/lib/thing && touch /run/lockstep-test")
        assert run("cat /proc/sys/kernel/panic") == "7\n"
        assert (tmp_path / "lib" / "thing").is_dir()
        assert "cgroup.procs" in run("ls /sys/fs/cgroup /sys/fs/cgroup/*")
        assert CGROUP not in run("find /sys/fs/cgroup -maxdepth 2")
        assert cgroups()
        # This thread is in its network, and not among its mounts.
        assert ADDRESS in addresses()
        assert not Path("/run/lockstep-test").exists()
        assert str(tmp_path) not in Path("/proc/mounts").read_text(encoding="utf-8")
    assert settings() == before
    assert ADDRESS not in addresses()
    assert not cgroups()


def test_all_processes_of_a_machine_end_with_it(tmp_path: Path) -> None:
    with own_machine(tmp_path) as machine:
        # One of them leaves its session.
        process = subprocess.Popen([*machine, "sh", "-c", "setsid sleep infinity & exec sleep infinity"])
        own = psutil.Process(process.pid)
        wait_until(lambda: len(own.children(recursive=True)) == 2, "process in the background")
        inner = own.children(recursive=True)
    process.wait()
    _, alive = psutil.wait_procs(inner, timeout=PATIENCE_S)
    assert not alive
