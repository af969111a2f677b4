"""What a worker reported when it was attached."""

from __future__ import annotations

from dataclasses import dataclass

from shared.wire import NOT_INTRODUCED, Introduction


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a scheduler knows about a worker."""

    epoch: int
    model_digest: str
    context_length: int
    logits_width: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    num_draft_tokens: int = 0
    """For one sequence in a step, at most."""
    needs_all_tokens: bool = False
    """Whether sequences must enter with all their tokens, including cached ones."""
    default_sampling: bytes = b""
    """A serialized `lockstep.v1.SamplingParams`, opaque to the engine."""
    numerics_fingerprint: str = ""
    """Equal for workers whose results are bitwise equal."""
    is_exact: bool = False
    """Whether a row's bits depend on nothing but its own tokens."""
    proposed_prompt_tokens: int = 16384
    """Used unless a budget is configured."""
    proposes_mixed_steps: bool = False
    """Used unless configured."""
    graph_batch_sizes: tuple[int, ...] = ()
    """For which it has captured graphs of decode steps."""
    weights_digest: str = ""
    """The digest of the weights that answers depend on; empty if the worker does not report it."""
    introduction: Introduction = NOT_INTRODUCED
    """What its release can do."""
    state_bytes_per_slot: int = 0
    """Bytes of a sequence's recurrent state; 0 if the model has none."""
    num_checkpoint_slots: int = 0
    """Saved states that it holds beside those of running sequences."""
    max_num_seqs: int | None = None
    """Sequences that it has room for, which may be fewer than were asked for; None if it does not say."""
    start_s: float | None = None
    """How long it took from its process's start until it could be attached; None if it does not say."""

    @property
    def has_recurrent_state(self) -> bool:
        """Whether its model keeps a state per sequence beside the KV blocks."""
        return self.state_bytes_per_slot > 0

    @property
    def may_share_prefixes(self) -> bool:
        """Whether a cached prefix can be continued, which takes the recurrent state after it, if there is one."""
        return not self.has_recurrent_state or self.num_checkpoint_slots > 0
