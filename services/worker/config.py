"""What the worker service can be told."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from shared.config import DraftProposerName, LocalAddress, ServiceSettings
from shared.limits import MAX_DRAFT_TOKENS


class WorkerSettings(ServiceSettings):
    """Settings of one worker process."""

    model_config = SettingsConfigDict(env_prefix="LOCKSTEP_WORKER_", cli_prog_name="python -m services.worker")

    model_dir: Path = Field(description="The model: a directory in Hugging Face's layout.")
    ops_backend: Literal["cpu", "reference"] = Field(
        default="cpu", description="Kernels: cpu is fast, reference is exact (a row's bits depend on nothing else)."
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Type of weights and KV cache.")
    load_format: Literal["auto", "dummy"] = Field(
        default="auto",
        description="Where weights come from: auto reads the model's files, each layer in its own format; dummy are "
        "random ones of the shapes that its config.json asks for, for performance work.",
    )
    dummy_seed: int = Field(
        default=0, ge=0, lt=2**63, description="Seed of dummy weights; equal ones give equal weights."
    )
    kv_cache_memory_gib: float = Field(
        default=1.0, gt=0, allow_inf_nan=False, description="Memory for the KV cache, in GiB."
    )
    kv_cache_num_blocks: int | None = Field(
        default=None, ge=1, description="KV blocks, instead of what the memory holds."
    )
    num_threads: int | None = Field(default=None, ge=1, description="Threads that compute; all cores by default.")
    draft_proposer: DraftProposerName = Field(
        default="none",
        description="Who drafts tokens that the model then checks several at once: ngram looks up where a sequence's "
        "last tokens stood before, which pays where answers repeat what they were given; mtp are the layers that a "
        "checkpoint brings for it (multi-token prediction); model is a second, smaller model.",
    )
    draft_model: Path | None = Field(
        default=None,
        description="The model that drafts, with the tokenizer of the other: a directory in Hugging Face's layout.",
    )
    num_draft_tokens: int = Field(
        default=4, ge=1, le=MAX_DRAFT_TOKENS, description="Most tokens drafted for a sequence in a step."
    )
    listen: LocalAddress = Field(
        default="127.0.0.1:50053", description="Address to serve on: unix:PATH, or HOST:PORT on loopback."
    )

    @property
    def weights_seed(self) -> int | None:
        """Seed of random weights; None: those of the directories are loaded."""
        return self.dummy_seed if self.load_format == "dummy" else None

    @model_validator(mode="after")
    def _check_draft_model(self) -> WorkerSettings:
        if (self.draft_proposer == "model") is not (self.draft_model is not None):
            raise ValueError("--draft-proposer model and --draft-model go together")
        return self
