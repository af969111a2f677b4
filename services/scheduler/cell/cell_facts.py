"""What a cell serves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.scheduler.cell.domains.domain import Domain
from services.scheduler.core.worker_facts import WorkerFacts
from shared.request.limits import MAX_DRAFT_TOKENS, ModelLimits
from shared.wire import introduce_self, lower_of


class CellFacts:
    """The model, the limits for requests, and the exactness that can be promised.

    A lost rank still counts for the limits, because it may return. An endpoint that has left its place does not, but
    what the last of all reported stays.
    """

    def __init__(self, block_size: int) -> None:
        self.model: WorkerFacts | None = None
        """None until a domain has been attached."""
        self.limits: ModelLimits | None = None
        """Include the smallest pool of any rank; None while `model` is."""
        self.exact_fingerprint = ""
        """The exact numerics of all attached ranks, or of the last ones; empty if unavailable."""
        self.version = 0
        """Increases whenever something of this may have changed."""
        self.weights_digest = ""
        """The digest of the model's weights; empty while no worker has reported it."""
        self.introduction = introduce_self()
        """This scheduler, with what all ranks can do too."""
        self.worker_start_s: float | None = None
        """How long the slowest rank's worker took to start, attached or lost; None if none says."""
        self._block_size = block_size

    def find_fault(self, facts: Iterable[WorkerFacts]) -> str | None:
        """Say why these ranks cannot serve, if so."""
        for rank_facts in facts:
            if rank_facts.num_draft_tokens > MAX_DRAFT_TOKENS:
                return f"it drafts more than {MAX_DRAFT_TOKENS} tokens"
            if not rank_facts.proposed_prompt_tokens:
                return "it proposes no prompt tokens for a step"
        return None

    def find_other_model(self, facts: Iterable[WorkerFacts]) -> str | None:
        """Say how these ranks' model differs from that of earlier ones, if it does as far as their releases report."""
        facts = tuple(facts)
        digests = {rank_facts.weights_digest for rank_facts in facts} | {self.weights_digest}
        if len(digests - {""}) > 1:
            return "it serves a different model"
        for rank_facts in facts:
            model = self.model or rank_facts
            if _model_of(rank_facts) != _model_of(model):
                return "it serves a different model"
            if rank_facts.context_length != model.context_length:
                return (
                    f"it serves a context of {rank_facts.context_length} tokens, the cell one of "
                    f"{model.context_length}: all need the same --max-model-len"
                )
        return None

    def update(self, domains: Sequence[Domain]) -> None:
        """Recompute everything after a domain was attached, lost or vacated."""
        known = [rank.facts for domain in domains for rank in domain.ranks if rank.facts is not None]
        attached = [
            rank.facts
            for domain in domains
            for rank in domain.ranks
            if domain.epoch is not None and rank.facts is not None
        ]
        if not known:
            return
        self.version += 1
        self.model = known[0]
        self.introduction = lower_of(introduce_self(), *(facts.introduction for facts in known))
        if not self.weights_digest:
            self.weights_digest = next((facts.weights_digest for facts in known if facts.weights_digest), "")
        num_blocks = min(facts.num_blocks for facts in known)
        self.limits = ModelLimits(
            self.model.context_length, self.model.logits_width, num_pool_tokens=num_blocks * self._block_size
        )
        self.worker_start_s = max((facts.start_s for facts in known if facts.start_s is not None), default=None)
        if attached:
            fingerprints = {facts.numerics_fingerprint if facts.is_exact else "" for facts in attached}
            self.exact_fingerprint = fingerprints.pop() if len(fingerprints) == 1 else ""


def _model_of(facts: WorkerFacts) -> tuple[object, ...]:
    return (
        facts.model_digest,
        facts.logits_width,
        facts.eos_token_ids,
        facts.default_sampling,
        facts.embeds,
    )
