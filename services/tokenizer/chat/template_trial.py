"""Tries a chat template in a separate process, where an endless loop or a memory hog does no harm.

Run as a module, it is that process: a trial on stdin, the result on stdout, both JSON.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from services.tokenizer.chat.conversation import Message, ToolCall
from services.tokenizer.chat.message_forms import TemplateFeatures, message_fields
from services.tokenizer.chat.template_rendering import render_template
from services.tokenizer.json.json_values import JsonObject, JsonValue
from services.tokenizer.text_size import MAX_TEXT_BYTES
from services.tokenizer.trial_limits import cpu_problem, limit_cpu, wall_clock_s, was_out_of_cpu
from shared.model_dir import ModelDirectoryError
from shared.process.parent import make_end_with_parent

MAX_MEMORY_BYTES = 512 * 1024 * 1024

_MAX_ERROR_LENGTH = 500

_SYSTEM, _USER = Message("system", "Answer briefly."), Message("user", "Hello")
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
_CALL = ToolCall("call_0", "look_up", _ARGUMENTS)
# As some model wrote it.
_MALFORMED_CALL = ToolCall("call_0", "look_up", f'{{"word": "{_WORD}')
_OTHER_CALL = ToolCall("call_1", "look_up", {"word": "valediction"})


@functools.lru_cache(maxsize=16)
def try_template(
    source: str, special_tokens: tuple[tuple[str, str], ...], *, timeout_s: float, has_tools: bool = False
) -> TemplateFeatures:
    """Try a template; results are cached.

    Args:
        timeout_s: CPU seconds, not counting the start of the process.
        has_tools: Whether it only takes conversations with tools.

    Raises:
        ModelDirectoryError: it does not render a plain message within `timeout_s` and 512 MiB.
    """
    tools: list[JsonValue] | None = [_TOOL] if has_tools else None
    trial = json.dumps(
        {"source": source, "special_tokens": dict(special_tokens), "timeout_s": timeout_s, "tools": tools}
    )
    try:
        child = subprocess.run(
            [sys.executable, "-m", __spec__.name, str(os.getpid())],
            input=trial.encode(),
            capture_output=True,
            timeout=wall_clock_s(timeout_s),
            check=True,
            env={"PYTHONPATH": os.pathsep.join(sys.path)},
        )
    except subprocess.TimeoutExpired:
        raise _refusal(f"it did not finish within {wall_clock_s(timeout_s):g} s") from None
    except subprocess.CalledProcessError as error:
        if was_out_of_cpu(error.returncode):
            raise _refusal(cpu_problem(timeout_s)) from None
        raise _refusal(f"the trial process exited with status {error.returncode}") from None
    result = json.loads(child.stdout)
    if "error" in result:
        raise _refusal(result["error"])
    return TemplateFeatures(**result)


def main() -> int:
    """Entry point of the trial process."""
    make_end_with_parent(int(sys.argv[1]))()
    trial = json.load(sys.stdin)
    _limit_memory()
    limit_cpu(trial["timeout_s"])

    def render(fields: JsonObject) -> str:
        return render_template(trial["source"], trial["special_tokens"], fields)

    try:
        result: JsonObject = asdict(find_features(render, trial["tools"]))
    except Exception as error:  # noqa: BLE001 - a template can raise anything
        result = {"error": f"{type(error).__name__}: {error}"[:_MAX_ERROR_LENGTH]}
    json.dump(result, sys.stdout)
    return 0


def find_features(render: Callable[[JsonObject], str], tools: list[JsonValue] | None) -> TemplateFeatures:
    """Find out how a template handles tools, in this process and without limits.

    Args:
        render: Renders the template with the given variables.
        tools: The tools beside the plain message.

    Raises:
        Exception: whatever the template raises on a plain message, also after a system message; ValueError if it writes
            too much.
    """
    opening = _find_opening(render, tools)
    trial = _Trial(render, opening)
    takes_tools = "look_up" in trial.rendered((), TemplateFeatures())
    # The first form in which calls are rendered wins; the form that `apply_chat_template` takes is tried first.
    for ids_are_short, empty_content_is_none, arguments_are_text in itertools.product((False, True), repeat=3):
        features = TemplateFeatures(takes_tools, arguments_are_text, empty_content_is_none, ids_are_short)
        if trial.writes(Message("assistant", "", (_CALL,)), features):
            return trial.with_needs(features)
    return TemplateFeatures(takes_tools)


def _find_opening(render: Callable[[JsonObject], str], tools: list[JsonValue] | None) -> tuple[Message, ...]:
    """The first opening that the template renders."""
    failures: list[Exception] = []
    for opening in _OPENINGS:
        try:
            fields: JsonObject = {"messages": _fields(opening, TemplateFeatures()), "tools": tools}
            size = len(render(fields).encode())
        except Exception as error:  # noqa: BLE001 - a template can raise anything
            failures.append(error)
            continue
        if size > MAX_TEXT_BYTES:
            raise ValueError(f"the rendered text of {size} bytes is too large")
        return opening
    raise failures[0]


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
            ("content_is_apart", Message("assistant", "So:", (_CALL,))),
            ("content_is_reasoning", Message("assistant", "So:", (_CALL,), reasoning="Hm.")),
        ):
            needy = replace(features, **{name: True})
            if not self.writes(message, features) and self.writes(message, needy):
                features = needy
        return features

    def writes(self, message: Message, features: TemplateFeatures) -> bool:
        """Whether all calls of a message are rendered."""
        results = [Message("tool", "A greeting.", tool_call_id=call.id, name=call.name) for call in message.tool_calls]
        text = self.rendered((message, *results), features)
        # A template that expects text and gets an object writes it in Python's notation.
        return str(_ARGUMENTS) not in text and all(_word_of(call) in text for call in message.tool_calls)

    def rendered(self, messages: tuple[Message, ...], features: TemplateFeatures) -> str:
        """Empty if the template fails."""
        try:
            return self._render({"messages": _fields((*self._opening, *messages), features), "tools": [_TOOL]})
        except Exception:  # noqa: BLE001 - a template can raise anything
            return ""


def _word_of(call: ToolCall) -> str:
    """What is in a text that the call's arguments are in."""
    return _WORD if isinstance(call.arguments, str) else str(call.arguments["word"])


def _fields(messages: tuple[Message, ...], features: TemplateFeatures) -> list[JsonValue]:
    return message_fields(messages, features, lambda value: value)


def _limit_memory() -> None:
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    address_space = num_pages * resource.getpagesize() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))


def _refusal(cause: str) -> ModelDirectoryError:
    return ModelDirectoryError(f"the chat template cannot render a plain message: {cause}")


if __name__ == "__main__":
    sys.exit(main())
