"""No body costs more than its parse again, and none holds the interpreter: many of anything, at any depth."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial

import pytest

from services.tokenizer.http.connections import bodies as limits
from services.tokenizer.http.reading.body_readers import BodyReaders
from services.tokenizer.http.reading.parsing import parse_body
from services.tokenizer.http.reading.readers import READERS
from services.tokenizer.http.refusals import HttpError
from tests.support.tokenizer.body_costs import arguments_of, read
from tests.support.tokenizer.held_loop import MAX_HOLD_S, cpu_s, least_hold
from tests.support.tokenizer.many_values import KINDS, bodies

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
        taken_s = min(cpu_s(partial(read, reader, data)) for _ in range(3))
        assert taken_s <= MAX_HOLD_S, (reader, name)


def all_bodies() -> list[tuple[str, str, Callable[[int], bytes]]]:
    found = [(reader, *each) for reader in KINDS for each in bodies(reader)]
    assert len(found) >= 700
    return found


@pytest.mark.process
@pytest.mark.parametrize(("size", "every"), SAMPLE)
async def test_no_large_body_holds_the_interpreter(readers: BodyReaders, size: int, every: int) -> None:
    for reader, name, make in all_bodies()[::every]:
        held, _ = await least_hold(partial(read_apart, readers, reader, make(size)), read_flat_list)
        assert held <= 1, (reader, name)


def read_flat_list() -> None:
    READERS["read_detokenize_request"](parse_body(YARDSTICK))


async def read_apart(readers: BodyReaders, reader: str, data: bytes) -> None:
    """Read a body as the server does; it may be refused."""
    with suppress(HttpError):
        await readers.read(reader, arguments_of(reader), data)
