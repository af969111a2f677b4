"""Which prompts are refused, with which error, and which fields it names."""

from __future__ import annotations

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
from shared.request.limits import ModelLimits, check_fit, check_prompt, check_token_ids, room_left

LIMITS = ModelLimits(context_length=100, logits_width=50, num_pool_tokens=80)


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


def test_unsigned_ids_above_int32_are_refused() -> None:
    with pytest.raises(InvalidRequestError):
        check_token_ids(np.array([2**32 - 1], dtype=np.uint32), 50, field="token_ids")


@pytest.mark.parametrize(
    ("max_tokens", "error_type", "limit"), [(91, ContextExceededError, "100"), (71, KvCapacityExceededError, "80")]
)
def test_a_request_that_can_never_fit_is_refused(max_tokens: int, error_type: type[ServiceError], limit: str) -> None:
    with pytest.raises(error_type) as caught:
        check_fit(10, max_tokens, LIMITS)

    assert caught.value.values == {"limit": limit, "actual": str(10 + max_tokens)}


@given(num_prompt_tokens=st.integers(1, 79), context=st.integers(80, 9000), pool=st.integers(80, 9000))
def test_the_room_that_is_left_fits(num_prompt_tokens: int, context: int, pool: int) -> None:
    limits = ModelLimits(context_length=context, logits_width=50, num_pool_tokens=pool)

    max_tokens = room_left(num_prompt_tokens, limits)

    assert max_tokens >= 1
    check_fit(num_prompt_tokens, max_tokens, limits)
