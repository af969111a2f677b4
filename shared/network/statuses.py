"""Errors as gRPC statuses, and statuses as errors."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from shared.errors import ServiceError

ERROR_DOMAIN = "lockstep"
STATUS_DETAILS_KEY = "grpc-status-details-bin"


def to_status(error: ServiceError) -> status_pb2.Status:
    """The status, with ErrorInfo and, if they apply, BadRequest and RetryInfo."""
    status = status_pb2.Status(code=error.code.value, message=error.message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=error.values)
    status.details.append(_pack(info))
    if error.violations:
        bad_request = error_details_pb2.BadRequest()
        for violation in error.violations:
            bad_request.field_violations.add(
                field=violation.field, reason=violation.reason, description=violation.description
            )
        status.details.append(_pack(bad_request))
    if error.retry_delay_s is not None:
        retry_info = error_details_pb2.RetryInfo()
        retry_info.retry_delay.FromMilliseconds(round(error.retry_delay_s * 1000))
        status.details.append(_pack(retry_info))
    return status


def status_from_rpc_error(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """The status with which a call failed; without details if there were none."""
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY:
            return status_pb2.Status.FromString(value)
    return status_pb2.Status(code=error.code().value[0], message=error.details() or "")


def reason_of(status: status_pb2.Status) -> str | None:
    """The stable reason in ErrorInfo, if any."""
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Unpack(info):
            return str(info.reason)
    return None


class StatusError(ServiceError):
    """Another service's status, passed on unchanged."""

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__(status.message)
        self.status = status


def _pack(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
