"""Reads the bodies of Anthropic's `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.http.messages.chat import MessagesParts, MessagesTurn, ReadTurns
from services.tokenizer.http.messages.tools import MessagesTool, MessagesToolChoice, OfferedTools
from services.tokenizer.http.refusals import invalid_field
from services.tokenizer.http.requests.answer_forms import SchemaText
from services.tokenizer.http.requests.api_request import AnswerOptions, ApiRequest
from services.tokenizer.http.requests.field_names import MessagesNames
from services.tokenizer.http.requests.fields import (
    Count,
    Fields,
    Several,
    Stops,
    check_honoured,
    ignored_names,
    read_fields,
)
from services.tokenizer.http.requests.sampling_fields import CommonFields, Seconds, make_message
from services.tokenizer.json.json_values import JsonObject

# Anthropic's fields that change the answer and cannot be honoured, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {"mcp_servers": ([],), "container": ()}
# What they ask for is done anyway: prompts are cached, and calls streamed as they are written.
_ALWAYS_DONE = ("cache_control", "eager_input_streaming")


class OutputFormat(Fields):
    """The answer's form."""

    type: Literal["json_schema"]
    json_schema: SchemaText = Field(alias="schema")


class OutputConfig(Fields):
    """How the answer is made."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Thinking(Fields):
    """Whether the model reasons, and whether the client is shown it."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class Metadata(Fields):
    """What a client says of the request: it changes nothing."""

    user_id: str | None = None


class CountTokensFields(Fields):
    """What both bodies share."""

    messages: Several[MessagesTurn]
    model: str | None = None
    system: MessagesParts = None
    tools: Several[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


class MessagesFields(CountTokensFields):
    """The body; the last three fields are as in chats."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**32)]
    stream: bool | None = None
    stop_sequences: Stops | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    seed: int | None = None
    determinism: Literal["ordinary", "exact"] | None = None
    timeout_s: Seconds | None = None


def read_messages_request(value: JsonObject, request_id: str) -> ApiRequest:
    """Read a request for an answer.

    Raises:
        HttpError: names the first field that is wrong or cannot be honoured.
    """
    check_honoured(value, _UNSUPPORTED)
    fields = read_fields(MessagesFields, value)
    common = CommonFields(
        stop=fields.stop_sequences,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        seed=fields.seed,
        determinism=fields.determinism,
    )
    options = AnswerOptions(
        is_streamed=bool(fields.stream),
        hides_reasoning=fields.thinking is not None and fields.thinking.display == "omitted",
        max_tokens=fields.max_tokens,
        schema_field=f"{_form_of(fields)[0]}.schema",
    )
    api = _make_request(fields, make_message(common, request_id), options)
    api.default_max_tokens, api.timeout_s = fields.max_tokens, fields.timeout_s
    names = ignored_names(fields, value, _UNSUPPORTED)
    api.ignored[:0] = (name for name in names if not name.endswith(_ALWAYS_DONE))
    return api


def read_count_request(value: JsonObject, request_id: str) -> ApiRequest:
    """Read a request for the number of a prompt's tokens; raises as `read_messages_request`."""
    check_honoured(value, _UNSUPPORTED)
    fields = read_fields(CountTokensFields, value)
    return _make_request(fields, tokenizer_pb2.GenerateRequest(request_id=request_id), AnswerOptions())


def _make_request(
    fields: CountTokensFields, message: tokenizer_pb2.GenerateRequest, options: AnswerOptions
) -> ApiRequest:
    """Add the chat and the answer's form."""
    turns, tools = ReadTurns(), OfferedTools()
    turns.add_system(fields.system or ())
    for index, turn in enumerate(fields.messages):
        turns.add_turn(turn, index)
    tools.add(fields.tools or (), frozenset(turns.named_tools))
    for tool, place in turns.added_tools:
        tools.define(tool, place)
    chat = message.chat
    chat.messages.extend(turns.messages)
    # Agents send back what some model wrote.
    chat.keep_invalid_arguments = True
    chat.continue_final_message = _continues(chat.messages)
    if variables := _template_variables(fields):
        chat.template_variables = json.dumps(variables)
    tools.add_to(chat, fields.tool_choice)
    form_name, form = _form_of(fields)
    if form is not None:
        message.structured_output.CopyFrom(tokenizer_pb2.StructuredOutput(json_schema=form.json_schema, strict=False))
    names = MessagesNames(turns.places, tools.places, form_name)
    ignored = [*turns.ignored, *tools.ignored]
    if fields.thinking is not None and fields.thinking.budget_tokens is not None:
        # A template may tell the model of it; nothing here ends the reasoning.
        ignored.append("thinking.budget_tokens")
    return ApiRequest(message, options, names, fields.model, ignored=ignored)


def _continues(messages: Sequence[tokenizer_pb2.ChatMessage]) -> bool:
    """Whether the answer goes on with the last message, which is then the assistant's."""
    if not messages or messages[-1].role != tokenizer_pb2.ROLE_ASSISTANT:
        return False
    return not messages[-1].tool_calls and bool(messages[-1].content or messages[-1].reasoning)


def _template_variables(fields: CountTokensFields) -> JsonObject:
    """Templates turn thinking on and off by one of two names; some take the effort, or the budget."""
    thinking, config = fields.thinking, fields.output_config
    variables: JsonObject = {}
    is_disabled = thinking is not None and thinking.type == "disabled"
    if thinking is not None:
        variables = {"enable_thinking": not is_disabled, "thinking": not is_disabled}
        if thinking.budget_tokens is not None:
            variables["thinking_budget"] = thinking.budget_tokens
    if config is not None and config.effort is not None and not is_disabled:
        variables["reasoning_effort"] = config.effort
    return variables


def _form_of(fields: CountTokensFields) -> tuple[str, OutputFormat | None]:
    """The answer's form, and the name of its field."""
    form = None if fields.output_config is None else fields.output_config.format
    if fields.output_format is None:
        return "output_config.format", form
    if form is not None:
        raise invalid_field("output_format", "cannot be combined with output_config.format")
    return "output_format", fields.output_format
