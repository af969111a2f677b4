"""Failures for recovery tests."""

from __future__ import annotations

import os

import numpy as np

from services.scheduler.cell.events import ClientMessage, Event
from shared.request.limits import TOKEN_DTYPE

EXIT_CODE = 70


class SubmitFailpoint:
    """Ends the process, as a crash would, when a prompt with a certain token is submitted."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def check(self, event: Event) -> None:
        """Look for the token; may not return."""
        if not isinstance(event, ClientMessage):
            return
        for submission in event.submissions:
            if self._token_id in np.frombuffer(submission.prompt, TOKEN_DTYPE):
                os._exit(EXIT_CODE)
