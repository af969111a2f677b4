"""Writing to stderr never waits for its reader."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from shared.process.line_writer import MAX_WAITING_BYTES, ErrorStream, LineWriter
from tests.support.system.pipes import full_pipe, read_lines
from tests.support.system.processes import module_environment

WAIT_S = 60.0

# A process that logs much more than a pipe and the buffer can hold, and ends with an exception.
TALKER = """
import logging
from shared.process.logging import configure_logging
configure_logging(service="talker", level="INFO", log_format="text")
for number in range(4000):
    logging.info("line %d %s", number, "x" * 1000)
raise SystemExit("the end")
"""

TALKING = [sys.executable, "-c", TALKER]


def make_writer(fd: int) -> LineWriter:
    return LineWriter(fd, lambda num_lines: f"{num_lines} lost")


def test_lines_are_written_in_order_and_drained() -> None:
    reader, fd = os.pipe()
    writer = make_writer(fd)
    for number in range(1000):
        writer.write(f"{number}\n".encode())
    writer.drain(WAIT_S)
    os.close(fd)
    assert read_lines(reader) == [str(number) for number in range(1000)]
    os.close(reader)


def test_lines_that_do_not_fit_are_dropped_and_counted_in_place() -> None:
    line = b"x" * 1023 + b"\n"
    num_kept = MAX_WAITING_BYTES // len(line)
    with full_pipe() as (reader, fd):
        writer = make_writer(fd)
        # The writing thread may already have taken the first line, and be blocked on it.
        for _ in range(num_kept + 100):
            writer.write(line)
        lines: list[str] = []
        with open(reader, encoding="utf-8", closefd=False) as file:
            while not (lines and lines[-1].endswith("lost")):
                lines += [text for text in [file.readline().strip()] if text]
            writer.write(b"after\n")
            assert file.readline() == "after\n"
    *kept, loss = lines
    assert len(kept) + int(loss.split()[0]) == num_kept + 100
    assert len(kept) in (num_kept, num_kept + 1)


def test_lines_written_without_a_reader_are_counted_too() -> None:
    reader, fd = os.pipe()
    writer = make_writer(fd)
    os.close(reader)
    for _ in range(3):
        writer.write(b"lost\n")
    writer.drain(WAIT_S)
    reader, new_fd = os.pipe()
    os.dup2(new_fd, fd)
    writer.write(b"again\n")
    writer.drain(WAIT_S)
    for number in (fd, new_fd):
        os.close(number)
    assert read_lines(reader) == ["3 lost", "again"]
    os.close(reader)


def test_a_status_stays_below_the_lines_until_it_is_cleared() -> None:
    reader, fd = os.pipe()
    writer = make_writer(fd)
    # One at a time: otherwise a status might be replaced before the writer has shown it.
    writer.show("50 %")
    writer.drain(WAIT_S)
    writer.write(b"a line\n")
    writer.drain(WAIT_S)
    writer.show("")
    writer.drain(WAIT_S)
    assert os.read(reader, 100) == b"50 %" + b"\r\x1b[Ka line\n50 %" + b"\r\x1b[K"
    for number in (reader, fd):
        os.close(number)


def test_a_stream_writes_whole_lines_and_flushed_text() -> None:
    reader, fd = os.pipe()
    writer = make_writer(fd)
    stream = ErrorStream(writer, fd)
    stream.write("a ")
    stream.write("line\nand ")
    writer.drain(WAIT_S)
    assert os.read(reader, 100) == b"a line\n"
    stream.flush()
    writer.drain(WAIT_S)
    assert os.read(reader, 100) == b"and "
    assert (stream.isatty(), stream.fileno()) == (False, fd)
    for number in (reader, fd):
        os.close(number)


def test_a_file_made_non_blocking_by_another_process_loses_nothing() -> None:
    with full_pipe() as (reader, fd):
        os.set_blocking(fd, False)
        writer = make_writer(fd)
        writer.write(b"late\n")
        with open(reader, encoding="utf-8", closefd=False) as file:
            while not (line := file.readline().strip()):
                pass
    assert line == "late"


@pytest.mark.process
@pytest.mark.parametrize("is_closed", [False, True])
def test_a_process_whose_stderr_is_not_read_ends(is_closed: bool) -> None:
    with full_pipe() as (reader, fd):
        process = subprocess.Popen(TALKING, stderr=fd, env=module_environment())
        if is_closed:
            os.close(reader)
        assert process.wait(WAIT_S) == 1


@pytest.mark.process
def test_a_process_without_stderr_ends() -> None:
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *TALKING]
    assert subprocess.run(command, env=module_environment(), timeout=WAIT_S, check=False).returncode == 1


@pytest.mark.process
def test_the_last_line_of_a_process_is_written_whole() -> None:
    result = subprocess.run(TALKING, stderr=subprocess.PIPE, env=module_environment(), check=False)
    *records, last = result.stderr.decode().splitlines()
    assert last == "the end"
    numbers = [int(match[1]) for record in records if (match := re.search(r"line (\d+) x+$", record))]
    losses = [int(match[1]) for record in records if (match := re.search(r"not be written num_lines=(\d+)$", record))]
    assert numbers == sorted(numbers)
    assert len(numbers) + sum(losses) == 4000
