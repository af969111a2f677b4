"""The names that the fields of a `GenerateRequest` have in the JSON of the HTTP API."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_MESSAGE = re.compile(r"^chat\.messages\[(\d+)\]")
# Applied in this order; what follows a name, such as an index, stays.
_CHAT_RULES = (
    (r"^chat\.(tool_mode|tool_name|allowed_tool_names).*", r"tool_choice"),
    (r"^chat\.tools\[(\d+)\]\.", r"tools[\1].function."),
    (r"^chat\.messages\[(\d+)\]\.tool_calls\[(\d+)\]\.(name|arguments)", r"messages[\1].tool_calls[\2].function.\3"),
    (r"^chat\.template_variables", "chat_template_kwargs"),
    (r"^chat\.single_tool_call", "parallel_tool_calls"),
    (r"^chat\.omit_generation_prompt", "add_generation_prompt"),
    (r"^chat\.", ""),
    (r"^(chat|prompt)$", "messages"),
)
_COMPLETION_RULES = (
    (r"^prompts\.prompts\[(\d+)\]\.(text|prompt|tokens\.token_ids)", r"prompt[\1]"),
    (r"^prompts\.prompts", "prompt"),
    (r"^(text|prompt|tokens\.token_ids)", "prompt"),
)
_RULES = (
    (r"^sampling\.num_prompt_logprobs", "prompt_logprobs"),
    (r"^sampling\.num_logprobs", "logprobs"),
    (r"^sampling\.", ""),
    (r"^include_stop$", "include_stop_str_in_output"),
)

RESPONSE_FORMAT = {
    "structured_output.json_schema": "response_format.json_schema.schema",
    "structured_output": "response_format",
}
"""The names of a form that is OpenAI's."""
STRUCTURED_OUTPUTS = {
    "structured_output.json_schema": "structured_outputs.json",
    "structured_output.choices.texts": "structured_outputs.choice",
    "structured_output.choices": "structured_outputs.choice",
    "structured_output": "structured_outputs",
}
"""The names of a form that is vLLM's."""


class FieldNames:
    """Names fields for one route and request."""

    def __init__(self, *, is_chat: bool, given: Mapping[str, str], num_messages: Sequence[int] = ()) -> None:
        """Name none yet.

        Args:
            is_chat: Whether the request is a chat.
            given: The names that depend on the request, by the beginnings of the message's; the first counts.
            num_messages: How many messages of the cell each message of the request has become; one if not given.
        """
        self._given = given
        self._places = [place for place, count in enumerate(num_messages) for _ in range(count)]
        self._rules = (*(_CHAT_RULES if is_chat else _COMPLETION_RULES), *_RULES)

    def __call__(self, field: str) -> str:
        """The name in the request's JSON."""
        for beginning, name in self._given.items():
            if field.startswith(beginning):
                return name + field.removeprefix(beginning)
        field = _MESSAGE.sub(self._place, field)
        for pattern, name in self._rules:
            field = re.sub(pattern, name, field)
        return field

    def _place(self, match: re.Match[str]) -> str:
        index = int(match[1])
        return f"chat.messages[{self._places[index] if index < len(self._places) else index}]"
