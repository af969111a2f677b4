"""Every error that the HTTP API answers: status, code, and the headers that tell clients whether to retry.

Nothing else in the API chooses a status for a `ServiceError`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from google.rpc import error_details_pb2

from services.tokenizer.http.refusals import FieldNaming, HttpError
from shared.errors import ErrorCode, InternalError, ServiceError, Violation
from shared.network.call_interceptor import without_text
from shared.network.statuses import StatusError, to_status

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""What nginx answers where the client's side ended the request."""

_DEFAULT_RETRY_S = 1.0

_STATUSES: dict[int, int] = {
    ErrorCode.CANCELLED.value: CLIENT_CLOSED_REQUEST,
    ErrorCode.INVALID_ARGUMENT.value: HTTPStatus.BAD_REQUEST,
    ErrorCode.DEADLINE_EXCEEDED.value: HTTPStatus.GATEWAY_TIMEOUT,
    ErrorCode.NOT_FOUND.value: HTTPStatus.NOT_FOUND,
    ErrorCode.ALREADY_EXISTS.value: HTTPStatus.CONFLICT,
    ErrorCode.PERMISSION_DENIED.value: HTTPStatus.FORBIDDEN,
    # Not 5xx: load balancers eject a server that answers that.
    ErrorCode.RESOURCE_EXHAUSTED.value: HTTPStatus.TOO_MANY_REQUESTS,
    ErrorCode.FAILED_PRECONDITION.value: HTTPStatus.BAD_REQUEST,
    ErrorCode.UNIMPLEMENTED.value: HTTPStatus.NOT_IMPLEMENTED,
    ErrorCode.INTERNAL.value: HTTPStatus.INTERNAL_SERVER_ERROR,
    ErrorCode.UNAVAILABLE.value: HTTPStatus.SERVICE_UNAVAILABLE,
    ErrorCode.UNAUTHENTICATED.value: HTTPStatus.UNAUTHORIZED,
}
_STATUS_BY_REASON: dict[str, int] = {"REQUEST_TOO_LARGE": HTTPStatus.REQUEST_ENTITY_TOO_LARGE}
# The code of any other reason is the reason in lower case.
_CODE_BY_REASON = {
    "INVALID_REQUEST": "invalid_request",
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "CONTEXT_EXCEEDED": "context_length_exceeded",
    "QUEUE_FULL": "server_overloaded",
    "UNAUTHENTICATED": "invalid_api_key",
}
_RATE_LIMIT_CODE = "rate_limit_exceeded"
# Clients' libraries retry every 5xx; these would fail again, or have already taken all the time that the client has.
_NOT_RETRIED_REASONS = frozenset({"POISON_REQUEST", "NUMERIC_ERROR"})
_NOT_RETRIED_STATUSES = frozenset({HTTPStatus.NOT_IMPLEMENTED, HTTPStatus.GATEWAY_TIMEOUT})
_RETRIED_STATUSES = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})


def http_error(error: ServiceError, naming: FieldNaming) -> HttpError:
    """What a `ServiceError` is in HTTP."""
    facts = _facts_of(error)
    status = _STATUS_BY_REASON.get(facts.reason, _STATUSES.get(facts.code, HTTPStatus.INTERNAL_SERVER_ERROR))
    return HttpError(
        status,
        _code(facts.reason, status),
        _message(facts, naming),
        param=_param(facts, naming),
        headers=_headers(facts, status),
    )


def any_error(error: Exception, naming: FieldNaming) -> HttpError:
    """What any exception is in HTTP; an unexpected one is logged, both without its text."""
    if isinstance(error, HttpError):
        return error
    if not isinstance(error, ServiceError):
        logger.error("unexpected error", extra={"method": "HTTP"}, exc_info=without_text(error))
        error = InternalError("internal error")
    return http_error(error, naming)


@dataclass(frozen=True, slots=True)
class _Facts:
    code: int
    reason: str
    message: str
    violations: tuple[Violation, ...]
    retry_delay_s: float | None
    values: Mapping[str, str]


def _facts_of(error: ServiceError) -> _Facts:
    status = error.status if isinstance(error, StatusError) else to_status(error)
    info, bad_request = error_details_pb2.ErrorInfo(reason="INTERNAL"), error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    delay_s = None
    for detail in status.details:
        if detail.Unpack(retry):
            delay_s = retry.retry_delay.ToTimedelta().total_seconds()
        elif not detail.Unpack(info):
            detail.Unpack(bad_request)
    violations = tuple(
        Violation(violation.field, violation.reason, violation.description)
        for violation in bad_request.field_violations
    )
    return _Facts(status.code, info.reason, status.message, violations, delay_s, dict(info.metadata))


def _code(reason: str, status: int) -> str:
    other = _RATE_LIMIT_CODE if status == HTTPStatus.TOO_MANY_REQUESTS else reason.lower()
    return _CODE_BY_REASON.get(reason, other)


def _message(facts: _Facts, naming: FieldNaming) -> str:
    if facts.violations:
        return "; ".join(f"{naming(violation.field)}: {violation.description}" for violation in facts.violations)
    if _CODE_BY_REASON.get(facts.reason) == "context_length_exceeded":
        return _context_message(facts)
    return facts.message


def _context_message(facts: _Facts) -> str:
    """Clients and proxies recognize the error by these words of OpenAI's and Anthropic's; some read the number."""
    limit = int(facts.values["limit"])
    if facts.reason == "PROMPT_TOO_LONG":
        # It is the longest prompt's, which leaves room for a token.
        return f"This model's maximum context length is {limit + 1} tokens, the prompt is too long: {facts.message}"
    return f"This model's maximum context length is {limit} tokens: {facts.message}"


def _param(facts: _Facts, naming: FieldNaming) -> str | None:
    if facts.violations:
        return naming(facts.violations[0].field)
    if facts.reason == "MODEL_NOT_FOUND":
        return "model"
    return naming("prompt") if facts.reason in ("PROMPT_TOO_LONG", "CONTEXT_EXCEEDED") else None


def _headers(facts: _Facts, status: int) -> dict[str, str]:
    headers: dict[str, str] = {}
    if status in _RETRIED_STATUSES:
        delay_s = _DEFAULT_RETRY_S if facts.retry_delay_s is None else facts.retry_delay_s
        headers["Retry-After"] = str(max(1, math.ceil(delay_s)))
        headers["retry-after-ms"] = str(round(1000 * delay_s))
    if status in _NOT_RETRIED_STATUSES or facts.reason in _NOT_RETRIED_REASONS:
        headers["x-should-retry"] = "false"
    if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    if facts.reason == "DRAINING":
        headers["Connection"] = "close"
    return headers
