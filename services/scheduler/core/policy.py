"""The scheduler's policy and its counters: data only."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.core.admission import AdmissionPolicy
from services.scheduler.core.queue.waiting_queue import QueuePolicy
from services.scheduler.core.retraction import RetractionPolicy

RECOVERY_BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True, slots=True)
class SchedulerPolicy:
    """How the scheduler decides. Defaults are ATOM's, plus chunks for prompts that do not fit a step.

    None means what a rank's workers propose; see `step_budget`.
    """

    max_num_seqs: int = 512
    max_num_batched_tokens: int | None = 16384
    delay_factor: float = 0.0
    max_steps_in_flight: int = 2
    enable_chunked_prefill: bool = True
    enable_mixed_steps: bool | None = False
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 2_000_000
    max_prompt_logprob_bytes: int = 256 * 1024 * 1024
    queue_policy: QueuePolicy = QueuePolicy.FCFS
    max_age_s: float = 10.0
    admission_policy: AdmissionPolicy = AdmissionPolicy.PLAIN
    retraction_policy: RetractionPolicy = RetractionPolicy.LAST_IN
    share_in_step: bool = True
    placement_tokens_per_seq: int = 256
    """See `placement`."""
    max_prefill_wait_steps: int = 0
    """For coupled ranks; see `lockstep`."""
    worker_silence_s: float = 3.0
    suspect_patience_s: float = 5.0
    """How long suspects wait for an idle failure domain before they take a busy one."""


@dataclass(frozen=True, slots=True)
class CellTopology:
    """The DP ranks of a cell, and which of them fail together.

    Coupled ranks share collectives: they form one failure domain with one epoch and run in lockstep. Otherwise each
    rank is a domain of its own.
    """

    dp_size: int = 1
    is_coupled: bool = False

    @property
    def num_domains(self) -> int:
        """The number of failure domains."""
        return 1 if self.is_coupled else self.dp_size

    def domain_of(self, rank: int) -> int:
        """The domain of a DP rank."""
        return 0 if self.is_coupled else rank

    def ranks_of(self, domain: int) -> range:
        """The DP ranks of a domain."""
        return range(self.dp_size) if self.is_coupled else range(domain, domain + 1)


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The KV cache's settings."""

    block_size: int = 16
    enable_prefix_caching: bool = True


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the process started."""

    num_preemptions: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_finished: int = 0
    num_lost_epochs: int = 0
    num_late_results: int = 0
    """Results of ended epochs, and duplicates; ignored."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Includes tokens discarded after a stop."""
    num_replayed_tokens: int = 0
    """Greedy completion tokens recomputed for resumed sequences."""
    num_replay_mismatches: int = 0
    """Replayed tokens that were not the likeliest at their position this time."""
    num_suspect_trials: int = 0
    num_poison_requests: int = 0
    num_recoveries: int = 0
    """Lost epochs whose sequences have all got another token or ended."""
    recovery_s: float = 0.0
    """Total time of these recoveries."""
    recoveries_by_s: list[int] = field(default_factory=lambda: [0] * (len(RECOVERY_BUCKETS_S) + 1))
    """By bucket of `RECOVERY_BUCKETS_S`, longer ones last; not cumulative."""
