"""Every error a client can receive: status code, stable reason and explaining values.

Domain code raises these without importing grpc; an interceptor in `shared.network.rpc` turns them into
`google.rpc.Status`.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass

# A status travels in the metadata, and clients accept at most 8 KiB of it.
MAX_VIOLATIONS = 16


MAX_QUOTED_CHARACTERS = 64
"""Of a name that an error repeats."""


def quote_name(name: str) -> str:
    """A name as JSON in ASCII, cut to `MAX_QUOTED_CHARACTERS`, without characters that are not printable."""
    shown = "".join(filter(str.isprintable, name[: MAX_QUOTED_CHARACTERS + 1]))
    is_whole = len(name) <= MAX_QUOTED_CHARACTERS
    return json.dumps(shown if is_whole else f"{shown[:MAX_QUOTED_CHARACTERS]}...")


class ErrorCode(enum.Enum):
    """gRPC's status codes, with their numbers on the wire."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


@dataclass(frozen=True, slots=True)
class Violation:
    """One invalid field of a request."""

    field: str
    reason: str
    description: str


class ServiceError(Exception):
    """An error whose message and values clients may see, so they contain no prompt text or paths.

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
    """Fields of the request are invalid."""

    code = ErrorCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"

    @classmethod
    def from_violations(cls, violations: Sequence[Violation]) -> InvalidRequestError:
        """Report the first `MAX_VIOLATIONS` of `violations`, at least one."""
        violations = violations[:MAX_VIOLATIONS]
        text = "; ".join(f"{v.field}: {v.description}" for v in violations)
        return cls(text, violations=violations)


class PromptTooLongError(ServiceError):
    """The prompt leaves no room in the context for a token."""

    code = ErrorCode.INVALID_ARGUMENT
    reason = "PROMPT_TOO_LONG"


class ContextExceededError(ServiceError):
    """Prompt and `max_tokens` exceed the model's context."""

    code = ErrorCode.INVALID_ARGUMENT
    reason = "CONTEXT_EXCEEDED"


class RequestTooLargeError(ServiceError):
    """The request contains too much text."""

    code = ErrorCode.INVALID_ARGUMENT
    reason = "REQUEST_TOO_LARGE"


class KvCapacityExceededError(ServiceError):
    """Prompt and `max_tokens` exceed the cell's whole KV pool."""

    code = ErrorCode.FAILED_PRECONDITION
    reason = "KV_CAPACITY_EXCEEDED"


class ExactUnavailableError(ServiceError):
    """The request must be exact, which the cell cannot guarantee."""

    code = ErrorCode.FAILED_PRECONDITION
    reason = "EXACT_UNAVAILABLE"


class ModelNotFoundError(ServiceError):
    """The requested model is not served here."""

    code = ErrorCode.NOT_FOUND
    reason = "MODEL_NOT_FOUND"

    @classmethod
    def from_name(cls, asked: str, served: Sequence[str]) -> ModelNotFoundError:
        """Name the model as its client did, and those that there are.

        It is the only message with a client's words in it: for that client alone, and for no log.
        """
        names = ", ".join(map(quote_name, served))
        return cls(f"the model {quote_name(asked)} is not served here; served: {names}", served_model=served[0])


class DuplicateRequestError(ServiceError):
    """A request with this id is in flight."""

    code = ErrorCode.ALREADY_EXISTS
    reason = "DUPLICATE_REQUEST"


class UnauthenticatedError(ServiceError):
    """The method needs a role or a key, and the caller's certificate or metadata names none that is known."""

    code = ErrorCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class PermissionDeniedError(ServiceError):
    """The caller's role may not call the method, or its key does not allow what the request asks for."""

    code = ErrorCode.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


class QueueFullError(ServiceError):
    """Too many are waiting; a retry may succeed after `retry_delay_s`."""

    code = ErrorCode.RESOURCE_EXHAUSTED
    reason = "QUEUE_FULL"


class TenantLimitError(ServiceError):
    """The tenant has too much in flight or waiting; a retry may succeed after `retry_delay_s`."""

    code = ErrorCode.RESOURCE_EXHAUSTED
    reason = "TENANT_LIMIT"


class NotSupportedError(ServiceError):
    """This release does not support the request, at least with this model."""

    code = ErrorCode.UNIMPLEMENTED
    reason = "NOT_SUPPORTED"


class NotReadyError(ServiceError):
    """The service is loading, or not connected to one it depends on."""

    code = ErrorCode.UNAVAILABLE
    reason = "NOT_READY"


class DrainingError(ServiceError):
    """The service is shutting down."""

    code = ErrorCode.UNAVAILABLE
    reason = "DRAINING"


class SchedulerLostError(ServiceError):
    """The scheduler was lost while the request was in flight."""

    code = ErrorCode.UNAVAILABLE
    reason = "SCHEDULER_LOST"


class WorkersLostError(ServiceError):
    """All workers were lost, and did not return within the operator's bound."""

    code = ErrorCode.UNAVAILABLE
    reason = "WORKERS_LOST"


class ModelChangedError(ServiceError):
    """The cell's workers serve another model now, so the request cannot be continued."""

    code = ErrorCode.UNAVAILABLE
    reason = "MODEL_CHANGED"


class AbortedByCallError(ServiceError):
    """Another call aborted this request."""

    code = ErrorCode.CANCELLED
    reason = "ABORTED_BY_CALL"


class DeadlinePassedError(ServiceError):
    """The caller's deadline passed before the request ended."""

    code = ErrorCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_PASSED"


class ClientTooSlowError(ServiceError):
    """The client has read nothing for too long, or reads more slowly than there is news."""

    code = ErrorCode.RESOURCE_EXHAUSTED
    reason = "CLIENT_TOO_SLOW"


class StepMismatchError(ServiceError):
    """A step does not fit the worker's batch."""

    code = ErrorCode.FAILED_PRECONDITION
    reason = "STEP_MISMATCH"


class StaleEpochError(ServiceError):
    """A message of an epoch that has ended, or a claim not above the current epoch."""

    code = ErrorCode.FAILED_PRECONDITION
    reason = "STALE_EPOCH"


class GroupHeldError(ServiceError):
    """A live scheduler already holds the worker."""

    code = ErrorCode.FAILED_PRECONDITION
    reason = "GROUP_HELD"


class GroupMismatchError(ServiceError):
    """A process tries to join a failure domain, or a start of it, that is not its own."""

    code = ErrorCode.FAILED_PRECONDITION
    reason = "GROUP_MISMATCH"


class ProfilingUnavailableError(ServiceError):
    """Steps cannot be recorded: the worker has no directory for traces, or is recording already."""

    code = ErrorCode.FAILED_PRECONDITION
    reason = "PROFILING_UNAVAILABLE"


class TemplateFailedError(ServiceError):
    """The model has no usable chat template."""

    code = ErrorCode.FAILED_PRECONDITION
    reason = "TEMPLATE_FAILED"


class NumericError(ServiceError):
    """The model's logits for this request were not finite."""

    code = ErrorCode.INTERNAL
    reason = "NUMERIC_ERROR"


class PoisonRequestError(ServiceError):
    """The request was alone in two steps, and each time the worker died."""

    code = ErrorCode.INTERNAL
    reason = "POISON_REQUEST"


class InternalError(ServiceError):
    """A bug. The message never includes the exception's text."""
