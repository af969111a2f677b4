"""Where text is in Markdown's code: markup there is shown, not meant.

Source: CommonMark 0.31, sections 4.5 (fenced code blocks) and 6.1 (code spans). Here a span ends with its line, so that
a lone backtick hides nothing after that.
"""

from __future__ import annotations

import re

_PIECE = re.compile(r"\n|`+|~+|[^\n`~]+")
_LEAST_FENCE = 3


class CodeSpans:
    """Follows a text that arrives in pieces."""

    def __init__(self) -> None:
        # The characters that opened a block or a span, and how many.
        self._fence = ""
        self._span = ""
        # A run of backticks or tildes that may go on, and whether only blanks are before it on its line.
        self._run = ""
        self._is_line_blank = True
        # Whether this line opened the block, or ends it unless more follows.
        self._opens = False
        self._closes = False

    def push(self, text: str) -> None:
        """Take the next piece."""
        for piece in _PIECE.findall(text):
            if self._run and piece[0] != self._run[0]:
                self._end_run()
            if piece == "\n":
                self._end_line()
            elif piece[0] in "`~":
                self._run += piece
            elif piece.strip():
                self._is_line_blank = self._closes = False

    def is_in_code(self, opening: str) -> bool:
        """Whether markup that begins here with `opening` is in code."""
        if self._run:
            self._end_run()
        if opening.startswith("\n"):
            # What comes next begins a line.
            return bool(self._fence) and not self._closes
        return bool(self._span) or (bool(self._fence) and not self._closes)

    def _end_run(self) -> None:
        run, self._run = self._run, ""
        is_first, self._is_line_blank = self._is_line_blank, False
        if self._fence:
            if self._opens and run[0] == "`":
                # Not a block, since its first line has another run: a span.
                self._fence, self._opens, self._span = "", False, "" if run == self._fence else self._fence
            elif is_first and run.startswith(self._fence):
                self._closes = True
        elif is_first and len(run) >= _LEAST_FENCE:
            self._fence, self._opens = run, True
        elif run[0] == "`":
            self._span = "" if run == self._span else self._span or run

    def _end_line(self) -> None:
        if self._closes:
            self._fence = ""
        self._span = ""
        self._is_line_blank, self._opens, self._closes = True, False, False
