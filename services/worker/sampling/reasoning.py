"""Where a completion is that may reason before its grammar applies."""

from __future__ import annotations

from collections import deque


class Reasoning:
    """Follows one completion until its reasoning is over, or it has begun without any.

    Reasoning is found again from the tokens alone when a sequence is resumed.
    """

    def __init__(self, begin: tuple[int, ...], end: tuple[int, ...]) -> None:
        """`begin` are the tokens that open it, empty if the prompt has; `end` those that close it, at least one."""
        self.is_open = not begin
        """Whether any token may come next except an end of sequence."""
        self._begin = begin
        self._end = end
        # How many of the opening's tokens have come; None once another token has, or all of them.
        self._num_begun: int | None = 0 if begin else None
        self._last: deque[int] = deque(maxlen=len(end))

    def advance(self, token_id: int) -> bool:
        """Take the next token; returns whether it closes the reasoning."""
        if self.is_open:
            self._last.append(token_id)
            self.is_open = tuple(self._last) != self._end
            return not self.is_open
        if self._num_begun is not None:
            is_next = token_id == self._begin[self._num_begun]
            self._num_begun = self._num_begun + 1 if is_next else None
            if self._num_begun == len(self._begin):
                self.is_open, self._num_begun = True, None
        return False
