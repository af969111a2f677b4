"""Which replica may try the requests that it suspects of ending schedulers."""

from __future__ import annotations


class Trials:
    """Gives the trial to one replica at a time, in the order in which they ask.

    Replicas that tried suspects side by side would each see deaths that another's caused, and blame innocents.

    Invariant: the first that asks and is still linked has the trial.
    """

    def __init__(self) -> None:
        # In the order in which they asked.
        self._asking: dict[int, None] = {}

    def note(self, client: int, *, is_trying: bool) -> None:
        """A replica's message has said whether it has suspects to try."""
        if is_trying:
            self._asking.setdefault(client)
        else:
            self._asking.pop(client, None)

    def unlink(self, client: int) -> None:
        """A replica's stream has ended."""
        self._asking.pop(client, None)

    def is_given_to(self, client: int) -> bool:
        """Whether a replica has the trial."""
        return next(iter(self._asking), None) == client
