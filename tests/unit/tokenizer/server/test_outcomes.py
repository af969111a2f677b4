"""Every way in which a call can end: the counters agree with what clients saw."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.answer.request_totals import RequestTotals
from shared.errors import NumericError
from shared.network import rpc
from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.tokenizer.exchange_peer import Row, make_end, make_error_end
from tests.support.tokenizer.http_client import HttpService, run_http_service
from tests.support.tokenizer.tokenizer_service import Service, read_rest, run_tokenizer_service

HELLO = tokenizer_pb2.GenerateRequest(text="The fox")
MAX_TOKENS = common_pb2.FINISH_REASON_MAX_TOKENS
UNPARSABLE = b"\x0a\x7fx"


class Totals(RequestTotals):
    """Totals for whose next failure a test can wait."""

    def __init__(self) -> None:
        super().__init__()
        self._has_failure = asyncio.Event()

    def count_failure(self, reason: str | None) -> None:
        super().count_failure(reason)
        self._has_failure.set()

    async def until_failed(self, num_calls: int) -> None:
        """Wait until this many calls have failed: a handler ends after its client's call."""
        while sum(self.num_by_failure.values()) < num_calls:
            await self._has_failure.wait()
            self._has_failure.clear()


@pytest.fixture
def totals(monkeypatch: pytest.MonkeyPatch) -> Totals:
    """What the service under test counts."""
    counted = Totals()
    monkeypatch.setattr("services.tokenizer.service.RequestTotals", lambda: counted)
    return counted


@pytest.fixture
async def service(totals: Totals, tmp_path: Path, model_dir: Path) -> AsyncIterator[Service]:
    """A linked service."""
    async with run_tokenizer_service(model_dir, tmp_path) as running:
        await running.link()
        yield running


@pytest.fixture
async def http(totals: Totals, tmp_path: Path, model_dir: Path) -> AsyncIterator[HttpService]:
    """A linked service with its HTTP API."""
    async with run_http_service(model_dir, tmp_path) as running:
        yield running


def failures(totals: Totals) -> dict[str, int]:
    """How many calls failed, by reason."""
    return {reason: count for reason, count in totals.num_by_failure.items() if count}


async def failure_seen(call: Any) -> str:
    """How a client sees the end of a call that must fail: by its reason, or by the code that its library chose."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_rest(call)
    return reason_of(status_from_rpc_error(caught.value)) or caught.value.code().name


async def test_every_deadline_is_counted_and_logged_as_one(
    service: Service, totals: Totals, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    calls = [service.stub.Generate(HELLO, timeout=0.5 + 0.013 * number) for number in range(40)]
    seen = Counter([await failure_seen(call) for call in calls])
    assert seen.total() == seen["DEADLINE_EXCEEDED"] + seen["DEADLINE_PASSED"] == 40
    await totals.until_failed(40)
    assert failures(totals) == {"DEADLINE_PASSED": 40}
    outcomes = [record.outcome for record in caplog.records if record.message == "request ended"]  # type: ignore[attr-defined]
    assert outcomes == ["DEADLINE_PASSED"] * 40


async def test_each_end_of_a_call_is_counted_as_its_client_sees_it(service: Service, totals: Totals) -> None:
    seen: Counter[str] = Counter()
    call, submit = await service.begin(HELLO)
    service.peer.send(Row(submit.handle, 0, [70]), ends=[make_end(submit.handle, MAX_TOKENS, 1)])
    await read_rest(call)
    seen[await failure_seen(service.stub.Generate(tokenizer_pb2.GenerateRequest()))] += 1
    call, submit = await service.begin(HELLO)
    service.peer.send(ends=[make_error_end(submit.handle, NumericError("not finite"))])
    seen[await failure_seen(call)] += 1
    # Long before its deadline.
    call = service.stub.Generate(HELLO, timeout=300.0)
    await call.read()
    call.cancel()
    seen["CANCELLED"] += 1
    for method in ("Generate", "Complete", "Tokenize"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.channel.unary_unary(f"/lockstep.v1.TokenizerService/{method}")(UNPARSABLE)
        reason = reason_of(status_from_rpc_error(caught.value))
        assert reason == "INVALID_REQUEST"
        seen[reason] += method != "Tokenize"
    await totals.until_failed(seen.total())
    assert failures(totals) == dict(seen)
    assert totals.num_by_finish[MAX_TOKENS] == 1


async def test_calls_above_the_limit_are_counted(
    totals: Totals, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = rpc.ServerLimits

    def make_limits(**settings: Any) -> rpc.ServerLimits:
        return limits(max_open_calls=2, **settings)

    monkeypatch.setattr("services.tokenizer.service.ServerLimits", make_limits)
    async with run_tokenizer_service(model_dir, tmp_path) as service:
        await service.link()
        calls: list[Any] = []
        # The server may not have noticed yet that the watch of its health is over.
        while not totals.num_by_failure["QUEUE_FULL"]:
            calls.append(service.stub.Generate(HELLO))
            await asyncio.wait([asyncio.ensure_future(calls[-1].read())])
        assert await failure_seen(calls.pop()) == "QUEUE_FULL"
        for call in calls:
            call.cancel()
        await totals.until_failed(1 + len(calls))
    assert calls
    assert failures(totals) == {"CANCELLED": len(calls), "QUEUE_FULL": 1}


async def test_completions_over_http_are_counted_too(http: HttpService, totals: Totals) -> None:
    path = "/v1/completions"
    malformed = await http.ask("POST", path, data=b"{", headers={"Content-Type": "application/json"})
    wrong = await http.post(path, {"model": "tiny", "prompt": "x", "temperature": -1})
    unknown = await http.post(path, {"model": "another", "prompt": "x"})
    late = await http.post(path, {"model": "tiny", "prompt": "x", "timeout_s": 0.3})
    answers = [malformed, wrong, unknown, late]
    assert [answer.status for answer in answers] == [400, 400, 404, 504]
    await totals.until_failed(4)
    assert failures(totals) == {"INVALID_REQUEST": 2, "MODEL_NOT_FOUND": 1, "DEADLINE_PASSED": 1}
