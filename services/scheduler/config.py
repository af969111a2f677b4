"""Settings of the scheduler service."""

from __future__ import annotations

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from services.scheduler.engine import CacheSettings
from services.scheduler.scheduler import SchedulerPolicy
from shared.config import Address, LocalAddress, ServiceSettings


class SchedulerSettings(ServiceSettings):
    """What the scheduler can be told; names and defaults follow ATOM."""

    model_config = SettingsConfigDict(env_prefix="LOCKSTEP_SCHEDULER_", cli_prog_name="python -m services.scheduler")

    listen: LocalAddress = Field(
        default="127.0.0.1:50052", description="Address to serve on: unix:PATH, or HOST:PORT on loopback."
    )
    worker: Address = Field(default="127.0.0.1:50053", description="Address of the worker service.")
    max_num_seqs: int = Field(default=512, ge=1, le=65536, description="Most sequences that run at once.")
    max_num_batched_tokens: int = Field(
        default=16384, ge=1, description="Most tokens computed in one step; at least the model's context."
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
            self.max_num_seqs, self.max_num_batched_tokens, self.scheduler_delay_factor, self.max_steps_in_flight
        )

    @property
    def cache(self) -> CacheSettings:
        """The part that the KV cache is run by."""
        return CacheSettings(self.kv_cache_block_size, self.enable_prefix_caching)
