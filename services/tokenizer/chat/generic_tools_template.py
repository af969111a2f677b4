"""Tools for a chat template that takes none: what is put before its source.

Tools are listed in a message that the template knows, calls are part of the assistant's text, and results are a
user's. Without any of them the template gets the messages as they are.
"""

from __future__ import annotations

GENERIC_MARK = "lockstep_generic_tools"
"""What tells a source with generic tools from others: the name of the one variable that it adds."""

TOOL_ROLES = ("system", "user")
"""Whose message may list the tools, the preferred one first: some templates refuse or ignore a system's."""

# Results are in the user's message after them, since some templates want turns to alternate. Lists grow and are joined
# at once: a text that grew would be copied for each part.
_BEFORE = r"""
{%- set NS = namespace(turns=[], turn={}, results=[], parts=[], text='') -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- set NS.results = NS.results + ['<tool_response>\n' ~ (message.content or '') ~ '\n</tool_response>'] -%}
{%- else -%}
{%- set NS.turn = message -%}
{%- if NS.results and message.role == 'user' -%}
{%- set NS.turn = dict(message, content=(NS.results + [message.content or '']) | join('\n')) -%}
{%- elif NS.results -%}
{%- set NS.turns = NS.turns + [dict(role='user', content=NS.results | join('\n'))] -%}
{%- endif -%}
{%- set NS.results = [] -%}
{%- if message.tool_calls -%}
{%- set NS.parts = [message.content] if message.content else [] -%}
{%- for call in message.tool_calls -%}
{%- set arguments = call.function.arguments -%}
{%- set written = arguments if arguments is string else arguments | tojson -%}
{%- set head = '<tool_call>\n{"name": ' ~ (call.function.name | tojson) ~ ', "arguments": ' -%}
{%- set NS.parts = NS.parts + [head ~ written ~ '}\n</tool_call>'] -%}
{%- endfor -%}
{%- set NS.turn = dict(role=message.role, content=NS.parts | join('\n')) -%}
{%- if message.reasoning_content -%}
{%- set NS.turn = dict(NS.turn, reasoning_content=message.reasoning_content, thinking=message.reasoning_content) -%}
{%- endif -%}
{%- endif -%}
{%- set NS.turns = NS.turns + [NS.turn] -%}
{%- endif -%}
{%- endfor -%}
{%- if NS.results -%}
{%- set NS.turns = NS.turns + [dict(role='user', content=NS.results | join('\n'))] -%}
{%- endif -%}
{%- set messages = NS.turns -%}
{%- if tools -%}
{%- set NS.text = 'You can call functions. These are there, each with a JSON schema of its arguments:\n<tools>\n'
    ~ (tools | map('tojson') | join('\n'))
    ~ '\n</tools>\nTo call one, write this and nothing after it:\n'
    ~ '<tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>\n'
    ~ 'Several calls come one after the other. What a function has found is in <tool_response></tool_response>. '
    ~ 'Where no function helps, answer without one.' -%}
LISTING
{%- endif -%}
{%- set tools = none %}
"""
# A system's own instructions come first, a user's question last.
_LISTINGS = {
    "system": r"""
{%- if messages[0].role == 'system' -%}
{%- set NS.turn = dict(messages[0], content=[messages[0].content, NS.text] | select | join('\n\n')) -%}
{%- set messages = [NS.turn] + messages[1:] -%}
{%- else -%}
{%- set messages = [dict(role='system', content=NS.text)] + messages -%}
{%- endif -%}
""",
    "user": r"""
{%- set NS.turns = [] -%}
{%- for message in messages -%}
{%- if NS.text and message.role == 'user' -%}
{%- set NS.turns = NS.turns + [dict(message, content=NS.text ~ '\n\n' ~ message.content)] -%}
{%- set NS.text = '' -%}
{%- else -%}
{%- set NS.turns = NS.turns + [message] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = ([dict(role='user', content=NS.text)] if NS.text else []) + NS.turns -%}
""",
}


def with_generic_tools(source: str, role: str) -> str:
    """A template's source that lists tools in a message of a role, one of `TOOL_ROLES`."""
    before = _BEFORE.lstrip().replace("LISTING", _LISTINGS[role].strip()).replace("NS", GENERIC_MARK)
    # It ends with a line, so that the template begins as it does alone.
    return before + source
