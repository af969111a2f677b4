"""A request as a cell takes it: tokens and resolved parameters, submitted as often as it takes."""

from __future__ import annotations

from dataclasses import dataclass

from shared.limits import TOKEN_DTYPE, SamplingParams


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request with a prompt of ids and every parameter resolved, the seed too; it fits the cell.

    `prompt` is little-endian int32, `priority` a `lockstep.v1.Priority`, `n` the number of choices. With `is_exact` its
    bytes may depend on nothing else.
    """

    request_id: str
    prompt: bytes
    sampling: SamplingParams
    priority: int = 0
    cache_salt: bytes = b""
    n: int = 1
    is_exact: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt) // TOKEN_DTYPE.itemsize


@dataclass(frozen=True, slots=True)
class ChoiceSoFar:
    """What is known of one choice: its completion tokens, little-endian int32, and whether it has ended."""

    output: bytes
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class Attempt:
    """One submission of a request; `number` counts them from 1, on whatever stream.

    `choices_so_far` has nothing, or an entry a choice. `age_s` is how long ago the request arrived, `time_left_s` how
    long its caller still waits; None is for ever. With `resumes_exactly` no byte can tell recoveries, this attempt or
    those of its cell: all its cells were exact, and by one fingerprint. Each of its choices has gone on at least
    `num_resumes` times after a loss, this attempt included.
    """

    handle: int
    request: ResolvedRequest
    number: int
    choices_so_far: tuple[ChoiceSoFar, ...]
    age_s: float
    time_left_s: float | None
    resumes_exactly: bool = False
    num_resumes: int = 0
