"""What each tenant of a cell has been given: the counters by which the waiting queue is fair."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from services.scheduler.core.batch.slot_table import Slots
from services.scheduler.core.lazy_heap import LazyHeap
from shared.step.columns import Int32Column
from shared.tenant import Tenant

# What a token costs, as in the paper's evaluation.
PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0


@dataclass(slots=True, eq=False)
class TenantAccount:
    """One tenant's counter."""

    number: int
    """A number from 0, in the order in which the tenants came."""
    weight: float
    counter: float = 0.0
    """The cost of what was computed for it, by its weight."""
    num_waiting: int = 0
    """Its waiting sequences, on all ranks and on none."""


class AccountHeap:
    """Accounts by their counters, which only rise."""

    def __init__(self) -> None:
        self._accounts: dict[int, TenantAccount] = {}
        self._heap = LazyHeap(self._accounts, attrgetter("counter"))

    def __contains__(self, account: TenantAccount) -> bool:
        return account.number in self._accounts

    def add(self, account: TenantAccount) -> None:
        """Add an account that is not here."""
        self._accounts[account.number] = account
        self._heap.add(account.number)

    def remove(self, account: TenantAccount) -> None:
        """Take an account out."""
        del self._accounts[account.number]

    def lowest(self) -> TenantAccount | None:
        """The account with the lowest counter; None if there is none.

        Amortised O(log accounts) for each that was charged or added.
        """
        number = self._heap.lowest()
        return None if number is None else self._accounts[number]

    def check_integrity(self) -> None:
        """Assert that none is lost."""
        self._heap.check_integrity()


class TenantCounters:
    """The virtual token counters of a cell's tenants, one table for all its ranks.

    A tenant is charged for what is computed: prompt tokens that were not cached when their sequence is admitted, output
    tokens when they arrive. A tenant that begins to wait is lifted to the lowest counter that waits; where none waits,
    to that of the tenant that waited last. So none saves credit, not even while all others run without waiting. While a
    cell has had only one tenant, nothing is charged.

    Source: Sheng et al., "Fairness in serving large language models" (OSDI '24), algorithm 2 and its weights.

    Invariant: `_waiting` has the accounts of the tenants that wait; `_last_waiting` is the last one that left it;
    `_weights` has the weights of all accounts, by number, in its first `len(self)` entries.
    """

    def __init__(self) -> None:
        self._accounts: list[TenantAccount] = []
        self._name_to_account: dict[str, TenantAccount] = {}
        self._waiting = AccountHeap()
        self._last_waiting: TenantAccount | None = None
        self._weights = np.zeros(1)

    def __len__(self) -> int:
        return len(self._accounts)

    def __getitem__(self, number: int) -> TenantAccount:
        return self._accounts[number]

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        """The weights by number: [num_tenants]; must not be modified."""
        return self._weights[: len(self)]

    @property
    def are_shared(self) -> bool:
        """Whether the cell has had several tenants."""
        return len(self._accounts) > 1

    def account_of(self, tenant: Tenant) -> TenantAccount:
        """A tenant's account, opened when it first comes; its weight is the newest one."""
        account = self._name_to_account.get(tenant.name)
        if account is None:
            account = self._name_to_account[tenant.name] = TenantAccount(len(self._accounts), tenant.weight)
            self._accounts.append(account)
            if len(self) > len(self._weights):
                self._weights = np.concatenate([self._weights, np.zeros(len(self))])
            self._weights[account.number] = account.weight
        elif account.weight != tenant.weight:
            account.weight = self._weights[account.number] = tenant.weight
        return account

    def begin_to_wait(self, account: TenantAccount) -> None:
        """Count a sequence that waits; lifts the counter of a tenant that had none waiting."""
        if not account.num_waiting:
            lowest = self._waiting.lowest() or self._last_waiting
            if lowest is not None:
                account.counter = max(account.counter, lowest.counter)
            self._waiting.add(account)
        account.num_waiting += 1

    def end_to_wait(self, account: TenantAccount) -> None:
        """Take `begin_to_wait` back."""
        account.num_waiting -= 1
        if not account.num_waiting:
            self._waiting.remove(account)
            self._last_waiting = account

    def charge_prompt(self, number: int, num_tokens: int) -> None:
        """Charge prompt tokens that will be computed for the tenant of this number."""
        if self.are_shared:
            account = self._accounts[number]
            account.counter += PROMPT_TOKEN_COST * num_tokens / account.weight

    def charge_output(self, numbers: Slots, counts: Int32Column | None) -> None:
        """Charge a step's output tokens.

        Args:
            numbers: [num_rows], the accounts' numbers.
            counts: [num_rows], how many tokens each row has; None for one each.
        """
        num_tokens = np.bincount(numbers, weights=counts)
        for number in np.flatnonzero(num_tokens).tolist():
            account = self._accounts[number]
            account.counter += OUTPUT_TOKEN_COST * float(num_tokens[number]) / account.weight
