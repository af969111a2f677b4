"""Where a sequence stops by its tokens; the tokenizer finds stops in its text."""

from __future__ import annotations

from services.scheduler.core.batch.sequence import TOKEN_BYTES, Finish, FinishReason, Sequence
from shared.request.sampling_params import MAX_STOP_TOKEN_SEQUENCE_LENGTH, SamplingParams


def watched_tokens(params: SamplingParams, eos_token_ids: frozenset[int]) -> list[int]:
    """The tokens after which `find_finish` may find a stop other than the length."""
    tokens = {*params.stop_token_ids, *(sequence[-1] for sequence in params.stop_token_sequences)}
    if not params.ignore_eos:
        tokens |= eos_token_ids
    return sorted(tokens)


def find_finish(seq: Sequence, eos_token_ids: frozenset[int]) -> Finish | None:
    """Why a sequence stops after its newest token; None when it continues.

    All tokens must be stored, at least one of them generated. The order of checks is ATOM's. Before `min_tokens`, the
    only stop is an EOS under a grammar, sampled only when the grammar allows nothing else.
    """
    params = seq.params
    if params.options is not None and seq.num_stored_tokens - seq.num_prompt_tokens < params.options.min_tokens:
        return _find_early_finish(seq, eos_token_ids)
    longest_run = MAX_STOP_TOKEN_SEQUENCE_LENGTH * TOKEN_BYTES
    start = max(seq.num_prompt_tokens * TOKEN_BYTES, len(seq.token_bytes) - longest_run)
    completion = seq.token_bytes[start:]
    token_id = _last_token(seq)
    if any(completion.endswith(_to_bytes(sequence)) for sequence in params.stop_token_sequences):
        return Finish(FinishReason.STOP_SEQUENCE)
    if token_id in eos_token_ids and not params.ignore_eos:
        return Finish(FinishReason.EOS, token_id)
    if token_id in params.stop_token_ids:
        return Finish(FinishReason.STOP_TOKEN, token_id)
    if seq.num_stored_tokens >= seq.max_num_tokens:
        return Finish(FinishReason.MAX_TOKENS)
    return None


def _find_early_finish(seq: Sequence, eos_token_ids: frozenset[int]) -> Finish | None:
    """The length is no reason, since `min_tokens` is at most `max_tokens`."""
    token_id = _last_token(seq)
    has_grammar = seq.params.options is not None and bool(seq.params.options.grammar)
    if has_grammar and token_id in eos_token_ids and not seq.params.ignore_eos:
        return Finish(FinishReason.EOS, token_id)
    return None


def _last_token(seq: Sequence) -> int:
    return int.from_bytes(seq.token_bytes[-TOKEN_BYTES:], "little")


def _to_bytes(token_ids: tuple[int, ...]) -> bytes:
    return b"".join(token_id.to_bytes(TOKEN_BYTES, "little") for token_id in token_ids)
