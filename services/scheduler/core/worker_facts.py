"""What a worker reported when it was attached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.wire import NOT_INTRODUCED, Introduction

MAY_DIFFER = "may differ"
"""The name of the mark that each field has: whether groups of one domain, which compute together, may differ in it."""
ALIKE: Mapping[str, bool] = {MAY_DIFFER: False}
OWN: Mapping[str, bool] = {MAY_DIFFER: True}


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a scheduler knows about a worker. A field that is `ALIKE` keeps groups that differ in it from one domain."""

    epoch: int = field(metadata=ALIKE)
    model_digest: str = field(metadata=ALIKE)
    context_length: int = field(metadata=ALIKE)
    logits_width: int = field(metadata=ALIKE)
    eos_token_ids: tuple[int, ...] = field(metadata=ALIKE)
    num_blocks: int = field(metadata=OWN)
    num_draft_tokens: int = field(default=0, metadata=ALIKE)
    """Drafts of one sequence in a step, at most."""
    needs_all_tokens: bool = field(default=False, metadata=ALIKE)
    """Whether sequences must enter with all their tokens, including cached ones."""
    default_sampling: bytes = field(default=b"", metadata=ALIKE)
    """A serialized `lockstep.v1.SamplingParams`, opaque to the engine."""
    numerics_fingerprint: str = field(default="", metadata=OWN)
    """Equal for workers whose results are bitwise equal."""
    is_exact: bool = field(default=False, metadata=ALIKE)
    """Whether a row's bits depend on nothing but its own tokens."""
    proposed_prompt_tokens: int = field(default=16384, metadata=ALIKE)
    """Used unless a budget is configured."""
    proposes_mixed_steps: bool = field(default=False, metadata=ALIKE)
    """Used unless configured."""
    graph_batch_sizes: tuple[int, ...] = field(default=(), metadata=OWN)
    """Batch sizes for which it has captured graphs of decode steps."""
    weights_digest: str = field(default="", metadata=ALIKE)
    """The digest of the weights that answers depend on; empty if the worker does not report it."""
    introduction: Introduction = field(default=NOT_INTRODUCED, metadata=ALIKE)
    """What its release can do."""
    state_bytes_per_slot: int = field(default=0, metadata=ALIKE)
    """Bytes of a sequence's recurrent state; 0 if the model has none."""
    num_checkpoint_slots: int = field(default=0, metadata=OWN)
    """Saved states that it holds beside those of running sequences."""
    max_num_seqs: int | None = field(default=None, metadata=OWN)
    """Sequences that it has room for, which may be fewer than were asked for; None if it does not say."""
    start_s: float | None = field(default=None, metadata=OWN)
    """How long it took from its process's start until it could be attached; None if it does not say."""
    implementation: str = field(default="", metadata=ALIKE)
    """Whose code computes the model, opaque to the engine; empty if it does not say."""
    embeds: bool = field(default=False, metadata=ALIKE)
    """Whether the model is served for vectors of prompts, and nothing else."""

    @property
    def has_recurrent_state(self) -> bool:
        """Whether its model keeps a state per sequence beside the KV blocks."""
        return self.state_bytes_per_slot > 0

    @property
    def may_share_prefixes(self) -> bool:
        """Whether a cached prefix can be continued, which takes the recurrent state after it, if there is one."""
        return not self.has_recurrent_state or self.num_checkpoint_slots > 0
