"""What passes between the scheduler and the process that watches Kubernetes: JSON, a line for each message."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from services.scheduler.cell.events import Endpoint
from shared.network.addresses import check_host_and_port

MAX_LINE_BYTES = 4 * 1024 * 1024
# Between two attempts that fail, of the process to watch and of the scheduler to keep it running.
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class WatchTask(_Message):
    """What to watch; the process's only argument."""

    api_server: str
    service_account: str
    """The directory."""
    namespace: str
    service: str
    port: str
    period_s: float
    """Seconds between two lists; the slices are watched in between."""
    parent_pid: int


class EndpointMessage(_Message):
    """A worker's address, and whether it is ready."""

    address: Annotated[str, AfterValidator(check_host_and_port)]
    is_ready: bool
    is_terminating: bool
    zone: str | None = None


class WatchMessage(_Message):
    """What the API server reports, or a problem: why there is no report."""

    endpoints: tuple[EndpointMessage, ...] | None = None
    """All that there are; None with a problem."""
    problem: str = ""
    is_watched: bool = False
    """The report comes from a watch: problems are over. A list alone may be answered while every watch is refused."""

    @classmethod
    def of(cls, endpoints: tuple[Endpoint, ...], *, is_watched: bool = False) -> WatchMessage:
        """Encode a report."""
        return cls(
            is_watched=is_watched,
            endpoints=tuple(
                EndpointMessage(
                    address=one.address, is_ready=one.is_ready, is_terminating=one.is_terminating, zone=one.zone
                )
                for one in endpoints
            ),
        )

    def found(self) -> tuple[Endpoint, ...] | None:
        """The endpoints; None with a problem.

        Raises:
            ValueError: an address occurs twice.
        """
        if self.endpoints is None:
            return None
        found = tuple(Endpoint(one.address, one.is_ready, one.is_terminating, one.zone) for one in self.endpoints)
        if len({one.address for one in found}) < len(found):
            raise ValueError("an address occurs twice")
        return found

    def line(self) -> bytes:
        """The message as a line."""
        return self.model_dump_json(exclude_defaults=True).encode() + b"\n"
