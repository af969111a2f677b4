"""Tables in documents, generated from the code: a part of a text between two marks."""

from __future__ import annotations


def replace_tables(document: str, begin: str, end: str, tables: str) -> str:
    """The document's text with what is between the lines `begin` and `end` replaced.

    Raises:
        ValueError: the text does not have the two marks, once each and in order.
    """
    before, found_begin, rest = document.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end or begin in after or end in before + after:
        raise ValueError(f"the document lacks the marks around its tables: {begin.strip()} and {end.strip()}")
    return f"{before}{begin}\n{tables}{end}{after}"
