"""The fields that all routes share which answer, and those that chats and completions do."""

from __future__ import annotations

import re
import secrets
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.http.fields.answer_forms import AnswerForm, FormFields
from services.tokenizer.http.fields.api_request import AnswerOptions
from services.tokenizer.http.fields.fields import Count, Fields, Several, TextOrTexts, Whole
from services.tokenizer.http.refusals import invalid_field
from services.tokenizer.request.checks import MAX_BAD_STRINGS
from shared.request.sampling_params import MAX_ALLOWED_TOKEN_IDS, MAX_LOGIT_BIASES, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS

# A drawn seed fits what every client's JSON library reads exactly.
_DRAWN_SEED_BITS = 53
# Above 0, and below what any token's probability adds to: only the likeliest token is left.
_SMALLEST_TOP_P = 1e-9
_MAX_TIMEOUT_S = 1e9
_DRAWN = -1
# The first one has the name that errors take where none is given.
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_TOKEN_ID = re.compile(r"[0-9]{1,10}")


def _check_biased(value: object) -> object:
    """Here, as every wrong entry would be an error object, and be named by its key."""
    if isinstance(value, dict):
        if len(value) > MAX_LOGIT_BIASES:
            raise ValueError(f"must have at most {MAX_LOGIT_BIASES} entries")
        if not all(isinstance(key, str) and _TOKEN_ID.fullmatch(key) and int(key) < 2**32 for key in value):
            raise ValueError("its keys must be token ids")
    return value


Seconds = Annotated[float, Field(gt=0, le=_MAX_TIMEOUT_S)]
Biases = Annotated[dict[str, float], BeforeValidator(_check_biased)]


class StreamOptions(Fields):
    """What streams say beside the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ControlFields(FormFields):
    """Fields that every route has: OpenAI's, vLLM's and our own."""

    model: str | None = None
    stream: bool | None = None
    seed: Whole | None = None
    stop: TextOrTexts | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Biases | None = None

    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    max_output_tokens: Count | None = None

    top_k: Whole | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[Several[Count], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Annotated[Several[str], Field(max_length=MAX_BAD_STRINGS)] | None = None
    allowed_token_ids: Annotated[Several[Count], Field(max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    priority: Whole | None = None
    cache_salt: str | None = None

    determinism: Literal["ordinary", "exact"] | None = None
    timeout_s: Seconds | None = None

    def length(self) -> tuple[str, int | None]:
        """The name and value of what bounds the answer: the lowest of those that are given."""
        given = {name: getattr(self, name) for name in _LENGTHS}
        lengths = [(name, value) for name, value in given.items() if value is not None]
        return min(lengths, key=lambda each: each[1], default=(_LENGTHS[0], None))


class CommonFields(ControlFields):
    """Fields of chats and completions."""

    stream_options: StreamOptions | None = None
    n: Count | None = None
    best_of: Count | None = None

    logprob_token_ids: Annotated[Several[Count], Field(max_length=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Count | None = None
    truncate_prompt_tokens: Count | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid_field("stream_options", "needs stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid_field("prompt_logprobs", "cannot be streamed")
        return self

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        if self.best_of is not None and self.best_of != (1 if self.n is None else self.n):
            raise invalid_field("best_of", "is not supported")
        return self

    def answer_options(self, form: AnswerForm | None) -> AnswerOptions:
        """What both routes read alike of how the answer is to look."""
        stream = self.stream_options
        return AnswerOptions(
            is_streamed=bool(self.stream),
            has_usage=stream is not None and bool(stream.include_usage),
            has_running_usage=stream is not None and bool(stream.continuous_usage_stats),
            has_token_ids=bool(self.return_token_ids),
            names_tokens_by_id=bool(self.return_tokens_as_token_ids),
            has_prompt_logprobs=self.prompt_logprobs is not None,
            schema_field="" if form is None else form.schema_field,
        )


def make_message(fields: ControlFields, request_id: str, form: AnswerForm | None) -> tokenizer_pb2.GenerateRequest:
    """A request with the fields set that all routes have; the seed is drawn if there is none."""
    message = tokenizer_pb2.GenerateRequest(
        request_id=request_id,
        sampling=_sampling(fields),
        stop=fields.stop,
        priority=priority_of(fields.priority or 0),
        cache_salt=fields.cache_salt,
        bad_words=fields.bad_words,
        include_stop=fields.include_stop_str_in_output,
        skip_special_tokens=fields.skip_special_tokens,
    )
    if fields.determinism == "exact":
        message.determinism = common_pb2.DETERMINISM_EXACT
    if form is not None:
        message.structured_output.CopyFrom(form.message)
    return message


def make_common_message(
    fields: CommonFields, request_id: str, form: AnswerForm | None
) -> tokenizer_pb2.GenerateRequest:
    """`make_message`, with what chats and completions have besides."""
    message = make_message(fields, request_id, form)
    if fields.truncate_prompt_tokens is not None:
        message.truncate_prompt_tokens = fields.truncate_prompt_tokens
    message.sampling.MergeFrom(
        common_pb2.SamplingParams(
            n=fields.n, num_prompt_logprobs=fields.prompt_logprobs, logprob_token_ids=fields.logprob_token_ids
        )
    )
    return message


def _sampling(fields: ControlFields) -> common_pb2.SamplingParams:
    top_p, top_k = fields.top_p, fields.top_k
    return common_pb2.SamplingParams(
        max_tokens=fields.length()[1],
        temperature=fields.temperature,
        top_k=_top_k(top_k),
        top_p=_SMALLEST_TOP_P if top_p == 0 else top_p,
        seed=_seed(fields.seed),
        ignore_eos=fields.ignore_eos,
        stop_token_ids=fields.stop_token_ids,
        min_p=fields.min_p,
        repetition_penalty=fields.repetition_penalty,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        logit_bias={int(token_id): bias for token_id, bias in (fields.logit_bias or {}).items()},
        min_tokens=fields.min_tokens,
        allowed_token_ids=fields.allowed_token_ids,
    )


def _seed(seed: int | None) -> int:
    """-1 asks for a drawn one, as in vLLM."""
    return secrets.randbits(_DRAWN_SEED_BITS) if seed in (None, _DRAWN) else seed % 2**64


def _top_k(top_k: int | None) -> int | None:
    """-1 means all, as in vLLM."""
    if top_k is None:
        return None
    if not -1 <= top_k < 2**32:
        raise invalid_field("top_k", "must be at least -1, and at most the number of tokens")
    return max(top_k, 0)


def priority_of(priority: int) -> common_pb2.Priority:
    """As in vLLM, smaller numbers come first."""
    if priority == 0:
        return common_pb2.PRIORITY_NORMAL
    return common_pb2.PRIORITY_HIGH if priority < 0 else common_pb2.PRIORITY_LOW
