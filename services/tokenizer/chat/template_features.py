"""Finds out how a chat template takes tools and system messages, by what it renders of sample conversations."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

from services.tokenizer.chat.conversation import Message, ToolCall
from services.tokenizer.chat.message_forms import TemplateFeatures, message_fields
from services.tokenizer.json.json_values import JsonObject, JsonValue
from services.tokenizer.text_size import MAX_TEXT_BYTES

_SYSTEM, _USER = Message("system", "Answer briefly."), Message("user", "Hello")
_LATE_SYSTEM = Message("system", "Answer at once.")
# How a conversation begins: some templates need a system message.
_OPENINGS = ((_USER,), (_SYSTEM, _USER))
_TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
_WORD = "salutation"
_ARGUMENTS: JsonObject = {"word": _WORD}
# Before a call.
_TEXT = "I look that up."
_CALL = ToolCall("call_0", "look_up", _ARGUMENTS)
# As some model wrote it.
_MALFORMED_CALL = ToolCall("call_0", "look_up", f'{{"word": "{_WORD}')
_OTHER_CALL = ToolCall("call_1", "look_up", {"word": "valediction"})


def sample_tools() -> list[JsonValue]:
    """Tools for a template that only takes conversations with some."""
    return [_TOOL]


def find_features(render: Callable[[JsonObject], str], tools: list[JsonValue] | None) -> TemplateFeatures:
    """Find out how a template handles tools and system messages, in this process and without limits.

    Args:
        render: Renders the template with the given variables.
        tools: The tools beside the plain message.

    Raises:
        Exception: whatever the template raises on a plain message, also after a system message; ValueError if it writes
            too much.
        MemoryError: it needs too much memory, while it is compiled or on any of the conversations.
    """
    with _no_hidden_memory_error():
        opening = find_opening(render, tools)
    trial = _Trial(render, opening)
    return replace(
        _tool_features(trial),
        system_needs_user=_leaves_system_out(render, tools),
        system_comes_first=_wants_system_first(render, opening, tools),
    )


def _tool_features(trial: _Trial) -> TemplateFeatures:
    takes_tools = "look_up" in trial.rendered((), TemplateFeatures())
    # The first form in which calls are rendered wins; the form that `apply_chat_template` takes is tried first.
    for ids_are_short, empty_content_is_none, arguments_are_text in itertools.product((False, True), repeat=3):
        features = TemplateFeatures(takes_tools, arguments_are_text, empty_content_is_none, ids_are_short)
        if trial.writes(Message("assistant", "", (_CALL,)), features):
            return trial.with_needs(features)
    return TemplateFeatures(takes_tools, loses_calls=True)


def _leaves_system_out(render: Callable[[JsonObject], str], tools: list[JsonValue] | None) -> bool:
    """Whether the template renders a system message alone as nothing, although it has it before a user's message."""
    try:
        alone, opening = (
            render({"messages": _fields(messages, TemplateFeatures()), "tools": tools})
            for messages in ((_SYSTEM,), (_SYSTEM, _USER))
        )
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - a template can raise anything, and then says so itself
        return False
    return _SYSTEM.content in opening and _SYSTEM.content not in alone


def _wants_system_first(
    render: Callable[[JsonObject], str], opening: tuple[Message, ...], tools: list[JsonValue] | None
) -> bool:
    """Whether the template only has the text of a later system message if that is in a user's message."""
    messages = (*opening, _LATE_SYSTEM, Message("assistant", "Hi."), _USER)

    def shows(features: TemplateFeatures) -> bool:
        try:
            return _LATE_SYSTEM.content in render({"messages": _fields(messages, features), "tools": tools})
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - a template can raise anything, and then says so itself
            return False

    return not shows(TemplateFeatures()) and shows(TemplateFeatures(system_comes_first=True))


def find_opening(render: Callable[[JsonObject], str], tools: list[JsonValue] | None) -> tuple[Message, ...]:
    """The first opening that the template renders; raises as `find_features`."""
    failures: list[Exception] = []
    for opening in _OPENINGS:
        try:
            fields: JsonObject = {"messages": _fields(opening, TemplateFeatures()), "tools": tools}
            size = len(render(fields).encode())
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a template can raise anything
            failures.append(error)
            continue
        if size > MAX_TEXT_BYTES:
            raise ValueError(f"the rendered text of {size} bytes is too large")
        return opening
    raise failures[0]


@contextmanager
def _no_hidden_memory_error() -> Iterator[None]:
    """Raise at the end any MemoryError that was raised inside, although it was caught.

    Jinja computes constant expressions while it compiles a template, and goes on where that fails.
    """
    is_hidden = False

    def trace(frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        nonlocal is_hidden
        frame.f_trace_lines = False
        is_hidden = is_hidden or (event == "exception" and issubclass(arg[0], MemoryError))
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(outer)
    if is_hidden:
        raise MemoryError


class _Trial:
    """Renders what follows an opening."""

    def __init__(self, render: Callable[[JsonObject], str], opening: tuple[Message, ...]) -> None:
        self._render = render
        self._opening = opening

    def with_needs(self, features: TemplateFeatures) -> TemplateFeatures:
        """Add what messages need that have several calls, content beside one, or arguments that are no object."""
        for name, message in (
            ("arguments_have_names", Message("assistant", "", (_MALFORMED_CALL,))),
            ("one_call_per_message", Message("assistant", "", (_CALL, _OTHER_CALL))),
            ("content_is_apart", Message("assistant", _TEXT, (_CALL,))),
            ("content_is_reasoning", Message("assistant", _TEXT, (_CALL,), reasoning="Hm.")),
        ):
            need: dict[str, Any] = {name: True}
            needy = replace(features, **need)
            if not self.writes(message, features) and self.writes(message, needy):
                features = needy
        shows_content = self.writes(Message("assistant", _TEXT, (_CALL,)), features)
        return replace(features, ids_have_names=self._shows_ids_alone(features), loses_content=not shows_content)

    def _shows_ids_alone(self, features: TemplateFeatures) -> bool:
        """Whether a call's text depends on its id, and not on its name."""
        calls = (_CALL, replace(_CALL, name="find"), replace(_CALL, id="call_1"))
        text, renamed, other = (self.rendered((Message("assistant", "", (call,)),), features) for call in calls)
        return text == renamed != other

    def writes(self, message: Message, features: TemplateFeatures) -> bool:
        """Whether all calls of a message are rendered, and its content."""
        results = [Message("tool", "A greeting.", tool_call_id=call.id, name=call.name) for call in message.tool_calls]
        text = self.rendered((message, *results), features)
        # A template that expects text and gets an object writes it in Python's notation.
        has_calls = str(_ARGUMENTS) not in text and all(_word_of(call) in text for call in message.tool_calls)
        return has_calls and message.content in text

    def rendered(self, messages: tuple[Message, ...], features: TemplateFeatures) -> str:
        """Empty if the template fails."""
        try:
            return self._render({"messages": _fields((*self._opening, *messages), features), "tools": [_TOOL]})
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - a template can raise anything
            return ""


def _word_of(call: ToolCall) -> str:
    """What is in a text that the call's arguments are in."""
    return _WORD if isinstance(call.arguments, str) else str(call.arguments["word"])


def _fields(messages: tuple[Message, ...], features: TemplateFeatures) -> list[JsonValue]:
    return message_fields(messages, features, lambda value: value)
