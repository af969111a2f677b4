"""Reads the body of `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.chat.chat_request import MAX_MESSAGES, MAX_TOOLS
from services.tokenizer.http.fields.answer_forms import AnswerForm
from services.tokenizer.http.fields.api_request import AnswerOptions, ApiRequest
from services.tokenizer.http.fields.field_names import FieldNames
from services.tokenizer.http.fields.fields import Count, Several, read_request
from services.tokenizer.http.fields.sampling_fields import CommonFields, make_common_message
from services.tokenizer.http.fields.thinking_fields import ThinkingFields
from services.tokenizer.http.openai.chat_messages import ChatMessage, read_message
from services.tokenizer.http.openai.chat_tools import ChatTool, OfferedTools, WordOrChoice, add_tools, choose_tools
from services.tokenizer.http.refusals import invalid_field
from services.tokenizer.json.json_values import JsonObject


class ChatFields(CommonFields, ThinkingFields):
    """The body."""

    messages: Annotated[Several[ChatMessage], Field(max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: Annotated[Several[ChatTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: WordOrChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: Literal[False] | None = None
    """A template writes those that it wants."""

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid_field("top_logprobs", "needs logprobs: true")
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid_field("add_generation_prompt", "cannot be combined with continue_final_message")
        return self


def read_chat_request(value: JsonObject, request_id: str, *, is_lenient: bool = False) -> ApiRequest:
    """Read a request; `is_lenient` as for `read_request`.

    Raises:
        HttpError: names the first field that is wrong, unknown, or cannot be honoured.
    """
    return _make_request(*read_request(ChatFields, value, is_lenient=is_lenient), request_id)


def _make_request(fields: ChatFields, ignored: list[str], request_id: str) -> ApiRequest:
    form = fields.form()
    message = make_common_message(fields, request_id, form)
    num_messages = []
    for index, each in enumerate(fields.messages):
        read = read_message(each, index, ignored)
        message.chat.messages.extend(read)
        num_messages.append(len(read))
    offered = _add_chat(message.chat, fields)
    if fields.logprobs:
        message.sampling.num_logprobs = fields.top_logprobs or 0
    return ApiRequest(
        message,
        _options(fields, form, offered),
        FieldNames(
            is_chat=True,
            given=_given_names(fields, form),
            num_messages=num_messages,
            custom=[*(place for _, place in offered.custom), *_custom_calls(fields)],
        ),
        fields.model,
        timeout_s=fields.timeout_s,
        ignored=[*ignored, *offered.not_held],
    )


def _custom_calls(fields: ChatFields) -> Iterator[str]:
    """Where calls of custom tools are in the request."""
    for index, message in enumerate(fields.messages):
        for number, call in enumerate(message.tool_calls or ()):
            if call.type == "custom":
                yield f"messages[{index}].tool_calls[{number}]"


def _add_chat(chat: tokenizer_pb2.Chat, fields: ChatFields) -> OfferedTools:
    """Add all but the messages; returns what tools the model is offered."""
    chat.SetInParent()
    chat.continue_final_message = bool(fields.continue_final_message)
    chat.omit_generation_prompt = fields.add_generation_prompt is False and not fields.continue_final_message
    # Agents send back what some model wrote.
    chat.keep_invalid_arguments = True
    chat.single_tool_call = fields.parallel_tool_calls is False
    fields.set_variables(chat)
    choose_tools(chat, fields.tool_choice)
    return add_tools(chat, fields.tools or ())


def _options(fields: ChatFields, form: AnswerForm | None, offered: OfferedTools) -> AnswerOptions:
    return replace(
        fields.answer_options(form),
        has_reasoning=fields.include_reasoning is not False and not fields.hides_reasoning,
        has_logprobs=bool(fields.logprobs or fields.logprob_token_ids),
        custom_tools=[name for name, _ in offered.custom],
        variable_fields=fields.variable_fields(),
    )


def _given_names(fields: ChatFields, form: AnswerForm | None) -> dict[str, str]:
    return {
        "sampling.max_tokens": fields.length()[0],
        "sampling.num_logprobs": "top_logprobs",
        **({} if form is None else form.names),
    }
