"""The forms that an answer may be asked for: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.http.refusals import invalid_field
from services.tokenizer.http.requests.fields import Fields, Several
from services.tokenizer.text_size import MAX_CHOICE_TEXTS


def _schema_text(value: object) -> object:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | bool) else value


SchemaText = Annotated[str, BeforeValidator(_schema_text, json_schema_input_type=dict[str, Any] | bool | str)]


class StructuredOutputs(Fields):
    """vLLM's form of an answer: one of the first five."""

    json_schema: SchemaText | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[Several[str], Field(max_length=MAX_CHOICE_TEXTS)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    structural_tag: None = None
    whitespace_pattern: None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        forms = (self.json_schema, self.regex, self.choice, self.grammar, self.json_object or None)
        if sum(form is not None for form in forms) != 1:
            raise invalid_field(
                "structured_outputs", "needs exactly one of json, regex, choice, grammar and json_object"
            )
        return self

    def message(self) -> tokenizer_pb2.StructuredOutput:
        """The form."""
        form = tokenizer_pb2.StructuredOutput(
            json_schema=self.json_schema,
            regex=self.regex,
            grammar=self.grammar,
            compact_json=self.disable_any_whitespace,
        )
        if self.choice is not None:
            form.choices.texts.extend(self.choice)
            form.choices.SetInParent()
        if self.json_object:
            form.json_object = True
        return form


class JsonSchema(Fields):
    """A schema that the answer must match."""

    name: str | None = None
    description: str | None = None
    json_schema: SchemaText | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """The answer's form."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise invalid_field("response_format.json_schema", "is required")
        return self

    def message(self) -> tokenizer_pb2.StructuredOutput | None:
        """The form; None for any text."""
        if self.type == "text":
            return None
        schema = self.json_schema
        if self.type == "json_object" or schema is None or schema.json_schema is None:
            return tokenizer_pb2.StructuredOutput(json_object=True)
        return tokenizer_pb2.StructuredOutput(json_schema=schema.json_schema, strict=bool(schema.strict))
