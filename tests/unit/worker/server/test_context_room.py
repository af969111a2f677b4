"""A KV cache with less room than the context: refused at a cell's first start if the context was set, else reported."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import grpc
import pytest

from services.worker.models.loader import LoadedModel
from services.worker.process.exits import ExitCode
from services.worker.server.context_room import ContextRoom
from tests.support.worker.worker_runner import make_runner
from tests.support.worker.worker_service import BLOCK_SIZE, Worker, error_of

NUM_BLOCKS = 64
ROOM = NUM_BLOCKS * BLOCK_SIZE
LESS = "the KV cache holds less than the context"


def logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    names = ("request_tokens", "context_length", "whole_context")
    return [{name: vars(record)[name] for name in names} for record in caplog.records if record.getMessage() == LESS]


def context_of(loaded: LoadedModel) -> int:
    assert loaded.facts.context_length > ROOM
    return loaded.facts.context_length


@pytest.mark.parametrize(("is_set", "is_first"), [*itertools.product((False, True), repeat=2)])
async def test_only_a_context_that_was_set_must_fit_and_only_at_the_first_start(
    worker: Worker, loaded: LoadedModel, caplog: pytest.LogCaptureFixture, is_set: bool, is_first: bool
) -> None:
    context = context_of(loaded)
    worker.servicer.context_room = ContextRoom(context if is_set else None)
    caplog.set_level(logging.INFO)
    worker.open(make_runner(loaded, num_blocks=NUM_BLOCKS))
    if is_set and is_first:
        code, _, _ = await error_of(worker.attach(1, is_first_start=True))
        assert (code, worker.ended.get_nowait()) == (grpc.StatusCode.INVALID_ARGUMENT, ExitCode.REFUSED)
        assert not logged(caplog)
        return
    # Whatever it holds, the context is the same.
    assert (await worker.attach(1, is_first_start=is_first)).context_length == context
    fact = {
        "request_tokens": ROOM,
        "context_length": context,
        "whole_context": f"--kv-cache-num-blocks {context // BLOCK_SIZE}",
    }
    assert logged(caplog) == [fact]
    # It is said again only when it changes. A scheduler that starts anew finds a group that has been attached before.
    await worker.attach(2, is_first_start=True)
    assert logged(caplog) == [fact]
    await worker.attach(3, is_first_start=True, block_size=2)
    assert [each["request_tokens"] for each in logged(caplog)] == [ROOM, ROOM // 2]
    assert worker.ended.empty()


async def test_a_context_that_fits_is_taken_in_silence(
    worker: Worker, loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    context = context_of(loaded)
    worker.servicer.context_room = ContextRoom(context)
    caplog.set_level(logging.INFO)
    worker.open(make_runner(loaded, num_blocks=context // BLOCK_SIZE))
    await worker.attach(1, is_first_start=True)
    assert (logged(caplog), worker.ended.empty()) == ([], True)


def test_the_refusal_names_both_numbers_the_largest_and_what_would_hold_it(loaded: LoadedModel) -> None:
    context, runner = context_of(loaded), make_runner(loaded, num_blocks=None)
    runner.attach(block_size=16, max_num_seqs=2, max_num_batched_tokens=64)
    room = runner.room._replace(num_blocks=3)
    fault = ContextRoom(context).find_fault(runner, room, 16, is_first_start=True)
    assert fault == (
        f"--max-model-len {context} does not fit: the KV cache holds 48 tokens, so that is the largest; the worker's "
        f"--kv-cache-memory-gib 0.01 would hold {context}"
    )
