from __future__ import annotations

import re

import numpy as np
import pytest

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.chat.chat_request import check_chat
from services.tokenizer.chat.conversation import Conversation, Message
from services.tokenizer.request.checks import (
    AnswerForm,
    CheckedRequest,
    check_request,
    resolve_request,
)
from services.tokenizer.text_size import MAX_TEXT_BYTES, check_text
from shared.errors import (
    ContextExceededError,
    InvalidRequestError,
    KvCapacityExceededError,
    ModelNotFoundError,
    PromptTooLongError,
    RequestTooLargeError,
    ServiceError,
)
from shared.network.statuses import to_status
from shared.request.limits import ModelLimits
from shared.request.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams

LIMITS = ModelLimits(context_length=100, logits_width=50, num_pool_tokens=1000)
USER = tokenizer_pb2.ROLE_USER


def make_request(*, sampling: dict[str, object] | None = None, **fields: object) -> tokenizer_pb2.GenerateRequest:
    """A valid request, except for the given fields."""
    prompt = {} if {"text", "chat", "tokens"} & fields.keys() else {"text": "hello"}
    return tokenizer_pb2.GenerateRequest(
        **(prompt | fields),  # type: ignore[arg-type]
        sampling=None if sampling is None else common_pb2.SamplingParams(**sampling),  # type: ignore[arg-type]
    )


def tokens(*token_ids: int) -> common_pb2.TokenSequence:
    return common_pb2.TokenSequence(token_ids=token_ids)


def chat(*contents: str, role: int = USER) -> tokenizer_pb2.Chat:
    messages = [tokenizer_pb2.ChatMessage(role=role, content=content) for content in contents]  # type: ignore[arg-type]
    return tokenizer_pb2.Chat(messages=messages)


def check(request: tokenizer_pb2.GenerateRequest) -> CheckedRequest:
    return check_request(request, model_name="tiny", limits=LIMITS)


def refused_fields(request: tokenizer_pb2.GenerateRequest) -> dict[str, str]:
    """The violations of a request that must have some."""
    with pytest.raises(InvalidRequestError) as caught:
        check(request)
    return {violation.field: violation.reason for violation in caught.value.violations}


def test_absent_fields_get_their_defaults() -> None:
    checked, other = check(make_request()), check(make_request())
    assert re.fullmatch("[0-9a-f]{32}", checked.request_id)
    assert checked.request_id != other.request_id
    assert checked.sampling == SamplingParams(DEFAULT_MAX_TOKENS, seed=checked.sampling.seed)
    assert checked.sampling.seed != other.sampling.seed
    assert not checked.has_max_tokens
    assert checked.form == AnswerForm()
    assert (checked.n, checked.bad_words, checked.structured_output) == (1, (), None)


def test_given_fields_are_kept() -> None:
    sampling = {
        "max_tokens": 9,
        "temperature": 0.0,
        "top_k": 3,
        "top_p": 0.5,
        "seed": 0,
        "ignore_eos": True,
        "stop_token_ids": [49],
        "stop_token_sequences": [tokens(1, 2)],
    }
    request = make_request(
        model="tiny", request_id="my-id_1", tokens=tokens(1, 49), sampling=sampling, stop=["a", "é" * 128]
    )
    checked = check(request)
    assert checked.request_id == "my-id_1"
    assert checked.has_max_tokens
    assert checked.sampling == SamplingParams(
        max_tokens=9,
        temperature=0.0,
        top_k=3,
        top_p=0.5,
        seed=0,
        ignore_eos=True,
        stop_token_ids=(49,),
        stop_token_sequences=((1, 2),),
    )
    assert checked.form.stop_strings == ("a", "é" * 128)
    assert isinstance(checked.prompts[0], np.ndarray)
    assert checked.prompts[0].tolist() == [1, 49]


def test_a_chat_becomes_a_conversation() -> None:
    assert check(make_request(chat=chat("x", "y"))).prompts == (
        Conversation((Message("user", "x"), Message("user", "y"))),
    )


@pytest.mark.parametrize("name", ["other", "", "../../etc/passwd"])
def test_an_unknown_model_is_refused_beside_the_name_of_the_served_one(name: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        check(make_request(model=name))
    assert str(caught.value) == f'the model "{name}" is not served here; served: "tiny"'


@pytest.mark.parametrize(
    ("request_message", "expected"),
    [
        (tokenizer_pb2.GenerateRequest(), {"prompt": "PROMPT_EMPTY"}),
        (make_request(text=""), {"text": "PROMPT_EMPTY"}),
        (make_request(tokens=tokens()), {"tokens.token_ids": "PROMPT_EMPTY"}),
        (make_request(tokens=tokens(50)), {"tokens.token_ids[0]": "TOKEN_ID_OUT_OF_RANGE"}),
        (make_request(tokens=tokens(5, 2**31 - 1, 5)), {"tokens.token_ids[1]": "TOKEN_ID_OUT_OF_RANGE"}),
        (make_request(tokens=tokens(2**32 - 1)), {"tokens.token_ids[0]": "TOKEN_ID_OUT_OF_RANGE"}),
        (make_request(chat=chat()), {"chat.messages": "OUT_OF_RANGE"}),
        (make_request(chat=chat(*["x"] * 1025)), {"chat.messages": "OUT_OF_RANGE"}),
        (make_request(chat=chat("x", role=0)), {"chat.messages[0].role": "OUT_OF_RANGE"}),
        (make_request(chat=chat("x", role=77)), {"chat.messages[0].role": "OUT_OF_RANGE"}),
        (make_request(chat=chat("x", "é" * 2**18 + "x")), {"chat.messages[1].content": "OUT_OF_RANGE"}),
        (make_request(request_id=""), {"request_id": "OUT_OF_RANGE"}),
        (make_request(request_id="x" * 65), {"request_id": "OUT_OF_RANGE"}),
        (make_request(request_id="a\nb"), {"request_id": "OUT_OF_RANGE"}),
        (make_request(request_id="a\n"), {"request_id": "OUT_OF_RANGE"}),
        (make_request(request_id="é"), {"request_id": "OUT_OF_RANGE"}),
        (make_request(stop=[""]), {"stop[0]": "OUT_OF_RANGE"}),
        (make_request(stop=["a", "x" * 257]), {"stop[1]": "OUT_OF_RANGE"}),
        (make_request(stop=["a", "é" * 129]), {"stop[1]": "OUT_OF_RANGE"}),
        (make_request(stop=["x"] * 9), {"stop": "OUT_OF_RANGE"}),
        (make_request(stop=["x"] * 500_000), {"stop": "OUT_OF_RANGE"}),
        (make_request(stop=["x" * 256] * 5), {"stop": "OUT_OF_RANGE"}),
        # One range of many: the others are in tests/unit/shared/request/test_limits.py.
        (make_request(sampling={"temperature": float("nan")}), {"sampling.temperature": "NOT_FINITE"}),
        (
            make_request(sampling={"stop_token_sequences": [tokens(3, 2**31)]}),
            {"sampling.stop_token_sequences[0].token_ids[1]": "TOKEN_ID_OUT_OF_RANGE"},
        ),
    ],
)
def test_a_bad_field_is_named(request_message: tokenizer_pb2.GenerateRequest, expected: dict[str, str]) -> None:
    assert refused_fields(request_message) == expected


def test_all_bad_fields_are_named_together() -> None:
    request = make_request(
        request_id="a b", tokens=tokens(1, 99), stop=[""], sampling={"temperature": 3.0, "top_p": 2.0}
    )
    assert refused_fields(request).keys() == {
        "request_id",
        "tokens.token_ids[1]",
        "sampling.temperature",
        "sampling.top_p",
        "stop[0]",
    }


@pytest.mark.parametrize(
    "request_message",
    [
        make_request(chat=chat(*["x"] * 1024, role=9)),
        make_request(sampling={"stop_token_ids": [99] * 64, "stop_token_sequences": [tokens(*[99] * 32)] * 8}),
    ],
)
def test_a_refusal_fits_in_the_metadata(request_message: tokenizer_pb2.GenerateRequest) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(request_message)
    # The details are sent in base64, the message next to them.
    size = len(to_status(caught.value).SerializeToString()) * 4 // 3 + len(caught.value.message)
    assert size < 7000


def test_the_limit_of_text_is_in_bytes() -> None:
    check(make_request(text="é" * (MAX_TEXT_BYTES // 2)))
    with pytest.raises(RequestTooLargeError):
        check(make_request(text="é" * (MAX_TEXT_BYTES // 2) + "x"))
    with pytest.raises(RequestTooLargeError):
        check_text("x" * (MAX_TEXT_BYTES + 1))


def test_a_conversation_beyond_the_limit_is_too_large() -> None:
    conversation = chat(*["x" * 2**19] * 7)
    with pytest.raises(RequestTooLargeError):
        check(make_request(chat=conversation))
    with pytest.raises(RequestTooLargeError):
        check_chat(conversation)


def test_token_ids_without_room_for_one_more_are_too_long() -> None:
    check(make_request(tokens=tokens(*[1] * 99)))
    with pytest.raises(PromptTooLongError):
        check(make_request(tokens=tokens(*[1] * 100)))


def resolve(num_prompt_tokens: int, max_tokens: int | None, limits: ModelLimits = LIMITS) -> int:
    """The resolved `max_tokens`."""
    request = make_request(sampling=None if max_tokens is None else {"max_tokens": max_tokens})
    prompt = np.ones(num_prompt_tokens, np.uint32)
    checked = check(request)
    return resolve_request(checked, 0, prompt, checked.sampling, limits).sampling.max_tokens


def test_absent_max_tokens_is_the_remaining_room() -> None:
    wide = ModelLimits(context_length=10_000, logits_width=50, num_pool_tokens=10_000)
    small_pool = ModelLimits(context_length=10_000, logits_width=50, num_pool_tokens=300)
    assert (resolve(10, None), resolve(10, None, wide), resolve(10, None, small_pool)) == (90, 4096, 290)


def test_given_max_tokens_is_kept() -> None:
    assert resolve(99, 1) == 1


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "limits", "error"),
    [
        (0, 1, LIMITS, InvalidRequestError),
        (100, 1, LIMITS, PromptTooLongError),
        (100, None, LIMITS, PromptTooLongError),
        (10, 91, LIMITS, ContextExceededError),
        (10, 2**32 - 1, LIMITS, ContextExceededError),
        (20, 31, ModelLimits(100, 50, 50), KvCapacityExceededError),
        (50, None, ModelLimits(100, 50, 50), KvCapacityExceededError),
        (60, None, ModelLimits(100, 50, 50), KvCapacityExceededError),
    ],
)
def test_a_request_that_cannot_fit_is_refused(
    num_prompt_tokens: int, max_tokens: int | None, limits: ModelLimits, error: type[ServiceError]
) -> None:
    with pytest.raises(error):
        resolve(num_prompt_tokens, max_tokens, limits)


def test_a_request_has_its_prompt_as_int32() -> None:
    request = make_request(
        request_id="r",
        priority=common_pb2.PRIORITY_LOW,
        cache_salt="é",
        determinism=common_pb2.DETERMINISM_EXACT,
    )
    checked = check(request)
    resolved = resolve_request(checked, 0, np.array([1, 49], np.uint32), checked.sampling, LIMITS)
    assert (resolved.request_id, list(resolved.prompt_ids)) == ("r", [1, 49])
    assert resolved.prompt == np.array([1, 49], "<i4").tobytes()
    assert (resolved.priority, resolved.cache_salt) == (common_pb2.PRIORITY_LOW, "é".encode())
    assert resolved.is_exact


def test_priority_cache_salt_and_determinism_are_checked() -> None:
    request = make_request(priority=9, cache_salt="x" * 65, determinism=9)
    refused = ("priority", "cache_salt", "determinism")
    assert refused_fields(request) == dict.fromkeys(refused, "OUT_OF_RANGE")
    checked = check(make_request())
    assert (checked.priority, checked.cache_salt, checked.is_exact) == (common_pb2.PRIORITY_NORMAL, b"", False)
