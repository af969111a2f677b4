"""Settings of the worker service."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Len
from pydantic import BeforeValidator, Field, PositiveInt, model_validator
from pydantic_settings import CliSuppress, NoDecode, SettingsConfigDict

from services.worker.device import DeviceError, DeviceRequest, check_device
from services.worker.layout import RankLayout
from shared.config import ProcessSettings, load_settings
from shared.model_files.embedders import TASK_DESCRIPTION, Task, served_config
from shared.model_files.implementations import MODEL_IMPL_DESCRIPTION, WantedImplementation
from shared.model_files.model_dir import ModelDirectoryError, read_config, refuse_pointer, weight_paths
from shared.model_files.packed_files import PackedCache
from shared.model_files.sentence_files import VectorRecipe, read_vector_recipe
from shared.network.addresses import is_any_host, split_address
from shared.network.tls import Role
from shared.request.limits import MAX_DRAFT_TOKENS
from shared.setting_types import (
    MAX_MODEL_LEN_DESCRIPTION,
    Address,
    DraftProposerName,
    ListenAddress,
    MaxModelLen,
    split_list,
)

# `1,2,4` on the command line and in the environment.
BatchSizes = Annotated[tuple[PositiveInt, ...], NoDecode, BeforeValidator(split_list), Len(1)]

_GIB = 1024**3


class WorkerSettings(ProcessSettings):
    """Settings of one worker process."""

    model_config = SettingsConfigDict(env_prefix="LOCKSTEP_WORKER_", cli_prog_name="python -m services.worker")
    role = Role.WORKER

    model_dir: Path = Field(description="Model directory in Hugging Face's layout.")
    max_model_len: MaxModelLen = Field(default="auto", description=MAX_MODEL_LEN_DESCRIPTION)
    model_impl: WantedImplementation = Field(default="auto", description=MODEL_IMPL_DESCRIPTION)
    task: Task = Field(default="generate", description=TASK_DESCRIPTION)
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="What to compute on: cuda is a GPU, NVIDIA's or AMD's; auto takes one if torch sees any.",
    )
    device_index: int = Field(
        default=0,
        ge=0,
        description="Which of the visible GPUs; CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES says which are visible.",
    )
    ops_backend: Literal["auto", "aiter", "native", "reference", "triton", "triton-exact"] = Field(
        default="auto",
        description="Kernels: native is fast on x86-64, and compiled at the first start, except in an image, which "
        "brings it; where it cannot be compiled, and on other processors, torch's kernels take over, as the backend "
        "cpu; triton runs on GPUs; aiter on AMD's, with AMD's library of kernels, which are built at the first start; "
        "reference is exact (a row's bits do not depend on the rest of the batch), and so is triton-exact, on GPUs; "
        "auto is aiter on an AMD GPU where that library is installed, else triton on a GPU and native on a CPU.",
    )
    native_isa: Literal["auto", "avx2", "avx512", "avx512_bf16", "amx"] = Field(
        default="auto",
        description="Instructions that the native kernels use: avx512 has VNNI, amx a unit for tiles, where the system "
        "permits its use; auto is the last that the processor has.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Type of activations, KV cache and weights that are not quantised; auto is bfloat16 with "
        "the backends triton, triton-exact and aiter, and with native on a processor that has instructions for it, "
        "else float32.",
    )
    quantization: Literal["auto", "none", "int8", "int4"] = Field(
        default="auto",
        description="What a model's matrices are quantised to while it loads, unless its files are quantised already; "
        "with int4 the head has 8 bits. auto is int8 on the native backend, unless with --task embed, and none on the "
        "others.",
    )
    activation_quantization: Literal["none", "fp8"] = Field(
        default="none",
        description="What activations are quantised to where they are multiplied with matrices in FP8: fp8 (E4M3, with "
        "a scale per token, and per 128 columns if the matrix has scales by group) uses a GPU's FP8 instructions, with "
        "the backends triton and triton-exact on NVIDIA's sm_89 and later, gfx942 and gfx950; results are then less "
        "precise than on a CPU, which multiplies activations as they are.",
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8", "fp8"] = Field(
        default="auto",
        description="Type of the KV cache: auto is the weights' type. int8, with a scale for each token and head, "
        "needs the kernels of native, as do float32 and bfloat16 for weights of another type. fp8 (E4M3, half the size "
        "of bfloat16) takes the checkpoint's scales of each layer's keys and values, or 1, and clamps what is too "
        "large; it needs triton, triton-exact or reference, since AITER's FP8 is another format on MI300 than on "
        "MI350. Latent attention stores the weights' type only.",
    )
    load_format: Literal["auto", "dummy"] = Field(
        default="auto",
        description="Where weights come from: auto reads the model's files, each layer in its own format; dummy makes "
        "random weights of the shapes and formats in config.json, for performance work.",
    )
    dummy_seed: int = Field(
        default=0, ge=0, lt=2**63, description="Seed for dummy weights; equal seeds give equal weights."
    )
    packed_cache: bool = Field(
        default=True,
        description="Keep weights as the native backend packs them in a file that outlives the process, about as large "
        "as they are in memory, and read that file at the next start instead of reading, quantising and packing the "
        "model's own; where the folder cannot be written, weights are packed at every start.",
    )
    packed_dir: Path | None = Field(
        default=None,
        description="The folder of packed weights: this user's alone, with mode 0700, as it is made if it is missing. "
        "By default lockstep/packed in XDG_CACHE_HOME, or in .cache in the user's home.",
    )
    packed_cache_gib: float = Field(
        default=64.0,
        gt=0,
        allow_inf_nan=False,
        description="The most that all files of packed weights take, in GiB; those that were not used for the longest "
        "time are removed.",
    )
    graph_batch_sizes: BatchSizes | None = Field(
        default=None,
        description="Batch sizes for which decode steps are captured, separated by commas; a batch is padded to the "
        "next one, and runs eagerly above the largest. By default 1, 2, 4, 8 and the multiples of 16 up to 512 on a "
        "GPU, and every size up to 64 on the native backend.",
    )
    enforce_eager: bool = Field(default=False, description="Capture no decode steps: call kernels one by one.")
    kv_cache_memory_gib: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Memory for the KV cache, in GiB; by default 1 on a CPU, and what --gpu-memory-utilization leaves "
        "on a GPU.",
    )
    gpu_memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="The part of a GPU's memory for weights, activations and KV cache; the rest is for graphs and "
        "libraries.",
    )
    kv_cache_num_blocks: int | None = Field(
        default=None, ge=1, description="Number of KV blocks; by default as many as the memory holds."
    )
    num_threads: int | None = Field(
        default=None,
        ge=1,
        description="Compute threads; by default all cores, or as many as a container's limit grants.",
    )
    draft_proposer: DraftProposerName = Field(
        default="none",
        description="What drafts tokens, which the model then checks several at once: ngram looks up where a "
        "sequence's last tokens occurred before, which pays off when answers repeat their prompt; mtp uses the "
        "checkpoint's multi-token prediction layers; model uses a second, smaller model.",
    )
    draft_model: Path | None = Field(
        default=None,
        description="The smaller model that drafts: a directory in Hugging Face's layout, with the same tokenizer.",
    )
    num_draft_tokens: int = Field(
        default=4, ge=1, le=MAX_DRAFT_TOKENS, description="Maximum tokens drafted per sequence and step."
    )
    dp_rank: int | None = Field(
        default=None,
        ge=0,
        description="Data-parallel rank of the process's tensor-parallel group, from 0; by default the group fits any "
        "place of a cell that is not coupled. Workers that a scheduler discovers must not set it.",
    )
    dp_size: int = Field(
        default=1,
        ge=1,
        description="Number of tensor-parallel groups in the cell, each with a whole model; only with --dp-rank.",
    )
    tp_rank: int = Field(
        default=0, ge=0, description="Rank of the process in its tensor-parallel group, from 0, which is the leader's."
    )
    tp_size: int = Field(default=1, ge=1, description="Processes that a model is split over.")
    ep: bool = Field(
        default=False,
        description="Split experts over all processes of the cell, which then are one failure domain.",
    )
    leader: Address | None = Field(
        default=None,
        description="The leader to join: for a group's other members their group's leader; with --ep, for the other "
        "groups' leaders the one of DP rank 0.",
    )
    meet_timeout_s: float = Field(
        default=300.0,
        gt=0.0,
        allow_inf_nan=False,
        description="Seconds to wait at start for names that do not resolve yet and for a leader that does not answer "
        "yet; the process then exits. Weights load after that.",
    )
    collective_host: str | None = Field(
        default=None,
        description="Local address or name for collectives, which are not encrypted; by default the one on the route "
        "to the leader. The first process of a failure domain has no leader: by default it takes the host that it "
        "listens on, 127.0.0.1 for a unix socket, and needs this setting if it listens on every interface.",
    )
    silence_s: float = Field(
        default=3.0,
        ge=1.0,
        allow_inf_nan=False,
        description="Seconds without a sign of life after which a process of the failure domain counts as lost and the "
        "domain ends.",
    )
    profile_dir: Path | None = Field(
        default=None,
        description="Directory for traces of steps, which WorkerService.Profile writes; by default it writes none.",
    )
    fail_on_token: CliSuppress[int | None] = Field(
        default=None,
        ge=0,
        description="For recovery tests: the process ends when a step contains this token in a prompt or in a "
        "completion so far.",
    )
    listen: ListenAddress = Field(
        default="127.0.0.1:50053",
        description="Address for the scheduler and for other workers: unix:PATH, HOST:PORT on loopback, or with mutual "
        "TLS any HOST:PORT.",
    )

    @property
    def context_limit(self) -> int | None:
        """The most tokens of a sequence; None means the model's own context."""
        return None if self.max_model_len == "auto" else self.max_model_len

    def read_recipe(self) -> VectorRecipe | None:
        """How vectors are made; None if the model is served for text.

        Raises:
            ModelDirectoryError: the directory does not say, or its model is not served so.
        """
        served_config(read_config(self.model_dir), self.task)
        return None if self.task == "generate" else read_vector_recipe(self.model_dir)

    @property
    def weights_seed(self) -> int | None:
        """None means that weights are loaded from the model directories."""
        return self.dummy_seed if self.load_format == "dummy" else None

    @property
    def packed_weights(self) -> PackedCache | None:
        """Where packed weights are kept; None if they are not."""
        return PackedCache(self.packed_dir, int(self.packed_cache_gib * _GIB)) if self.packed_cache else None

    @property
    def device_request(self) -> DeviceRequest:
        """What these settings say about the device."""
        return DeviceRequest(self.device, self.device_index, self.ops_backend)

    def check_weights(self) -> None:
        """Check that there are weights to load, before anything slow is imported.

        Raises:
            ModelDirectoryError: a model's directory has none, or only pointers to them.
        """
        if self.weights_seed is not None:
            return
        for model_dir in filter(None, (self.model_dir, self.draft_model)):
            for path in weight_paths(model_dir):
                refuse_pointer(path)

    @property
    def store_host(self) -> str:
        """Where the store listens by which the domain's ranks connect to each other, if this is its first process."""
        if self.collective_host is not None:
            return self.collective_host
        if self.bind_address.startswith("unix:"):
            return "127.0.0.1"
        return split_address(self.bind_address)[0]

    @property
    def layout(self) -> RankLayout:
        """The process's place in the cell."""
        return RankLayout(
            self.dp_rank or 0,
            self.dp_size,
            self.tp_rank,
            self.tp_size,
            has_expert_parallel=self.ep,
            fits_any_place=self.dp_rank is None,
        )

    @model_validator(mode="after")
    def _check_layout(self) -> WorkerSettings:
        if self.dp_rank is None and self.dp_size > 1:
            raise ValueError("--dp-size needs --dp-rank")
        if (self.dp_rank or 0) >= self.dp_size or self.tp_rank >= self.tp_size:
            raise ValueError("--dp-rank must be less than --dp-size, and --tp-rank less than --tp-size")
        if self.layout.follows is not (self.leader is not None):
            raise ValueError(
                "--leader is required for every member of a group except its first, and with --ep for the leader of "
                "every group except the first; no other process may have it"
            )
        return self

    @model_validator(mode="after")
    def _check_store_host(self) -> WorkerSettings:
        is_first = not self.layout.is_alone and not self.layout.follows
        if is_first and is_any_host(self.store_host):
            raise ValueError(
                "--collective-host is required for the first process of a failure domain that listens on every "
                "interface: collectives use one address"
            )
        return self

    @model_validator(mode="after")
    def _check_drafts_are_planned(self) -> WorkerSettings:
        # A step says how many tokens each group computes, but only the group itself knows how many drafts it makes.
        if self.layout.is_coupled and self.draft_proposer != "none":
            raise ValueError("--draft-proposer can be combined with --ep only when there is a single group")
        return self

    @model_validator(mode="after")
    def _check_task(self) -> WorkerSettings:
        if self.task == "embed" and (self.draft_proposer != "none" or self.model_impl == "transformers"):
            raise ValueError("--task embed cannot be combined with --draft-proposer or --model-impl transformers")
        return self

    @model_validator(mode="after")
    def _check_draft_model(self) -> WorkerSettings:
        if (self.draft_proposer == "model") is not (self.draft_model is not None):
            raise ValueError("--draft-proposer model and --draft-model must be used together")
        return self


if __name__ == "__main__":
    # `lockstep serve` runs this module to check flags and model before it starts anything.
    try:
        settings = load_settings(WorkerSettings)
        check_device(settings.device_request)
        settings.read_recipe()
        settings.check_weights()
    except (DeviceError, ModelDirectoryError) as error:
        sys.exit(f"error: {error}")
