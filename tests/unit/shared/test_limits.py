"""Which requests are refused, with which error, and what it names."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import (
    ContextExceededError,
    InvalidRequestError,
    KvCapacityExceededError,
    PromptTooLongError,
    ServiceError,
)
from shared.limits import (
    DEFAULT_MAX_TOKENS,
    ModelLimits,
    SamplingParams,
    check_fit,
    check_prompt,
    check_sampling,
    check_token_ids,
    default_max_tokens,
)

LIMITS = ModelLimits(context_length=100, logits_width=50, num_pool_tokens=80)
GOOD = SamplingParams(max_tokens=1)
EDGES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 2.0},
    {"top_p": 1e-9},
    {"top_p": 1.0},
    {"top_k": 0},
    {"top_k": 50},
    {"seed": 2**64 - 1},
    {"stop_token_ids": (0, 49)},
    {"stop_token_ids": (1,) * 64},
    {"stop_token_sequences": ((1,) * 32,) * 8},
]
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": 0}, "max_tokens", "OUT_OF_RANGE"),
    ({"temperature": float("nan")}, "temperature", "NOT_FINITE"),
    ({"temperature": float("inf")}, "temperature", "NOT_FINITE"),
    ({"temperature": -0.1}, "temperature", "OUT_OF_RANGE"),
    ({"temperature": 2.1}, "temperature", "OUT_OF_RANGE"),
    ({"top_p": 0.0}, "top_p", "OUT_OF_RANGE"),
    ({"top_p": -1.0}, "top_p", "OUT_OF_RANGE"),
    ({"top_p": 1.1}, "top_p", "OUT_OF_RANGE"),
    ({"top_p": float("nan")}, "top_p", "NOT_FINITE"),
    ({"top_k": -1}, "top_k", "OUT_OF_RANGE"),
    ({"top_k": 51}, "top_k", "OUT_OF_RANGE"),
    ({"seed": -1}, "seed", "OUT_OF_RANGE"),
    ({"seed": 2**64}, "seed", "OUT_OF_RANGE"),
    ({"stop_token_ids": (3, 50)}, "stop_token_ids[1]", "TOKEN_ID_OUT_OF_RANGE"),
    ({"stop_token_ids": (-1,)}, "stop_token_ids[0]", "TOKEN_ID_OUT_OF_RANGE"),
    ({"stop_token_ids": (1,) * 65}, "stop_token_ids", "OUT_OF_RANGE"),
    ({"stop_token_sequences": ((1,),) * 9}, "stop_token_sequences", "OUT_OF_RANGE"),
    ({"stop_token_sequences": ((1,), ())}, "stop_token_sequences[1]", "OUT_OF_RANGE"),
    ({"stop_token_sequences": ((1,) * 33,)}, "stop_token_sequences[0]", "OUT_OF_RANGE"),
    ({"stop_token_sequences": ((1, 50),)}, "stop_token_sequences[0].token_ids[1]", "TOKEN_ID_OUT_OF_RANGE"),
]


@pytest.mark.parametrize("changes", EDGES, ids=str)
def test_values_at_the_edges_are_accepted(changes: dict[str, Any]) -> None:
    check_sampling(dataclasses.replace(GOOD, **changes), LIMITS)


@pytest.mark.parametrize(("changes", "field", "reason"), BAD, ids=str)
def test_a_bad_value_is_refused_by_name(changes: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_sampling(dataclasses.replace(GOOD, **changes), LIMITS)

    assert [(v.field, v.reason) for v in caught.value.violations] == [(f"sampling.{field}", reason)]


def test_all_bad_values_are_reported_together() -> None:
    bad = SamplingParams(max_tokens=0, temperature=-1.0, top_p=2.0)

    with pytest.raises(InvalidRequestError) as caught:
        check_sampling(bad, LIMITS, prefix="")

    assert [violation.field for violation in caught.value.violations] == ["max_tokens", "temperature", "top_p"]


@pytest.mark.parametrize(
    ("token_ids", "error_type", "reason"),
    [
        ([], InvalidRequestError, "PROMPT_EMPTY"),
        ([1, 50, 51], InvalidRequestError, "TOKEN_ID_OUT_OF_RANGE"),
        ([-1], InvalidRequestError, "TOKEN_ID_OUT_OF_RANGE"),
        ([1] * 100, PromptTooLongError, None),
    ],
)
def test_a_prompt_that_cannot_be_computed_is_refused(
    token_ids: list[int], error_type: type[ServiceError], reason: str | None
) -> None:
    with pytest.raises(error_type) as caught:
        check_prompt(np.array(token_ids, dtype=np.int64), LIMITS)

    assert [violation.reason for violation in caught.value.violations] == ([] if reason is None else [reason])


def test_a_prompt_that_leaves_room_for_one_token_is_accepted() -> None:
    check_prompt(np.full(99, 49, dtype=np.int32), LIMITS)


def test_the_first_bad_token_id_is_named_by_its_index() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_token_ids(np.array([1, 2, 50, 99]), 50, field="token_ids")

    assert [violation.field for violation in caught.value.violations] == ["token_ids[2]"]


def test_unsigned_ids_above_every_int32_are_refused() -> None:
    with pytest.raises(InvalidRequestError):
        check_token_ids(np.array([2**32 - 1], dtype=np.uint32), 50, field="token_ids")


@pytest.mark.parametrize(
    ("max_tokens", "error_type", "limit"), [(91, ContextExceededError, "100"), (71, KvCapacityExceededError, "80")]
)
def test_a_request_that_can_never_fit_is_refused(max_tokens: int, error_type: type[ServiceError], limit: str) -> None:
    with pytest.raises(error_type) as caught:
        check_fit(10, max_tokens, LIMITS)

    assert caught.value.values == {"limit": limit, "actual": str(10 + max_tokens)}


def test_the_default_of_max_tokens_is_at_most_4096() -> None:
    large = ModelLimits(context_length=10_000, logits_width=50, num_pool_tokens=20_000)

    assert default_max_tokens(10, large) == DEFAULT_MAX_TOKENS == 4096


@given(num_prompt_tokens=st.integers(1, 79), context=st.integers(80, 9000), pool=st.integers(80, 9000))
def test_the_default_of_max_tokens_always_fits(num_prompt_tokens: int, context: int, pool: int) -> None:
    limits = ModelLimits(context_length=context, logits_width=50, num_pool_tokens=pool)

    max_tokens = default_max_tokens(num_prompt_tokens, limits)

    assert max_tokens >= 1
    check_fit(num_prompt_tokens, max_tokens, limits)
