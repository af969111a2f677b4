"""No body costs more than its parse again, and none holds the interpreter: many of anything, at any depth."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable

import pytest

from services.tokenizer.http.connections import bodies as limits
from services.tokenizer.http.reading.body_readers import BodyReaders
from services.tokenizer.http.reading.parsing import parse_body
from services.tokenizer.http.reading.readers import READERS
from services.tokenizer.http.refusals import HttpError
from tests.support.tokenizer.body_costs import arguments_of, read
from tests.support.tokenizer.many_values import KINDS, bodies

MAX_HOLD_S = 0.05
YARDSTICK = b'{"tokens": [' + b"12345," * 680_000 + b"0]}"
# What a process has beside the body, and what its pages round up to.
SLACK_BYTES, SLACK_S = 24 * 2**20, 0.05
MIB = 2**20
# A body that is large, and one that is as large as any.
SAMPLE = [pytest.param(MIB // 2, 131, id="sample"), pytest.param(4 * MIB, 1, id="all", marks=pytest.mark.proof)]


@pytest.fixture
async def readers() -> AsyncIterator[BodyReaders]:
    running = BodyReaders()
    yield running
    running.close()


# Those with as many objects as are read; each takes seconds.
FULL = [pytest.param("full", 47, id="full-sample"), pytest.param("full", 1, id="full", marks=pytest.mark.proof)]


@pytest.mark.process
@pytest.mark.parametrize(("size", "every"), [*SAMPLE, *FULL])
def test_reading_takes_at_most_the_parse_again_and_linear_time(size: int | str, every: int) -> None:
    command = [sys.executable, "-m", "tests.support.tokenizer.body_costs", str(size), str(every)]
    paths = {"PYTHONPATH": ":".join(sys.path)}
    costs = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, env=paths).stdout)
    assert len(costs) >= (2 if size == "full" else 6)
    assert not [each for each in costs if each["read"] > 2 * each["parsed"] + SLACK_BYTES]
    assert not [each for each in costs if each["whole_s"] > 3 * each["half_s"] + SLACK_S]


@pytest.mark.parametrize("every", [pytest.param(13, id="sample"), pytest.param(1, id="all", marks=pytest.mark.proof)])
def test_a_body_that_is_read_on_the_loop_holds_it_shortly(every: int) -> None:
    for reader, name, make in all_bodies()[::every]:
        data = make(limits._MAX_BYTES_ON_LOOP)
        # What disturbs a measurement disturbs one of them.
        taken_s = min(cpu_s(reader, data) for _ in range(3))
        assert taken_s <= MAX_HOLD_S, (reader, name)


def all_bodies() -> list[tuple[str, str, Callable[[int], bytes]]]:
    found = [(reader, *each) for reader in KINDS for each in bodies(reader)]
    assert len(found) >= 700
    return found


def cpu_s(reader: str, data: bytes) -> float:
    began = time.process_time()
    read(reader, data)
    return time.process_time() - began


@pytest.mark.process
@pytest.mark.parametrize(("size", "every"), SAMPLE)
async def test_no_large_body_holds_the_interpreter(readers: BodyReaders, size: int, every: int) -> None:
    began = time.process_time()
    READERS["read_detokenize_request"](parse_body(YARDSTICK))
    allowed_s = max(MAX_HOLD_S, 2 * (time.process_time() - began))
    for reader, name, make in all_bodies()[::every]:
        assert await longest_hold(readers, reader, make(size)) <= allowed_s, (reader, name)


async def longest_hold(readers: BodyReaders, reader: str, data: bytes) -> float:
    """The CPU seconds of this process between two turns of its loop while a body is read, at most."""
    reading = asyncio.create_task(readers.read(reader, arguments_of(reader), data))
    longest, last = 0.0, time.process_time()
    while not reading.done():
        await asyncio.wait([reading], timeout=0.001)
        now = time.process_time()
        longest, last = max(longest, now - last), now
    error = reading.exception()
    assert error is None or isinstance(error, HttpError)
    return longest
