"""Turns submissions into sequences, and checks them against the model."""

from __future__ import annotations

import numpy as np

from services.scheduler.cell.events import ChoiceSoFar, Submission
from services.scheduler.cell.requests.requests import Request
from services.scheduler.core.batch.sequence import Sequence
from shared.errors import InvalidRequestError, Violation
from shared.request.limits import TOKEN_DTYPE, ModelLimits, check_fit, check_prompt, check_task, check_token_ids
from shared.request.sampling_params import check_sampling
from shared.tenants.tenant import salt_of

_NOTHING_SO_FAR = ChoiceSoFar()
# A token id, a value, and a share of the columns with one number per position.
_BYTES_PER_LOGPROB = 12


def make_request(client: int, submission: Submission, now: float, *, shares_between_tenants: bool) -> Request:
    """Make a sequence for each choice that has not ended.

    Args:
        shares_between_tenants: Whether a tenant may find prefixes that another's requests computed.
    """
    cache_salt = submission.cache_salt
    if not shares_between_tenants:
        cache_salt = salt_of(submission.tenant, cache_salt)
    so_far = submission.choices_so_far or (_NOTHING_SO_FAR,) * submission.n
    choices = [
        _make_sequence(
            client,
            submission,
            choice,
            output=so_far[choice].output,
            arrived_at=now - submission.age_s,
            cache_salt=cache_salt,
        )
        for choice in submission.open_choices
    ]
    return Request(
        submission.key,
        client,
        submission.handle,
        submission.attempt,
        submission.tenant,
        choices,
        now,
        deadline=None if submission.time_left_s is None else now + submission.time_left_s,
        num_prompt_logprob_bytes=sum(_num_prompt_logprob_bytes(seq) for seq in choices),
        needs=submission.needs,
    )


def check_sequence(seq: Sequence, limits: ModelLimits, *, embeds: bool = False) -> None:
    """Check a waiting sequence against the model, which `embeds` or generates text, and the KV pool.

    Its ranges were checked where the client called; but a replica of another release may have other ranges, and what a
    worker refuses ends the step of all.

    Raises:
        ServiceError: it cannot be served.
    """
    tokens = np.frombuffer(seq.token_bytes, TOKEN_DTYPE)
    prompt, output = tokens[: seq.num_prompt_tokens], tokens[seq.num_prompt_tokens :]
    options = seq.params.options
    check_task(wants_vector=options is not None and options.pooling is not None, embeds=embeds)
    check_sampling(seq.params, limits)
    check_prompt(prompt, limits)
    check_fit(len(prompt), seq.params.max_tokens, limits)
    if not output.size:
        return
    check_token_ids(output, limits.logits_width, field="output")
    if len(output) > seq.params.max_tokens:
        violation = Violation("output", "OUT_OF_RANGE", f"at most {seq.params.max_tokens} tokens")
        raise InvalidRequestError.from_violations([violation])


def _make_sequence(
    client: int, submission: Submission, choice: int, *, output: bytes, arrived_at: float, cache_salt: bytes
) -> Sequence:
    tokens = bytearray(submission.prompt)
    tokens += output
    return Sequence(
        submission.request_id,
        client,
        submission.handle_of(choice),
        submission.params,
        tokens,
        len(submission.prompt) // TOKEN_DTYPE.itemsize,
        arrived_at,
        priority=submission.priority,
        tenant=submission.tenant,
        cache_salt=cache_salt,
        attempt=1 if submission.waits_as_new else submission.attempt,
        choice=choice,
        num_earlier_tokens=len(output) // TOKEN_DTYPE.itemsize,
        is_exact=submission.is_exact,
        num_resumes=submission.num_earlier_resumes,
    )


def _num_prompt_logprob_bytes(seq: Sequence) -> int:
    options = seq.params.options
    if options is None or options.num_prompt_logprobs is None or not seq.wants_prompt_logprobs:
        return 0
    return seq.num_prompt_tokens * (options.num_prompt_logprobs + 1) * _BYTES_PER_LOGPROB
