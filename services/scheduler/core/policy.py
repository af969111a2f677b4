"""The scheduler's policy, the step sizes that follow from it, and its counters: data only."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from services.scheduler.core.admission import AdmissionPolicy
from services.scheduler.core.queue.waiting_queue import QueuePolicy
from services.scheduler.core.worker_facts import WorkerFacts
from shared.ids import DpRank

RECOVERY_BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class RetractionPolicy(enum.Enum):
    """Which sequence gives its blocks back when none are free.

    The last to enter, as in ATOM, or the one that has generated least.

    Source of the second: SGLang, `ScheduleBatch.retract_decode` (srt/managers/schedule_batch.py). There ties go to the
    longest prompt, here to the last to enter.
    """

    LAST_IN = "last_in"
    FEWEST_OUTPUT_TOKENS = "fewest_output_tokens"


@dataclass(frozen=True, slots=True)
class SchedulerPolicy:
    """How the scheduler decides. Defaults are ATOM's, plus chunks for prompts that do not fit a step.

    None means what a rank's workers propose; see `StepBudget`.
    """

    max_num_seqs: int = 512
    max_num_batched_tokens: int | None = 16384
    delay_factor: float = 0.0
    max_steps_in_flight: int = 2
    enable_chunked_prefill: bool = True
    enable_mixed_steps: bool | None = False
    max_waiting_requests: int = 1024
    """Requests of one tenant, as `max_waiting_tokens` and `max_prompt_logprob_bytes`."""
    max_waiting_tokens: int = 2_000_000
    max_prompt_logprob_bytes: int = 256 * 1024 * 1024
    num_full_tenants: int = 8
    """How many times what one tenant may have waiting all of them together may have; at least 1."""
    queue_policy: QueuePolicy = QueuePolicy.FCFS
    max_age_s: float = 10.0
    admission_policy: AdmissionPolicy = AdmissionPolicy.PLAIN
    retraction_policy: RetractionPolicy = RetractionPolicy.LAST_IN
    share_in_step: bool = True
    """Whether a prompt shares blocks that its own step computes; otherwise it waits for the next step."""
    placement_tokens_per_seq: int = 256
    """What a sequence adds to a rank's load, in prompt tokens."""
    max_prefill_wait_steps: int = 0
    """A limit for coupled ranks; see `lockstep`."""
    worker_silence_s: float = 3.0
    workers_lost_s: float | None = None
    """How long requests wait while no domain is attached or can compute; None for as long as their deadlines allow."""
    suspect_patience_s: float = 5.0
    """How long suspects wait for an idle failure domain before they take a busy one."""
    drain_s: float = 30.0
    """How long sequences may take to finish on a failure domain that is about to stop."""


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

    def prompt_tokens_beside(self, num_decodes: int) -> int:
        """Prompt tokens that fit beside the decodes."""
        return min(self.max_prompt_tokens, self.max_tokens - num_decodes)


@dataclass(frozen=True, slots=True)
class CellTopology:
    """The DP ranks of a cell, and which of them fail together.

    Coupled ranks share collectives: they form one failure domain with one epoch and run in lockstep. Otherwise each
    rank is a domain of its own.
    """

    dp_size: int = 1
    is_coupled: bool = False
    is_dynamic: bool = False
    """Whether endpoints come and go: each rank is a place, vacant until one takes it. Such ranks are not coupled."""
    preferred_zone: str | None = None
    """Endpoints of this zone get places first."""

    @property
    def num_domains(self) -> int:
        """The number of failure domains."""
        return 1 if self.is_coupled else self.dp_size

    @property
    def ranks(self) -> list[DpRank]:
        """All DP ranks."""
        return [DpRank(rank) for rank in range(self.dp_size)]

    def domain_of(self, rank: DpRank) -> int:
        """The domain of a DP rank."""
        return 0 if self.is_coupled else rank

    def ranks_of(self, domain: int) -> list[DpRank]:
        """The DP ranks of a domain."""
        return self.ranks if self.is_coupled else [DpRank(domain)]


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The KV cache's settings."""

    block_size: int = 16
    enable_prefix_caching: bool = True
    shares_between_tenants: bool = False
    """Whether a tenant may find prefixes that another's requests computed."""
    state_checkpoint_interval: int = 8192
    """After how many tokens of a prompt its recurrent state is saved, for models that have one; 0 for never."""
    state_record_interval: int = 256
    """The same for tokens that are decoded; also how often a row is visited for it. See `StateSaves`."""


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the process started."""

    num_preemptions: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_prefix_tokens_lost_to_state: int = 0
    """Cached tokens that were computed again, because no recurrent state was saved after them."""
    num_completion_tokens: int = 0
    num_finished: int = 0
    num_lost_epochs: int = 0
    num_late_results: int = 0
    """Results of ended epochs, and duplicates; ignored."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Includes tokens discarded after a stop."""
    num_refused_models: int = 0
    """Attachments given up because the workers serve another model than the cell."""
    num_unfit_workers: int = 0
    """Attachments given up because the workers report what the scheduler cannot use."""
    num_suspect_trials: int = 0
    num_poison_requests: int = 0
    num_recoveries: int = 0
    """Lost epochs whose sequences have all got another token or ended."""
    recovery_s: float = 0.0
    """Total time of these recoveries."""
    recoveries_by_s: list[int] = field(default_factory=lambda: [0] * (len(RECOVERY_BUCKETS_S) + 1))
    """Counts by bucket of `RECOVERY_BUCKETS_S`, longer ones last; not cumulative."""
