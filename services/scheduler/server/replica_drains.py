"""The tokenizer replicas that were asked to end and let their answers finish."""

from __future__ import annotations

from collections.abc import Callable

from shared.process.stay import Stay


class ReplicaDrains:
    """Keeps a scheduler that is asked to end for the linked replicas that drain.

    Where all processes of a cell are asked at once, nothing else could finish their answers.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        """`on_change` is called when `is_staying` has changed."""
        self._on_change = on_change
        self._linked: set[int] = set()
        self._draining: set[int] = set()
        self._stay = Stay()
        self._is_asked = False
        self.is_staying = False
        """Whether this scheduler was asked to end and stays, as its workers should."""

    def link(self, replica: int) -> None:
        """A replica was linked."""
        self._linked.add(replica)
        self._update()

    def note(self, replica: int, *, is_draining: bool) -> None:
        """A linked replica has said whether it drains."""
        if is_draining and replica in self._linked and replica not in self._draining:
            self._draining.add(replica)
            self._update()

    def unlink(self, replica: int) -> None:
        """A replica's link has ended."""
        self._linked.discard(replica)
        self._draining.discard(replica)
        self._update()

    async def stay(self, limit_s: float) -> None:
        """This scheduler was asked to end: return once no replica needs it, at the latest after `limit_s`.

        Without a replica that drains, or says within 2 s that it does, those that are linked need it no longer: they
        take their requests to the next scheduler.
        """
        self._is_asked = True
        self._update()
        await self._stay.wait(limit_s)
        self._is_asked = False
        self._update()

    def _update(self) -> None:
        self._stay.note(is_needed=bool(self._draining), may_be_needed=bool(self._linked))
        is_staying = self._is_asked and self._stay.is_needed
        if is_staying != self.is_staying:
            self.is_staying = is_staying
            self._on_change()
