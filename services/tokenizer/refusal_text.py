"""Why a library refuses a text, without what it quotes of the text.

A proxy between the service and its client may log an error, and no client's text belongs in its log.
"""

from __future__ import annotations

import re

_LEFT_OUT = "…"
# Shorter words occur in any form by chance.
_WORD = re.compile(r"\w{4,}")

# The words of the notations, which say what is wrong and nothing of what a client wrote.
# Source: JSON Schema 2020-12, "Core" sections 8 to 11 and "Validation" sections 6, 7 and 9, without what is shorter.
_KEYWORDS = frozenset(
    """
    schema vocabulary anchor dynamicRef dynamicAnchor recursiveRef recursiveAnchor defs definitions comment
    allOf anyOf oneOf then else dependentSchemas dependentRequired dependencies prefixItems items additionalItems
    contains properties patternProperties additionalProperties propertyNames unevaluatedItems unevaluatedProperties
    type enum const multipleOf maximum exclusiveMaximum minimum exclusiveMinimum maxLength minLength pattern
    maxItems minItems uniqueItems maxContains minContains maxProperties minProperties required format
    contentEncoding contentMediaType contentSchema title description default deprecated readOnly writeOnly examples
    null boolean object array number string integer true false
    start root guidance
    """.split()  # noqa: SIM905 - a list of this length would have a line for each
)


def without_quotes(reason: str, form: str) -> str:
    """The library's reason without the form's own words and numbers; the notations' keywords stay.

    `form` is what was refused: a JSON value, a schema, a regular expression or a grammar.
    """

    def leave_out(match: re.Match[str]) -> str:
        word = match.group()
        return word if word in _KEYWORDS or word not in form else _LEFT_OUT

    return _WORD.sub(leave_out, reason)
