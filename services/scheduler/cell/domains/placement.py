"""Which DP rank takes a request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.scheduler.cell.domains.domain import Rank
from services.scheduler.core.batch.sequence import RequestKey
from services.scheduler.core.batch.sequence import Sequence as TokenSequence

# How many requests an idle rank considers in another one's queue each time it looks.
MAX_MOVES = 8


class Placement:
    """Prefers the rank with most of the prompt cached, as long as the load stays balanced.

    The choices of a request stay together, because they share its prompt. The lowest cost, in tokens, wins:

        newcomers' prompt tokens in its queue + tokens_per_seq * its waiting and running sequences - cached tokens

    What waits of other tenants counts only up to their share, since it does not go first (`WaitingQueue.load_beside`).
    Ties go to the lowest load (the cost without the cached tokens), then to the first rank. Source: the router of
    NVIDIA Dynamo weighs prefill blocks against active blocks in the same way.
    """

    def __init__(self, tokens_per_seq: int) -> None:
        self._tokens_per_seq = tokens_per_seq

    def place(self, sequences: Sequence[TokenSequence], ranks: Sequence[Rank], now: float) -> None:
        """Queue the choices of one request, which must not be in a queue."""
        rank = ranks[0] if len(ranks) == 1 else self._pick(sequences, ranks)
        for seq in sequences:
            seq.rank = rank.number
            rank.scheduler.add(seq, now)

    def rebalance(self, idle: Rank, ranks: Sequence[Rank], now: float) -> None:
        """Move requests from the busiest rank to an idle one, if they would be placed there now.

        Takes only requests of which no choice has begun, the last in the queue first. Does nothing unless `idle` is in
        `ranks`.
        """
        busy = [rank for rank in ranks if rank.scheduler.num_waiting]
        if not busy or idle not in ranks:
            return
        busiest = max(busy, key=self._load)
        for sequences in _newcomers(busiest)[: -MAX_MOVES - 1 : -1]:
            for seq in sequences:
                busiest.scheduler.withdraw(seq, now)
            self.place(sequences, (busiest, idle), now)

    def _pick(self, sequences: Sequence[TokenSequence], ranks: Iterable[Rank]) -> Rank:
        seq = sequences[0]
        num_tokens = seq.num_prompt_tokens + self._tokens_per_seq * len(sequences)
        costs = []
        for rank in ranks:
            load: float = self._tokens_per_seq * rank.scheduler.num_running
            load += rank.scheduler.queue.load_beside(seq.tenant, num_tokens, self._tokens_per_seq)
            num_cached_tokens = rank.scheduler.num_cached_tokens(seq)
            costs.append((load - num_cached_tokens, load, rank.number, rank, seq.cached_prefix))
        *_, rank, seq.cached_prefix = min(costs)
        return rank

    def _load(self, rank: Rank) -> int:
        scheduler = rank.scheduler
        num_sequences = scheduler.num_waiting + scheduler.num_running
        return scheduler.num_waiting_tokens + self._tokens_per_seq * num_sequences


def by_request(sequences: Iterable[TokenSequence]) -> list[list[TokenSequence]]:
    """Group by request, keeping the order."""
    requests: dict[RequestKey, list[TokenSequence]] = {}
    for seq in sequences:
        requests.setdefault(seq.key, []).append(seq)
    return list(requests.values())


def _newcomers(rank: Rank) -> list[list[TokenSequence]]:
    begun = {seq.key for seq in rank.scheduler.unfinished() if seq.num_first_cached_tokens is not None}
    return [sequences for sequences in by_request(rank.scheduler.waiting_sequences()) if sequences[0].key not in begun]
