"""A machine within this one, for a node: its own network, mounts and processes. Nothing of the host is changed.

`/run`, `/var/lib` and `/var/log` are its own, and what the kubelet writes to the kernel's settings goes to files. Its
cgroups are the host's, but below one that is named after this process and removed at the end.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.support.kubernetes.control_plane import find_binary, missing_binaries
from tests.support.system.patience import PATIENCE_S
from tests.support.system.processes import program_command

ADDRESS, DNS_ADDRESS = "10.96.0.1", "10.96.0.10"
"""The node's address, where the API server is also as a Service, and that of the DNS server."""

CGROUP = f"lockstep-test-{os.getpid()}"
"""In each of the host's hierarchies, the cgroup that is the machine's root."""

_NAMESPACES = ("unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
_CGROUPS = Path("/sys/fs/cgroup")
_NEW_NETWORK = 0x40000000
_POLL_S = 0.2

# What a machine needs of this one.
_TRY = """
mount -t tmpfs tmpfs /run && touch /run/file && mount --bind /run/file /proc/sys/kernel/panic && ip link set lo up
"""

# The settings are those that the kubelet asks for.
_BEGIN = f"""
set -e
cd "$1"
mkdir -p lib log sys
for each in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
    kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000
do
    [ -e "/proc/sys/${{each%=*}}" ] || continue
    file=sys/$(echo "${{each%=*}}" | tr / .)
    echo "${{each#*=}}" > "$file"
    mount --bind "$file" "/proc/sys/${{each%=*}}"
done
for each in /sys/fs/cgroup /sys/fs/cgroup/*
do
    # A hierarchy, of version 1 or 2.
    [ -e "$each/cgroup.procs" ] && [ ! -L "$each" ] || continue
    mkdir "$each/{CGROUP}"
    for file in cpuset.cpus cpuset.mems
    do
        [ ! -e "$each/$file" ] || cat "$each/$file" > "$each/{CGROUP}/$file"
    done
    mount --bind "$each/{CGROUP}" "$each"
done
mount --bind lib /var/lib
mount --bind log /var/log
mount -t tmpfs tmpfs /run
ip link set lo up
ip address add {ADDRESS}/32 dev lo
ip address add {DNS_ADDRESS}/32 dev lo
echo 1 > /proc/sys/net/ipv4/ip_forward
touch is-ready
# Not in the shell's place: it waits for the processes of parents that have ended.
sleep infinity
"""


def why_no_machine() -> str:
    """Why there can be none here; empty if there can. Namespaces are tried, and end at once."""
    if missing := missing_binaries("unshare", "nsenter", "mount", "ip"):
        return missing
    if os.geteuid() != 0:
        return "not root"
    if subprocess.run([*_NAMESPACES, "sh", "-c", _TRY], capture_output=True, check=False).returncode:
        return "no namespaces of networks, mounts and processes"
    folder = next(_CGROUPS.glob("memory"), _CGROUPS)
    return "" if os.access(folder, os.W_OK) else "cgroups that cannot be written"


@contextmanager
def own_machine(folder: Path) -> Iterator[Sequence[str]]:
    """Begin a machine and bring this thread into its network; yields the prefix of commands that run in it.

    What this thread starts is also in its network. At the end all processes of the machine are killed.
    """
    outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    command = [*_NAMESPACES[1:], "sh", "-c", _BEGIN, "sh", str(folder)]
    process = subprocess.Popen(program_command(str(find_binary("unshare")), *command))
    try:
        wait_until(lambda: process.poll() is not None or (folder / "is-ready").exists(), "a machine")
        assert process.poll() is None, "the machine has ended"
        (init,) = psutil.Process(process.pid).children()
        inside = os.open(f"/proc/{init.pid}/ns/net", os.O_RDONLY)
        _enter_network(inside)
        os.close(inside)
        yield (str(find_binary("nsenter")), f"--target={init.pid}", "--net", "--mount", "--pid", "--")
    finally:
        _enter_network(outside)
        os.close(outside)
        process.kill()
        process.wait()
        wait_until(_try_remove_cgroups, "cgroups without processes")


def wait_until(is_true: Callable[[], object], what: str) -> None:
    """Wait until something is true; fails after five minutes."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline, f"there is no {what}"
        time.sleep(_POLL_S)


def _enter_network(descriptor: int) -> None:
    # Source: setns(2). Python has it from 3.12 on.
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(descriptor, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "setns")


def _try_remove_cgroups() -> bool:
    """Remove the cgroups of containers; returns False if one has a process that is about to end."""
    for root in [*_CGROUPS.glob(CGROUP), *_CGROUPS.glob(f"*/{CGROUP}")]:
        # The inner ones first. Their files are the kernel's.
        for path, _, _ in os.walk(root, topdown=False):
            try:
                Path(path).rmdir()
            except OSError:
                return False
    return True
