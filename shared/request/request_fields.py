"""The fields that public requests share: which values are rejected, and what absence means.

Tokenizer and scheduler read them here, so that a request means the same in each. The `read_...` functions append to
`violations`. A list's length is checked before its contents.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lockstep.v1 import common_pb2, scheduler_pb2
from shared.errors import ExactUnavailableError, InvalidRequestError, Violation
from shared.request.limits import (
    MAX_CHOICES,
    ModelLimits,
    check_fit,
    check_prompt,
    check_prompt_length,
    check_token_ids,
    room_left,
)
from shared.request.sampling_params import (
    DEFAULT_MAX_TOKENS,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOP_TOKEN_SEQUENCE_LENGTH,
    MAX_STOP_TOKEN_SEQUENCES,
    NO_OPTIONS,
    SamplingOptions,
    SamplingParams,
    check_min_tokens,
    check_sampling,
)
from shared.tenants.tenant import MAX_CACHE_SALT_BYTES

# A deadline further away than this is treated as this one.
MAX_TIME_LEFT_S = 3600.0

_PRIORITIES = frozenset(common_pb2.Priority.values()) - {common_pb2.PRIORITY_UNSPECIFIED}
_DETERMINISMS = frozenset(common_pb2.Determinism.values())
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def read_request_id(request_id: str | None, violations: list[Violation]) -> str:
    """The request's id, or a random one for None."""
    if request_id is None:
        return secrets.token_hex(16)
    if not _REQUEST_ID.fullmatch(request_id):
        violations.append(Violation("request_id", "OUT_OF_RANGE", "must be 1 to 64 of A-Z, a-z, 0-9, _ and -"))
    return request_id


@contextmanager
def fields_under(prefix: str) -> Iterator[None]:
    """Put `prefix` before the fields that an `InvalidRequestError` from inside names."""
    try:
        yield
    except InvalidRequestError as error:
        violations = [replace(violation, field=prefix + violation.field) for violation in error.violations]
        raise InvalidRequestError.from_violations(violations) from error


def read_prompt_token_ids(
    token_ids: Sequence[int], limits: ModelLimits, violations: list[Violation], *, field: str
) -> npt.NDArray[np.uint32]:
    """A prompt of token ids, [num_prompt_tokens].

    Raises:
        PromptTooLongError: it leaves no room for a completion token.
    """
    try:
        check_prompt_length(len(token_ids), limits, field=field)
        # Unsigned until checked: as int32, an id of 2**31 or more would become negative.
        prompt = np.array(token_ids, np.uint32)
        check_prompt(prompt, limits, field=field)
    except InvalidRequestError as error:
        violations.extend(error.violations)
        return np.empty(0, np.uint32)
    return prompt


def read_sampling(
    sampling: common_pb2.SamplingParams,
    limits: ModelLimits,
    violations: list[Violation],
    *,
    defaults: common_pb2.SamplingParams | None = None,
) -> SamplingParams:
    """Sampling parameters, with defaults for absent ones.

    An absent seed is random. An absent `max_tokens` becomes the most that `resolve_max_tokens` may return. The model's
    `defaults` take precedence over those in common.proto.
    """
    given = _Given(sampling, defaults or common_pb2.SamplingParams())
    # One entry more than the maximum is enough to have a list rejected.
    params = SamplingParams(
        max_tokens=given.whole("max_tokens", DEFAULT_MAX_TOKENS),
        temperature=given.number("temperature", 1.0),
        top_k=given.whole("top_k", 0),
        top_p=given.number("top_p", 1.0),
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=tuple(sampling.stop_token_ids[: MAX_STOP_TOKEN_IDS + 1]),
        stop_token_sequences=_read_runs(
            sampling.stop_token_sequences, MAX_STOP_TOKEN_SEQUENCES, MAX_STOP_TOKEN_SEQUENCE_LENGTH
        ),
        options=_read_options(sampling, given),
    )
    try:
        check_sampling(params, limits)
    except InvalidRequestError as error:
        violations.extend(error.violations)
    return params


def read_num_choices(sampling: common_pb2.SamplingParams, violations: list[Violation]) -> int:
    """The number of choices, 1 if absent."""
    n = sampling.n if sampling.HasField("n") else 1
    if not 1 <= n <= MAX_CHOICES:
        violations.append(Violation("sampling.n", "OUT_OF_RANGE", f"must be between 1 and {MAX_CHOICES}"))
    return n


def read_priority(priority: common_pb2.Priority, violations: list[Violation]) -> common_pb2.Priority:
    """The request's priority, NORMAL if unspecified."""
    if priority == common_pb2.PRIORITY_UNSPECIFIED:
        return common_pb2.PRIORITY_NORMAL
    if priority not in _PRIORITIES:
        violations.append(Violation("priority", "OUT_OF_RANGE", "must be PRIORITY_HIGH, _NORMAL or _LOW"))
    return priority


def read_determinism(determinism: common_pb2.Determinism, violations: list[Violation]) -> bool:
    """Whether the answer must be exact, False if unspecified."""
    if determinism not in _DETERMINISMS:
        violations.append(Violation("determinism", "OUT_OF_RANGE", "must be DETERMINISM_ORDINARY or _EXACT"))
    return determinism == common_pb2.DETERMINISM_EXACT


def check_exactness(exact_fingerprint: str, *, is_exact: bool) -> None:
    """Reject a request for an exact answer if the cell cannot guarantee one.

    Args:
        exact_fingerprint: Empty unless all ranks' results are bitwise equal.

    Raises:
        ExactUnavailableError: it cannot.
    """
    if is_exact and not exact_fingerprint:
        raise ExactUnavailableError("the cell cannot give exact answers: their bytes depend on concurrent requests")


def read_cache_salt(cache_salt: str, violations: list[Violation]) -> bytes:
    """The salt of the request's prefixes, empty for none."""
    salt = cache_salt.encode()
    if len(salt) > MAX_CACHE_SALT_BYTES:
        violations.append(Violation("cache_salt", "OUT_OF_RANGE", f"must be at most {MAX_CACHE_SALT_BYTES} bytes"))
    return salt


def read_choices_so_far(
    choices: Sequence[scheduler_pb2.ChoiceSoFar],
    sampling: common_pb2.SamplingParams,
    limits: ModelLimits,
    violations: list[Violation],
) -> list[npt.NDArray[np.uint32]]:
    """The tokens of each choice of an earlier call, [num_tokens] each; or no entries.

    They need the seed and `max_tokens` that it resolved: under others the answer would differ.
    """
    if not choices:
        return []
    missing = [field for field in ("max_tokens", "seed") if not sampling.HasField(field)]
    violations += (
        Violation(f"sampling.{field}", "OUT_OF_RANGE", "must be given with choices_so_far") for field in missing
    )
    n = sampling.n if sampling.HasField("n") else 1
    if len(choices) != n:
        violations.append(Violation("choices_so_far", "OUT_OF_RANGE", "must be empty, or one for each of sampling.n"))
    elif all(choice.is_finished for choice in choices):
        violations.append(Violation("choices_so_far", "OUT_OF_RANGE", "must have at least one that is not finished"))
    if violations:
        return []
    return [
        _read_choice(choice, f"choices_so_far[{index}].token_ids", sampling.max_tokens, limits, violations)
        for index, choice in enumerate(choices)
    ]


def read_time_left(time_remaining_s: float | None) -> float | None:
    """Seconds to the deadline, at most `MAX_TIME_LEFT_S`; None without one."""
    return None if time_remaining_s is None else min(time_remaining_s, MAX_TIME_LEFT_S)


def resolve_max_tokens(
    params: SamplingParams, num_prompt_tokens: int, limits: ModelLimits, *, has_max_tokens: bool
) -> SamplingParams:
    """Reduce `max_tokens` to the room that is left, unless the request set it.

    Raises:
        InvalidRequestError: `max_tokens` ends up below `min_tokens`.
        ContextExceededError, KvCapacityExceededError: prompt and completion can never fit.
    """
    if not has_max_tokens:
        # If the prompt alone fills the pool, the request is rejected as one for a single token.
        room = max(1, room_left(num_prompt_tokens, limits))
        params = replace(params, max_tokens=min(params.max_tokens, room))
    check_fit(num_prompt_tokens, params.max_tokens, limits)
    check_min_tokens(params)
    return params


def raise_violations(violations: Sequence[Violation]) -> None:
    """Reject a request that has violations.

    Raises:
        InvalidRequestError: names the first `MAX_VIOLATIONS`.
    """
    if violations:
        raise InvalidRequestError.from_violations(violations)


class _Given:
    """Looks up a field in the request, then in the model's defaults."""

    def __init__(self, sampling: common_pb2.SamplingParams, defaults: common_pb2.SamplingParams) -> None:
        self._messages = (sampling, defaults)

    def number(self, field: str, otherwise: float) -> float:
        for message in self._messages:
            if message.HasField(field):
                return float(getattr(message, field))
        return otherwise

    def whole(self, field: str, otherwise: int) -> int:
        return int(self.number(field, otherwise))


def _read_options(sampling: common_pb2.SamplingParams, given: _Given) -> SamplingOptions | None:
    options = SamplingOptions(
        min_p=given.number("min_p", 0.0),
        repetition_penalty=given.number("repetition_penalty", 1.0),
        presence_penalty=given.number("presence_penalty", 0.0),
        frequency_penalty=given.number("frequency_penalty", 0.0),
        logit_bias=tuple(sorted(itertools.islice(sampling.logit_bias.items(), MAX_LOGIT_BIASES + 1))),
        bad_words=_read_runs(sampling.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH),
        min_tokens=sampling.min_tokens,
        num_logprobs=sampling.num_logprobs if sampling.HasField("num_logprobs") else None,
        num_prompt_logprobs=sampling.num_prompt_logprobs if sampling.HasField("num_prompt_logprobs") else None,
        allowed_token_ids=tuple(sorted(sampling.allowed_token_ids[: MAX_ALLOWED_TOKEN_IDS + 1])),
        logprob_token_ids=tuple(sampling.logprob_token_ids[: MAX_LOGPROBS + 1]),
    )
    return None if options == NO_OPTIONS else options


def _read_runs(
    sequences: Sequence[common_pb2.TokenSequence], max_runs: int, max_length: int
) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sequence.token_ids[: max_length + 1]) for sequence in sequences[: max_runs + 1])


def _read_choice(
    choice: scheduler_pb2.ChoiceSoFar, field: str, max_tokens: int, limits: ModelLimits, violations: list[Violation]
) -> npt.NDArray[np.uint32]:
    num_tokens = len(choice.token_ids)
    if num_tokens > max_tokens or (num_tokens == max_tokens and not choice.is_finished):
        violations.append(Violation(field, "OUT_OF_RANGE", "must be fewer than sampling.max_tokens"))
        return np.empty(0, np.uint32)
    token_ids = np.array(choice.token_ids, np.uint32)
    try:
        check_token_ids(token_ids, limits.logits_width, field=field)
    except InvalidRequestError as error:
        violations.extend(error.violations)
    return token_ids
