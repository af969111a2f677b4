"""What an engine sends in response to one event, as its clients see it."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.core.batch.sequence import Finish
from services.scheduler.core.results.outputs import Outputs
from tests.simulation.watches.epoch_watch import Key
from tests.support.scheduler.engine_driver import Scores, rows_of, scores_by_row, scores_of


@dataclass(slots=True)
class Responses:
    """What clients receive because of one event.

    Each choice has at most one run of tokens with their log-probabilities, one start and one end; each request has at
    most one range of prompt log-probabilities.
    """

    tokens: dict[Key, tuple[int, list[int]]] = field(default_factory=dict)
    """The index of the first token, and the token ids."""
    scores: dict[Key, list[Scores]] = field(default_factory=dict)
    prompt_scores: dict[Key, list[Scores]] = field(default_factory=dict)
    starts: dict[Key, int | None] = field(default_factory=dict)
    """The number of cached tokens."""
    ends: dict[Key, tuple[Finish | None, int] | str] = field(default_factory=dict)
    """The finish and the number of completion tokens, or the error's reason."""
    closed: set[int] = field(default_factory=set)
    """Clients whose streams are closed."""
    dropped: set[int] = field(default_factory=set)
    """Domains that are dropped."""

    def take_in(self, client: int, outputs: Outputs) -> None:
        """Record one message to a client."""
        for handle, first_index, token_ids in rows_of(outputs):
            assert (client, handle) not in self.tokens, "two runs of tokens in one event"
            self.tokens[client, handle] = (first_index, token_ids)
        for handle, scores in scores_by_row(outputs).items():
            self.scores[client, handle] = scores
        for handle, logprobs in outputs.prompt_logprobs:
            assert (client, handle) not in self.prompt_scores, "two ranges of a prompt"
            self.prompt_scores[client, handle] = scores_of(logprobs)
        for start in outputs.starts:
            assert (client, start.handle) not in self.starts, "two starts"
            self.starts[client, start.handle] = start.num_cached_tokens
        for end in outputs.ends:
            assert (client, end.handle) not in self.ends, "two ends"
            self.ends[client, end.handle] = (
                (end.finish, end.num_completion_tokens) if end.error is None else end.error.reason
            )
