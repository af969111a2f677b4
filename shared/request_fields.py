"""The fields that public requests have in common: which values are refused, and what absence means.

Every door of a cell reads them here, so that a request means the same at each. How long a list is, is looked at
before anything in it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lockstep.v1 import common_pb2
from shared.errors import InvalidRequestError, Violation
from shared.limits import (
    MAX_CACHE_SALT_BYTES,
    MAX_STOP_TOKEN_IDS,
    MAX_STOP_TOKEN_SEQUENCE_LENGTH,
    MAX_STOP_TOKEN_SEQUENCES,
    ModelLimits,
    SamplingParams,
    check_fit,
    check_prompt,
    check_prompt_length,
    check_sampling,
    check_token_ids,
    default_max_tokens,
)

# A caller that waits longer has no deadline: whoever sets none may send the longest time there is.
MAX_TIME_LEFT_S = 365 * 86400.0

_PRIORITIES = frozenset(common_pb2.Priority.values()) - {common_pb2.PRIORITY_UNSPECIFIED}
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def read_request_id(request_id: str | None, violations: list[Violation]) -> str:
    """The request's id, a drawn one for None; what is wrong with it joins `violations`."""
    if request_id is None:
        return secrets.token_hex(16)
    if not _REQUEST_ID.fullmatch(request_id):
        violations.append(Violation("request_id", "OUT_OF_RANGE", "must be 1 to 64 of A-Z, a-z, 0-9, _ and -"))
    return request_id


def read_prompt_token_ids(
    token_ids: Sequence[int], limits: ModelLimits, violations: list[Violation], *, field: str
) -> npt.NDArray[np.uint32]:
    """A prompt of ids, [num_prompt_tokens]; what is wrong with it joins `violations`, named by `field`.

    Raises:
        PromptTooLongError: no token could follow it.
    """
    try:
        check_prompt_length(len(token_ids), limits, field=field)
        # Unsigned until checked: as int32, an id of 2**31 and more would be a negative one.
        prompt = np.array(token_ids, np.uint32)
        check_prompt(prompt, limits, field=field)
    except InvalidRequestError as error:
        violations.extend(error.violations)
        return np.empty(0, np.uint32)
    return prompt


def read_sampling(
    sampling: common_pb2.SamplingParams, limits: ModelLimits, violations: list[Violation]
) -> SamplingParams:
    """Sampling parameters with defaults for what is absent; what is wrong with them joins `violations`.

    An absent seed is drawn. An absent `max_tokens` is 1 until `resolve_max_tokens`.
    """
    # One more than may be is enough to have a list refused.
    sequences = sampling.stop_token_sequences[: MAX_STOP_TOKEN_SEQUENCES + 1]
    params = SamplingParams(
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else 1,
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=tuple(sampling.stop_token_ids[: MAX_STOP_TOKEN_IDS + 1]),
        stop_token_sequences=tuple(
            tuple(sequence.token_ids[: MAX_STOP_TOKEN_SEQUENCE_LENGTH + 1]) for sequence in sequences
        ),
    )
    try:
        check_sampling(params, limits)
    except InvalidRequestError as error:
        violations.extend(error.violations)
    return params


def read_priority(priority: common_pb2.Priority, violations: list[Violation]) -> common_pb2.Priority:
    """How urgent a request is, NORMAL when it does not say; what is wrong with it joins `violations`."""
    if priority == common_pb2.PRIORITY_UNSPECIFIED:
        return common_pb2.PRIORITY_NORMAL
    if priority not in _PRIORITIES:
        violations.append(Violation("priority", "OUT_OF_RANGE", "must be PRIORITY_HIGH, _NORMAL or _LOW"))
    return priority


def read_cache_salt(cache_salt: str, violations: list[Violation]) -> bytes:
    """The salt of a request's prefixes, empty for none; what is wrong with it joins `violations`."""
    salt = cache_salt.encode()
    if len(salt) > MAX_CACHE_SALT_BYTES:
        violations.append(Violation("cache_salt", "OUT_OF_RANGE", f"at most {MAX_CACHE_SALT_BYTES} bytes"))
    return salt


def read_output_token_ids(
    token_ids: Sequence[int], sampling: common_pb2.SamplingParams, limits: ModelLimits, violations: list[Violation]
) -> npt.NDArray[np.uint32]:
    """The completion so far of an earlier call, [num_tokens]; what is wrong with it joins `violations`.

    It needs what the earlier call drew and resolved: another seed or limit would make another answer of it.
    """
    if not token_ids:
        return np.empty(0, np.uint32)
    missing = [field for field in ("max_tokens", "seed") if not sampling.HasField(field)]
    violations += (
        Violation(f"sampling.{field}", "OUT_OF_RANGE", "must be given with output_token_ids") for field in missing
    )
    if "max_tokens" not in missing and len(token_ids) >= sampling.max_tokens:
        violations.append(Violation("output_token_ids", "OUT_OF_RANGE", "must be fewer than sampling.max_tokens"))
    if violations:
        return np.empty(0, np.uint32)
    output = np.array(token_ids, np.uint32)
    try:
        check_token_ids(output, limits.logits_width, field="output_token_ids")
    except InvalidRequestError as error:
        violations.extend(error.violations)
    return output


def read_time_left(time_remaining_s: float | None) -> float | None:
    """How long a caller waits, in seconds, by what its call says; None is for ever."""
    return None if time_remaining_s is None or time_remaining_s > MAX_TIME_LEFT_S else time_remaining_s


def resolve_max_tokens(
    params: SamplingParams, num_prompt_tokens: int, limits: ModelLimits, *, has_max_tokens: bool
) -> SamplingParams:
    """The parameters with `max_tokens`, the room that is left unless the request had one.

    Raises:
        ContextExceededError, KvCapacityExceededError: prompt and completion can never fit.
    """
    if not has_max_tokens:
        # A prompt without room in the pool is refused as if one token had been asked for.
        params = replace(params, max_tokens=max(1, default_max_tokens(num_prompt_tokens, limits)))
    check_fit(num_prompt_tokens, params.max_tokens, limits)
    return params


def raise_violations(violations: Sequence[Violation]) -> None:
    """Refuse a request that has violations.

    Raises:
        InvalidRequestError: naming the first of them.
    """
    if violations:
        raise InvalidRequestError.from_violations(violations)
