"""What the worker service can be told."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from services.worker.layout import RankLayout
from shared.config import Address, DraftProposerName, LocalAddress, ServiceSettings, load_settings
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
    dp_rank: int = Field(default=0, ge=0, description="Of the process's tensor-parallel group: from 0.")
    dp_size: int = Field(default=1, ge=1, description="Tensor-parallel groups of the cell; each has a whole model.")
    tp_rank: int = Field(default=0, ge=0, description="Of the process in its group: from 0, which is its leader's.")
    tp_size: int = Field(default=1, ge=1, description="Processes that a model is split over.")
    ep: bool = Field(
        default=False,
        description="Split experts over all processes of the cell, which are one failure domain then.",
    )
    leader: Address | None = Field(
        default=None,
        description="Whom to join: a group's other members its leader, and with --ep the other groups' leaders that of "
        "DP rank 0.",
    )
    rendezvous: Address | None = Field(
        default=None,
        description="HOST:PORT where the processes of a failure domain find each other; its first one serves there.",
    )
    domain_start_id: str = Field(
        default="",
        description="Names this start of the failure domain: equal on all its processes, and on no other start's.",
    )
    collective_host: str | None = Field(
        default=None,
        description="Address that collectives use; by default that of the route to --rendezvous. They are not "
        "encrypted.",
    )
    silence_s: float = Field(
        default=3.0,
        ge=1.0,
        allow_inf_nan=False,
        description="Seconds without a sign of life after which a process of the failure domain is given up, and the "
        "domain ends.",
    )
    fail_on_token: int | None = Field(
        default=None,
        ge=0,
        description="For tests of recovery: the process ends where a step brings this token of a prompt or a "
        "completion so far.",
    )
    listen: LocalAddress = Field(
        default="127.0.0.1:50053", description="Address to serve on: unix:PATH, or HOST:PORT on loopback."
    )

    @property
    def weights_seed(self) -> int | None:
        """Seed of random weights; None: those of the directories are loaded."""
        return self.dummy_seed if self.load_format == "dummy" else None

    @property
    def layout(self) -> RankLayout:
        """The process's place among those that serve the model."""
        return RankLayout(self.dp_rank, self.dp_size, self.tp_rank, self.tp_size, has_expert_parallel=self.ep)

    @model_validator(mode="after")
    def _check_layout(self) -> WorkerSettings:
        if self.dp_rank >= self.dp_size or self.tp_rank >= self.tp_size:
            raise ValueError("--dp-rank and --tp-rank must be below --dp-size and --tp-size")
        if self.layout.follows is not (self.leader is not None):
            raise ValueError(
                "--leader is for the members of a group but its first, and with --ep for the leaders of all groups but "
                "the first"
            )
        if not self.layout.is_alone and (self.rendezvous is None or not self.domain_start_id):
            raise ValueError("several processes need --rendezvous and --domain-start-id")
        if self.rendezvous is not None and self.rendezvous.startswith("unix:"):
            raise ValueError("--rendezvous must be HOST:PORT")
        return self

    @model_validator(mode="after")
    def _check_drafts_are_planned(self) -> WorkerSettings:
        # A plan tells every group how many tokens the others compute, and drafts are made where they are computed.
        if self.layout.is_coupled and self.draft_proposer != "none":
            raise ValueError("--draft-proposer goes with --ep in a single group only")
        return self

    @model_validator(mode="after")
    def _check_draft_model(self) -> WorkerSettings:
        if (self.draft_proposer == "model") is not (self.draft_model is not None):
            raise ValueError("--draft-proposer model and --draft-model go together")
        return self


if __name__ == "__main__":
    # `lockstep serve` asks whether the flags are good, before it starts anything.
    load_settings(WorkerSettings)
