"""Turns the public chat message into a checked conversation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.chat.conversation import Conversation, Message, Tool, ToolCall, ToolMode
from services.tokenizer.json.json_values import JsonObject, most_values, read_json_object
from services.tokenizer.refusal_text import without_quotes
from services.tokenizer.text_size import check_text_bytes
from shared.errors import MAX_VIOLATIONS, Violation
from shared.request.request_fields import raise_violations

MAX_MESSAGES = 1024
MAX_MESSAGE_BYTES = 512 * 1024
MAX_TOOL_CALLS = 128
MAX_TOOLS = 128
MAX_ALL_TOOLS_BYTES = 512 * 1024
MAX_NAME_BYTES = 256
MAX_VARIABLES_BYTES = 64 * 1024
MAX_VALUES = 64 * 1024
"""The most values in all JSON of a conversation. One takes up to a hundred times what it takes as text, and nothing
else runs while a text is parsed."""

_ROLE_NAMES: dict[int, str] = {
    tokenizer_pb2.ROLE_SYSTEM: "system",
    tokenizer_pb2.ROLE_USER: "user",
    tokenizer_pb2.ROLE_ASSISTANT: "assistant",
    tokenizer_pb2.ROLE_TOOL: "tool",
}
_TOOL_MODES: dict[int, ToolMode] = {
    tokenizer_pb2.TOOL_MODE_UNSPECIFIED: ToolMode.AUTO,
    tokenizer_pb2.TOOL_MODE_AUTO: ToolMode.AUTO,
    tokenizer_pb2.TOOL_MODE_NONE: ToolMode.NONE,
    tokenizer_pb2.TOOL_MODE_REQUIRED: ToolMode.REQUIRED,
}
_NO_ARGUMENTS: JsonObject = {"type": "object", "properties": {}}

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_VARIABLE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
# Names that the template or its renderer already uses; a request must not override them, nor the special tokens.
_RESERVED_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversations",
        "messages",
        "return_assistant_tokens_mask",
        "self",
        "tools",
    }
)
_SPECIAL_TOKEN_VARIABLE = "_token"  # noqa: S105 - the end of a variable's name


def check_chat(chat: tokenizer_pb2.Chat) -> Conversation:
    """Read a request's conversation.

    Raises:
        RequestTooLargeError: its texts exceed 3 MiB of UTF-8.
        InvalidRequestError: names the first bad fields.
    """
    check_text_bytes(chat_text_bytes(chat))
    violations: list[Violation] = []
    conversation = read_chat(chat, violations)
    raise_violations(violations)
    return conversation


def chat_text_bytes(chat: tokenizer_pb2.Chat) -> int:
    """The UTF-8 bytes of a conversation's texts; where it has too many messages, calls or tools, of the first ones."""
    return sum(len(text.encode()) for text in _texts(chat))


def read_chat(chat: tokenizer_pb2.Chat, violations: list[Violation], *, field: str = "chat") -> Conversation:
    """Read a conversation; violations are appended, prefixed with `field`, and make the result unusable."""
    return _ChatReader(violations, field, keeps_invalid_arguments=chat.keep_invalid_arguments).read(chat)


class _ChatReader:
    def __init__(self, violations: list[Violation], field: str, *, keeps_invalid_arguments: bool) -> None:
        self._violations = violations
        self._field = field
        self._keeps_invalid_arguments = keeps_invalid_arguments
        self._num_values_left = MAX_VALUES

    def read(self, chat: tokenizer_pb2.Chat) -> Conversation:
        tools = self._read_tools(chat.tools)
        return Conversation(
            self._read_messages(chat.messages),
            tools,
            self._read_tool_mode(chat, tools),
            chat.tool_name,
            self._read_variables(chat.template_variables),
            allowed_names=self._read_allowed_names(chat, tools),
            one_call=chat.single_tool_call,
            continues_final=self._read_continuation(chat),
            opens_turn=not chat.omit_generation_prompt,
        )

    def _refuse(self, field: str, description: str) -> None:
        self._violations.append(Violation(f"{self._field}.{field}", "OUT_OF_RANGE", description))

    def _read_messages(self, messages: Sequence[tokenizer_pb2.ChatMessage]) -> tuple[Message, ...]:
        if not 1 <= len(messages) <= MAX_MESSAGES:
            self._refuse("messages", f"must have 1 to {MAX_MESSAGES} messages")
            return ()
        return tuple(self._up_to_enough(lambda index: self._read_message(messages[index], index), len(messages)))

    def _up_to_enough(self, read: Callable[[int], Message], count: int) -> Iterator[Message]:
        for index in range(count):
            if len(self._violations) > MAX_VIOLATIONS:
                return
            yield read(index)

    def _read_message(self, message: tokenizer_pb2.ChatMessage, index: int) -> Message:
        field = f"messages[{index}]"
        role = _ROLE_NAMES.get(message.role, "")
        if not role:
            self._refuse(f"{field}.role", "must be ROLE_SYSTEM, ROLE_USER, ROLE_ASSISTANT or ROLE_TOOL")
        self._check_size(f"{field}.content", message.content, MAX_MESSAGE_BYTES)
        self._check_size(f"{field}.reasoning", message.reasoning, MAX_MESSAGE_BYTES)
        self._check_size(f"{field}.tool_call_id", message.tool_call_id, MAX_NAME_BYTES)
        self._check_size(f"{field}.name", message.name, MAX_NAME_BYTES)
        if message.role != tokenizer_pb2.ROLE_ASSISTANT:
            self._check_absent(f"{field}.tool_calls", len(message.tool_calls), "the assistant")
            self._check_absent(f"{field}.reasoning", len(message.reasoning), "the assistant")
        if message.role != tokenizer_pb2.ROLE_TOOL:
            self._check_absent(f"{field}.tool_call_id", len(message.tool_call_id), "a tool")
        return Message(
            role,
            message.content,
            self._read_tool_calls(message.tool_calls, f"{field}.tool_calls"),
            message.tool_call_id,
            message.name,
            message.reasoning,
        )

    def _check_size(self, field: str, text: str, max_bytes: int) -> None:
        if len(text.encode()) > max_bytes:
            self._refuse(field, f"must have at most {max_bytes} bytes")

    def _check_absent(self, field: str, size: int, owner: str) -> None:
        if size:
            self._refuse(field, f"is only allowed in a message of {owner}")

    def _read_tool_calls(self, calls: Sequence[tokenizer_pb2.ToolCall], field: str) -> tuple[ToolCall, ...]:
        if len(calls) > MAX_TOOL_CALLS:
            self._refuse(field, f"must have at most {MAX_TOOL_CALLS} calls")
            return ()
        return tuple(self._read_tool_call(call, f"{field}[{index}]") for index, call in enumerate(calls))

    def _read_tool_call(self, call: tokenizer_pb2.ToolCall, field: str) -> ToolCall:
        self._check_size(f"{field}.id", call.id, MAX_NAME_BYTES)
        if not 1 <= len(call.name.encode()) <= MAX_NAME_BYTES:
            self._refuse(f"{field}.name", f"must have 1 to {MAX_NAME_BYTES} bytes")
        return ToolCall(call.id, call.name, self._read_arguments(f"{field}.arguments", call.arguments))

    def _read_arguments(self, field: str, text: str) -> JsonObject | str:
        if not self._check_json(field, text, MAX_MESSAGE_BYTES):
            return {}
        try:
            return read_json_object(text)
        except ValueError as error:
            if not self._keeps_invalid_arguments:
                self._refuse_json(field, text, error)
            return text

    def _read_object(self, field: str, text: str, max_bytes: int) -> JsonObject:
        if not self._check_json(field, text, max_bytes):
            return {}
        try:
            return read_json_object(text)
        except ValueError as error:
            self._refuse_json(field, text, error)
            return {}

    def _check_json(self, field: str, text: str, max_bytes: int) -> bool:
        """Whether there is a text to be parsed; one that would cost too much is refused."""
        if not text:
            return False
        if len(text.encode()) > max_bytes:
            self._refuse(field, f"must have at most {max_bytes} bytes")
            return False
        if self._num_values_left >= 0:
            self._num_values_left -= most_values(text, self._num_values_left)
        if self._num_values_left < 0:
            self._refuse(field, f"the JSON of a conversation must have at most {MAX_VALUES} values")
        return self._num_values_left >= 0

    def _refuse_json(self, field: str, text: str, error: ValueError) -> None:
        self._refuse(field, f"must be a JSON object: {without_quotes(str(error), text)}")

    def _read_tools(self, tools: Sequence[tokenizer_pb2.Tool]) -> tuple[Tool, ...]:
        if len(tools) > MAX_TOOLS:
            self._refuse("tools", f"must have at most {MAX_TOOLS} tools")
            return ()
        if sum(len(text.encode()) for tool in tools for text in _tool_texts(tool)) > MAX_ALL_TOOLS_BYTES:
            self._refuse("tools", f"must have at most {MAX_ALL_TOOLS_BYTES} bytes in total")
            return ()
        names: set[str] = set()
        return tuple(self._read_tool(tool, f"tools[{index}]", names) for index, tool in enumerate(tools))

    def _read_tool(self, tool: tokenizer_pb2.Tool, field: str, names: set[str]) -> Tool:
        if not _TOOL_NAME.fullmatch(tool.name):
            self._refuse(f"{field}.name", "must be 1 to 64 of A-Z, a-z, 0-9, _, . and -")
        elif tool.name in names:
            self._refuse(f"{field}.name", "must differ from the other tools' names")
        names.add(tool.name)
        parameters = self._read_object(f"{field}.parameters", tool.parameters, MAX_ALL_TOOLS_BYTES)
        if parameters.get("type", "object") != "object":
            self._refuse(f"{field}.parameters", 'must be a JSON schema of type "object"')
        return Tool(tool.name, tool.description, parameters or _NO_ARGUMENTS)

    def _read_tool_mode(self, chat: tokenizer_pb2.Chat, tools: Sequence[Tool]) -> ToolMode:
        mode = _TOOL_MODES.get(chat.tool_mode)
        if mode is None:
            self._refuse("tool_mode", "must be TOOL_MODE_AUTO, _NONE or _REQUIRED")
        elif mode is ToolMode.REQUIRED and not tools:
            self._refuse("tool_mode", "TOOL_MODE_REQUIRED needs tools")
        if chat.tool_name and not any(tool.name == chat.tool_name for tool in tools):
            self._refuse("tool_name", "must be the name of one of the tools")
        elif chat.tool_name and mode is ToolMode.NONE:
            self._refuse("tool_name", "cannot be combined with TOOL_MODE_NONE")
        return ToolMode.REQUIRED if chat.tool_name else mode or ToolMode.AUTO

    def _read_allowed_names(self, chat: tokenizer_pb2.Chat, tools: Sequence[Tool]) -> frozenset[str]:
        known, allowed = {tool.name for tool in tools}, frozenset(chat.allowed_tool_names)
        unknown = (index for index, name in enumerate(chat.allowed_tool_names) if name not in known)
        if (index := next(unknown, None)) is not None:
            self._refuse(f"allowed_tool_names[{index}]", "must be the name of one of the tools")
        elif allowed and chat.tool_name in known - allowed:
            self._refuse("tool_name", "must be one of allowed_tool_names")
        elif allowed and chat.tool_mode == tokenizer_pb2.TOOL_MODE_NONE:
            self._refuse("allowed_tool_names", "cannot be combined with TOOL_MODE_NONE")
        return allowed

    def _read_continuation(self, chat: tokenizer_pb2.Chat) -> bool:
        if not chat.continue_final_message or not chat.messages:
            return False
        if chat.omit_generation_prompt:
            self._refuse("omit_generation_prompt", "cannot be combined with continue_final_message")
        last = chat.messages[-1]
        if last.role != tokenizer_pb2.ROLE_ASSISTANT or last.tool_calls:
            self._refuse("continue_final_message", "needs an assistant's message without tool calls at the end")
        elif not (last.content or last.reasoning):
            self._refuse("continue_final_message", "needs content or reasoning in the last message")
        return True

    def _read_variables(self, text: str) -> JsonObject:
        variables = self._read_object("template_variables", text, MAX_VARIABLES_BYTES)
        for name in variables:
            if not _VARIABLE_NAME.fullmatch(name):
                self._refuse("template_variables", "names must be a letter followed by up to 63 of A-Z, a-z, 0-9 and _")
            elif name in _RESERVED_VARIABLES or name.endswith(_SPECIAL_TOKEN_VARIABLE):
                self._refuse("template_variables", f"{name} is reserved")
        return variables


def _texts(chat: tokenizer_pb2.Chat) -> Iterator[str]:
    for message in chat.messages[:MAX_MESSAGES]:
        yield from (message.content, message.reasoning, message.name, message.tool_call_id)
        for call in message.tool_calls[:MAX_TOOL_CALLS]:
            yield from (call.id, call.name, call.arguments)
    for tool in chat.tools[:MAX_TOOLS]:
        yield from _tool_texts(tool)
    yield chat.tool_name
    yield chat.template_variables


def _tool_texts(tool: tokenizer_pb2.Tool) -> tuple[str, ...]:
    return tool.name, tool.description, tool.parameters
