"""Settings of the scheduler service."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import CliSuppress, SettingsConfigDict

from services.scheduler.core.admission import AdmissionPolicy
from services.scheduler.core.policy import CacheSettings, RetractionPolicy, SchedulerPolicy
from services.scheduler.core.queue.waiting_queue import QueuePolicy
from services.scheduler.discovery.settings import MembershipSettings
from shared.config import ClientPortSettings, ProcessSettings, load_settings
from shared.network.tls import Role
from shared.setting_types import Address, ListenAddress

# Take what the workers propose.
Auto = Literal["auto"]

# A setting of the policy has the policy's default.
_POLICY = SchedulerPolicy()
_CACHE = CacheSettings()

# ATOM's default. Without chunks a prompt has to fit a step, and a worker may propose less than that.
_TOKENS_WITHOUT_CHUNKS = 16384


class SchedulerSettings(ProcessSettings, ClientPortSettings, MembershipSettings):
    """The scheduler's settings; names and defaults follow ATOM."""

    model_config = SettingsConfigDict(env_prefix="LOCKSTEP_SCHEDULER_", cli_prog_name="python -m services.scheduler")

    role = Role.SCHEDULER

    listen: ListenAddress = Field(
        default="127.0.0.1:50052",
        description="Address for clients that send token ids: unix:PATH, HOST:PORT on loopback, or with TLS any "
        "HOST:PORT.",
    )
    cell_listen: ListenAddress = Field(
        default="127.0.0.1:50054",
        description="Address for tokenizer services, operators and `lockstep top`: unix:PATH, HOST:PORT on loopback, "
        "or with mutual TLS any HOST:PORT.",
    )
    insecure_cell_bind: Address | None = Field(
        default=None,
        description="Serve the cell unencrypted on this address instead of --cell-listen; any host that can reach it "
        "may connect.",
    )
    worker_silence_s: float = Field(
        default=_POLICY.worker_silence_s,
        ge=1.0,
        allow_inf_nan=False,
        description="A worker or tokenizer service that sends no heartbeat for this many seconds counts as lost.",
    )
    workers_lost_s: float | None = Field(
        default=_POLICY.workers_lost_s,
        gt=0.0,
        allow_inf_nan=False,
        description="Seconds without any worker that computes, or where ranks are coupled without all, after which "
        "requests end with WORKERS_LOST, whether they had begun or not, each at the earliest this long after it came; "
        "new ones are refused. If not set, they wait for as long as their deadlines allow.",
    )
    drain_s: float = Field(
        default=_POLICY.drain_s,
        ge=0.0,
        allow_inf_nan=False,
        description="Seconds that requests may take to finish on workers that were asked to end, or that an operator "
        "drains; what is left then continues on other workers.",
    )
    max_num_seqs: int = Field(
        default=_POLICY.max_num_seqs, ge=1, le=65536, description="Maximum number of running sequences."
    )
    max_num_batched_tokens: Annotated[int, Field(ge=1)] | Auto = Field(
        default="auto",
        description="Token budget: the most tokens computed in one step. With auto, only prompt tokens are counted, "
        "and the worker proposes the limit: 512 on a CPU, 16384 on a GPU; 16384 without --enable-chunked-prefill.",
    )
    kv_cache_block_size: int = Field(
        default=_CACHE.block_size, description="Tokens per KV block: 1, or a multiple of 16."
    )
    enable_prefix_caching: bool = Field(
        default=_CACHE.enable_prefix_caching, description="Share the KV blocks of equal prefixes."
    )
    share_prefixes_between_tenants: bool = Field(
        default=_CACHE.shares_between_tenants,
        description="Share them between tenants too. Otherwise each has prefixes of its own, so that none can find out "
        "by the time or the count of cached tokens what another has asked.",
    )
    state_checkpoint_interval: int = Field(
        default=_CACHE.state_checkpoint_interval,
        ge=0,
        description="For models with recurrent state: save it after every so many tokens of a prompt, rounded up to "
        "blocks, so that a prompt with the same beginning continues from there; 0 for never. It is also saved where a "
        "request finds cached blocks without it, and while answers are generated.",
    )
    scheduler_delay_factor: float = Field(
        default=_POLICY.delay_factor,
        ge=0.0,
        allow_inf_nan=False,
        description="A prefill waits until the oldest request has waited this many times the last prefill's latency.",
    )

    max_steps_in_flight: int = Field(
        default=_POLICY.max_steps_in_flight,
        ge=1,
        le=8,
        description="Maximum number of steps sent but not returned; 1 means no overlap.",
    )

    enable_chunked_prefill: bool = Field(
        default=_POLICY.enable_chunked_prefill,
        description="Compute a prompt that does not fit a step's token budget over several steps.",
    )
    enable_mixed_steps: bool | Auto = Field(
        default="auto",
        description="Let decodes share a step with prompts, which fill what the decodes leave of the budget: true, "
        "false, or auto (the worker proposes: yes on a CPU, no on a GPU).",
    )

    queue_policy: Literal["fcfs", "priority", "longest_prefix"] = Field(
        default="fcfs",
        description="Which request goes first: by arrival, by priority (a higher one may preempt a lower one), or by "
        "the most cached tokens.",
    )
    max_queue_age_s: float = Field(
        default=_POLICY.max_age_s,
        ge=0.0,
        allow_inf_nan=False,
        description="Requests that have waited longer than this, in seconds, go first under any policy, by arrival.",
    )
    admission_policy: Literal["plain", "look_ahead"] = Field(
        default="plain",
        description="When a prompt may enter: when its blocks are free (plain), or when the expected growth of all "
        "running requests fits as well (look_ahead).",
    )
    retraction_policy: Literal["last_in", "fewest_output_tokens"] = Field(
        default="last_in", description="Which request is preempted when blocks run out."
    )
    max_prefill_wait_steps: int = Field(
        default=_POLICY.max_prefill_wait_steps,
        ge=0,
        description="With --coupled: the most decode steps that a prompt waits until other ranks have one too, so that "
        "fewer ranks idle.",
    )
    max_waiting_requests: int = Field(
        default=_POLICY.max_waiting_requests,
        ge=1,
        description="Most requests of a tenant waiting for their first step, counting each choice; more are refused at "
        "once. All tenants together may have eight times as many, of which one that fills its part leaves others room.",
    )
    max_waiting_tokens: int = Field(
        default=_POLICY.max_waiting_tokens,
        ge=1,
        description="Most prompt tokens of a tenant waiting for their first step; otherwise as --max-waiting-requests.",
    )
    max_prompt_logprob_bytes: int = Field(
        default=_POLICY.max_prompt_logprob_bytes,
        ge=1,
        description="Most bytes of prompt log-probabilities over a tenant's requests in flight; more are refused at "
        "once. All tenants together may have twice as many.",
    )
    max_unread_s: float = Field(
        default=30.0,
        gt=0.0,
        allow_inf_nan=False,
        description="A client that reads nothing of its answer for this many seconds loses it.",
    )

    fail_on_token: CliSuppress[int | None] = Field(
        default=None,
        ge=0,
        description="For recovery tests only: the process dies when a prompt with this token is submitted.",
    )

    @model_validator(mode="after")
    def _check_cell_bind(self) -> SchedulerSettings:
        if self.insecure_cell_bind is not None and self.certificates is not None:
            raise ValueError("--insecure-cell-bind cannot be used with TLS: --cell-listen then takes any address")
        return self

    @model_validator(mode="after")
    def _check_budget(self) -> SchedulerSettings:
        # A decode step has one token per running sequence; with auto these are not counted.
        if self.max_num_batched_tokens != "auto" and self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("--max-num-batched-tokens must be at least --max-num-seqs")
        return self

    @model_validator(mode="after")
    def _check_mixed_steps(self) -> SchedulerSettings:
        if self.enable_mixed_steps is True and not self.enable_chunked_prefill:
            raise ValueError("--enable-mixed-steps needs --enable-chunked-prefill")
        return self

    @field_validator("kv_cache_block_size")
    @classmethod
    def _check_block_size(cls, value: int) -> int:
        if value != 1 and (value < 16 or value % 16):
            raise ValueError("must be 1 or a multiple of 16")
        return value

    @property
    def cell_bind_address(self) -> str:
        """The cell's address."""
        return self.insecure_cell_bind or self.cell_listen

    @property
    def policy(self) -> SchedulerPolicy:
        """What the scheduler decides by."""
        return SchedulerPolicy(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self._max_num_batched_tokens,
            delay_factor=self.scheduler_delay_factor,
            max_steps_in_flight=self.max_steps_in_flight,
            enable_chunked_prefill=self.enable_chunked_prefill,
            enable_mixed_steps=None if self.enable_mixed_steps == "auto" else self.enable_mixed_steps,
            queue_policy=QueuePolicy(self.queue_policy),
            max_age_s=self.max_queue_age_s,
            admission_policy=AdmissionPolicy(self.admission_policy),
            retraction_policy=RetractionPolicy(self.retraction_policy),
            max_waiting_requests=self.max_waiting_requests,
            max_waiting_tokens=self.max_waiting_tokens,
            max_prompt_logprob_bytes=self.max_prompt_logprob_bytes,
            max_prefill_wait_steps=self.max_prefill_wait_steps,
            worker_silence_s=self.worker_silence_s,
            drain_s=self.drain_s,
            workers_lost_s=self.workers_lost_s,
        )

    @property
    def _max_num_batched_tokens(self) -> int | None:
        if self.max_num_batched_tokens != "auto":
            return self.max_num_batched_tokens
        return None if self.enable_chunked_prefill else max(_TOKENS_WITHOUT_CHUNKS, self.max_num_seqs)

    @property
    def cache(self) -> CacheSettings:
        """The KV cache's settings."""
        return CacheSettings(
            self.kv_cache_block_size,
            self.enable_prefix_caching,
            self.share_prefixes_between_tenants,
            state_checkpoint_interval=self.state_checkpoint_interval,
        )


if __name__ == "__main__":
    # `lockstep serve` runs this to check the flags before it starts anything.
    settings = load_settings(SchedulerSettings)
