"""Which sampling parameters are refused, and which fields the error names."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import (
    InvalidRequestError,
)
from shared.request.limits import ModelLimits
from shared.request.sampling_params import (
    MAX_GRAMMAR_BYTES,
    NO_OPTIONS,
    SamplingOptions,
    SamplingParams,
    check_min_tokens,
    check_sampling,
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


OPTION_EDGES: list[dict[str, Any]] = [
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"repetition_penalty": 0.1},
    {"repetition_penalty": 2.0},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 2.0},
    {"logit_bias": ((0, -100.0), (49, 100.0))},
    {"logit_bias": ((7, 1.0),) * 1024},
    {"bad_words": ((1,) * 32,) * 64},
    {"min_tokens": 9},
    {"num_logprobs": 0},
    {"num_logprobs": 20},
    {"num_prompt_logprobs": 0},
    {"num_prompt_logprobs": 20},
    {"grammar": "x" * MAX_GRAMMAR_BYTES},
    {"grammar": "x", "reasoning_begin": (0,) * 32, "reasoning_end": (49,) * 32},
    {"grammar": "x", "reasoning_end": (1,)},
    {"allowed_token_ids": (0,) * 1023 + (49,)},
    {"logprob_token_ids": (0,) * 19 + (49,)},
]
BAD_OPTIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"min_p": float("nan")}, "min_p", "NOT_FINITE"),
    ({"min_p": -0.1}, "min_p", "OUT_OF_RANGE"),
    ({"min_p": 1.1}, "min_p", "OUT_OF_RANGE"),
    ({"repetition_penalty": 0.09}, "repetition_penalty", "OUT_OF_RANGE"),
    ({"repetition_penalty": 2.01}, "repetition_penalty", "OUT_OF_RANGE"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty", "NOT_FINITE"),
    ({"presence_penalty": -2.1}, "presence_penalty", "OUT_OF_RANGE"),
    ({"presence_penalty": float("-inf")}, "presence_penalty", "NOT_FINITE"),
    ({"frequency_penalty": 2.1}, "frequency_penalty", "OUT_OF_RANGE"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty", "NOT_FINITE"),
    ({"logit_bias": ((50, 0.0),)}, "logit_bias[50]", "TOKEN_ID_OUT_OF_RANGE"),
    ({"logit_bias": ((-1, 0.0),)}, "logit_bias[-1]", "TOKEN_ID_OUT_OF_RANGE"),
    ({"logit_bias": ((3, 100.5),)}, "logit_bias[3]", "OUT_OF_RANGE"),
    ({"logit_bias": ((3, float("nan")),)}, "logit_bias[3]", "NOT_FINITE"),
    ({"logit_bias": ((3, float("-inf")),)}, "logit_bias[3]", "NOT_FINITE"),
    ({"logit_bias": ((50, float("nan")),) * 1025}, "logit_bias", "OUT_OF_RANGE"),
    ({"bad_words": ((50,),) * 65}, "bad_words", "OUT_OF_RANGE"),
    ({"bad_words": ((1,), ())}, "bad_words[1]", "OUT_OF_RANGE"),
    ({"bad_words": ((50,) * 33,)}, "bad_words[0]", "OUT_OF_RANGE"),
    ({"bad_words": ((1, 2), (3, 50))}, "bad_words[1].token_ids[1]", "TOKEN_ID_OUT_OF_RANGE"),
    ({"min_tokens": -1}, "min_tokens", "OUT_OF_RANGE"),
    ({"min_tokens": 10}, "min_tokens", "OUT_OF_RANGE"),
    ({"num_logprobs": -1}, "num_logprobs", "OUT_OF_RANGE"),
    ({"num_logprobs": 21}, "num_logprobs", "OUT_OF_RANGE"),
    ({"num_prompt_logprobs": 21}, "num_prompt_logprobs", "OUT_OF_RANGE"),
    ({"grammar": "x" * (MAX_GRAMMAR_BYTES + 1)}, "grammar", "OUT_OF_RANGE"),
    ({"grammar": "é" * (MAX_GRAMMAR_BYTES // 2 + 1)}, "grammar", "OUT_OF_RANGE"),
    ({"reasoning_end": (1,)}, "reasoning_end", "OUT_OF_RANGE"),
    ({"grammar": "x", "reasoning_begin": (1,)}, "reasoning_end", "OUT_OF_RANGE"),
    ({"grammar": "x", "reasoning_end": (1,) * 33}, "reasoning_end", "OUT_OF_RANGE"),
    ({"grammar": "x", "reasoning_end": (1, 50)}, "reasoning_end[1]", "TOKEN_ID_OUT_OF_RANGE"),
    ({"allowed_token_ids": (50,) * 1025}, "allowed_token_ids", "OUT_OF_RANGE"),
    ({"allowed_token_ids": (-1, 3)}, "allowed_token_ids[0]", "TOKEN_ID_OUT_OF_RANGE"),
    ({"logprob_token_ids": (50,) * 21}, "logprob_token_ids", "OUT_OF_RANGE"),
    ({"logprob_token_ids": (3, 50)}, "logprob_token_ids[1]", "TOKEN_ID_OUT_OF_RANGE"),
]


def with_options(**options: Any) -> SamplingParams:
    """Parameters with rarer options, and at most 9 tokens."""
    return SamplingParams(max_tokens=9, options=SamplingOptions(**options))


@pytest.mark.parametrize("options", OPTION_EDGES, ids=lambda options: next(iter(options)))
def test_options_at_their_limits_are_accepted(options: dict[str, Any]) -> None:
    check_sampling(with_options(**options), LIMITS)


@pytest.mark.parametrize(("options", "field", "reason"), BAD_OPTIONS, ids=[row[1] for row in BAD_OPTIONS])
def test_a_bad_option_is_refused_by_name(options: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_sampling(with_options(**options), LIMITS)

    assert [(v.field, v.reason) for v in caught.value.violations] == [(f"sampling.{field}", reason)]


def test_only_the_first_of_many_bad_values_are_named() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_sampling(with_options(logit_bias=((99, 999.0),) * 1024), LIMITS)

    assert len(caught.value.violations) == 16


def test_min_tokens_is_checked_against_the_resolved_max_tokens() -> None:
    check_min_tokens(with_options(min_tokens=9))
    check_min_tokens(SamplingParams(max_tokens=1))

    with pytest.raises(InvalidRequestError) as caught:
        check_min_tokens(with_options(min_tokens=10))

    assert [v.field for v in caught.value.violations] == ["sampling.min_tokens"]


@given(
    st.builds(
        SamplingOptions,
        min_p=st.floats(),
        repetition_penalty=st.floats(),
        presence_penalty=st.floats(),
        frequency_penalty=st.floats(),
        logit_bias=st.lists(st.tuples(st.integers(-5, 60), st.floats()), max_size=4).map(tuple),
        bad_words=st.lists(st.lists(st.integers(-5, 60), max_size=40).map(tuple), max_size=4).map(tuple),
        min_tokens=st.integers(0, 12),
        num_logprobs=st.none() | st.integers(0, 2**32 - 1),
        num_prompt_logprobs=st.none() | st.integers(0, 2**32 - 1),
        allowed_token_ids=st.lists(st.integers(-5, 60), max_size=4).map(tuple),
        logprob_token_ids=st.lists(st.integers(-5, 60), max_size=22).map(tuple),
    )
)
def test_accepted_options_are_in_range(options: SamplingOptions) -> None:
    try:
        check_sampling(SamplingParams(max_tokens=9, options=options), LIMITS)
    except InvalidRequestError:
        return
    ids = {token_id for token_id, _ in options.logit_bias} | {token_id for run in options.bad_words for token_id in run}
    assert ids.union(options.allowed_token_ids, options.logprob_token_ids) <= set(range(50))
    assert len(options.logprob_token_ids) <= 20
    assert all(-100 <= bias <= 100 for _, bias in options.logit_bias)
    assert all(1 <= len(run) <= 32 for run in options.bad_words)
    assert 0 <= options.min_p <= 1
    assert 0.1 <= options.repetition_penalty <= 2
    assert -2 <= options.presence_penalty <= 2
    assert -2 <= options.frequency_penalty <= 2
    assert options.min_tokens <= 9
    assert all(count is None or count <= 20 for count in (options.num_logprobs, options.num_prompt_logprobs))


@pytest.mark.parametrize(
    ("options", "needs_all"),
    [
        ({}, False),
        ({"min_p": 0.5, "min_tokens": 3, "num_logprobs": 2, "num_prompt_logprobs": 1}, False),
        ({"logit_bias": ((1, 2.0),)}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"bad_words": ((1,),)}, True),
        ({"grammar": "x"}, True),
    ],
)
def test_only_options_that_depend_on_tokens_need_them(options: dict[str, Any], needs_all: bool) -> None:
    assert dataclasses.replace(NO_OPTIONS, **options).needs_all_tokens == needs_all


@pytest.mark.parametrize("changes", EDGES, ids=str)
def test_values_at_their_limits_are_accepted(changes: dict[str, Any]) -> None:
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
