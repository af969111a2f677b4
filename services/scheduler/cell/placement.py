"""Which DP rank takes a request: the one that has most of its prompt, as long as the work is spread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.scheduler.cell.domain import Rank
from services.scheduler.core.batch.sequence import Sequence as TokenSequence

# An idle rank looks at so many requests in another one's queue, each time that something happens.
MAX_MOVES = 8


class Placement:
    """Puts requests on ranks, all choices of one on the same: they share its prompt.

    The cost of a rank, in tokens, is what is computed before a newcomer has its first token, and what it shares its
    steps with:

        newcomers' prompt tokens in its queue + tokens_per_seq * sequences that wait and run there - cached tokens

    The lowest cost is taken, of equals the least loaded rank (the same without the cached tokens), then the first. So
    the longest cached prefix decides, unless its rank has so much more work than another that it costs more than the
    prefix saves. Source: the router of NVIDIA Dynamo weighs prefill blocks against active blocks in the same way.
    """

    def __init__(self, tokens_per_seq: int) -> None:
        self._tokens_per_seq = tokens_per_seq

    def place(self, sequences: Sequence[TokenSequence], ranks: Sequence[Rank], now: float) -> None:
        """Queue the waiting choices of one request, which are in no queue, on one of the ranks, at least one."""
        rank = ranks[0] if len(ranks) == 1 else self._pick(sequences[0], ranks)
        for seq in sequences:
            seq.rank = rank.number
            rank.scheduler.add(seq, now)

    def feed(self, idle: Rank, ranks: Sequence[Rank], now: float) -> None:
        """Let a rank with nothing to do take requests that wait on the busiest one, if they would be placed there now.

        Only those of which no choice has begun, the last of them first. It does nothing unless `idle` is one of the
        ranks.
        """
        busy = [rank for rank in ranks if rank.scheduler.num_waiting]
        if not busy or idle not in ranks:
            return
        busiest = max(busy, key=self._load)
        for sequences in _newcomers(busiest)[: -MAX_MOVES - 1 : -1]:
            for seq in sequences:
                busiest.scheduler.withdraw(seq, now)
            self.place(sequences, (busiest, idle), now)

    def _pick(self, seq: TokenSequence, ranks: Iterable[Rank]) -> Rank:
        costs = []
        for rank in ranks:
            load = self._load(rank)
            num_cached_tokens = rank.scheduler.num_cached_tokens(seq)
            costs.append((load - num_cached_tokens, load, rank.number, rank, seq.cached_prefix))
        *_, rank, seq.cached_prefix = min(costs)
        return rank

    def _load(self, rank: Rank) -> int:
        scheduler = rank.scheduler
        num_sequences = scheduler.num_waiting + scheduler.num_running
        return scheduler.num_waiting_tokens + self._tokens_per_seq * num_sequences


def by_request(sequences: Iterable[TokenSequence]) -> list[list[TokenSequence]]:
    """The sequences of each request together, requests and choices in their order."""
    requests: dict[str, list[TokenSequence]] = {}
    for seq in sequences:
        requests.setdefault(seq.id, []).append(seq)
    return list(requests.values())


def _newcomers(rank: Rank) -> list[list[TokenSequence]]:
    """The requests in a rank's queue that have not begun: no choice was ever admitted."""
    begun = {seq.id for seq in rank.scheduler.unfinished() if seq.num_first_cached_tokens is not None}
    return [sequences for sequences in by_request(rank.scheduler.waiting_sequences()) if sequences[0].id not in begun]
