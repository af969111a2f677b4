"""The fields that turn a model's reasoning on and off, under the names of all APIs that have one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.chat.template_switches import THINKING_SWITCHES
from services.tokenizer.http.fields.fields import Count, Fields
from services.tokenizer.http.refusals import invalid_field
from services.tokenizer.json.json_values import JsonObject

ValueT = TypeVar("ValueT")

_NO_REASONING = "none"
# Fields of `thinking`, and the variables that tell a template of them.
_VARIABLES_OF_THINKING = {"budget_tokens": "thinking_budget", "clear_thinking": "clear_thinking"}

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much the model reasons."""


class Thinking(Fields):
    """Whether the model reasons, and whether the client is shown it: Anthropic's, DeepSeek's, GLM's and Kimi's form."""

    type: Literal["enabled", "adaptive", "auto", "between_tools", "disabled"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None
    clear_thinking: bool | None = None
    """GLM's: whether earlier reasoning is left out of the prompt."""


class Reasoning(Fields):
    """How much the model reasons; no summary is made of it."""

    effort: Effort | None = None
    enabled: bool | None = None


class ThinkingFields(Fields):
    """Fields of every route that renders a chat."""

    thinking: Thinking | None = None
    enable_thinking: bool | None = None
    reasoning: Reasoning | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def hides_reasoning(self) -> bool:
        """Whether the client asks not to be shown it."""
        return self.thinking is not None and self.thinking.display == "omitted"

    def switches(self) -> Iterator[tuple[str, bool]]:
        """What turns the reasoning on or off, by its name."""
        if self.thinking is not None:
            yield "thinking", self.thinking.type != "disabled"
        if self.enable_thinking is not None:
            yield "enable_thinking", self.enable_thinking
        if self.reasoning is not None and self.reasoning.enabled is not None:
            yield "reasoning.enabled", self.reasoning.enabled

    def efforts(self) -> Iterator[tuple[str, str]]:
        """What says how much the model reasons, by its name."""
        if self.reasoning_effort is not None:
            yield "reasoning_effort", self.reasoning_effort
        if self.reasoning is not None and self.reasoning.effort is not None:
            yield "reasoning.effort", self.reasoning.effort

    def template_variables(self) -> JsonObject:
        """What the template is told; the variables that a client names itself come last.

        Templates turn thinking on and off by one of two names; some take the effort, or the budget.

        Raises:
            HttpError: two fields contradict each other.
        """
        is_on, effort = _agreed(self.switches()), _agreed(self.efforts())
        if is_on is None:
            is_on = None if effort is None else effort != _NO_REASONING
        elif is_on and effort == _NO_REASONING:
            raise invalid_field(next(self.efforts())[0], f"contradicts {next(self.switches())[0]}")
        variables: JsonObject = {} if is_on is None else dict.fromkeys(THINKING_SWITCHES, is_on)
        if effort is not None and is_on:
            variables["reasoning_effort"] = effort
        if self.thinking is not None:
            variables |= _of_templates(self.thinking)
        return variables | (self.chat_template_kwargs or {})

    def variable_fields(self) -> dict[str, list[str]]:
        """The fields that `template_variables` come from, by the names of these."""
        switches, efforts = [name for name, _ in self.switches()], [name for name, _ in self.efforts()]
        fields = dict.fromkeys(THINKING_SWITCHES, switches or efforts)
        fields |= {"reasoning_effort": efforts}
        fields |= {name: [f"thinking.{field}"] for field, name in _VARIABLES_OF_THINKING.items()}
        return fields | {name: [f"chat_template_kwargs.{name}"] for name in self.chat_template_kwargs or ()}

    def set_variables(self, chat: tokenizer_pb2.Chat) -> None:
        """Write them to a chat; raises as `template_variables`."""
        if variables := self.template_variables():
            chat.template_variables = json.dumps(variables, ensure_ascii=False)


def _of_templates(thinking: Thinking) -> JsonObject:
    given = {name: getattr(thinking, field) for field, name in _VARIABLES_OF_THINKING.items()}
    return {name: value for name, value in given.items() if value is not None}


def _agreed(given: Iterator[tuple[str, ValueT]]) -> ValueT | None:
    """The one value; None if there is none."""
    first: tuple[str, ValueT] | None = None
    for name, value in given:
        if first is None:
            first = name, value
        elif value != first[1]:
            raise invalid_field(name, f"contradicts {first[0]}")
    return None if first is None else first[1]
