"""Reads the body of `POST /v1/responses`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import BeforeValidator, Field, model_validator

from services.tokenizer.http.fields.answer_forms import AnswerForm, SchemaText, schema_form
from services.tokenizer.http.fields.api_request import AnswerOptions, ApiRequest
from services.tokenizer.http.fields.field_names import ResponsesNames
from services.tokenizer.http.fields.fields import Count, Fields, Several, read_request
from services.tokenizer.http.fields.sampling_fields import ControlFields, make_message
from services.tokenizer.http.fields.thinking_fields import ThinkingFields
from services.tokenizer.http.openai_responses.items import InputItem, MessageReader, as_items
from services.tokenizer.http.openai_responses.tools import (
    OfferedTools,
    ResponseTool,
    ToolKind,
    WordOrChoice,
    add_tools,
    choose_tools,
)
from services.tokenizer.http.refusals import invalid_field
from services.tokenizer.json.json_values import JsonObject, JsonValue

_ENCRYPTED, _LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
_MAX_METADATA = 16
_FORM = "text.format"


class StreamOptions(Fields):
    """What streams have beside the answer: they end with the usage anyway."""

    include_usage: bool | None = None


class TextFormat(Fields):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: SchemaText | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def form(self) -> AnswerForm | None:
        """The form; None for any text."""
        if self.type == "text":
            return None
        return AnswerForm(_FORM, schema_form(self.json_schema, is_strict=bool(self.strict)), f"{_FORM}.schema")


class TextConfig(Fields):
    """The answer's text."""

    format: TextFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if self.format is None:
            return self
        if self.format.type == "json_schema" and self.format.json_schema is None:
            raise invalid_field(f"{_FORM}.schema", "is required")
        if self.format.type == "text" and self.format.json_schema is not None:
            raise invalid_field(f"{_FORM}.schema", "cannot be combined with type text")
        return self


def _check_metadata(value: object) -> object:
    if isinstance(value, dict) and len(value) > _MAX_METADATA:
        raise ValueError(f"must have at most {_MAX_METADATA} entries")
    return value


Key = Annotated[str, Field(max_length=64)]
Metadata = Annotated[dict[Key, Annotated[str, Field(max_length=512)]], BeforeValidator(_check_metadata)]


class ResponseFields(ControlFields, ThinkingFields):
    """The body."""

    input: Annotated[
        Several[InputItem] | None, BeforeValidator(as_items, json_schema_input_type=str | list[InputItem] | None)
    ] = None
    instructions: str | None = None
    stream_options: StreamOptions | None = None
    max_tool_calls: Count | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: (
        Several[
            Literal[
                "code_interpreter_call.outputs",
                "computer_call_output.output.image_url",
                "file_search_call.results",
                "message.input_image.image_url",
                "message.output_text.logprobs",
                "reasoning.encrypted_content",
                "web_search_call.action.sources",
                "web_search_call.results",
            ]
        ]
        | None
    ) = None
    text: TextConfig | None = None
    tools: Several[ResponseTool] | None = None
    tool_choice: WordOrChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    generate: bool | None = None
    """False asks only whether the request could be answered, as Codex does before its first one."""

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid_field("stream_options", "needs stream: true")
        if self.top_logprobs and _LOGPROBS not in (self.include or ()):
            raise invalid_field("top_logprobs", f"needs {_LOGPROBS} in include")
        if self.hides_reasoning:
            raise invalid_field("thinking.display", "cannot be omitted on this route")
        return self

    def forms(self) -> Iterator[AnswerForm]:
        """Forms that are given."""
        if self.text is not None and self.text.format is not None and (form := self.text.format.form()) is not None:
            yield form
        yield from super().forms()


@dataclass(frozen=True, slots=True)
class ResponseOptions(AnswerOptions):
    """What a response contains beside its items."""

    echoed: Mapping[str, Any] = field(default_factory=dict)
    """The request's fields that it repeats: each value, or its JSON as `msgspec.Raw`."""
    tools: Mapping[str, ToolKind] = field(default_factory=dict)
    """The tools by the names of their functions."""
    has_encrypted_reasoning: bool = False


def read_response_request(value: JsonObject, request_id: str, *, is_lenient: bool = False) -> ApiRequest:
    """Read a request; `is_lenient` as for `read_request`.

    Raises:
        HttpError: names the first field that is wrong, unknown, or cannot be honoured.
    """
    fields, ignored = read_request(ResponseFields, value, is_lenient=is_lenient)
    form = fields.form()
    message = make_message(fields, request_id, form)
    reader = MessageReader(fields.instructions)
    for index, item in enumerate(fields.input or ()):
        reader.read(item, f"input[{index}]")
    chat = message.chat
    chat.messages.extend(reader.drafts.messages)
    chat.keep_invalid_arguments = True
    chat.single_tool_call = fields.parallel_tool_calls is False
    fields.set_variables(chat)
    choose_tools(chat, fields.tool_choice)
    offered = add_tools(chat, _tool_lists(fields, value))
    echoed = _echoed(fields, value, offered)
    includes = fields.include or ()
    if _LOGPROBS in includes:
        message.sampling.num_logprobs = fields.top_logprobs or 0
    return ApiRequest(
        message,
        ResponseOptions(
            is_streamed=bool(fields.stream),
            has_logprobs=_LOGPROBS in includes,
            schema_field="" if form is None else form.schema_field,
            variable_fields=fields.variable_fields(),
            echoed={name: msgspec.Raw(msgspec.json.encode(each)) for name, each in echoed.items()},
            tools=offered.kinds,
            has_encrypted_reasoning=_ENCRYPTED in includes,
        ),
        ResponsesNames(reader.drafts.places, offered.places, _given_names(fields, form)),
        fields.model,
        timeout_s=fields.timeout_s,
        ignored=[
            *offered.skipped,
            *offered.not_held,
            *_outside([*offered.skipped, *reader.skipped], ignored),
            *reader.skipped,
            *reader.ignored,
        ],
        is_probe=fields.generate is False or not fields.input,
        log_facts={"skipped_tools": ",".join(sorted(offered.skipped_types))} if offered.skipped else {},
    )


def _given_names(fields: ResponseFields, form: AnswerForm | None) -> dict[str, str]:
    name, value = fields.length()
    return {
        "sampling.max_tokens": "max_output_tokens" if value is None else name,
        **({} if form is None else form.names),
    }


def _tool_lists(
    fields: ResponseFields, value: JsonObject
) -> list[tuple[str, Sequence[ResponseTool], Sequence[JsonObject]]]:
    """The lists of tools, those of items too: where each is in the request, its tools, and their JSON."""
    lists: list[tuple[str, Any, Any]] = [("tools", fields.tools or (), value.get("tools") or ())]
    for index, item in enumerate(fields.input or ()):
        if item.tools is not None and item.kind == "additional_tools":
            given: Any = value["input"]
            lists.append((f"input[{index}].tools", item.tools, given[index]["tools"]))
    return lists


def _outside(skipped: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """The names of what is outside of the tools and items that are skipped: what they have is skipped with them."""
    places = frozenset(skipped)
    return (name for name in names if not any(outer in places for outer in accumulate(_steps(name)[:-1])))


def _steps(name: str) -> list[str]:
    """The steps to a field, each but the first with the dot before it."""
    return re.split(r"(?=\.)", name)


def _echoed(fields: ResponseFields, value: JsonObject, offered: OfferedTools) -> JsonObject:
    text: JsonValue = value.get("text")
    form = text.get("format") if isinstance(text, dict) else None
    described: list[JsonValue] = [*offered.described]
    return {
        "background": False,
        "instructions": fields.instructions,
        "max_output_tokens": fields.length()[1],
        "max_tool_calls": fields.max_tool_calls,
        "metadata": value.get("metadata") or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {"effort": next((effort for _, effort in fields.efforts()), None), "summary": None},
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "temperature": fields.temperature,
        "text": {"format": form or {"type": "text"}},
        "tool_choice": value.get("tool_choice") or "auto",
        "tools": described,
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": fields.top_p,
        "truncation": "disabled",
        "user": fields.user,
    }
