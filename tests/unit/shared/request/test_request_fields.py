"""What both services of a cell read from a request. The table of bad values is that of `limits`."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from lockstep.v1 import common_pb2, scheduler_pb2
from shared.errors import (
    ContextExceededError,
    ExactUnavailableError,
    InvalidRequestError,
    KvCapacityExceededError,
    PromptTooLongError,
    ServiceError,
    Violation,
)
from shared.request.limits import ModelLimits
from shared.request.request_fields import (
    MAX_TIME_LEFT_S,
    check_exactness,
    raise_violations,
    read_cache_salt,
    read_choices_so_far,
    read_determinism,
    read_num_choices,
    read_priority,
    read_prompt_token_ids,
    read_request_id,
    read_sampling,
    read_time_left,
    resolve_max_tokens,
)
from shared.request.sampling_params import DEFAULT_MAX_TOKENS, SamplingOptions, SamplingParams
from tests.support.clients.every_option import unset_options

Choice = scheduler_pb2.ChoiceSoFar
LIMITS = ModelLimits(context_length=100, logits_width=50, num_pool_tokens=80)


def test_an_absent_id_is_drawn_and_a_given_one_is_kept() -> None:
    violations: list[Violation] = []
    first, second = read_request_id(None, violations), read_request_id(None, violations)
    assert first != second
    assert re.fullmatch("[0-9a-f]{32}", first)
    assert read_request_id("mine_1-2", violations) == "mine_1-2"
    assert violations == []


@pytest.mark.parametrize("request_id", ["", "a b", "a\n", "é", "x" * 65])
def test_an_invalid_id_is_named(request_id: str) -> None:
    violations: list[Violation] = []
    read_request_id(request_id, violations)
    assert [violation.field for violation in violations] == ["request_id"]


@pytest.mark.parametrize("token_id", [50, 2**31 - 1, 2**31, 2**31 + 5, 2**32 - 1])
def test_a_token_id_above_int32_is_named(token_id: int) -> None:
    violations: list[Violation] = []
    read_prompt_token_ids([1, token_id, 2], LIMITS, violations, field="ids")
    assert [(violation.field, violation.reason) for violation in violations] == [("ids[1]", "TOKEN_ID_OUT_OF_RANGE")]


def test_a_prompts_tokens_are_only_checked_if_its_length_is_valid() -> None:
    with pytest.raises(PromptTooLongError):
        read_prompt_token_ids([2**32 - 1] * 100, LIMITS, [], field="ids")
    violations: list[Violation] = []
    read_prompt_token_ids([], LIMITS, violations, field="ids")
    assert [violation.reason for violation in violations] == ["PROMPT_EMPTY"]


def test_a_valid_prompt_is_returned() -> None:
    violations: list[Violation] = []
    prompt = read_prompt_token_ids([1, 49] * 40, LIMITS, violations, field="ids")
    assert (prompt.tolist(), prompt.dtype, violations) == ([1, 49] * 40, np.dtype(np.uint32), [])


def test_absent_sampling_gets_defaults_and_a_drawn_seed() -> None:
    violations: list[Violation] = []
    first, second = [read_sampling(common_pb2.SamplingParams(), LIMITS, violations) for _ in range(2)]
    assert first == SamplingParams(max_tokens=DEFAULT_MAX_TOKENS, seed=first.seed)
    assert first.seed != second.seed
    assert violations == []


def read(defaults: common_pb2.SamplingParams | None = None, **sampling: Any) -> SamplingParams:
    """Read valid sampling parameters."""
    violations: list[Violation] = []
    message = common_pb2.SamplingParams(**{"seed": 0, **sampling})
    params = read_sampling(message, LIMITS, violations, defaults=defaults)
    assert violations == []
    return params


def test_every_option_is_read() -> None:
    params = read(
        max_tokens=9,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=0.5,
        logit_bias={7: 2.0, 3: -100.0},
        bad_words=[{"token_ids": [1, 2]}, {"token_ids": [3]}],
        min_tokens=4,
        num_logprobs=5,
        num_prompt_logprobs=0,
        allowed_token_ids=[9, 4],
        logprob_token_ids=[8, 2, 8],
    )
    assert params.options == SamplingOptions(
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=0.5,
        logit_bias=((3, -100.0), (7, 2.0)),
        bad_words=((1, 2), (3,)),
        min_tokens=4,
        num_logprobs=5,
        num_prompt_logprobs=0,
        allowed_token_ids=(4, 9),
        logprob_token_ids=(8, 2, 8),
    )
    # A form of the output becomes the first three; vectors are asked for by a message of their own.
    assert params.options is not None
    assert unset_options(params.options) == {"grammar", "reasoning_begin", "reasoning_end", "pooling"}


def test_options_that_change_nothing_are_none() -> None:
    params = read(min_p=0, repetition_penalty=1, presence_penalty=0, frequency_penalty=0, logit_bias={}, min_tokens=0)
    assert params.options is None


@pytest.mark.parametrize("option", [{"num_logprobs": 0}, {"num_prompt_logprobs": 0}, {"logit_bias": {1: 0.0}}])
def test_a_meaningful_zero_is_an_option(option: dict[str, Any]) -> None:
    assert read(**option).options is not None


def test_the_models_defaults_fill_absent_fields() -> None:
    defaults = common_pb2.SamplingParams(
        temperature=0.5, top_k=7, top_p=0.75, max_tokens=20, min_p=0.25, repetition_penalty=1.5
    )
    filled = SamplingParams(20, 0.5, 7, 0.75, options=SamplingOptions(min_p=0.25, repetition_penalty=1.5))
    assert read(defaults) == filled
    given = read(defaults, temperature=1, top_k=0, top_p=1, max_tokens=9, min_p=0, repetition_penalty=1)
    assert given == SamplingParams(max_tokens=9)


def test_a_default_of_max_tokens_is_capped_at_the_remaining_room() -> None:
    params = read(common_pb2.SamplingParams(max_tokens=2**32 - 1))
    assert resolve_max_tokens(params, 30, LIMITS, has_max_tokens=False).max_tokens == 50
    params = read(common_pb2.SamplingParams(max_tokens=20))
    assert resolve_max_tokens(params, 30, LIMITS, has_max_tokens=False).max_tokens == 20


def test_min_tokens_above_the_remaining_room_is_refused() -> None:
    params = read(min_tokens=51)
    assert resolve_max_tokens(params, 29, LIMITS, has_max_tokens=False).max_tokens == 51
    with pytest.raises(InvalidRequestError) as caught:
        resolve_max_tokens(params, 30, LIMITS, has_max_tokens=False)
    assert [violation.field for violation in caught.value.violations] == ["sampling.min_tokens"]


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"min_tokens": DEFAULT_MAX_TOKENS + 1}, "min_tokens"),
        ({"logit_bias": dict.fromkeys(range(5000), 0.0)}, "logit_bias"),
        ({"bad_words": [{"token_ids": [99]}] * 5000}, "bad_words"),
        ({"bad_words": [{"token_ids": [99] * 5000}]}, "bad_words[0]"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"num_logprobs": 2**32 - 1}, "num_logprobs"),
        ({"logprob_token_ids": [99] * 5000}, "logprob_token_ids"),
        ({"logprob_token_ids": [3, 2**32 - 1]}, "logprob_token_ids[1]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_option_is_named(sampling: dict[str, Any], field: str) -> None:
    violations: list[Violation] = []
    read_sampling(common_pb2.SamplingParams(**sampling), LIMITS, violations)
    assert [violation.field for violation in violations] == [f"sampling.{field}"]


@pytest.mark.parametrize(("given", "expected"), [(None, 1), (1, 1), (8, 8)])
def test_a_request_has_one_choice_by_default(given: int | None, expected: int) -> None:
    violations: list[Violation] = []
    assert read_num_choices(common_pb2.SamplingParams(n=given), violations) == expected
    assert violations == []


@pytest.mark.parametrize("n", [0, 9, 2**32 - 1])
def test_zero_choices_and_too_many_are_named(n: int) -> None:
    violations: list[Violation] = []
    read_num_choices(common_pb2.SamplingParams(n=n), violations)
    assert [(violation.field, violation.reason) for violation in violations] == [("sampling.n", "OUT_OF_RANGE")]


def test_an_explicit_zero_is_not_absent() -> None:
    sampling = common_pb2.SamplingParams(max_tokens=0, temperature=0, top_p=0, seed=0)
    violations: list[Violation] = []
    params = read_sampling(sampling, LIMITS, violations)
    assert (params.temperature, params.seed) == (0.0, 0)
    assert {violation.field for violation in violations} == {"sampling.max_tokens", "sampling.top_p"}
    with pytest.raises(InvalidRequestError):
        raise_violations(violations)


def test_absent_max_tokens_is_the_remaining_room() -> None:
    params = SamplingParams(max_tokens=DEFAULT_MAX_TOKENS)
    wide = ModelLimits(context_length=100_000, logits_width=50, num_pool_tokens=100_000)
    resolved = [resolve_max_tokens(params, 30, limits, has_max_tokens=False) for limits in (LIMITS, wide)]
    assert [params.max_tokens for params in resolved] == [50, DEFAULT_MAX_TOKENS]
    given = SamplingParams(max_tokens=7)
    assert resolve_max_tokens(given, 30, LIMITS, has_max_tokens=True) == given


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "error"),
    [(60, 41, ContextExceededError), (60, 21, KvCapacityExceededError), (80, None, KvCapacityExceededError)],
)
def test_a_request_that_can_never_fit_is_refused(
    num_prompt_tokens: int, max_tokens: int | None, error: type[ServiceError]
) -> None:
    params = SamplingParams(max_tokens=max_tokens or DEFAULT_MAX_TOKENS)
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
def test_a_request_has_normal_priority_by_default(given: common_pb2.Priority, meant: common_pb2.Priority) -> None:
    violations: list[Violation] = []
    assert read_priority(given, violations) == meant
    assert violations == []


@pytest.mark.parametrize("number", [-1, 4, 2**31 - 1])
def test_an_unknown_priority_is_named(number: int) -> None:
    # Enums are open on the wire: any number can arrive.
    request = scheduler_pb2.SchedulerServiceGenerateRequest(priority=number)  # type: ignore[arg-type]
    violations: list[Violation] = []
    read_priority(request.priority, violations)
    assert [(violation.field, violation.reason) for violation in violations] == [("priority", "OUT_OF_RANGE")]


@pytest.mark.parametrize(
    ("given", "is_exact"),
    [
        (common_pb2.DETERMINISM_UNSPECIFIED, False),
        (common_pb2.DETERMINISM_ORDINARY, False),
        (common_pb2.DETERMINISM_EXACT, True),
    ],
)
def test_an_answer_is_ordinary_unless_exactness_is_requested(given: common_pb2.Determinism, is_exact: bool) -> None:
    violations: list[Violation] = []
    assert read_determinism(given, violations) is is_exact
    assert violations == []


@pytest.mark.parametrize("number", [-1, 3, 2**31 - 1])
def test_an_unknown_determinism_is_named(number: int) -> None:
    request = scheduler_pb2.SchedulerServiceGenerateRequest(determinism=number)  # type: ignore[arg-type]
    violations: list[Violation] = []
    read_determinism(request.determinism, violations)
    assert [(violation.field, violation.reason) for violation in violations] == [("determinism", "OUT_OF_RANGE")]


def test_exactness_is_refused_only_if_it_is_unavailable() -> None:
    check_exactness("", is_exact=False)
    check_exactness("fingerprint", is_exact=True)
    with pytest.raises(ExactUnavailableError):
        check_exactness("", is_exact=True)


def test_a_cache_salt_is_measured_in_bytes() -> None:
    violations: list[Violation] = []
    assert read_cache_salt("", violations) == b""
    assert read_cache_salt("é" * 32, violations) == "é".encode() * 32
    assert violations == []
    read_cache_salt("é" * 32 + "x", violations)
    assert [(violation.field, violation.reason) for violation in violations] == [("cache_salt", "OUT_OF_RANGE")]


def read_so_far(*choices: Choice, **sampling: Any) -> tuple[list[list[int]], list[tuple[str, str]]]:
    """The choices so far as read, and the violations."""
    violations: list[Violation] = []
    outputs = read_choices_so_far(choices, common_pb2.SamplingParams(**sampling), LIMITS, violations)
    return [output.tolist() for output in outputs], [(violation.field, violation.reason) for violation in violations]


def test_choices_so_far_need_the_max_tokens_and_seed_of_the_earlier_call() -> None:
    assert read_so_far(Choice(token_ids=[4, 5]), max_tokens=3, seed=0) == ([[4, 5]], [])
    assert read_so_far() == ([], [])
    assert read_so_far(Choice(token_ids=[4]), max_tokens=3) == ([], [("sampling.seed", "OUT_OF_RANGE")])
    assert read_so_far(Choice(token_ids=[4]), seed=0) == ([], [("sampling.max_tokens", "OUT_OF_RANGE")])


def test_the_number_of_choices_so_far_is_zero_or_n() -> None:
    some, finished = Choice(token_ids=[4]), Choice(token_ids=[5, 6, 7], is_finished=True)
    assert read_so_far(some, finished, Choice(), max_tokens=3, seed=0, n=3) == ([[4], [5, 6, 7], []], [])
    for choices, n in (([some], 2), ([some, some], 1), ([some] * 1000, 2)):
        assert read_so_far(*choices, max_tokens=3, seed=0, n=n) == ([], [("choices_so_far", "OUT_OF_RANGE")])


def test_choices_so_far_that_are_all_finished_are_refused() -> None:
    finished = Choice(token_ids=[4], is_finished=True)
    _, violations = read_so_far(finished, finished, max_tokens=3, seed=0, n=2)
    assert violations == [("choices_so_far", "OUT_OF_RANGE")]


@pytest.mark.parametrize(("num_tokens", "is_finished"), [(3, False), (4, True)])
def test_a_choice_so_far_that_reaches_max_tokens_is_refused(num_tokens: int, is_finished: bool) -> None:
    choice = Choice(token_ids=[4] * num_tokens, is_finished=is_finished)
    _, violations = read_so_far(Choice(), choice, max_tokens=3, seed=0, n=2)
    assert violations == [("choices_so_far[1].token_ids", "OUT_OF_RANGE")]


@pytest.mark.parametrize("token_id", [50, 2**31, 2**32 - 1])
def test_an_invalid_token_id_in_a_choice_so_far_is_named(token_id: int) -> None:
    _, violations = read_so_far(Choice(token_ids=[4, token_id]), max_tokens=9, seed=0)
    assert violations == [("choices_so_far[0].token_ids[1]", "TOKEN_ID_OUT_OF_RANGE")]


def test_a_caller_waits_for_at_most_an_hour_or_without_limit() -> None:
    assert read_time_left(None) is None
    assert read_time_left(9e9) == read_time_left(MAX_TIME_LEFT_S) == 3600.0
    assert read_time_left(0.0) == 0.0
