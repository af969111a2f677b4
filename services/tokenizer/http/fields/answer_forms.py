"""The forms that an answer may be asked for, under the names of OpenAI's, Anthropic's, vLLM's, SGLang's and llama.cpp's
APIs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.http.fields.fields import Fields, Several
from services.tokenizer.http.refusals import invalid_field
from services.tokenizer.text_size import MAX_CHOICE_TEXTS

_SCHEMA = "structured_output.json_schema"


def _schema_text(value: object) -> object:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | bool) else value


SchemaText = Annotated[str, BeforeValidator(_schema_text, json_schema_input_type=dict[str, Any] | bool | str)]


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """A form, and where the request has it."""

    field: str
    """The name of the field."""
    message: tokenizer_pb2.StructuredOutput
    content: str = ""
    """The name of the field with the schema, the expression or the grammar; `field` if empty."""

    @property
    def names(self) -> Mapping[str, str]:
        """The names of the message's fields in the request."""
        content = self.content or self.field
        inner = (_SCHEMA, "structured_output.regex", "structured_output.grammar", "structured_output.choices.texts")
        return {
            **dict.fromkeys(inner, content),
            "structured_output.choices": content,
            "structured_output": self.field,
        }

    @property
    def schema_field(self) -> str:
        """The name of the field with the schema, or of a form that has none."""
        return self.field if self.message.json_object else self.names[_SCHEMA]


class StructuredOutputs(Fields):
    """vLLM's form of an answer: one of the first five."""

    json_schema: SchemaText | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[Several[str], Field(max_length=MAX_CHOICE_TEXTS)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        forms = (self.json_schema, self.regex, self.choice, self.grammar, self.json_object or None)
        if sum(form is not None for form in forms) != 1:
            raise invalid_field(
                "structured_outputs", "needs exactly one of json, regex, choice, grammar and json_object"
            )
        return self

    def form(self) -> AnswerForm:
        """The form."""
        message = tokenizer_pb2.StructuredOutput(compact_json=self.disable_any_whitespace)
        given = {"json": self.json_schema, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        for name, value in given.items():
            if value is not None:
                _set_form(message, name, value)
                return AnswerForm("structured_outputs", message, f"structured_outputs.{name}")
        message.json_object = True
        return AnswerForm("structured_outputs", message)


class JsonSchema(Fields):
    """A schema that the answer must match."""

    name: str | None = None
    description: str | None = None
    json_schema: SchemaText | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """The answer's form: OpenAI's, and llama.cpp's with the schema beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    own_schema: SchemaText | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        has_wrapper, has_schema = self.json_schema is not None, self.own_schema is not None
        if self.type == "json_schema" and not (has_wrapper or has_schema):
            raise invalid_field("response_format.json_schema", "is required")
        if has_wrapper and has_schema:
            raise invalid_field("response_format.schema", "cannot be combined with json_schema")
        if self.type == "text" and (has_wrapper or has_schema):
            place = "response_format.schema" if has_schema else "response_format.json_schema"
            raise invalid_field(place, "cannot be combined with type text")
        return self

    def form(self) -> AnswerForm | None:
        """The form; None for any text."""
        place, content = "response_format", "response_format.json_schema.schema"
        if self.type == "text":
            return None
        schema, strict = self.own_schema, self.strict
        if self.json_schema is not None:
            schema, strict = self.json_schema.json_schema, self.json_schema.strict
        elif schema is not None:
            content = "response_format.schema"
        return AnswerForm(place, schema_form(schema, is_strict=bool(strict)), content)


class OutputFormat(Fields):
    """The answer's form in Anthropic's API."""

    type: Literal["json_schema"]
    json_schema: SchemaText = Field(alias="schema")

    def form(self, place: str) -> AnswerForm:
        """The form; `place` is the field's name."""
        return AnswerForm(place, schema_form(self.json_schema, is_strict=False), f"{place}.schema")


class FormFields(Fields):
    """The fields of an answer's form that every route has; at most one may be given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    output_format: OutputFormat | None = None
    # vLLM's older ones.
    guided_json: SchemaText | None = None
    guided_regex: str | None = None
    guided_choice: Several[str] | None = None
    guided_grammar: str | None = None
    # SGLang's and llama.cpp's.
    json_schema: SchemaText | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None

    def forms(self) -> Iterator[AnswerForm]:
        """Forms that are given."""
        if self.response_format is not None and (form := self.response_format.form()) is not None:
            yield form
        if self.structured_outputs is not None:
            yield self.structured_outputs.form()
        if self.output_format is not None:
            yield self.output_format.form("output_format")
        for name, kind in _PLAIN_FORMS.items():
            if (value := getattr(self, name)) is not None:
                message = tokenizer_pb2.StructuredOutput()
                _set_form(message, kind, value)
                yield AnswerForm(name, message)

    def form(self) -> AnswerForm | None:
        """The answer's form; None if it may be any text.

        Raises:
            HttpError: there are two.
        """
        forms = list(self.forms())
        if len(forms) > 1:
            raise invalid_field(forms[1].field, f"cannot be combined with {forms[0].field}")
        return forms[0] if forms else None


_PLAIN_FORMS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}


def schema_form(schema: str | None, *, is_strict: bool) -> tokenizer_pb2.StructuredOutput:
    """A JSON value that a schema describes, or any object without one."""
    if schema is None:
        return tokenizer_pb2.StructuredOutput(json_object=True)
    return tokenizer_pb2.StructuredOutput(json_schema=schema, strict=is_strict)


def _set_form(message: tokenizer_pb2.StructuredOutput, kind: str, value: Any) -> None:
    if kind == "json":
        message.json_schema = value
    elif kind == "regex":
        message.regex = value
    elif kind == "grammar":
        message.grammar = value
    else:
        message.choices.texts.extend(value)
        message.choices.SetInParent()
