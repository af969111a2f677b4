"""Custom tools of a request: functions of one text, which may have a form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import model_validator

from services.tokenizer.http.fields.custom_input import INPUT
from services.tokenizer.http.fields.fields import Fields
from services.tokenizer.json.ecma_regex import full_match_regex
from services.tokenizer.json.json_values import JsonObject
from services.tokenizer.json.lark_regex import lark_regex
from shared.request.grammar import GrammarError


class InputFormat(Fields):
    """The form of a custom tool's input."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    @model_validator(mode="after")
    def _check_grammar(self) -> Self:
        if self.type == "grammar" and (self.syntax is None or self.definition is None):
            raise ValueError("a grammar needs syntax and definition")
        return self


@dataclass(frozen=True, slots=True)
class CustomFunction:
    """A custom tool as the model is told of it."""

    description: str
    parameters: JsonObject
    keeps_form: bool
    """Whether calls have the form that was asked for."""


def custom_function(description: str | None, form: InputFormat | None, *, is_held: bool) -> CustomFunction:
    """The function of a custom tool; `is_held` if a grammar holds its calls, as it must be called."""
    pattern = _pattern(form, is_held=is_held)
    text: JsonObject = {"type": "string", "pattern": pattern} if pattern else {"type": "string"}
    told, has_grammar = description or "", form is not None and form.type == "grammar"
    if form is not None and has_grammar:
        told += f"\n\nThe input has the form of this {form.syntax} grammar:\n{form.definition}"
    parameters: JsonObject = {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return CustomFunction(told.strip(), parameters, keeps_form=not has_grammar or (is_held and bool(pattern)))


def _pattern(form: InputFormat | None, *, is_held: bool) -> str:
    """The regular expression of an input, as that of a JSON schema; empty if there is none."""
    if form is None or form.definition is None:
        return ""
    if form.syntax == "regex":
        return f"^(?:{form.definition})$"
    if not is_held:
        return ""
    try:
        pattern = f"^(?:{lark_regex(form.definition)})$"
        full_match_regex(pattern)
    except GrammarError:
        return ""
    return pattern
