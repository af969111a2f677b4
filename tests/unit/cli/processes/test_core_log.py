"""What gRPC's core writes to the stderr of a service under a launcher."""

from __future__ import annotations

import asyncio
import logging
import sys

import pytest

from services.cli.processes.core_log import CoreLog
from services.cli.processes.service_command import ServiceCommand
from services.cli.processes.service_process import ServiceProcess

FULL = b"E1126 21:05:23.372442    3789 posix_engine_listener.cc:164] File descriptor limit reached. Retrying."
HANDSHAKE = b"I1126 20:11:42.358534 29285 ssl_transport_security.cc:2563] Handshake failed"
OTHERS = [
    b"F1126 20:11:42.358534 29285 call.cc:1] Check failed: is_open",
    b"    @ 0x7f1 absl::Abort()",
    b"[W1126 20:11:42.358 socket.cpp:752] [c10d] a line of torch",
    b"20:11:42 INFO worker: serving",
    b"",
]


def test_each_place_is_logged_three_times_a_minute_and_then_counted(caplog: pytest.LogCaptureFixture) -> None:
    times = [*(100.0 + second for second in range(10)), 159.0, 159.5, 160.0, 161.0]
    seconds = iter(times)
    log = CoreLog("worker 0.1", lambda: next(seconds))
    with caplog.at_level(logging.INFO):
        assert all(log.try_add(FULL) for _ in range(10))
        assert all(log.try_add(line) for line in (FULL, HANDSHAKE, FULL, FULL))
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert {record.getMessage() for record in errors} == {"gRPC: File descriptor limit reached. Retrying."}
    # Three of the first eleven, and those of the next minute.
    assert [vars(record).get("num_suppressed") for record in errors] == [None, None, None, 8, None]
    assert {(vars(record)["process_name"], vars(record)["source"]) for record in errors} == {
        ("worker 0.1", "posix_engine_listener.cc:164")
    }
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.INFO] == [
        "gRPC: Handshake failed"
    ]


@pytest.mark.process
async def test_other_lines_are_forwarded_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    output = b"\n".join([OTHERS[0], *[FULL] * 9, *OTHERS[1:], b"the end"])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", f"import os; os.write(1, {output!r})"), stdout=asyncio.subprocess.PIPE
    )
    lines: list[bytes] = []
    service = ServiceProcess(ServiceCommand("worker", (), "unix:/nowhere", domain="worker"), process, lines.append)
    await service.wait()
    await service.stop(0.0, asyncio.Event())
    assert lines == [*OTHERS, b"the end"]
    assert sum("File descriptor limit" in record.getMessage() for record in caplog.records) == 3
