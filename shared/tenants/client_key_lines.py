"""One line of the file of clients' keys.

Only processes with such a file import this: pydantic takes longer to import than gRPC.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from shared.tenants.tenant import MAX_WEIGHT, MIN_WEIGHT, Tenant

_DIGEST = re.compile(r"[0-9a-f]{64}", re.IGNORECASE)
_TENANT_NAME = re.compile(r"[!-~]{1,64}")
# Other names may be anything, a key among them.
_FIELD_NAME = re.compile(r"[a-z_]{1,32}")
_MAX_IN_FLIGHT = 2**32 - 1
_MAX_WAITING_TOKENS = 2**63 - 1


def _check_digest(text: str) -> str:
    if not _DIGEST.fullmatch(text):
        raise ValueError("must be 64 hexadecimal digits")
    return text


def _check_tenant_name(text: str) -> str:
    if not _TENANT_NAME.fullmatch(text):
        raise ValueError("must be 1 to 64 visible ASCII characters")
    return text


class ClientKeyLine(BaseModel):
    """What a line says of a key."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    sha256: Annotated[str, AfterValidator(_check_digest)]
    tenant: Annotated[str, AfterValidator(_check_tenant_name)]
    weight: float = Field(default=1.0, ge=MIN_WEIGHT, le=MAX_WEIGHT, allow_inf_nan=False)
    max_in_flight: int | None = Field(default=None, ge=1, le=_MAX_IN_FLIGHT)
    max_waiting_requests: int | None = Field(default=None, ge=1, le=_MAX_IN_FLIGHT)
    max_waiting_tokens: int | None = Field(default=None, ge=1, le=_MAX_WAITING_TOKENS)
    max_priority: Literal["HIGH", "NORMAL", "LOW"] = "NORMAL"
    is_operator: bool = False

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_null(cls, value: object) -> object:
        if value is None:
            raise ValueError("must not be null; leave it out")
        return value

    def of_tenant(self) -> Tenant:
        """The tenant for which the key's holder calls."""
        return Tenant(
            self.tenant,
            self.weight,
            max_in_flight=self.max_in_flight,
            max_waiting_requests=self.max_waiting_requests,
            max_waiting_tokens=self.max_waiting_tokens,
        )


def parse_line(text: str) -> ClientKeyLine:
    """Parse a line.

    Raises:
        ValueError: it is wrong; the message quotes none of its values.
    """
    try:
        value = json.loads(text, object_pairs_hook=_make_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(str(error) if isinstance(error, _RepeatedNameError) else "not valid JSON") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    try:
        return ClientKeyLine.model_validate(value)
    except ValidationError as error:
        details = error.errors(include_input=False, include_url=False)[0]
        name = str(details["loc"][0])
        if details["type"] == "extra_forbidden":
            raise ValueError(f"unknown field{f' {name}' if _FIELD_NAME.fullmatch(name) else ''}") from None
        message = details["msg"].removeprefix("Value error, ").replace("Input should", "must")
        raise ValueError(f"{name}: {message}") from None


class _RepeatedNameError(ValueError):
    """A JSON object has a field twice."""


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise _RepeatedNameError("a field is there twice")
    return value
