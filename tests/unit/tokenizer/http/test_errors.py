from __future__ import annotations

import json

import pytest

from services.tokenizer.http.errors import any_error, http_error
from services.tokenizer.http.fields.field_names import FieldNames
from shared.errors import (
    AbortedByCallError,
    ClientTooSlowError,
    ContextExceededError,
    DeadlinePassedError,
    DrainingError,
    ExactUnavailableError,
    InvalidRequestError,
    ModelNotFoundError,
    NotSupportedError,
    NumericError,
    PoisonRequestError,
    PromptTooLongError,
    QueueFullError,
    RequestTooLargeError,
    SchedulerLostError,
    ServiceError,
    TenantLimitError,
    Violation,
    WorkersLostError,
)
from shared.network.statuses import StatusError, to_status


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (InvalidRequestError, 400, "invalid_request"),
        (PromptTooLongError, 400, "context_length_exceeded"),
        (ContextExceededError, 400, "context_length_exceeded"),
        (RequestTooLargeError, 413, "request_too_large"),
        (ModelNotFoundError, 404, "model_not_found"),
        (ExactUnavailableError, 400, "exact_unavailable"),
        (QueueFullError, 429, "server_overloaded"),
        (TenantLimitError, 429, "rate_limit_exceeded"),
        (ClientTooSlowError, 429, "rate_limit_exceeded"),
        (SchedulerLostError, 503, "scheduler_lost"),
        (WorkersLostError, 503, "workers_lost"),
        (DrainingError, 503, "draining"),
        (DeadlinePassedError, 504, "deadline_passed"),
        (AbortedByCallError, 499, "aborted_by_call"),
        (NotSupportedError, 501, "not_supported"),
        (PoisonRequestError, 500, "poison_request"),
        (NumericError, 500, "numeric_error"),
    ],
)
def test_every_error_has_a_status_and_code(kind: type[ServiceError], status: int, code: str) -> None:
    # The same, whether it is from here or from another service.
    for error in (kind("text", limit=9), StatusError(to_status(kind("text", limit=9)))):
        found = http_error(error, str)
        assert (found.status, found.code) == (status, code)
        assert json.loads(found.body())["error"]["message"].endswith("text")


def test_only_what_may_succeed_is_retried() -> None:
    queue_full = http_error(QueueFullError("full", retry_delay_s=2.5), str)
    assert queue_full.headers == {"Retry-After": "3", "retry-after-ms": "2500"}
    tenant_limit = http_error(StatusError(to_status(TenantLimitError("enough", retry_delay_s=0.5))), str)
    assert tenant_limit.headers == {"Retry-After": "1", "retry-after-ms": "500"}
    assert http_error(SchedulerLostError("lost"), str).headers == {"Retry-After": "1", "retry-after-ms": "1000"}
    for kind in (PoisonRequestError, NumericError, NotSupportedError, DeadlinePassedError):
        assert http_error(kind("no"), str).headers == {"x-should-retry": "false"}
    assert http_error(DrainingError("stopping"), str).headers["Connection"] == "close"


def test_fields_have_their_names_of_this_api() -> None:
    violations = [Violation("sampling.max_tokens", "OUT_OF_RANGE", "must be at least 1"), Violation("x", "Y", "z")]
    names = FieldNames(is_chat=True, given={"sampling.max_tokens": "max_completion_tokens"})
    found = http_error(InvalidRequestError.from_violations(violations), names)
    assert (found.param, found.message) == ("max_completion_tokens", "max_completion_tokens: must be at least 1; x: z")


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("sampling.stop_token_ids[3]", "stop_token_ids[3]"),
        ("chat.messages[1].tool_calls[0].arguments", "messages[1].tool_calls[0].function.arguments"),
        ("chat.tools[2].name", "tools[2].function.name"),
        ("chat.tools", "tools"),
        ("chat.allowed_tool_names[1]", "tool_choice"),
        ("chat.template_variables", "chat_template_kwargs"),
        ("prompt", "messages"),
        ("include_stop", "include_stop_str_in_output"),
    ],
)
def test_the_fields_of_a_chat(field: str, name: str) -> None:
    assert FieldNames(is_chat=True, given={})(field) == name


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("text", "prompt"),
        ("tokens.token_ids[4]", "prompt[4]"),
        ("prompts.prompts[1].tokens.token_ids[4]", "prompt[1][4]"),
        ("prompts.prompts[1].prompt", "prompt[1]"),
        ("prompts.prompts", "prompt"),
        ("sampling.num_logprobs", "logprobs"),
    ],
)
def test_the_fields_of_a_completion(field: str, name: str) -> None:
    assert FieldNames(is_chat=False, given={})(field) == name


def test_an_unexpected_error_tells_nothing_of_its_text(caplog: pytest.LogCaptureFixture) -> None:
    found = any_error(ValueError("the client's secret"), str)
    assert (found.status, found.code) == (500, "internal")
    assert "secret" not in found.message + caplog.text
