"""Settings of the scheduler service."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from services.scheduler.admission import AdmissionPolicy
from services.scheduler.policy import CacheSettings, SchedulerPolicy
from services.scheduler.retraction import RetractionPolicy
from services.scheduler.waiting_queue import QueuePolicy
from shared.config import Address, LocalAddress, ServiceSettings


class SchedulerSettings(ServiceSettings):
    """What the scheduler can be told; names and defaults follow ATOM."""

    model_config = SettingsConfigDict(env_prefix="LOCKSTEP_SCHEDULER_", cli_prog_name="python -m services.scheduler")

    listen: LocalAddress = Field(
        default="127.0.0.1:50052", description="Address to serve on: unix:PATH, or HOST:PORT on loopback."
    )
    worker: Address = Field(default="127.0.0.1:50053", description="Address of the worker service.")
    metrics_listen: LocalAddress | None = Field(
        default=None, description="Address to serve metrics for Prometheus on, as GET /metrics over HTTP."
    )
    max_num_seqs: int = Field(default=512, ge=1, le=65536, description="Most sequences that run at once.")
    max_num_batched_tokens: int = Field(
        default=16384, ge=1, description="Most tokens computed in one step: its token budget."
    )
    kv_cache_block_size: int = Field(default=16, description="Tokens per KV block: 1, or a multiple of 16.")
    enable_prefix_caching: bool = Field(default=True, description="Share the KV blocks of equal prefixes.")
    scheduler_delay_factor: float = Field(
        default=0.0,
        ge=0.0,
        allow_inf_nan=False,
        description="A prefill waits until the oldest request has waited this many times the last prefill's latency.",
    )

    max_steps_in_flight: int = Field(
        default=2, ge=1, le=8, description="Steps sent before the first of them has returned; 1 is no overlap."
    )

    enable_chunked_prefill: bool = Field(
        default=True, description="Compute a prompt that does not fit a step's token budget over several steps."
    )
    enable_mixed_steps: bool = Field(
        default=False, description="Let decodes join prefill steps, and prompts fill what they leave of the budget."
    )

    queue_policy: Literal["fcfs", "priority", "longest_prefix"] = Field(
        default="fcfs",
        description="Who goes first: by arrival, by the request's priority (a higher one may preempt a lower one), or "
        "by the most cached tokens.",
    )
    max_queue_age_s: float = Field(
        default=10.0,
        ge=0.0,
        allow_inf_nan=False,
        description="Whoever has waited longer goes first by any policy, in the order of arrival. Seconds.",
    )
    admission_policy: Literal["plain", "look_ahead"] = Field(
        default="plain",
        description="When a prompt is let in: when its blocks are free, or when what all that run are expected to need "
        "is free as well.",
    )
    retraction_policy: Literal["last_in", "fewest_output_tokens"] = Field(
        default="last_in", description="Who gives way when blocks run out."
    )
    enable_sharing_in_step: bool = Field(
        default=True,
        description="Let a prompt share blocks that the same step computes; else it waits for the next step.",
    )
    max_waiting_requests: int = Field(
        default=1024,
        ge=1,
        description="Most requests that wait for their first step, each choice counted; more are refused at once.",
    )
    max_waiting_tokens: int = Field(
        default=2_000_000, ge=1, description="Most prompt tokens that wait for their first step, likewise."
    )
    max_prompt_logprob_bytes: int = Field(
        default=256 * 1024 * 1024,
        ge=1,
        description="Most bytes that the log-probabilities of prompts may come to, over all requests in flight; more "
        "are refused at once.",
    )
    max_unread_s: float = Field(
        default=30.0,
        gt=0.0,
        allow_inf_nan=False,
        description="A client that takes nothing of its answer for so many seconds loses it.",
    )

    @model_validator(mode="after")
    def _check_budget(self) -> SchedulerSettings:
        if self.max_num_batched_tokens < self.max_num_seqs:
            # A decode step has a token for each sequence that runs.
            raise ValueError("--max-num-batched-tokens must be at least --max-num-seqs")
        return self

    @model_validator(mode="after")
    def _check_mixed_steps(self) -> SchedulerSettings:
        if self.enable_mixed_steps and not self.enable_chunked_prefill:
            raise ValueError("--enable-mixed-steps needs --enable-chunked-prefill")
        return self

    @field_validator("kv_cache_block_size")
    @classmethod
    def _check_block_size(cls, value: int) -> int:
        if value != 1 and (value < 16 or value % 16):
            raise ValueError("must be 1 or a multiple of 16")
        return value

    @property
    def policy(self) -> SchedulerPolicy:
        """The part that the scheduler decides by."""
        return SchedulerPolicy(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            delay_factor=self.scheduler_delay_factor,
            max_steps_in_flight=self.max_steps_in_flight,
            enable_chunked_prefill=self.enable_chunked_prefill,
            enable_mixed_steps=self.enable_mixed_steps,
            queue_policy=QueuePolicy(self.queue_policy),
            max_age_s=self.max_queue_age_s,
            admission_policy=AdmissionPolicy(self.admission_policy),
            retraction_policy=RetractionPolicy(self.retraction_policy),
            share_in_step=self.enable_sharing_in_step,
            max_waiting_requests=self.max_waiting_requests,
            max_waiting_tokens=self.max_waiting_tokens,
            max_prompt_logprob_bytes=self.max_prompt_logprob_bytes,
        )

    @property
    def cache(self) -> CacheSettings:
        """The part that the KV cache is run by."""
        return CacheSettings(self.kv_cache_block_size, self.enable_prefix_caching)
