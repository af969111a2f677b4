"""Renders a conversation with a chat template, and says what a client may know of its failure."""

from __future__ import annotations

from jinja2 import Environment
from jinja2.exceptions import TemplateError
from jinja2.meta import find_undeclared_variables

from services.tokenizer.chat.template_environment import compile_template, render
from services.tokenizer.chat.typescript_tools import VARIABLE, declared_tools, sorted_tools
from services.tokenizer.json.json_values import JsonObject

# The length of a template's own words in an error, which travels as metadata.
_MAX_WORDS_LENGTH = 500


class RenderError(Exception):
    """A template rejected a conversation, failed on it, or cost too much. The text is for the client.

    Attributes:
        error_type: What was raised, or what ended the process; for the log.
    """

    def __init__(self, problem: str, error_type: str) -> None:
        super().__init__(problem)
        self.error_type = error_type


def render_template(source: str, special_tokens: dict[str, str], fields: JsonObject, *, opens_turn: bool = True) -> str:
    """Render a template, with the assistant's turn opened at the end if `opens_turn`.

    Its exceptions pass through, its time and memory are unlimited. `fields` are `messages`, `tools` (None for none) and
    variables, none named like a special token. A template that asks for the tools' declaration gets it.
    """
    return render(source, add_generation_prompt=opens_turn, **special_tokens, **_with_declaration(source, fields))


def read_variables(source: str) -> tuple[str, ...]:
    """The names of the variables that a template reads, sorted; its exceptions pass through, as `render_template`'s."""
    environment = compile_template(source).environment
    return tuple(sorted(find_undeclared_variables(environment.parse(source))))


def _with_declaration(source: str, fields: JsonObject) -> JsonObject:
    tools = fields["tools"]
    if not isinstance(tools, list) or VARIABLE not in source:
        return fields
    tools = sorted_tools(tools)
    declaration = declared_tools(tools)
    return {**fields, "tools": tools, **({} if declaration is None else {VARIABLE: declaration})}


def explain_failure(error: Exception, source: str) -> RenderError:
    """What a client may know of an exception that a template raised."""
    error_type = type(error)
    problem = "the chat template failed"
    if error_type is TemplateError:
        problem = "the chat template rejected the messages"
        # A template may also build its words of the client's own, which are repeated nowhere.
        if str(error) in _literals_of(source):
            problem += f": {str(error)[:_MAX_WORDS_LENGTH]}"
    return RenderError(problem, error_type.__name__)


def _literals_of(source: str) -> frozenset[str]:
    """The strings that are written in a template."""
    tokens = Environment().lexer.tokenize(source)  # noqa: S701 - nothing is rendered
    return frozenset(token.value for token in tokens if token.type == "string")
