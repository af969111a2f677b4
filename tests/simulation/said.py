"""What an engine says because of one event, in the terms of its clients."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.core.batch.sequence import Finish
from services.scheduler.core.batch.step import Outputs
from tests.simulation.epoch_watch import Key
from tests.support.engine_driver import Scores, rows_of, scores_by_row, scores_of


@dataclass(slots=True)
class Said:
    """What clients are told because of one event.

    Of each choice at most one run of tokens (the index of the first, and their ids) with their log-probabilities, one
    beginning (cached tokens) and one end (the finish with the number of completion tokens, or the error's reason); of
    each request the log-probabilities of some positions of its prompt.
    """

    tokens: dict[Key, tuple[int, list[int]]] = field(default_factory=dict)
    scores: dict[Key, list[Scores]] = field(default_factory=dict)
    prompt_scores: dict[Key, list[Scores]] = field(default_factory=dict)
    starts: dict[Key, int | None] = field(default_factory=dict)
    ends: dict[Key, tuple[Finish | None, int] | str] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    """Domains."""

    def take_in(self, client: int, outputs: Outputs) -> None:
        """Note what a client is told."""
        for handle, first_index, token_ids in rows_of(outputs):
            assert (client, handle) not in self.tokens, "two runs of tokens at once"
            self.tokens[client, handle] = (first_index, token_ids)
        for handle, scores in scores_by_row(outputs).items():
            self.scores[client, handle] = scores
        for handle, logprobs in outputs.prompt_logprobs:
            assert (client, handle) not in self.prompt_scores, "two parts of a prompt"
            self.prompt_scores[client, handle] = scores_of(logprobs)
        for start in outputs.starts:
            assert (client, start.handle) not in self.starts, "two beginnings"
            self.starts[client, start.handle] = start.num_cached_tokens
        for end in outputs.ends:
            assert (client, end.handle) not in self.ends, "two ends"
            self.ends[client, end.handle] = (
                (end.finish, end.num_completion_tokens) if end.error is None else end.error.reason
            )
