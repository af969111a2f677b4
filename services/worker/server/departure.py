"""When a group that was asked to end does so.

    asked to end
    |--- its scheduler may stay, as long as replicas need it ---|--- it says that it leaves, and is drained ---| ends
                  ↑              stream ends without a last word: the scheduler may have died              │
                  └────────────────────── it waits for the next scheduler ─────────────────────────────────┘

tests/simulation runs this beside the claim ledger.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from services.worker.server.claim import ClaimLedger
from shared.process.stay import Stay

logger = logging.getLogger(__name__)

# A scheduler notices the end of the drain time a heartbeat late, and the last steps take their time.
_DRAIN_MARGIN_S = 5.0


class Departure:
    """Lets the schedulers of a group that was asked to end finish what it computes, and then ends it.

    It ends when a scheduler has said that none needs it any more, and at the latest soon after the drain time: all its
    schedulers may have died. A scheduler that says no last words has said so with any end of its stream.

    Invariant: `leaving` is set, and the ledger refuses claims, only while its scheduler drains it, or once it ends.
    """

    def __init__(self, ledger: ClaimLedger, end: Callable[[str], None]) -> None:
        """`end` ends the process as planned, and is given the reason."""
        self.leaving = asyncio.Event()
        """Set while heartbeats to the scheduler say that the group leaves."""
        self._ledger = ledger
        self._end = end
        # How long the scheduler that claimed the group last drains it; None if it cannot.
        self._drain_s: float | None = None
        self._says_last_word = False
        self._has_heard_last_word = False
        self._has_stream = False
        # When it ends at the latest; None until it was asked to end.
        self._end_at: float | None = None
        self._stay = Stay()
        self._staying: asyncio.Task[None] | None = None

    def note_claim(self, drain_s: float | None, *, says_last_word: bool) -> None:
        """A scheduler has claimed the group, and will open a stream.

        Args:
            drain_s: See `AttachRequest.drain_time`.
            says_last_word: Whether it tells the group when no scheduler needs it any more.
        """
        self._drain_s, self._says_last_word = drain_s, says_last_word
        self._has_heard_last_word = False

    def hear(self, *, is_staying: bool, is_last: bool) -> None:
        """The scheduler that holds the group has sent a heartbeat on the epoch's stream."""
        self._has_heard_last_word |= is_last
        if not self._has_stream:
            self._has_stream, self._stay = True, Stay()
            if self._end_at is not None:
                self._begin_stay(self._end_at)
        self._stay.note(is_needed=is_staying)

    def lose_stream(self) -> None:
        """The epoch's stream has ended."""
        self._has_stream = False
        if self._end_at is None:
            return
        self._end_stay()
        if self._is_released:
            self._leave("drained")
        else:
            self._ledger.is_leaving = False
            self.leaving.clear()
            logger.info("waiting for the next scheduler, which may have answers to finish")

    def ask(self) -> None:
        """The failure domain was asked to end. Once."""
        if self._drain_s is None or (self._is_released and not self._has_stream):
            self._leave("nothing to drain")
            return
        loop = asyncio.get_running_loop()
        self._end_at = loop.time() + self._drain_s
        loop.call_at(self._end_at + _DRAIN_MARGIN_S, self._leave, "not drained in time")
        if self._has_stream:
            self._begin_stay(self._end_at)
        else:
            logger.info("waiting for a scheduler, which may have answers to finish")

    @property
    def _is_released(self) -> bool:
        """Whether no scheduler will need the group, once its stream has ended."""
        return self._has_heard_last_word or not self._says_last_word

    def _leave(self, reason: str) -> None:
        self._ledger.is_leaving = True
        # Nothing is waited for any more.
        self._end_at = None
        self._end(reason)

    def _begin_stay(self, end_at: float) -> None:
        loop = asyncio.get_running_loop()
        self._staying = loop.create_task(self._stay_and_leave(self._stay, end_at - loop.time()))

    def _end_stay(self) -> None:
        if self._staying is not None:
            self._staying.cancel()
            self._staying = None

    async def _stay_and_leave(self, stay: Stay, limit_s: float) -> None:
        await stay.wait(limit_s)
        self._ledger.is_leaving = True
        self.leaving.set()
