"""The encoding of what comes from the command line and goes to the terminal.

Python decodes arguments as the locale says. What it cannot decode it keeps as lone surrogates, which are no text.
"""

from __future__ import annotations

import codecs
import io
import sys


def is_text(text: str) -> bool:
    """Whether UTF-8 can encode it: it has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def describe_locale() -> str:
    """The end of a message about a text that is not UTF-8: the locale if it may be the cause, or nothing."""
    encoding = sys.getfilesystemencoding()
    if encoding == "utf-8":
        return ""
    return f"; the locale's encoding is {encoding}: use one of UTF-8, such as LC_ALL=C.UTF-8"


def escape_stdout() -> None:
    """Let stdout escape characters that its encoding lacks, as stderr does; by default they are an exception."""
    if isinstance(sys.stdout, io.TextIOWrapper) and codecs.lookup(sys.stdout.encoding).name != "utf-8":
        sys.stdout.reconfigure(errors="backslashreplace")
