"""How many tokens a step may compute."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.core.policy import SchedulerPolicy
from services.scheduler.core.worker_facts import WorkerFacts


@dataclass(frozen=True, slots=True)
class StepBudget:
    """The token limits of a step, and whether prompts and decodes share steps.

    A configured budget covers both: prompts get what decodes leave of it. One proposed by the rank's workers is for
    prompts alone, on top of one token per running sequence.
    """

    max_tokens: int
    max_prompt_tokens: int
    mixes: bool

    @classmethod
    def of(cls, policy: SchedulerPolicy, facts: WorkerFacts) -> StepBudget:
        """The budget of a rank that reported `facts`."""
        mixes = facts.proposes_mixed_steps if policy.enable_mixed_steps is None else policy.enable_mixed_steps
        # Sharing a step with decodes means cutting prompts into chunks.
        mixes = mixes and policy.enable_chunked_prefill
        if policy.max_num_batched_tokens is not None:
            return cls(policy.max_num_batched_tokens, policy.max_num_batched_tokens, mixes)
        return cls(facts.proposed_prompt_tokens + policy.max_num_seqs, facts.proposed_prompt_tokens, mixes)

    def left_by(self, num_decodes: int) -> int:
        """Prompt tokens that fit beside the decodes."""
        return min(self.max_prompt_tokens, self.max_tokens - num_decodes)
