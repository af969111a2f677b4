"""What clients receive of a step: tokens, and starts and ends of choices."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from services.scheduler.core.batch.row_tokens import RowTokens
from services.scheduler.core.batch.sequence import Finish, Sequence
from services.scheduler.core.batch.slot_table import RowConstants
from shared.errors import ServiceError
from shared.ids import RequestHandle
from shared.step.columns import Float32Column, Int32Column
from shared.step.logprobs import Logprobs

_NO_HANDLES = np.empty(0, np.uint32)
_NO_ROWS = np.empty(0, np.int32)


@dataclass(slots=True)
class RequestStart:
    """A choice got its first token."""

    handle: RequestHandle
    num_cached_tokens: int
    queue_s: float
    """Time in this scheduler's queues."""
    prefill_s: float = 0.0
    """Time since it last left them."""


@dataclass(slots=True)
class RequestEnd:
    """The end of a choice: exactly one of `finish` and `error` is set."""

    handle: RequestHandle
    num_completion_tokens: int = 0
    finish: Finish | None = None
    error: ServiceError | None = None
    num_resumes: int = 0
    """As in `Sequence`."""
    is_resume_exact: bool = True
    """Whether the tokens are the same as without a loss, as far as this scheduler knows."""
    queue_s: float = 0.0
    """Time in this scheduler's queues."""

    @classmethod
    def failure(cls, seq: Sequence, error: ServiceError) -> RequestEnd:
        """The end of a failed choice, which has left the queue."""
        return cls(seq.handle, error=error, num_resumes=seq.num_resumes, queue_s=seq.waited_s)


@dataclass(slots=True)
class Outputs:
    """What one client receives: rows, and starts and ends of choices."""

    handles: np.ndarray[tuple[int], np.dtype[np.uint32]]  # [num_rows]
    first_indexes: Int32Column  # [num_rows]
    """The index of each row's first token among its completion tokens."""
    token_ids: Int32Column  # [num_tokens]
    """Row after row."""
    starts: list[RequestStart] = field(default_factory=list)
    ends: list[RequestEnd] = field(default_factory=list)
    counts: Int32Column | None = None  # [num_rows]
    """Tokens per row; None means one each."""
    logprobs: Logprobs | None = None
    """Values by index into `token_ids`."""
    prompt_logprobs: list[tuple[RequestHandle, Logprobs]] = field(default_factory=list)
    """Values of prompts, by handle."""
    vectors: list[tuple[RequestHandle, Float32Column]] = field(default_factory=list)
    """Vectors of prompts, by handle."""
    resumes: list[tuple[RequestHandle, int]] = field(default_factory=list)
    """Handles that resume after a loss, and how often they have by now."""

    @classmethod
    def only_ends(cls, ends: list[RequestEnd]) -> Outputs:
        """Outputs that come from no step."""
        return cls(_NO_HANDLES, _NO_ROWS, _NO_ROWS, ends=ends)

    def set_rows(
        self, handles: np.ndarray[tuple[int], np.dtype[np.uint32]], first_indexes: Int32Column, rows: RowTokens
    ) -> None:
        """Set rows of at least one token each."""
        self.handles, self.first_indexes, self.token_ids = handles, first_indexes, rows.token_ids
        self.counts = None if len(rows.token_ids) == len(handles) else rows.counts
        self.logprobs = rows.logprobs


class OutputsByClient:
    """Collects one step's outputs, split by client."""

    def __init__(self) -> None:
        self.by_client: dict[int, Outputs] = {}

    def add_rows(self, constants: RowConstants, first_indexes: Int32Column, rows: RowTokens) -> None:
        """Add the rows that got tokens. Call it once."""
        if constants.only_client is not None:
            self._of(constants.only_client).set_rows(constants.handles, first_indexes, rows)
            return
        for client in np.unique(constants.clients):
            is_own = constants.clients == client
            self._of(int(client)).set_rows(constants.handles[is_own], first_indexes[is_own], rows.of_rows(is_own))

    def add_prompt_logprobs(self, client: int, handle: RequestHandle, logprobs: Logprobs) -> None:
        """Add log-probabilities of a prompt's next tokens."""
        self._of(client).prompt_logprobs.append((handle, logprobs))

    def add_vector(self, client: int, handle: RequestHandle, values: Float32Column) -> None:
        """Add a prompt's vector."""
        self._of(client).vectors.append((handle, values))

    def add_start(self, client: int, start: RequestStart) -> None:
        """Add a choice that started."""
        self._of(client).starts.append(start)

    def add_resume(self, seq: Sequence) -> None:
        """Add a choice that resumes."""
        self._of(seq.client).resumes.append((seq.handle, seq.num_resumes))

    def add_end(self, client: int, end: RequestEnd) -> None:
        """Add a choice that ended."""
        self._of(client).ends.append(end)

    def _of(self, client: int) -> Outputs:
        if client not in self.by_client:
            self.by_client[client] = Outputs.only_ends([])
        return self.by_client[client]
