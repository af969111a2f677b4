"""What a scheduler knows of a worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker answered when it was attached."""

    epoch: int
    model_digest: str
    context_length: int
    logits_width: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    num_draft_tokens: int = 0
    """Most tokens that it drafts for a sequence in a step."""
    needs_all_tokens: bool = False
    """Whether sequences must enter with all their tokens, cached ones included."""
    default_sampling: bytes = b""
    """What requests leave to the model: a serialized `lockstep.v1.SamplingParams`, which the domain does not read."""
    numerics_fingerprint: str = ""
    """Equal where results are bitwise equal."""
    is_exact: bool = False
    """Whether a row's bits depend on nothing but its own tokens."""
    proposed_prompt_tokens: int = 16384
    """Most prompt tokens of a step, where nobody set a budget."""
    proposes_mixed_steps: bool = False
    """Whether prompts and decodes are computed in one step, where nobody said."""
