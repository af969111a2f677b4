"""Fields of direct calls beyond the prompt and its sampling: priority, cache salt, deadline, and output so far."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from lockstep.v1 import common_pb2
from services.scheduler.cell.events import ChoiceSoFar, ClientMessage, Event
from services.scheduler.core.batch.sequence import Priority
from services.scheduler.server.direct_clients import DirectClients, resolve_request
from shared.errors import DeadlinePassedError, InvalidRequestError
from shared.ids import RequestHandle
from shared.request.limits import ModelLimits
from tests.support.clients.token_client import (
    PROMPT,
    Request,
    Response,
    endless,
    error_of,
    generate_tokens,
    reason,
    seeded,
)
from tests.support.scheduler.cell_model import expected_completion
from tests.support.scheduler.engine_driver import token_bytes
from tests.support.scheduler.gated_worker import GatedWorker
from tests.support.scheduler.scheduler_shell import running_cell
from tests.support.scheduler.worker_peer import WorkerPeer

HANDLE = RequestHandle(7)
LIMITS = ModelLimits(context_length=512, logits_width=1000, num_pool_tokens=512)


def resumed(output: list[int], *, request_id: str | None = None, max_tokens: int = 9, seed: int = 0) -> Request:
    """A request that continues after the output of an earlier call."""
    request = seeded(PROMPT, request_id=request_id, max_tokens=max_tokens, seed=seed)
    request.choices_so_far.add(token_ids=output)
    return request


def violations(request: Request) -> dict[str, str]:
    """The violations of a request that must have some."""
    with pytest.raises(InvalidRequestError) as caught:
        resolve_request(HANDLE, request, LIMITS)
    return {violation.field: violation.reason for violation in caught.value.violations}


def test_a_submission_carries_the_requests_fields() -> None:
    request = seeded(PROMPT)
    request.priority = common_pb2.PRIORITY_HIGH
    request.cache_salt = "é"
    submission = resolve_request(HANDLE, request, LIMITS, time_left_s=3.5)
    assert (submission.handle, submission.prompt) == (HANDLE, token_bytes(PROMPT))
    assert (submission.priority, submission.cache_salt) == (Priority.HIGH, "é".encode())
    assert (submission.attempt, submission.choices_so_far, submission.time_left_s) == (1, (), 3.5)


def test_a_request_without_these_fields_has_normal_priority_and_an_empty_salt() -> None:
    submission = resolve_request(HANDLE, seeded(PROMPT), LIMITS)
    assert (submission.priority, submission.cache_salt, submission.time_left_s) == (Priority.NORMAL, b"", None)


def test_output_so_far_makes_a_second_attempt_that_waits_as_a_new_one() -> None:
    submission = resolve_request(HANDLE, resumed([4, 5]), LIMITS)
    assert submission.waits_as_new
    assert (submission.attempt, submission.choices_so_far) == (2, (ChoiceSoFar(token_bytes([4, 5])),))


def test_all_bad_values_are_named_together() -> None:
    request = seeded(PROMPT)
    request.priority = 9  # type: ignore[assignment]
    request.cache_salt = "x" * 65
    request.sampling.n = 9
    assert violations(request) == {
        "priority": "OUT_OF_RANGE",
        "cache_salt": "OUT_OF_RANGE",
        "sampling.n": "OUT_OF_RANGE",
    }
    assert violations(resumed([1000], max_tokens=1)) == {"choices_so_far[0].token_ids": "OUT_OF_RANGE"}
    assert violations(resumed([1, 1000])) == {"choices_so_far[0].token_ids[1]": "TOKEN_ID_OUT_OF_RANGE"}
    request = resumed([1])
    request.sampling.ClearField("seed")
    assert violations(request) == {"sampling.seed": "OUT_OF_RANGE"}


async def test_a_call_continues_after_the_output_of_an_earlier_one(tmp_path: Path) -> None:
    tokens = expected_completion(PROMPT, 5, 9)
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        completion = await generate_tokens(cell.scheduler, resumed(tokens[:4], seed=5))
    assert completion.token_ids == tokens[4:]
    assert completion.finish is not None
    assert completion.finish.usage.num_completion_tokens == 9
    assert completion.finish.usage.num_prompt_tokens == len(PROMPT)


async def test_a_call_whose_output_has_already_ended_gets_its_finish(tmp_path: Path) -> None:
    tokens = expected_completion(PROMPT, 0, 4)
    request = resumed(tokens)
    request.sampling.stop_token_ids.append(tokens[3])
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        completion = await generate_tokens(cell.scheduler, request)
    assert (completion.token_ids, completion.reason) == ([], "STOP_TOKEN")
    assert completion.finish is not None
    assert completion.finish.usage.num_completion_tokens == 4


async def test_a_continuing_call_replaces_the_call_that_it_continues(tmp_path: Path) -> None:
    tokens = expected_completion(PROMPT, 0, 500)
    worker = GatedWorker(is_open=True)
    async with running_cell(tmp_path, worker) as cell:
        await cell.wait_until_ready()
        worker.gate.clear()
        calls = [cell.scheduler.Generate(endless("same"))]
        await calls[0].read()
        for num_known in (1, 2):
            call = cell.scheduler.Generate(resumed(tokens[:num_known], request_id="same", max_tokens=500))
            assert (await call.read()).accepted.request_id == "same"
            error = await error_of(calls[-1])
            assert (error.code(), reason(error)) == (grpc.StatusCode.CANCELLED, "ABORTED_BY_CALL")
            calls.append(call)
        assert (await cell.state()).num_running + (await cell.state()).num_waiting == 1
        calls[-1].cancel()
        worker.gate.set()
        await cell.wait_until_free()


@pytest.mark.parametrize("key", ["tenant", "x-tenant-id", "x-lockstep-tenant"])
async def test_all_callers_are_one_tenant_whatever_their_metadata(tmp_path: Path, key: str) -> None:
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        usages = []
        for tenant in ("one", "another"):
            call = cell.scheduler.Generate(seeded([5] * 40, max_tokens=2), metadata=((key, tenant),))
            responses = [response async for response in call]
            usages.append(responses[-1].finish.usage.num_cached_tokens)
    assert usages == [0, 32]


async def test_prefixes_are_shared_only_under_equal_salts(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        usages = []
        for salt in ("a", "a", "b", "", ""):
            request = seeded([5] * 40, max_tokens=2)
            request.cache_salt = salt
            completion = await generate_tokens(cell.scheduler, request)
            assert completion.finish is not None
            usages.append(completion.finish.usage.num_cached_tokens)
    assert usages == [0, 32, 0, 0, 32]


async def test_the_engine_ends_a_call_whose_deadline_passed_while_it_waited(tmp_path: Path) -> None:
    worker = GatedWorker(is_open=True)
    async with running_cell(tmp_path, worker, max_num_seqs=1) as cell:
        await cell.wait_until_ready()
        worker.gate.clear()
        first = cell.scheduler.Generate(endless())
        await first.read()

        async def write(_: Response) -> None:
            pass

        # A client whose own clock has not noticed the deadline yet.
        with pytest.raises(DeadlinePassedError):
            await cell.server.direct_clients.generate(seeded([9]), write, time_left_s=0.05)
        assert (await cell.state()).num_waiting == 0
        first.cancel()
        worker.gate.set()
        await cell.wait_until_free()
    # It never reached the worker.
    assert all(len(request.enters) < 2 for request in worker.requests)
    assert sum(len(request.enters) for request in worker.requests) == 1


async def test_the_deadline_of_a_call_reaches_the_engine(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        events: list[Event] = []
        on_event = cell.server.on_event

        def spy(event: Event) -> None:
            events.append(event)
            on_event(event)

        cell.server.direct_clients = DirectClients(lambda: LIMITS, spy)
        async for _ in cell.scheduler.Generate(seeded(PROMPT, max_tokens=2), timeout=50):
            pass
        async for _ in cell.scheduler.Generate(seeded(PROMPT, max_tokens=2)):
            pass
    first, second = [event.submissions[0] for event in events if isinstance(event, ClientMessage)]
    assert first.time_left_s is not None
    # The deadline is rounded up a little on the wire.
    assert 40 < first.time_left_s < 60
    assert second.time_left_s is None


def test_output_ids_above_int32_do_not_wrap_around() -> None:
    assert violations(resumed([2**32 - 1, 2**31])) == {"choices_so_far[0].token_ids[0]": "TOKEN_ID_OUT_OF_RANGE"}


async def test_exactness_is_refused_without_exact_workers_and_promised_with_them(tmp_path: Path) -> None:
    request = seeded([1], max_tokens=3)
    request.determinism = common_pb2.DETERMINISM_EXACT
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        error = await error_of(cell.scheduler.Generate(request))
        assert (error.code(), reason(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "EXACT_UNAVAILABLE")
        assert (await cell.exchange().read()).cell_info.exact_fingerprint == ""
    worker = WorkerPeer()
    worker.response.is_exact = True
    worker.response.numerics_fingerprint = "reference"
    async with running_cell(tmp_path, worker) as cell:
        await cell.wait_until_ready()
        assert (await generate_tokens(cell.scheduler, request)).token_ids == expected_completion([1], 0, 3)
        assert (await cell.exchange().read()).cell_info.exact_fingerprint == "reference"


@pytest.mark.parametrize("is_exact", [False, True])
async def test_a_resumed_choice_reports_its_resumes_and_whether_they_were_exact(tmp_path: Path, is_exact: bool) -> None:
    worker = WorkerPeer()
    worker.response.is_exact = is_exact
    worker.response.numerics_fingerprint = "numerics"
    worker.lose_link_at = 3
    async with running_cell(tmp_path, worker) as cell:
        await cell.wait_until_ready()
        lost = await generate_tokens(cell.scheduler, seeded([1], max_tokens=9))
        plain = await generate_tokens(cell.scheduler, seeded([1], max_tokens=9))
    assert lost.finish is not None
    assert plain.finish is not None
    assert lost.finish.recovery == common_pb2.Recovery(resume_count=1, resume_exact=is_exact)
    assert not plain.finish.HasField("recovery")
    assert lost.token_ids == plain.token_ids
