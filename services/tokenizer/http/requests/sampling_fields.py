"""The fields that chats and completions share."""

from __future__ import annotations

import json
import re
import secrets
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.http.errors import invalid_field
from services.tokenizer.http.requests.fields import Count, Fields, Several, TextOrTexts
from shared.limits import MAX_LOGIT_BIASES

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


Biases = Annotated[dict[str, float], BeforeValidator(_check_biased)]


class StreamOptions(Fields):
    """What streams say beside the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _schema_text(value: object) -> object:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | bool) else value


SchemaText = Annotated[str, BeforeValidator(_schema_text, json_schema_input_type=dict[str, Any] | bool | str)]


class StructuredOutputs(Fields):
    """vLLM's form of an answer: one of the first five."""

    json_schema: SchemaText | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Several[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    structural_tag: None = None
    whitespace_pattern: None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        forms = (self.json_schema, self.regex, self.choice, self.grammar, self.json_object or None)
        if sum(form is not None for form in forms) != 1:
            raise invalid_field(
                "structured_outputs", "needs exactly one of json, regex, choice, grammar and json_object"
            )
        return self

    def message(self) -> tokenizer_pb2.StructuredOutput:
        """The form."""
        form = tokenizer_pb2.StructuredOutput(
            json_schema=self.json_schema,
            regex=self.regex,
            grammar=self.grammar,
            compact_json=self.disable_any_whitespace,
        )
        if self.choice is not None:
            form.choices.texts.extend(self.choice)
            form.choices.SetInParent()
        if self.json_object:
            form.json_object = True
        return form


class CommonFields(Fields):
    """Fields of both routes: OpenAI's, vLLM's and our own."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    n: Count | None = None
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
    stop_token_ids: Several[Count] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Several[str] | None = None
    allowed_token_ids: Several[Count] | None = None
    logprob_token_ids: Several[Count] | None = None
    prompt_logprobs: Count | None = None
    truncate_prompt_tokens: Count | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None

    determinism: Literal["ordinary", "exact"] | None = None
    timeout_s: Annotated[float, Field(gt=0, le=_MAX_TIMEOUT_S)] | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid_field("stream_options", "needs stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid_field("prompt_logprobs", "cannot be streamed")
        return self


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
    if fields.structured_outputs is not None:
        message.structured_output.CopyFrom(fields.structured_outputs.message())
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
