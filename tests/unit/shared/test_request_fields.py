"""What both doors of a cell read from a request. The table of bad values is the one of `limits`."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from lockstep.v1 import common_pb2, scheduler_pb2
from shared.errors import (
    ContextExceededError,
    InvalidRequestError,
    KvCapacityExceededError,
    PromptTooLongError,
    ServiceError,
    Violation,
)
from shared.limits import DEFAULT_MAX_TOKENS, ModelLimits, SamplingParams
from shared.request_fields import (
    MAX_TIME_LEFT_S,
    raise_violations,
    read_cache_salt,
    read_output_token_ids,
    read_priority,
    read_prompt_token_ids,
    read_request_id,
    read_sampling,
    read_time_left,
    resolve_max_tokens,
)

LIMITS = ModelLimits(context_length=100, logits_width=50, num_pool_tokens=80)


def test_an_absent_id_is_drawn_and_a_given_one_stays() -> None:
    violations: list[Violation] = []
    first, second = read_request_id(None, violations), read_request_id(None, violations)
    assert first != second
    assert re.fullmatch("[0-9a-f]{32}", first)
    assert read_request_id("mine_1-2", violations) == "mine_1-2"
    assert violations == []


@pytest.mark.parametrize("request_id", ["", "a b", "a\n", "é", "x" * 65])
def test_an_id_that_nobody_may_have_is_named(request_id: str) -> None:
    violations: list[Violation] = []
    read_request_id(request_id, violations)
    assert [violation.field for violation in violations] == ["request_id"]


@pytest.mark.parametrize("token_id", [50, 2**31 - 1, 2**31, 2**31 + 5, 2**32 - 1])
def test_an_id_that_would_be_another_as_int32_is_named(token_id: int) -> None:
    violations: list[Violation] = []
    read_prompt_token_ids([1, token_id, 2], LIMITS, violations, field="ids")
    assert [(violation.field, violation.reason) for violation in violations] == [("ids[1]", "TOKEN_ID_OUT_OF_RANGE")]


def test_a_prompt_is_looked_at_only_when_its_length_is_right() -> None:
    with pytest.raises(PromptTooLongError):
        read_prompt_token_ids([2**32 - 1] * 100, LIMITS, [], field="ids")
    violations: list[Violation] = []
    read_prompt_token_ids([], LIMITS, violations, field="ids")
    assert [violation.reason for violation in violations] == ["PROMPT_EMPTY"]


def test_a_good_prompt_comes_back() -> None:
    violations: list[Violation] = []
    prompt = read_prompt_token_ids([1, 49] * 40, LIMITS, violations, field="ids")
    assert (prompt.tolist(), prompt.dtype, violations) == ([1, 49] * 40, np.dtype(np.uint32), [])


def test_absent_sampling_gets_defaults_and_a_drawn_seed() -> None:
    violations: list[Violation] = []
    first, second = [read_sampling(common_pb2.SamplingParams(), LIMITS, violations) for _ in range(2)]
    assert first == SamplingParams(max_tokens=1, seed=first.seed)
    assert first.seed != second.seed
    assert violations == []


def test_a_zero_that_was_given_is_no_absence() -> None:
    sampling = common_pb2.SamplingParams(max_tokens=0, temperature=0, top_p=0, seed=0)
    violations: list[Violation] = []
    params = read_sampling(sampling, LIMITS, violations)
    assert (params.temperature, params.seed) == (0.0, 0)
    assert {violation.field for violation in violations} == {"sampling.max_tokens", "sampling.top_p"}
    with pytest.raises(InvalidRequestError):
        raise_violations(violations)


def test_absent_max_tokens_is_the_room_that_is_left() -> None:
    params = SamplingParams(max_tokens=1)
    wide = ModelLimits(context_length=100_000, logits_width=50, num_pool_tokens=100_000)
    resolved = [resolve_max_tokens(params, 30, limits, has_max_tokens=False) for limits in (LIMITS, wide)]
    assert [params.max_tokens for params in resolved] == [50, DEFAULT_MAX_TOKENS]
    assert resolve_max_tokens(params, 30, LIMITS, has_max_tokens=True) == params


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "error"),
    [(60, 41, ContextExceededError), (60, 21, KvCapacityExceededError), (80, None, KvCapacityExceededError)],
)
def test_what_can_never_fit_is_refused(
    num_prompt_tokens: int, max_tokens: int | None, error: type[ServiceError]
) -> None:
    params = SamplingParams(max_tokens=max_tokens or 1)
    with pytest.raises(error):
        resolve_max_tokens(params, num_prompt_tokens, LIMITS, has_max_tokens=max_tokens is not None)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (common_pb2.PRIORITY_UNSPECIFIED, common_pb2.PRIORITY_NORMAL),
        (common_pb2.PRIORITY_HIGH, common_pb2.PRIORITY_HIGH),
        (common_pb2.PRIORITY_NORMAL, common_pb2.PRIORITY_NORMAL),
        (common_pb2.PRIORITY_LOW, common_pb2.PRIORITY_LOW),
    ],
)
def test_a_request_is_of_normal_urgency_unless_it_says(given: common_pb2.Priority, meant: common_pb2.Priority) -> None:
    violations: list[Violation] = []
    assert read_priority(given, violations) == meant
    assert violations == []


@pytest.mark.parametrize("number", [-1, 4, 2**31 - 1])
def test_a_priority_that_nobody_knows_is_named(number: int) -> None:
    # Enums are open on the wire: any number may come.
    request = scheduler_pb2.SchedulerServiceGenerateRequest(priority=number)  # type: ignore[arg-type]
    violations: list[Violation] = []
    read_priority(request.priority, violations)
    assert [(violation.field, violation.reason) for violation in violations] == [("priority", "OUT_OF_RANGE")]


def test_a_cache_salt_is_measured_in_bytes() -> None:
    violations: list[Violation] = []
    assert read_cache_salt("", violations) == b""
    assert read_cache_salt("é" * 32, violations) == "é".encode() * 32
    assert violations == []
    read_cache_salt("é" * 32 + "x", violations)
    assert [(violation.field, violation.reason) for violation in violations] == [("cache_salt", "OUT_OF_RANGE")]


def read_output(token_ids: list[int], **sampling: Any) -> tuple[list[int], list[tuple[str, str]]]:
    """What is read of an output so far, and the violations."""
    violations: list[Violation] = []
    output = read_output_token_ids(token_ids, common_pb2.SamplingParams(**sampling), LIMITS, violations)
    return output.tolist(), [(violation.field, violation.reason) for violation in violations]


def test_an_output_so_far_comes_with_the_limit_and_the_seed_of_the_call_it_is_from() -> None:
    assert read_output([4, 5], max_tokens=3, seed=0) == ([4, 5], [])
    assert read_output([]) == ([], [])
    _, violations = read_output([4], max_tokens=3)
    assert violations == [("sampling.seed", "OUT_OF_RANGE")]
    _, violations = read_output([4], seed=0)
    assert violations == [("sampling.max_tokens", "OUT_OF_RANGE")]


def test_an_output_so_far_is_short_of_the_limit() -> None:
    _, violations = read_output([4] * 3, max_tokens=3, seed=0)
    assert violations == [("output_token_ids", "OUT_OF_RANGE")]


@pytest.mark.parametrize("token_id", [50, 2**31, 2**32 - 1])
def test_an_output_so_far_has_the_models_ids(token_id: int) -> None:
    _, violations = read_output([4, token_id], max_tokens=9, seed=0)
    assert violations == [("output_token_ids[1]", "TOKEN_ID_OUT_OF_RANGE")]


def test_a_caller_that_waits_for_ever_has_no_deadline() -> None:
    assert read_time_left(None) is None
    assert read_time_left(9e9) is None
    assert read_time_left(MAX_TIME_LEFT_S) == MAX_TIME_LEFT_S
    assert read_time_left(0.0) == 0.0
