"""What a process answers when Kubernetes asks whether it lives, has started and is ready."""

from __future__ import annotations

from collections.abc import Callable


class Probes:
    """How far a process has come: it starts once, is then ready or not, and leaves at last.

    Every answer is None for yes, or a few words that say why not. A process whose event loop does not turn gives no
    answer. Belongs to the event loop that serves the management port.
    """

    def __init__(self, waits_for: str, *, stuck: Callable[[], str | None] = lambda: None) -> None:
        """Begin a process's probes.

        Args:
            waits_for: What keeps the process from having started.
            stuck: Says what keeps it from living, such as work in a thread that never ends; None if nothing does.
        """
        self._stuck = stuck
        self._waits_for: str | None = waits_for
        self._obstacle: str | None = None
        self.is_leaving = False
        """Set once the process was asked to end, or drains."""

    @property
    def why_not_alive(self) -> str | None:
        """Only a new start helps."""
        return self._stuck()

    @property
    def why_not_started(self) -> str | None:
        """Stays None once it is None."""
        return self._waits_for

    @property
    def why_not_ready(self) -> str | None:
        """Whether new work may be sent to the process."""
        return "leaving" if self.is_leaving else self._waits_for or self._obstacle

    def set_waiting(self, waits_for: str) -> None:
        """The process waits for something else now; not after `set_started`."""
        assert self._waits_for is not None, "it has started"
        self._waits_for = waits_for

    def set_started(self) -> None:
        """The process has what it needs to serve."""
        self._waits_for = None

    def set_obstacle(self, obstacle: str | None) -> None:
        """What keeps a started process from being ready; None when nothing does."""
        self._obstacle = obstacle
