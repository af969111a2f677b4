"""The fields that chats and completions share."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.http.refusals import invalid_field
from services.tokenizer.http.requests.answer_forms import ResponseFormat, StructuredOutputs
from services.tokenizer.http.requests.api_request import AnswerOptions
from services.tokenizer.http.requests.field_names import RESPONSE_FORMAT, STRUCTURED_OUTPUTS
from services.tokenizer.http.requests.fields import Count, Fields, Several, TextOrTexts
from services.tokenizer.request.checks import MAX_BAD_STRINGS
from shared.sampling_params import MAX_ALLOWED_TOKEN_IDS, MAX_LOGIT_BIASES, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS

# A drawn seed fits what every client's JSON library reads exactly.
_DRAWN_SEED_BITS = 53
# Above 0, and below what any token's probability adds to: only the likeliest token is left.
_SMALLEST_TOP_P = 1e-9
_MAX_TIMEOUT_S = 1e9
_TOKEN_ID = re.compile(r"[0-9]{1,10}")

UNSUPPORTED = {
    "use_beam_search": (False,),
    "logits_processors": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "kv_transfer_params": ({},),
    "prompt_embeds": (),
}
"""vLLM's fields that change the answer and cannot be honoured, with the values that ask for nothing."""


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


class ControlFields(Fields):
    """Fields that every route has: OpenAI's, vLLM's and our own."""

    model: str | None = None
    stream: bool | None = None
    seed: int | None = None
    stop: TextOrTexts | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Biases | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[Several[Count], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Annotated[Several[str], Field(max_length=MAX_BAD_STRINGS)] | None = None
    allowed_token_ids: Annotated[Several[Count], Field(max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    priority: int | None = None
    cache_salt: str | None = None

    determinism: Literal["ordinary", "exact"] | None = None
    timeout_s: Seconds | None = None


class CommonFields(ControlFields):
    """Fields of chats and completions."""

    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    n: Count | None = None
    best_of: Count | None = None

    logprob_token_ids: Annotated[Several[Count], Field(max_length=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Count | None = None
    truncate_prompt_tokens: Count | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
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
    def _check_form(self) -> Self:
        if self.response_format is not None and self.structured_outputs is not None:
            raise invalid_field("structured_outputs", "cannot be combined with response_format")
        if self.best_of is not None and self.best_of != (1 if self.n is None else self.n):
            raise invalid_field("best_of", "is not supported")
        return self

    @property
    def form_names(self) -> Mapping[str, str]:
        """The names that the fields of the answer's form have here."""
        return STRUCTURED_OUTPUTS if self.response_format is None else RESPONSE_FORMAT

    @property
    def answer_options(self) -> AnswerOptions:
        """What both routes read alike of how the answer is to look."""
        stream = self.stream_options
        return AnswerOptions(
            is_streamed=bool(self.stream),
            has_usage=stream is not None and bool(stream.include_usage),
            has_running_usage=stream is not None and bool(stream.continuous_usage_stats),
            has_token_ids=bool(self.return_token_ids),
            names_tokens_by_id=bool(self.return_tokens_as_token_ids),
            has_prompt_logprobs=self.prompt_logprobs is not None,
            schema_field=self.form_names["structured_output.json_schema"],
        )


def make_message(fields: CommonFields, request_id: str) -> tokenizer_pb2.GenerateRequest:
    """A request with all shared fields set; the seed is drawn if there is none."""
    message = tokenizer_pb2.GenerateRequest(
        request_id=request_id,
        sampling=_sampling(fields),
        stop=fields.stop,
        priority=_priority(fields.priority or 0),
        cache_salt=fields.cache_salt,
        bad_words=fields.bad_words,
        include_stop=fields.include_stop_str_in_output,
        skip_special_tokens=fields.skip_special_tokens,
        truncate_prompt_tokens=fields.truncate_prompt_tokens,
    )
    if fields.determinism == "exact":
        message.determinism = common_pb2.DETERMINISM_EXACT
    asked = fields.structured_outputs or fields.response_format
    form = None if asked is None else asked.message()
    if form is not None:
        message.structured_output.CopyFrom(form)
    return message


def _sampling(fields: CommonFields) -> common_pb2.SamplingParams:
    top_p, top_k = fields.top_p, fields.top_k
    return common_pb2.SamplingParams(
        max_tokens=fields.max_tokens,
        temperature=fields.temperature,
        top_k=_top_k(top_k),
        top_p=_SMALLEST_TOP_P if top_p == 0 else top_p,
        seed=secrets.randbits(_DRAWN_SEED_BITS) if fields.seed is None else fields.seed % 2**64,
        ignore_eos=fields.ignore_eos,
        stop_token_ids=fields.stop_token_ids,
        min_p=fields.min_p,
        repetition_penalty=fields.repetition_penalty,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        logit_bias={int(token_id): bias for token_id, bias in (fields.logit_bias or {}).items()},
        min_tokens=fields.min_tokens,
        num_prompt_logprobs=fields.prompt_logprobs,
        n=fields.n,
        allowed_token_ids=fields.allowed_token_ids,
        logprob_token_ids=fields.logprob_token_ids,
    )


def _top_k(top_k: int | None) -> int | None:
    """-1 means all, as in vLLM."""
    if top_k is None:
        return None
    if not -1 <= top_k < 2**32:
        raise invalid_field("top_k", "must be at least -1, and at most the number of tokens")
    return max(top_k, 0)


def _priority(priority: int) -> common_pb2.Priority:
    """As in vLLM, smaller numbers come first."""
    if priority == 0:
        return common_pb2.PRIORITY_NORMAL
    return common_pb2.PRIORITY_HIGH if priority < 0 else common_pb2.PRIORITY_LOW
