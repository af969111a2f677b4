"""How much a step of a rank may compute: as somebody set it, or else as the rank's workers propose."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.core.policy import SchedulerPolicy
from services.scheduler.core.worker_facts import WorkerFacts


@dataclass(frozen=True, slots=True)
class StepBudget:
    """The most tokens of a step, the most of them that are prompts', and whether a step has prompts and decodes.

    A budget that somebody set holds for both together: prompts get what decodes leave of it. A proposed one is for
    prompts alone, beside one token of each sequence that runs.
    """

    max_tokens: int
    max_prompt_tokens: int
    mixes: bool

    @classmethod
    def of(cls, policy: SchedulerPolicy, facts: WorkerFacts) -> StepBudget:
        """The budget of a rank that answered `facts`."""
        mixes = facts.proposes_mixed_steps if policy.enable_mixed_steps is None else policy.enable_mixed_steps
        # A step of both cuts prompts.
        mixes = mixes and policy.enable_chunked_prefill
        if policy.max_num_batched_tokens is not None:
            return cls(policy.max_num_batched_tokens, policy.max_num_batched_tokens, mixes)
        return cls(facts.proposed_prompt_tokens + policy.max_num_seqs, facts.proposed_prompt_tokens, mixes)

    def left_by(self, num_decodes: int) -> int:
        """The prompt tokens that go with so many decodes."""
        return min(self.max_prompt_tokens, self.max_tokens - num_decodes)
