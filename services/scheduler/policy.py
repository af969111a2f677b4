"""How the scheduler decides, and what it counts: data only."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.admission import AdmissionPolicy
from services.scheduler.retraction import RetractionPolicy
from services.scheduler.waiting_queue import QueuePolicy


@dataclass(frozen=True, slots=True)
class SchedulerPolicy:
    """How the scheduler decides; defaults are ATOM's, and chunks for prompts that do not fit a step."""

    max_num_seqs: int = 512
    max_num_batched_tokens: int = 16384
    delay_factor: float = 0.0
    max_steps_in_flight: int = 2
    enable_chunked_prefill: bool = True
    enable_mixed_steps: bool = False
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 2_000_000
    max_prompt_logprob_bytes: int = 256 * 1024 * 1024
    queue_policy: QueuePolicy = QueuePolicy.FCFS
    max_age_s: float = 10.0
    admission_policy: AdmissionPolicy = AdmissionPolicy.PLAIN
    retraction_policy: RetractionPolicy = RetractionPolicy.LAST_IN
    share_in_step: bool = True


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """How KV blocks are used."""

    block_size: int = 16
    enable_prefix_caching: bool = True


@dataclass(slots=True)
class SchedulerCounters:
    """What happened since the process started."""

    num_prefill_steps: int = 0
    num_decode_steps: int = 0
    num_mixed_steps: int = 0
    num_preemptions: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_finished: int = 0
    num_lost_epochs: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Of the draft tokens; those behind a stop, which count for nothing else, included."""
