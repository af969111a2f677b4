"""Which variables of a chat have no effect, since its template never reads them.

Templates turn reasoning on and off by one of two names; an API's switch sets both. Where a template reads neither, a
switch may still ask for what the model does anyway: one without reasoning never reasons, another one always does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from services.tokenizer.json.json_values import JsonObject

THINKING_SWITCHES = ("enable_thinking", "thinking")


def unread_variables(variables: JsonObject, read: Collection[str], *, reasons: bool) -> Iterator[str]:
    """The names of `variables` that have no effect.

    Args:
        variables: What the template is told.
        read: The names that it reads.
        reasons: Whether the model reasons, at least where nothing turns that off.
    """
    for name, value in variables.items():
        if name in read:
            continue
        if name in THINKING_SWITCHES:
            is_read = any(other in read and variables.get(other) is value for other in THINKING_SWITCHES)
            is_done_anyway = not any(other in read for other in THINKING_SWITCHES) and value is reasons
            if is_read or is_done_anyway:
                continue
        yield name
