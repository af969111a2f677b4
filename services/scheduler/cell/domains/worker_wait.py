"""How long a cell has had no workers."""

from __future__ import annotations

from services.scheduler.cell.domains.domain import Domain


class WorkerWait:
    """Since when no domain can compute, for an operator's bound on how long requests wait for one.

    It begins with the first event, or with the end of an epoch. Workers that are attached, are sent steps and return
    none before they are lost could not compute: the wait then goes on since its former beginning. Others have ended it,
    also if there was nothing to compute.

                  attached   lost    attached   sent steps, lost   attached   returned a step, lost
        waits     -          since   -          since the former   -          since
                             here               loss                          here
    """

    def __init__(self) -> None:
        self._since: float | None = None

    def begin(self, now: float) -> None:
        """An event comes; only the first one counts."""
        if self._since is None:
            self._since = now

    def on_epoch_end(self, domain: Domain, now: float) -> None:
        """A domain's epoch has ended."""
        if not domain.has_computed_nothing:
            self._since = now

    def extend(self, pause_s: float) -> None:
        """Ignore the last `pause_s` seconds, when this process was not listening."""
        if self._since is not None:
            self._since += pause_s

    def is_over(self, bound_s: float, now: float) -> bool:
        """Whether it has lasted for `bound_s`, if no domain is attached."""
        return self._since is not None and now - self._since >= bound_s
