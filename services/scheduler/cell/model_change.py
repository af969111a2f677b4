"""What happens to workers that serve another model than the cell."""

from __future__ import annotations

from services.scheduler.cell.domains.domain import Domain
from services.scheduler.cell.events import DropDomain

CHANGE_S = 30.0
"""How long only another model must have been offered until the cell's model counts as replaced. A worker that crashes
is back earlier."""
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 8.0


class ModelChange:
    """Tells an odd worker from a change of the whole cell's model.

    While domains with the cell's model are attached, one with another model waits, and is offered again after delays
    that double. The model has changed when none has been attached for `CHANGE_S` since another one was offered.
    """

    def __init__(self) -> None:
        self._domain_to_delay_s: dict[Domain, float] = {}
        self._offered_since: float | None = None

    def on_attached(self, domain: Domain) -> None:
        """A domain has been attached with the cell's model."""
        self._domain_to_delay_s.pop(domain, None)
        self._offered_since = None

    def refuse(self, domain: Domain, epoch: int, difference: str, now: float, *, is_cell_attached: bool) -> DropDomain:
        """Refuse a domain with another model; `difference` says what is another one."""
        if is_cell_attached:
            self._offered_since = None
        elif self._offered_since is None:
            self._offered_since = now
        is_repeated = domain in self._domain_to_delay_s
        delay_s = self._domain_to_delay_s.get(domain, _FIRST_DELAY_S)
        self._domain_to_delay_s[domain] = min(2 * delay_s, _LONGEST_DELAY_S)
        return DropDomain(domain.number, epoch, difference, delay_s, is_repeated=is_repeated)

    def is_over(self, now: float) -> bool:
        """Whether the model has changed."""
        return self._offered_since is not None and now - self._offered_since >= CHANGE_S
