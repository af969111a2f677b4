"""The tokenizer replicas that were asked to end and let their answers finish."""

from __future__ import annotations

from collections.abc import Callable

from shared.process.stay import Stay

# Within this time a replica is linked to a scheduler that has just started, if there is any.
_LINK_S = 10.0


class ReplicaDrains:
    """Keeps workers, and a scheduler that is asked to end, for the linked replicas that drain.

    Where all processes of a cell are asked at once, nothing else could finish their answers. A scheduler that has taken
    the place of one that died then was not asked, and learns from its replicas that the cell ends.
    """

    def __init__(self, on_change: Callable[[], None], clock: Callable[[], float]) -> None:
        """This scheduler starts now.

        Args:
            on_change: Called when `is_staying` has changed, other than by time.
            clock: Returns seconds.
        """
        self._on_change = on_change
        self._clock = clock
        self._awaited_until = clock() + _LINK_S
        self._has_had_replica = False
        # Whether each drains, by number; None until it has said something.
        self._replica_to_drains: dict[int, bool | None] = {}
        self._stay = Stay()
        self._is_asked = False
        self._was_staying = False

    @property
    def linked(self) -> frozenset[int]:
        """The linked replicas."""
        return frozenset(self._replica_to_drains)

    @property
    def is_staying(self) -> bool:
        """Whether workers that were asked to end should stay, for answers that only they can finish.

        While no replica goes on, the whole cell ends. One that goes on lets its requests wait for the workers' restart.
        A scheduler that was asked to end itself stays while any replica drains.
        """
        if self._awaits_replicas:
            return True
        drains = self._replica_to_drains.values()
        return any(drains) if self._is_asked else bool(drains) and False not in drains

    @property
    def is_over(self) -> bool:
        """Whether no replica is linked, nor is about to be."""
        return not self._replica_to_drains and not self._awaits_replicas

    def link(self, replica: int) -> None:
        """A replica was linked."""
        self._has_had_replica = True
        self._replica_to_drains[replica] = None
        self._update()

    def note(self, replica: int, *, is_draining: bool) -> None:
        """A linked replica has said whether it drains; one that does goes on doing so."""
        drained = self._replica_to_drains.get(replica, True)
        if not drained and drained is not is_draining:
            self._replica_to_drains[replica] = is_draining
            self._update()

    def unlink(self, replica: int) -> None:
        """A replica's link has ended."""
        self._replica_to_drains.pop(replica, None)
        self._update()

    async def stay(self, limit_s: float) -> None:
        """This scheduler was asked to end: return once no replica needs it, at the latest after `limit_s`.

        Without a replica that drains, or says within 2 s that it does, those that are linked need it no longer: they
        take their requests to the next scheduler.
        """
        self._is_asked = True
        self._update()
        await self._stay.wait(limit_s)

    @property
    def _awaits_replicas(self) -> bool:
        return not self._has_had_replica and self._clock() < self._awaited_until

    def _update(self) -> None:
        drains = self._replica_to_drains
        self._stay.note(is_needed=any(drains.values()), may_be_needed=bool(drains))
        if self.is_staying != self._was_staying:
            self._was_staying = self.is_staying
            self._on_change()
