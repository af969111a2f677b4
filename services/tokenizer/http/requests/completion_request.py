"""Reads the body of `POST /v1/completions`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Self

from pydantic import BeforeValidator, model_validator

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.http.refusals import invalid_field
from services.tokenizer.http.requests.api_request import AnswerOptions, ApiRequest
from services.tokenizer.http.requests.field_names import FieldNames
from services.tokenizer.http.requests.fields import Count, Several, check_honoured, ignored_names, read_fields
from services.tokenizer.http.requests.sampling_fields import UNSUPPORTED, CommonFields, make_message
from services.tokenizer.json.json_values import JsonObject
from services.tokenizer.request.checks import MAX_PROMPTS

DEFAULT_MAX_TOKENS = 16

_UNSUPPORTED = {**UNSUPPORTED, "suffix": ("",), "add_special_tokens": (True,)}
_ID_LIMIT = 2**32

PromptPart = str | Several[int]


def _as_prompts(value: object) -> object:
    """One prompt or several, as a list. By hand, since a prompt may be a long list of ids."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and len(value) > MAX_PROMPTS and not isinstance(value[0], int):
        raise ValueError(f"must have at most {MAX_PROMPTS} prompts")
    if isinstance(value, list) and all(isinstance(item, str) or _is_ids(item) for item in value):
        return value
    raise ValueError("must be a text, a list of token ids, or a list of either")


def _is_ids(value: object) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(type(item) is int and 0 <= item < _ID_LIMIT for item in value)
    )


class CompletionFields(CommonFields):
    """The body."""

    prompt: Annotated[
        Several[PromptPart], BeforeValidator(_as_prompts, json_schema_input_type=PromptPart | list[PromptPart])
    ]
    echo: bool | None = None
    logprobs: Count | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.stream and self.echo and self.logprobs is not None and (self.n or 1) > 1:
            raise invalid_field("n", "must be 1 in a stream with echo and logprobs")
        return self


def read_completion_request(value: JsonObject, request_id: str) -> ApiRequest:
    """Read a request.

    Raises:
        HttpError: names the first field that is wrong or cannot be honoured.
    """
    check_honoured(value, _UNSUPPORTED)
    fields = read_fields(CompletionFields, value)
    message = make_message(fields, request_id)
    message.echo = bool(fields.echo)
    _set_prompts(message, fields.prompt)
    if fields.logprobs is not None:
        message.sampling.num_logprobs = fields.logprobs
        if fields.echo:
            message.sampling.num_prompt_logprobs = max(fields.logprobs, fields.prompt_logprobs or 0)
    return ApiRequest(
        message,
        _options(fields),
        FieldNames(is_chat=False, given=_given_names(fields)),
        fields.model,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        timeout_s=fields.timeout_s,
        ignored=list(ignored_names(fields, value, _UNSUPPORTED)),
    )


def _set_prompts(message: tokenizer_pb2.GenerateRequest, prompts: list[PromptPart]) -> None:
    if len(prompts) == 1:
        [prompt] = prompts
        if isinstance(prompt, str):
            message.text = prompt
        else:
            message.tokens.token_ids.extend(prompt)
        return
    message.prompts.SetInParent()
    for prompt in prompts:
        if isinstance(prompt, str):
            message.prompts.prompts.add(text=prompt)
        else:
            message.prompts.prompts.add(tokens={"token_ids": prompt})


def _options(fields: CompletionFields) -> AnswerOptions:
    return replace(
        fields.answer_options,
        has_logprobs=fields.logprobs is not None or bool(fields.logprob_token_ids),
        has_prompt_in_logprobs=bool(fields.echo) and fields.logprobs is not None,
    )


def _given_names(fields: CompletionFields) -> dict[str, str]:
    names = dict(fields.form_names)
    if fields.prompt_logprobs is None:
        names["sampling.num_prompt_logprobs"] = "logprobs"
    return names
