"""Reads the body of `POST /v1/chat/completions`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.chat.chat_request import MAX_MESSAGES, MAX_TOOLS
from services.tokenizer.http.refusals import invalid_field
from services.tokenizer.http.requests.api_request import AnswerOptions, ApiRequest
from services.tokenizer.http.requests.chat_messages import ChatMessage, read_message
from services.tokenizer.http.requests.chat_tools import ChatTool, WordOrChoice, add_tools
from services.tokenizer.http.requests.field_names import FieldNames
from services.tokenizer.http.requests.fields import Count, Several, check_honoured, ignored_names, read_fields
from services.tokenizer.http.requests.sampling_fields import UNSUPPORTED, CommonFields, make_message
from services.tokenizer.json.json_values import JsonObject

_UNSUPPORTED = {
    **UNSUPPORTED,
    "audio": (),
    "modalities": (["text"], []),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "web_search_options": (),
    "verbosity": ("medium",),
    "documents": ([],),
    "chat_template": (),
    "echo": (False,),
    "suffix": ("",),
    "add_special_tokens": (False,),
}
_NO_REASONING = "none"

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much the model reasons."""


class ChatFields(CommonFields):
    """The body."""

    messages: Annotated[Several[ChatMessage], Field(max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: Annotated[Several[ChatTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: WordOrChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid_field("top_logprobs", "needs logprobs: true")
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid_field("add_generation_prompt", "cannot be combined with continue_final_message")
        return self


def read_chat_request(value: JsonObject, request_id: str) -> ApiRequest:
    """Read a request.

    Raises:
        HttpError: names the first field that is wrong or cannot be honoured.
    """
    check_honoured(value, _UNSUPPORTED)
    fields = read_fields(ChatFields, value)
    message = make_message(fields, request_id)
    num_messages = []
    for index, each in enumerate(fields.messages):
        read = read_message(each, index)
        message.chat.messages.extend(read)
        num_messages.append(len(read))
    not_held = _add_chat(message.chat, fields)
    if fields.max_completion_tokens is not None:
        message.sampling.max_tokens = fields.max_completion_tokens
    if fields.logprobs:
        message.sampling.num_logprobs = fields.top_logprobs or 0
    return ApiRequest(
        message,
        _options(fields),
        FieldNames(is_chat=True, given=_given_names(fields), num_messages=num_messages),
        fields.model,
        timeout_s=fields.timeout_s,
        ignored=[*ignored_names(fields, value, _UNSUPPORTED), *not_held],
    )


def _add_chat(chat: tokenizer_pb2.Chat, fields: ChatFields) -> list[str]:
    """Add all but the messages; returns the names of fields that have no effect."""
    chat.SetInParent()
    chat.continue_final_message = bool(fields.continue_final_message)
    chat.omit_generation_prompt = fields.add_generation_prompt is False and not fields.continue_final_message
    # Agents send back what some model wrote.
    chat.keep_invalid_arguments = True
    chat.single_tool_call = fields.parallel_tool_calls is False
    variables = thinking_variables(fields.reasoning_effort) | (fields.chat_template_kwargs or {})
    if variables:
        chat.template_variables = json.dumps(variables, ensure_ascii=False)
    return add_tools(chat, fields.tools or [], fields.tool_choice)


def thinking_variables(effort: Effort | None) -> JsonObject:
    """Templates turn thinking on and off by one of two names, and some take the effort itself."""
    if effort is None:
        return {}
    variables: JsonObject = {"enable_thinking": effort != _NO_REASONING, "thinking": effort != _NO_REASONING}
    if effort != _NO_REASONING:
        variables["reasoning_effort"] = effort
    return variables


def _options(fields: ChatFields) -> AnswerOptions:
    return replace(
        fields.answer_options,
        has_reasoning=fields.include_reasoning is not False,
        has_logprobs=bool(fields.logprobs or fields.logprob_token_ids),
    )


def _given_names(fields: ChatFields) -> dict[str, str]:
    return {
        "sampling.max_tokens": "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens",
        "sampling.num_logprobs": "top_logprobs",
        **fields.form_names,
    }
