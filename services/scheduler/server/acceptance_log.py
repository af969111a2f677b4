"""Logs how many drafts are accepted: poor ones only cost time."""

from __future__ import annotations

import logging

from services.scheduler.core.policy import SchedulerCounters

logger = logging.getLogger(__name__)

DRAFT_TOKENS_PER_LINE = 1000


class AcceptanceLog:
    """Logs once per `DRAFT_TOKENS_PER_LINE` draft tokens."""

    def __init__(self, counters: SchedulerCounters) -> None:
        self._counters = counters
        self._num_drafted = counters.num_draft_tokens
        self._num_accepted = counters.num_accepted_tokens

    def on_event(self) -> None:
        """Check the counters."""
        counters = self._counters
        num_drafted = counters.num_draft_tokens - self._num_drafted
        if num_drafted < DRAFT_TOKENS_PER_LINE:
            return
        num_accepted = counters.num_accepted_tokens - self._num_accepted
        logger.info(
            "drafts",
            extra={
                "num_draft_tokens": num_drafted,
                "num_accepted_tokens": num_accepted,
                "acceptance_rate": round(num_accepted / num_drafted, 3),
            },
        )
        self._num_drafted, self._num_accepted = counters.num_draft_tokens, counters.num_accepted_tokens
