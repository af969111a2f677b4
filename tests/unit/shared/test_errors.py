"""The table of errors: the code and reason for each situation."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shared import errors
from shared.errors import ErrorCode, InvalidRequestError, ServiceError, Violation


@pytest.mark.parametrize(
    ("error_type", "code", "reason"),
    [
        (errors.InvalidRequestError, ErrorCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        (errors.PromptTooLongError, ErrorCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG"),
        (errors.ContextExceededError, ErrorCode.INVALID_ARGUMENT, "CONTEXT_EXCEEDED"),
        (errors.RequestTooLargeError, ErrorCode.INVALID_ARGUMENT, "REQUEST_TOO_LARGE"),
        (errors.KvCapacityExceededError, ErrorCode.FAILED_PRECONDITION, "KV_CAPACITY_EXCEEDED"),
        (errors.ExactUnavailableError, ErrorCode.FAILED_PRECONDITION, "EXACT_UNAVAILABLE"),
        (errors.ModelNotFoundError, ErrorCode.NOT_FOUND, "MODEL_NOT_FOUND"),
        (errors.DuplicateRequestError, ErrorCode.ALREADY_EXISTS, "DUPLICATE_REQUEST"),
        (errors.NotSupportedError, ErrorCode.UNIMPLEMENTED, "NOT_SUPPORTED"),
        (errors.GroupMismatchError, ErrorCode.FAILED_PRECONDITION, "GROUP_MISMATCH"),
        (errors.NotReadyError, ErrorCode.UNAVAILABLE, "NOT_READY"),
        (errors.DrainingError, ErrorCode.UNAVAILABLE, "DRAINING"),
        (errors.SchedulerLostError, ErrorCode.UNAVAILABLE, "SCHEDULER_LOST"),
        (errors.WorkersLostError, ErrorCode.UNAVAILABLE, "WORKERS_LOST"),
        (errors.StepMismatchError, ErrorCode.FAILED_PRECONDITION, "STEP_MISMATCH"),
        (errors.StaleEpochError, ErrorCode.FAILED_PRECONDITION, "STALE_EPOCH"),
        (errors.GroupHeldError, ErrorCode.FAILED_PRECONDITION, "GROUP_HELD"),
        (errors.ProfilingUnavailableError, ErrorCode.FAILED_PRECONDITION, "PROFILING_UNAVAILABLE"),
        (errors.TemplateFailedError, ErrorCode.FAILED_PRECONDITION, "TEMPLATE_FAILED"),
        (errors.NumericError, ErrorCode.INTERNAL, "NUMERIC_ERROR"),
        (errors.PoisonRequestError, ErrorCode.INTERNAL, "POISON_REQUEST"),
        (errors.InternalError, ErrorCode.INTERNAL, "INTERNAL"),
    ],
)
def test_each_error_has_its_code_and_reason(error_type: type[ServiceError], code: ErrorCode, reason: str) -> None:
    error = error_type("what happened", limit=3)

    assert (error.code, error.reason) == (code, reason)
    assert (error.message, error.values) == ("what happened", {"limit": "3"})
    assert str(error) == "what happened"


def test_one_error_names_every_violation() -> None:
    violations = [Violation("top_p", "OUT_OF_RANGE", "is too large"), Violation("seed", "OUT_OF_RANGE", "is negative")]

    error = InvalidRequestError.from_violations(violations)

    assert error.message == "top_p: is too large; seed: is negative"
    assert error.violations == tuple(violations)


@pytest.mark.process
def test_the_error_and_limit_modules_import_no_transport() -> None:
    modules = "shared.errors, shared.request.limits"
    code = f"import sys, {modules}; print([name for name in ('grpc', 'google') if name in sys.modules])"

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "[]"
