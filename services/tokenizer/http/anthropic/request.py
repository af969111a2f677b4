"""Reads the bodies of Anthropic's `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.http.anthropic.chat import MessagesParts, MessagesTurn, ReadTurns
from services.tokenizer.http.anthropic.tools import MessagesTool, MessagesToolChoice, OfferedTools
from services.tokenizer.http.fields.answer_forms import AnswerForm, OutputFormat
from services.tokenizer.http.fields.api_request import AnswerOptions, ApiRequest
from services.tokenizer.http.fields.field_names import MessagesNames
from services.tokenizer.http.fields.fields import Count, Fields, Several, Stops, read_request
from services.tokenizer.http.fields.sampling_fields import ControlFields, make_message
from services.tokenizer.http.fields.thinking_fields import Effort, ThinkingFields
from services.tokenizer.http.refusals import invalid_field
from services.tokenizer.json.json_values import JsonObject


class OutputConfig(Fields):
    """How the answer is made."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class CountTokensFields(ThinkingFields):
    """What both bodies share."""

    messages: Several[MessagesTurn]
    model: str | None = None
    system: MessagesParts = None
    tools: Several[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    output_config: OutputConfig | None = None

    def efforts(self) -> Iterator[tuple[str, str]]:
        """What says how much the model reasons, by its name."""
        yield from super().efforts()
        if self.output_config is not None and self.output_config.effort is not None:
            yield "output_config.effort", self.output_config.effort


class MessagesFields(CountTokensFields, ControlFields):
    """The body."""

    max_tokens: Annotated[Count, Field(ge=1)]
    stop_sequences: Stops | None = None
    metadata: dict[str, Any] | None = None

    def forms(self) -> Iterator[AnswerForm]:
        """Forms that are given."""
        if self.output_config is not None and self.output_config.format is not None:
            yield self.output_config.format.form("output_config.format")
        yield from super().forms()


# What a count of tokens does not depend on.
_OF_ANSWERS = MessagesFields.model_fields.keys() - CountTokensFields.model_fields.keys()


def read_messages_request(value: JsonObject, request_id: str, *, is_lenient: bool = False) -> ApiRequest:
    """Read a request for an answer; `is_lenient` as for `read_request`.

    Raises:
        HttpError: names the first field that is wrong, unknown, or cannot be honoured.
    """
    fields, ignored = read_request(MessagesFields, value, is_lenient=is_lenient)
    form, (_, length) = fields.form(), fields.length()
    message = make_message(fields, request_id, form)
    # It is the most, and less where the context has no room.
    message.sampling.ClearField("max_tokens")
    if fields.stop and fields.stop_sequences:
        raise invalid_field("stop", "cannot be combined with stop_sequences")
    message.stop.extend(fields.stop_sequences or ())
    options = AnswerOptions(
        is_streamed=bool(fields.stream),
        hides_reasoning=fields.hides_reasoning,
        max_tokens=length,
        variable_fields=fields.variable_fields(),
        schema_field="" if form is None else form.schema_field,
    )
    given = {"stop": "stop"} if fields.stop else {}
    api = _make_request(fields, message, options, given if form is None else given | dict(form.names))
    api.default_max_tokens, api.timeout_s = length, fields.timeout_s
    api.ignored[:0] = ignored
    return api


def read_count_request(value: JsonObject, request_id: str, *, is_lenient: bool = False) -> ApiRequest:
    """Read a request for the number of a prompt's tokens; raises as `read_messages_request`.

    What only an answer needs is left unread.
    """
    asked = {name: given for name, given in value.items() if name not in _OF_ANSWERS}
    fields, _ = read_request(CountTokensFields, asked, is_lenient=is_lenient)
    message = tokenizer_pb2.GenerateRequest(request_id=request_id)
    return _make_request(fields, message, AnswerOptions(), {})


def _make_request(
    fields: CountTokensFields,
    message: tokenizer_pb2.GenerateRequest,
    options: AnswerOptions,
    given_names: Mapping[str, str],
) -> ApiRequest:
    """Add the chat."""
    turns, tools = ReadTurns(), OfferedTools()
    turns.add_system(fields.system or ())
    for index, turn in enumerate(fields.messages):
        turns.add_turn(turn, index)
    tools.add(fields.tools or (), frozenset(turns.named_tools))
    for tool, place in turns.added_tools:
        tools.define(tool, place)
    chat = message.chat
    chat.messages.extend(turns.drafts.messages)
    # Agents send back what some model wrote.
    chat.keep_invalid_arguments = True
    chat.continue_final_message = _continues(chat.messages)
    fields.set_variables(chat)
    tools.add_to(chat, fields.tool_choice)
    names = MessagesNames(turns.drafts.places, tools.places, given_names)
    return ApiRequest(message, options, names, fields.model, ignored=[*turns.ignored, *tools.ignored])


def _continues(messages: Sequence[tokenizer_pb2.ChatMessage]) -> bool:
    """Whether the answer goes on with the last message, which is then the assistant's."""
    if not messages or messages[-1].role != tokenizer_pb2.ROLE_ASSISTANT:
        return False
    return not messages[-1].tool_calls and bool(messages[-1].content or messages[-1].reasoning)
