"""What a launcher and a process that waits say to each other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.process.handover import TAKES, WAITS, encode_flags, wait_for_flags
from tests.support.system.patience import PATIENCE_S
from tests.support.system.processes import ROOT, module_environment

ECHO = """
import os, sys
from shared.process.handover import take_link, wait_for_flags
flags = wait_for_flags(take_link())
print([os.fsencode(flag) for flag in flags], sys.stdin.read() == "")
"""

# What a command line may hold: any bytes but a zero.
ARGUMENTS = st.binary(max_size=20).map(lambda data: os.fsdecode(data.replace(b"\0", b"\n")))


@given(st.lists(ARGUMENTS, max_size=5))
def test_flags_arrive_as_they_would_in_a_command_line(flags: list[str]) -> None:
    launcher, process = socket.socketpair()
    with launcher:
        launcher.sendall(encode_flags(flags))
        assert wait_for_flags(process) == flags
        assert launcher.recv(9) == WAITS + TAKES


@given(st.lists(ARGUMENTS, max_size=2), st.data())
def test_a_launcher_that_ends_before_it_has_said_all_flags_starts_nothing(
    flags: list[str], data: st.DataObject
) -> None:
    line = encode_flags(flags)
    said = line[: data.draw(st.integers(0, len(line) - 2))]
    launcher, process = socket.socketpair()
    launcher.sendall(said)
    launcher.close()
    assert wait_for_flags(process) is None


def test_a_launcher_that_leaves_once_it_has_said_all_starts_a_service() -> None:
    launcher, process = socket.socketpair()
    launcher.sendall(encode_flags(["--listen=unix:/a"]))
    launcher.close()
    assert wait_for_flags(process) == ["--listen=unix:/a"]


@pytest.mark.process
def test_a_process_has_an_empty_stdin_and_the_flags_bytes() -> None:
    launcher, other = socket.socketpair()
    with launcher, other:
        launcher.sendall(encode_flags(["--model-dir=/m/\udcff", "ä b"]))
        run = subprocess.run(
            [sys.executable, "-c", ECHO],
            stdin=other.fileno(),
            cwd=ROOT,
            env=module_environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
    assert run.stdout == f"{[b'--model-dir=/m/' + bytes([255]), 'ä b'.encode()]} True\n"
