"""What each tenant of a cell has been given: the counters by which the waiting queue is fair."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from services.scheduler.core.batch.sequence import Sequence
from services.scheduler.core.batch.slot_table import Slots
from services.scheduler.core.lazy_heap import LazyHeap
from shared.step.columns import Int32Column
from shared.tenants.tenant import Tenant

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
    num_unfinished: int = 0
    """Its sequences that have been queued and have not ended."""


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

    A tenant is charged for what is computed: prompt tokens that were not cached when they are sent, output tokens when
    they arrive. A tenant that begins to wait is lifted to the lowest counter that waits; where none waits,
    to that of the tenant that waited last. So none saves credit, not even while all others run without waiting.

    Only differences between counters matter. While one tenant is alone and whoever comes would be lifted to its
    counter, or above, they cannot change, so nothing is counted or charged.

    Source: Sheng et al., "Fairness in serving large language models" (OSDI '24), algorithm 2 and its weights.

    Invariant: `_present` has the accounts with unfinished sequences, and `_highest` is at least each counter. While
    `are_shared`, `_waiting` has the accounts of the tenants that wait, and `_last_waiting` is the last one that left
    it. While not, at most one tenant is present, and its counter is `_highest`. `_weights` has the weights of all
    accounts, by number, in its first `len(self)` entries.
    """

    def __init__(self) -> None:
        self.are_shared = False
        """Whether several tenants are here, or were and one of them would come back with more than nothing to its
        account: then tokens are charged."""
        self._accounts: list[TenantAccount] = []
        self._name_to_account: dict[str, TenantAccount] = {}
        self._present: dict[int, TenantAccount] = {}
        self._highest = 0.0
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

    def add_waiting(self, seq: Sequence) -> TenantAccount:
        """Count a sequence that begins to wait; returns its tenant's account."""
        account = self.account_of(seq.tenant)
        seq.tenant_number = account.number
        if not seq.is_counted:
            seq.is_counted = True
            account.num_unfinished += 1
            if account.num_unfinished == 1:
                self._enter(account)
        if self.are_shared and not account.num_waiting:
            self.begin_to_wait(account)
        account.num_waiting += 1
        return account

    def begin_to_wait(self, account: TenantAccount) -> None:
        """Lift the counter of a tenant that had no sequence waiting; counters must be shared."""
        lowest = self._waiting.lowest() or self._last_waiting
        if lowest is not None:
            account.counter = max(account.counter, lowest.counter)
        self._waiting.add(account)

    def end_to_wait(self, account: TenantAccount) -> None:
        """Note that a tenant has no sequence waiting any more; counters must be shared."""
        self._waiting.remove(account)
        self._last_waiting = account

    def note_end(self, seq: Sequence) -> None:
        """Note that a sequence has ended, which waits no more."""
        account = self._accounts[seq.tenant_number]
        seq.is_counted = False
        account.num_unfinished -= 1
        if not account.num_unfinished:
            # The step that ended it is still to be charged, so this is no moment to stop counting.
            del self._present[account.number]

    def charge_prompt(self, number: int, num_tokens: int) -> None:
        """Charge prompt tokens that will be computed for the tenant of this number; counters must be shared."""
        self._charge(number, PROMPT_TOKEN_COST * num_tokens)
        self._try_end_sharing()

    def charge_output(self, numbers: Slots, counts: Int32Column | None) -> None:
        """Charge a step's output tokens; counters must be shared.

        Args:
            numbers: [num_rows], the accounts' numbers.
            counts: [num_rows], how many tokens each row has; None for one each.
        """
        num_tokens = np.bincount(numbers, weights=counts)
        for number in np.flatnonzero(num_tokens).tolist():
            self._charge(number, OUTPUT_TOKEN_COST * float(num_tokens[number]))
        self._try_end_sharing()

    def check_integrity(self, unfinished: Iterable[Sequence]) -> None:
        """Assert the class's invariant; `unfinished` are the cell's sequences that have not ended."""
        numbers = [seq.tenant_number for seq in unfinished]
        counts = [account.num_unfinished for account in self._accounts]
        assert counts == [numbers.count(number) for number in range(len(self))], "the tenants' sequences"
        present = {account.number for account in self._accounts if account.num_unfinished}
        assert self._present.keys() == present, "the tenants that are present"
        assert all(account.counter <= self._highest for account in self._accounts), "the highest counter"
        if self.are_shared:
            assert all((account in self._waiting) == bool(account.num_waiting) for account in self._accounts), (
                "the tenants that wait"
            )
            self._waiting.check_integrity()
        else:
            assert len(present) <= 1, "several tenants are not charged"
            assert all(account.counter == self._highest for account in self._present.values()), "a tenant has credit"

    def _charge(self, number: int, cost: float) -> None:
        account = self._accounts[number]
        account.counter += cost / account.weight
        self._highest = max(self._highest, account.counter)

    def _enter(self, account: TenantAccount) -> None:
        """Note that a tenant is present from now on; beside another one, begin to count for both."""
        if self.are_shared and not self._present:
            self._try_end_sharing()
        if not self.are_shared:
            account.counter = self._highest
            for other in self._present.values():
                self.are_shared = True
                self._last_waiting = other
                if other.num_waiting:
                    self._waiting.add(other)
        self._present[account.number] = account

    def _try_end_sharing(self) -> None:
        """Stop counting if no more than one tenant is present, and all others will be lifted to its counter."""
        if len(self._present) > 1:
            return
        standard = self._waiting.lowest() or self._last_waiting
        assert standard is not None
        if standard.counter == self._highest and all(account is standard for account in self._present.values()):
            self.are_shared = False
            self._waiting = AccountHeap()
