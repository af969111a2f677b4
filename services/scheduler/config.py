"""Settings of the scheduler service."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from services.scheduler.core.admission import AdmissionPolicy
from services.scheduler.core.policy import CacheSettings, CellTopology, SchedulerPolicy
from services.scheduler.core.queue.waiting_queue import QueuePolicy
from services.scheduler.core.retraction import RetractionPolicy
from shared.config import Address, Addresses, LocalAddress, ServiceSettings, load_settings

# As the workers propose.
Auto = Literal["auto"]

# A worker's proposal may be less than a prompt, which without chunks has to fit a step. ATOM's default.
_TOKENS_WITHOUT_CHUNKS = 16384


class SchedulerSettings(ServiceSettings):
    """What the scheduler can be told; names and defaults follow ATOM."""

    model_config = SettingsConfigDict(env_prefix="LOCKSTEP_SCHEDULER_", cli_prog_name="python -m services.scheduler")

    listen: LocalAddress = Field(
        default="127.0.0.1:50052",
        description="Address for clients that bring tokens, and for `lockstep top`: unix:PATH, or HOST:PORT on "
        "loopback.",
    )
    cell_listen: LocalAddress = Field(
        default="127.0.0.1:50054",
        description="Address for tokenizer services and operators: unix:PATH, or HOST:PORT on loopback.",
    )
    insecure_cell_bind: Address | None = Field(
        default=None, description="Serve unencrypted on this address instead of --cell-listen, whoever can reach it."
    )
    workers: Addresses = Field(
        default=("127.0.0.1:50053",),
        description="Addresses of the groups' first workers, by DP rank and with commas between them.",
    )
    coupled: bool = Field(
        default=False,
        description="The workers share collectives over DP ranks (expert parallelism): they step in lockstep, and are "
        "one failure domain.",
    )
    worker_silence_s: float = Field(
        default=3.0,
        ge=1.0,
        allow_inf_nan=False,
        description="A worker, or a tokenizer service, that gives no sign of life for so many seconds counts as lost.",
    )
    metrics_listen: LocalAddress | None = Field(
        default=None, description="Address to serve metrics for Prometheus on, as GET /metrics over HTTP."
    )
    max_num_seqs: int = Field(default=512, ge=1, le=65536, description="Most sequences that run at once.")
    max_num_batched_tokens: Annotated[int, Field(ge=1)] | Auto = Field(
        default="auto",
        description="Most tokens computed in one step: its token budget. With auto, prompt tokens alone are counted, "
        "and the worker proposes how many: 512 on a CPU, 16384 on a GPU; 16384 without --enable-chunked-prefill.",
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
    enable_mixed_steps: bool | Auto = Field(
        default="auto",
        description="Let decodes join prefill steps, and prompts fill what they leave of the budget: true, false, or "
        "as the worker proposes: on a CPU yes, on a GPU no.",
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
    placement_tokens_per_seq: int = Field(
        default=256,
        ge=0,
        description="A request goes to the DP rank that has most of its prompt cached, unless it has more to do: "
        "so many cached tokens outweigh one more request.",
    )
    max_prefill_wait_steps: int = Field(
        default=0,
        ge=0,
        description="With --coupled: most decode steps that a prompt waits for other ranks to have one as well, so "
        "that fewer ranks idle meanwhile.",
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

    fail_on_token: int | None = Field(
        default=None,
        ge=0,
        description="For tests of recovery only: the process dies when a prompt with this token is submitted.",
    )

    @model_validator(mode="after")
    def _check_workers(self) -> SchedulerSettings:
        if len(set(self.workers)) < len(self.workers):
            raise ValueError("--workers names an address twice")
        return self

    @model_validator(mode="after")
    def _check_budget(self) -> SchedulerSettings:
        # A decode step has a token for each sequence that runs; with auto they do not count.
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
        """The address to serve the cell on."""
        return self.insecure_cell_bind or self.cell_listen

    @property
    def policy(self) -> SchedulerPolicy:
        """The part that the scheduler decides by."""
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
            share_in_step=self.enable_sharing_in_step,
            max_waiting_requests=self.max_waiting_requests,
            max_waiting_tokens=self.max_waiting_tokens,
            max_prompt_logprob_bytes=self.max_prompt_logprob_bytes,
            placement_tokens_per_seq=self.placement_tokens_per_seq,
            max_prefill_wait_steps=self.max_prefill_wait_steps,
            worker_silence_s=self.worker_silence_s,
        )

    @property
    def _max_num_batched_tokens(self) -> int | None:
        if self.max_num_batched_tokens != "auto":
            return self.max_num_batched_tokens
        return None if self.enable_chunked_prefill else max(_TOKENS_WITHOUT_CHUNKS, self.max_num_seqs)

    @property
    def topology(self) -> CellTopology:
        """The DP ranks, and which of them stand and fall together."""
        return CellTopology(len(self.workers), is_coupled=self.coupled and len(self.workers) > 1)

    @property
    def cache(self) -> CacheSettings:
        """The part that the KV cache is run by."""
        return CacheSettings(self.kv_cache_block_size, self.enable_prefix_caching)


if __name__ == "__main__":
    # `lockstep serve` asks whether the flags are good, before it starts anything.
    load_settings(SchedulerSettings)
