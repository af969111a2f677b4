"""Reads the body of `POST /v1/completions`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, model_validator

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.http.fields.answer_forms import AnswerForm
from services.tokenizer.http.fields.api_request import AnswerOptions, ApiRequest
from services.tokenizer.http.fields.field_names import FieldNames
from services.tokenizer.http.fields.fields import Count, read_request
from services.tokenizer.http.fields.prompt_parts import PromptPart, Prompts, prompt_message, read_prompts
from services.tokenizer.http.fields.sampling_fields import CommonFields, make_common_message
from services.tokenizer.http.refusals import invalid_field
from services.tokenizer.json.json_values import JsonObject
from services.tokenizer.request.checks import MAX_PROMPTS

DEFAULT_MAX_TOKENS = 16


class CompletionFields(CommonFields):
    """The body."""

    prompt: Annotated[
        Prompts,
        BeforeValidator(partial(read_prompts, most=MAX_PROMPTS), json_schema_input_type=PromptPart | list[PromptPart]),
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
    message.prompts.prompts.extend(map(prompt_message, prompts))


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
