"""A request in the form that the cell takes: tokens and resolved parameters, and its attempts."""

from __future__ import annotations

from dataclasses import dataclass

from shared.limits import TOKEN_DTYPE, SamplingParams


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request for one prompt with every parameter resolved, including the seed; it fits the cell."""

    request_id: str
    prompt: bytes
    """The token ids, little-endian int32."""
    sampling: SamplingParams
    priority: int = 0
    """A `lockstep.v1.Priority`."""
    cache_salt: bytes = b""
    n: int = 1
    """The number of choices."""
    is_exact: bool = False
    """Whether the output must depend on nothing but the request, down to the byte."""

    @property
    def num_prompt_tokens(self) -> int:
        """The prompt's length in tokens."""
        return len(self.prompt) // TOKEN_DTYPE.itemsize


@dataclass(frozen=True, slots=True)
class ChoiceSoFar:
    """What is known so far about one choice."""

    output: bytes
    """Its completion tokens, little-endian int32."""
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class Attempt:
    """One submission of a request."""

    handle: int
    request: ResolvedRequest
    number: int
    """Counts the request's attempts across streams, from 1."""
    choices_so_far: tuple[ChoiceSoFar, ...]
    """One entry per choice; empty if nothing is known about any of them."""
    age_s: float
    """Seconds since the request arrived."""
    time_left_s: float | None
    """Seconds until the caller's deadline; None means there is none."""
    resumes_exactly: bool = False
    """Whether resuming changes no byte of the output: every cell the request was sent to was exact, with the same
    fingerprint."""
    num_resumes: int = 0
    """A lower bound on how often each unfinished choice has been resumed after a loss, including by this attempt."""
