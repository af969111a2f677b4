"""Parses the bodies of requests."""

from __future__ import annotations

from services.tokenizer.http.refusals import invalid_field
from services.tokenizer.json.json_values import MAX_DEPTH, JsonObject, read_json
from services.tokenizer.refusal_text import without_quotes


def parse_body(data: bytes | bytearray) -> JsonObject:
    """The JSON object that a body is.

    Raises:
        HttpError: it is none.
    """
    try:
        # A mark of the byte order may come first (RFC 8259, section 8.1).
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise invalid_field(None, "the body is not UTF-8") from None
    try:
        value = read_json(text, max_depth=MAX_DEPTH, has_unique_names=True)
    except ValueError as error:
        raise invalid_field(None, f"the body is not valid JSON: {without_quotes(str(error), text)}") from None
    if not isinstance(value, dict):
        raise invalid_field(None, "the body must be a JSON object")
    return value
