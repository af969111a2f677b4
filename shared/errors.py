"""Every error a client can meet: its status code, its stable reason, and the values that explain it.

The domain raises these; one interceptor in `shared.rpc` turns them into `google.rpc.Status`. Nothing here
imports grpc, so the domain needs none.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

# A status travels in the metadata, of which clients take 8 KiB.
MAX_VIOLATIONS = 16


class ErrorCode(enum.Enum):
    """gRPC's status codes, by the number they have on the wire."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


@dataclass(frozen=True, slots=True)
class Violation:
    """One field of a request that is not acceptable."""

    field: str
    reason: str
    description: str


class ServiceError(Exception):
    """An error with a status. Its message and values may be shown to clients: no prompt text, no paths.

    `values` become the metadata of `google.rpc.ErrorInfo`, `violations` a `google.rpc.BadRequest`, `retry_delay_s` a
    `google.rpc.RetryInfo`.
    """

    code = ErrorCode.INTERNAL
    reason = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        violations: Sequence[Violation] = (),
        retry_delay_s: float | None = None,
        **values: object,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.violations = tuple(violations)
        self.retry_delay_s = retry_delay_s
        self.values = {name: str(value) for name, value in values.items()}


class InvalidRequestError(ServiceError):
    """Fields of the request are not acceptable; they are reported together."""

    code = ErrorCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"

    @classmethod
    def from_violations(cls, violations: Sequence[Violation]) -> InvalidRequestError:
        """One error that names the violations, at least one; of many the first ones."""
        violations = violations[:MAX_VIOLATIONS]
        text = "; ".join(f"{v.field}: {v.description}" for v in violations)
        return cls(text, violations=violations)


class PromptTooLongError(ServiceError):
    """The prompt leaves no room for one token in the model's context."""

    code = ErrorCode.INVALID_ARGUMENT
    reason = "PROMPT_TOO_LONG"


class ContextExceededError(ServiceError):
    """Prompt and `max_tokens` together are longer than the model's context."""

    code = ErrorCode.INVALID_ARGUMENT
    reason = "CONTEXT_EXCEEDED"


class RequestTooLargeError(ServiceError):
    """The request carries more text than one request may."""

    code = ErrorCode.INVALID_ARGUMENT
    reason = "REQUEST_TOO_LARGE"


class KvCapacityExceededError(ServiceError):
    """Prompt and `max_tokens` together can never fit the cell's KV pool."""

    code = ErrorCode.FAILED_PRECONDITION
    reason = "KV_CAPACITY_EXCEEDED"


class ExactUnavailableError(ServiceError):
    """Exactness is asked of ranks that cannot give it."""

    code = ErrorCode.FAILED_PRECONDITION
    reason = "EXACT_UNAVAILABLE"


class ModelNotFoundError(ServiceError):
    """The request names a model that is not served here."""

    code = ErrorCode.NOT_FOUND
    reason = "MODEL_NOT_FOUND"


class DuplicateRequestError(ServiceError):
    """A request with this id is in flight."""

    code = ErrorCode.ALREADY_EXISTS
    reason = "DUPLICATE_REQUEST"


class QueueFullError(ServiceError):
    """Too many requests wait; it carries the delay after which a retry may find room."""

    code = ErrorCode.RESOURCE_EXHAUSTED
    reason = "QUEUE_FULL"


class NotSupportedError(ServiceError):
    """The request asks for what this release cannot do, or cannot do with this model."""

    code = ErrorCode.UNIMPLEMENTED
    reason = "NOT_SUPPORTED"


class NotReadyError(ServiceError):
    """The service is loading, or is not linked to what it needs."""

    code = ErrorCode.UNAVAILABLE
    reason = "NOT_READY"


class DrainingError(ServiceError):
    """The service is shutting down and takes no new requests."""

    code = ErrorCode.UNAVAILABLE
    reason = "DRAINING"


class SchedulerLostError(ServiceError):
    """The link to the cell's scheduler broke while the request was on it."""

    code = ErrorCode.UNAVAILABLE
    reason = "SCHEDULER_LOST"


class AbortedByCallError(ServiceError):
    """Another call asked for the end of this request."""

    code = ErrorCode.CANCELLED
    reason = "ABORTED_BY_CALL"


class DeadlinePassedError(ServiceError):
    """The caller's deadline passed before the request ended."""

    code = ErrorCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_PASSED"


class ClientTooSlowError(ServiceError):
    """The client took nothing of its answer for too long."""

    code = ErrorCode.RESOURCE_EXHAUSTED
    reason = "CLIENT_TOO_SLOW"


class StepMismatchError(ServiceError):
    """A step does not fit the batch that the worker holds."""

    code = ErrorCode.FAILED_PRECONDITION
    reason = "STEP_MISMATCH"


class StaleEpochError(ServiceError):
    """A message of an epoch that has ended, or a claim that is not above the present one."""

    code = ErrorCode.FAILED_PRECONDITION
    reason = "STALE_EPOCH"


class GroupHeldError(ServiceError):
    """A live scheduler holds the worker."""

    code = ErrorCode.FAILED_PRECONDITION
    reason = "GROUP_HELD"


class GroupMismatchError(ServiceError):
    """A process asks to join a failure domain, or a start of it, that it is no part of."""

    code = ErrorCode.FAILED_PRECONDITION
    reason = "GROUP_MISMATCH"


class TemplateFailedError(ServiceError):
    """The model has no usable chat template."""

    code = ErrorCode.FAILED_PRECONDITION
    reason = "TEMPLATE_FAILED"


class NumericError(ServiceError):
    """The model's logits for this request were not finite."""

    code = ErrorCode.INTERNAL
    reason = "NUMERIC_ERROR"


class PoisonRequestError(ServiceError):
    """The request was alone in two steps that their worker did not survive."""

    code = ErrorCode.INTERNAL
    reason = "POISON_REQUEST"


class InternalError(ServiceError):
    """A bug. The message never carries the cause's text."""
