"""Reads the body of `POST /v1/completions`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, model_validator

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.http.fields.answer_forms import AnswerForm
from services.tokenizer.http.fields.api_request import AnswerOptions, ApiRequest
from services.tokenizer.http.fields.field_names import FieldNames
from services.tokenizer.http.fields.fields import Count, Several, read_request
from services.tokenizer.http.fields.sampling_fields import CommonFields, make_common_message
from services.tokenizer.http.refusals import invalid_field
from services.tokenizer.json.json_values import JsonObject
from services.tokenizer.request.checks import MAX_PROMPTS

DEFAULT_MAX_TOKENS = 16

_ID_LIMIT = 2**32

PromptPart = str | Several[int]


def _as_prompts(value: object) -> object:
    """One prompt or several, as a list. By hand, since a prompt may be a long list of ids."""
    if isinstance(value, list):
        value = _with_whole_ids([_with_whole_ids(each) if isinstance(each, list) else each for each in value])
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and len(value) > MAX_PROMPTS and not isinstance(value[0], int):
        raise ValueError(f"must have at most {MAX_PROMPTS} prompts")
    if isinstance(value, list) and all(isinstance(item, str) or _is_ids(item) for item in value):
        return value
    raise ValueError("must be a text, a list of token ids, or a list of either")


def _with_whole_ids(values: list[object]) -> list[object]:
    """Numbers such as `5.0` as the integers that they are."""
    if any(type(each) is float for each in values):
        return [int(each) if isinstance(each, float) and each.is_integer() else each for each in values]
    return values


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
    add_special_tokens: Literal[True] | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.stream and self.echo and self.logprobs is not None and (self.n or 1) > 1:
            raise invalid_field("n", "must be 1 in a stream with echo and logprobs")
        return self


def read_completion_request(value: JsonObject, request_id: str, *, is_lenient: bool = False) -> ApiRequest:
    """Read a request; `is_lenient` as for `read_request`.

    Raises:
        HttpError: names the first field that is wrong, unknown, or cannot be honoured.
    """
    fields, ignored = read_request(CompletionFields, value, is_lenient=is_lenient)
    form = fields.form()
    message = make_common_message(fields, request_id, form)
    message.echo = bool(fields.echo)
    _set_prompts(message, fields.prompt)
    if fields.logprobs is not None:
        message.sampling.num_logprobs = fields.logprobs
        if fields.echo:
            message.sampling.num_prompt_logprobs = max(fields.logprobs, fields.prompt_logprobs or 0)
    return ApiRequest(
        message,
        _options(fields, form),
        FieldNames(is_chat=False, given=_given_names(fields, form)),
        fields.model,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        timeout_s=fields.timeout_s,
        ignored=ignored,
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


def _options(fields: CompletionFields, form: AnswerForm | None) -> AnswerOptions:
    return replace(
        fields.answer_options(form),
        has_logprobs=fields.logprobs is not None or bool(fields.logprob_token_ids),
        has_prompt_in_logprobs=bool(fields.echo) and fields.logprobs is not None,
    )


def _given_names(fields: CompletionFields, form: AnswerForm | None) -> dict[str, str]:
    names = {"sampling.max_tokens": fields.length()[0], **({} if form is None else form.names)}
    if fields.prompt_logprobs is None:
        names["sampling.num_prompt_logprobs"] = "logprobs"
    return names
