"""How a sequence is sampled, and the ranges of its parameters.

Plain Python: tokenizers and schedulers check what clients send, workers check what schedulers send.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from shared.errors import MAX_VIOLATIONS, InvalidRequestError, Violation
from shared.request.limits import ModelLimits, out_of_vocabulary

MAX_STOP_TOKEN_IDS = 64
MAX_STOP_TOKEN_SEQUENCES = 8
MAX_STOP_TOKEN_SEQUENCE_LENGTH = 32
MAX_TEMPERATURE = 2.0
# The most of the likeliest tokens at a position, and the most of the requested ones.
MAX_LOGPROBS = 20
MAX_BAD_WORDS = 64
MAX_BAD_WORD_LENGTH = 32
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 1024
# The most tokens of the markup that opens or closes a model's reasoning.
MAX_REASONING_MARKER_LENGTH = 32
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY = 0.1
MAX_REPETITION_PENALTY = 2.0
MAX_GRAMMAR_BYTES = 1024 * 1024
DEFAULT_MAX_TOKENS = 4096

# Maximum number of runs of token ids, and of ids per run.
_STOP_RUNS = (MAX_STOP_TOKEN_SEQUENCES, MAX_STOP_TOKEN_SEQUENCE_LENGTH)
_BAD_RUNS = (MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)
_ABOVE_MAX_TOKENS = ("OUT_OF_RANGE", "must be at most max_tokens")

# A violation's field, reason and description.
_Fault = tuple[str, str, str]


class Pooling(enum.Enum):
    """Which of a prompt's hidden states after the last norm are its vector."""

    LAST = "last"
    """The last token's."""
    MEAN = "mean"
    """The mean of all tokens'."""


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """The less common sampling options, resolved; a request that uses none has no such object.

    Units and ranges are those of `lockstep.v1.SamplingParams`.
    """

    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, ascending, and what is added to their logits."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    grammar: str = ""
    """Empty means unconstrained."""
    reasoning_begin: tuple[int, ...] = ()
    """Tokens that the grammar allows first, and that open free text; empty if the prompt has opened it."""
    reasoning_end: tuple[int, ...] = ()
    """Tokens that close the free text; the grammar goes on with them. Empty if the grammar applies from the start."""
    allowed_token_ids: tuple[int, ...] = ()
    """Ascending; empty means all."""
    logprob_token_ids: tuple[int, ...] = ()
    """In the order of the request."""
    pooling: Pooling | None = None
    """What is wanted of the prompt instead of a completion; None means nothing."""

    @property
    def num_top(self) -> int | None:
        """How many of the likeliest tokens come with each completion token's log-probability; None without any."""
        return 0 if self.num_logprobs is None and self.logprob_token_ids else self.num_logprobs

    @property
    def needs_all_tokens(self) -> bool:
        """Whether the worker needs every token of the sequence, even cached ones."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.bad_words
            or self.grammar
        )


NO_OPTIONS = SamplingOptions()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a sequence is sampled and when it ends, with every parameter resolved.

    Units and ranges are those of `lockstep.v1.SamplingParams`. Invariant: `options` is None if it would equal
    `NO_OPTIONS`.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop_token_sequences: tuple[tuple[int, ...], ...] = ()
    options: SamplingOptions | None = None


def check_sampling(params: SamplingParams, limits: ModelLimits, *, prefix: str = "sampling.") -> None:
    """Reject sampling parameters that are out of range.

    Raises:
        InvalidRequestError: names every bad field, with `prefix` before it.
    """
    # Stop at the number that is reported: a list of bad ids may be long.
    faults = list(itertools.islice(_sampling_violations(params, limits.logits_width), MAX_VIOLATIONS))
    if faults:
        raise InvalidRequestError.from_violations([Violation(prefix + field, *rest) for field, *rest in faults])


def check_min_tokens(params: SamplingParams, *, field: str = "sampling.min_tokens") -> None:
    """Reject a `min_tokens` above the resolved `max_tokens`.

    Raises:
        InvalidRequestError: it is above.
    """
    if params.options is not None and params.options.min_tokens > params.max_tokens:
        raise InvalidRequestError.from_violations([Violation(field, *_ABOVE_MAX_TOKENS)])


def _sampling_violations(params: SamplingParams, logits_width: int) -> Iterator[_Fault]:
    if params.max_tokens < 1:
        yield "max_tokens", "OUT_OF_RANGE", "must be at least 1"
    if not 0.0 <= params.temperature <= MAX_TEMPERATURE:
        yield _not_between("temperature", params.temperature, 0.0, MAX_TEMPERATURE)
    if not 0.0 < params.top_p <= 1.0:
        yield _not_above_zero("top_p", params.top_p, 1.0)
    if not 0 <= params.top_k <= logits_width:
        yield _not_between("top_k", params.top_k, 0, logits_width)
    if not 0 <= params.seed < 2**64:
        yield "seed", "OUT_OF_RANGE", "must be an unsigned 64-bit number"
    if params.stop_token_ids:
        yield from _list_violations(
            "stop_token_ids", params.stop_token_ids, logits_width, max_length=MAX_STOP_TOKEN_IDS
        )
    if params.stop_token_sequences:
        yield from _run_violations("stop_token_sequences", params.stop_token_sequences, _STOP_RUNS, logits_width)
    if params.options is not None:
        yield from _option_violations(params.options, params.max_tokens, logits_width)


def _option_violations(options: SamplingOptions, max_tokens: int, logits_width: int) -> Iterator[_Fault]:
    if not 0.0 <= options.min_p <= 1.0:
        yield _not_between("min_p", options.min_p, 0.0, 1.0)
    if not MIN_REPETITION_PENALTY <= options.repetition_penalty <= MAX_REPETITION_PENALTY:
        yield _not_between(
            "repetition_penalty", options.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        )
    for field, penalty in (
        ("presence_penalty", options.presence_penalty),
        ("frequency_penalty", options.frequency_penalty),
    ):
        if not -MAX_PENALTY <= penalty <= MAX_PENALTY:
            yield _not_between(field, penalty, -MAX_PENALTY, MAX_PENALTY)
    yield from _bias_violations(options.logit_bias, logits_width)
    yield from _run_violations("bad_words", options.bad_words, _BAD_RUNS, logits_width)
    if not 0 <= options.min_tokens <= max_tokens:
        yield "min_tokens", *_ABOVE_MAX_TOKENS
    for field, count in (
        ("num_logprobs", options.num_logprobs),
        ("num_prompt_logprobs", options.num_prompt_logprobs),
    ):
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            yield _not_between(field, count, 0, MAX_LOGPROBS)
    yield from _list_violations(
        "allowed_token_ids", options.allowed_token_ids, logits_width, max_length=MAX_ALLOWED_TOKEN_IDS
    )
    if options.pooling is not None and max_tokens > 1:
        yield "max_tokens", "OUT_OF_RANGE", "must be 1 where the prompt's vector is wanted"
    yield from _list_violations("logprob_token_ids", options.logprob_token_ids, logits_width, max_length=MAX_LOGPROBS)
    yield from _grammar_violations(options, logits_width)


def _grammar_violations(options: SamplingOptions, logits_width: int) -> Iterator[_Fault]:
    for field, ids in (("reasoning_begin", options.reasoning_begin), ("reasoning_end", options.reasoning_end)):
        yield from _list_violations(field, ids, logits_width, max_length=MAX_REASONING_MARKER_LENGTH)
        if ids and not options.grammar:
            yield field, "OUT_OF_RANGE", "needs a grammar"
    if options.reasoning_begin and not options.reasoning_end:
        yield "reasoning_end", "OUT_OF_RANGE", "must be set if reasoning_begin is"
    # A character is at least one byte, so this saves encoding a text that is clearly too long.
    if len(options.grammar) > MAX_GRAMMAR_BYTES or len(options.grammar.encode()) > MAX_GRAMMAR_BYTES:
        yield "grammar", "OUT_OF_RANGE", f"must be at most {MAX_GRAMMAR_BYTES} bytes"


def _bias_violations(biases: tuple[tuple[int, float], ...], logits_width: int) -> Iterator[_Fault]:
    if len(biases) > MAX_LOGIT_BIASES:
        yield "logit_bias", "OUT_OF_RANGE", f"must have at most {MAX_LOGIT_BIASES} entries"
        return
    for token_id, bias in biases:
        field = f"logit_bias[{token_id}]"
        if not 0 <= token_id < logits_width:
            yield out_of_vocabulary(field, logits_width)
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            yield _not_between(field, bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def _run_violations(
    field: str, runs: tuple[tuple[int, ...], ...], most: tuple[int, int], logits_width: int
) -> Iterator[_Fault]:
    max_runs, max_length = most
    if len(runs) > max_runs:
        yield field, "OUT_OF_RANGE", f"must have at most {max_runs} entries"
        return
    for number, ids in enumerate(runs):
        if not 1 <= len(ids) <= max_length:
            yield f"{field}[{number}]", "OUT_OF_RANGE", f"must have 1 to {max_length} token ids"
        else:
            yield from _id_violations(f"{field}[{number}].token_ids", ids, logits_width)


def _not_between(field: str, value: float, low: float, high: float) -> _Fault:
    return _bad_number(field, value, f"must be between {low:.9g} and {high:.9g}")


def _not_above_zero(field: str, value: float, high: float) -> _Fault:
    return _bad_number(field, value, f"must be above 0 and at most {high:.9g}")


def _bad_number(field: str, value: float, rule: str) -> _Fault:
    """NaN is outside every range."""
    if math.isfinite(value):
        return field, "OUT_OF_RANGE", rule
    return field, "NOT_FINITE", "must be a finite number"


def _list_violations(field: str, ids: tuple[int, ...], logits_width: int, *, max_length: int) -> Iterator[_Fault]:
    if len(ids) > max_length:
        yield field, "OUT_OF_RANGE", f"must have at most {max_length} entries"
    else:
        yield from _id_violations(field, ids, logits_width)


def _id_violations(field: str, ids: tuple[int, ...], logits_width: int) -> Iterator[_Fault]:
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < logits_width:
            yield out_of_vocabulary(f"{field}[{index}]", logits_width)
