"""Runs steps on the device."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.batch.drafts import Drafting
from services.worker.config import WorkerSettings
from services.worker.device import choose_device, propose_steps
from services.worker.forward.forward_context import Progress
from services.worker.layers.context_limit import ContextLimit
from services.worker.layout import RankLayout
from services.worker.models.loader import LoadedModel, LoadOptions, ModelFacts, load_model
from services.worker.models.planning import plan_model
from services.worker.ops import Ops, load_ops
from services.worker.parallel.distributed import make_parallel
from services.worker.parallel.rendezvous import Rendezvous
from services.worker.runner.batch_runner import BatchRunner
from services.worker.runner.cache_memory import DeviceMemory, GpuMemory, KvCacheSize, device_memory
from services.worker.runner.cache_room import CacheRoom
from services.worker.runner.epoch import Epochs
from services.worker.runner.faster_kernels import describe_faster, look_at_machine
from services.worker.runner.graphs.graph_runner import GraphSettings
from services.worker.runner.memory_wait import CurrentGpu, wait_for_memory
from services.worker.runner.number_formats import (
    check_ranks_agree,
    choose_dtype,
    choose_kv_dtype,
    choose_quantization,
    log_loaded,
)
from services.worker.runner.plan_checks import check_activations, check_plan
from services.worker.runner.rank import Rank
from services.worker.runner.step_totals import StepTotals
from services.worker.runner.steps.pending_step import PendingStep, reported
from services.worker.runner.stream import Stream, make_stream
from services.worker.sampling.sampler import SAMPLING_VERSION
from services.worker.spec_decode.drafting import check_drafting, make_drafting
from shared.errors import StaleEpochError
from shared.process.cores import num_usable_cores
from shared.step.step import Step, StepResult

logger = logging.getLogger(__name__)

_GIB = 1024**3
_DEFAULT_MEMORY_GIB = 1.0
_ALONE = RankLayout()


@dataclass(frozen=True, slots=True)
class Execution:
    """How a device is given its work."""

    graphs: GraphSettings | None = None
    """None means that every step runs eagerly."""
    stream: Stream | None = None
    """None means the device's own."""


_ON_THE_DEVICE = Execution()


class ModelRunner:
    """One model on one device, with its KV cache, batch and sampler.

    One thread calls `attach` and `launch`; any thread may finish steps and read the facts.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        ops: Ops,
        kv_cache_size: KvCacheSize,
        *,
        drafting: Drafting | None = None,
        layout: RankLayout = _ALONE,
        execution: Execution = _ON_THE_DEVICE,
    ) -> None:
        """`loaded` was loaded with `ops` and for `layout`; without `drafting` no tokens are drafted."""
        stream = execution.stream or make_stream(loaded.device)
        self.device = loaded.device
        self.layout: RankLayout = layout
        self.step_totals = StepTotals()
        self._rank = Rank(loaded.model, ops, loaded.device, stream, layout, Progress(), self.step_totals)
        self._epochs = Epochs(self._rank, loaded, kv_cache_size, drafting=drafting, graphs=execution.graphs)
        self._epoch: BatchRunner | None = None
        self.facts: ModelFacts = loaded.facts
        self.state_bytes_per_slot: int = loaded.model.state_spec.bytes_per_slot
        self.ops_backend: str = ops.name
        self.is_exact: bool = ops.is_exact
        self.step_proposal = propose_steps(self.device.type)
        self.numerics_fingerprint: str = numerics_fingerprint(loaded, ops, layout)

    @property
    def progress(self) -> int:
        """Layers and steps computed, over all epochs. From any thread."""
        return self._rank.progress.count

    @property
    def num_draft_tokens(self) -> int:
        """Most tokens drafted for a sequence in a step; 0 without drafting."""
        return self._epochs.num_draft_tokens

    @property
    def num_blocks(self) -> int:
        """The KV blocks of the present epoch, or of the last one; 0 before the first. From any thread."""
        return self._epochs.num_blocks

    @property
    def room(self) -> CacheRoom:
        """What the present epoch has room for, or the last one had; nothing before the first. From any thread."""
        return self._epochs.room

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the present epoch's KV cache, or of the last one's; 0 before the first. From any thread."""
        cache = self._epochs.kv_cache
        return 0 if cache is None else cache.num_blocks * cache.block_size * cache.spec.bytes_per_token

    def device_memory(self) -> DeviceMemory | None:
        """What the process has of its GPU's memory; None on a CPU. From any thread."""
        return device_memory(self.device)

    @property
    def graph_batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes, ascending, for which there are graphs of decode steps, or will be. From any thread."""
        graphs = self._epochs.graphs
        return () if graphs is None else graphs.decodes.sizes

    def how_to_hold(self, num_tokens: int) -> str:
        """The setting with which the KV cache would hold so many tokens. After the first `attach`; from any thread."""
        return self._epochs.how_to_hold(num_tokens)

    def attach(self, *, block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """Start an epoch with an empty batch, once the launched steps have been computed.

        The KV cache is kept from the last epoch if its blocks have this size, and so are graphs if they fit.

        Returns:
            The number of KV blocks; 0 if the memory does not hold one, and then no step can be run.

        Raises:
            InvalidRequestError: the backend cannot read blocks of this size; the last epoch goes on.
        """
        self._rank.ops.check_block_size(block_size)
        self._epoch = None
        self._rank.stream.synchronize()
        self._epoch = self._epochs.begin(
            block_size=block_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )
        return self.num_blocks

    def launch(self, step: Step) -> PendingStep:
        """Update the batch and have the device compute the step; see `BatchRunner` for when this waits.

        Raises:
            StepMismatchError: the step does not fit the batch; nothing was computed.
            StaleEpochError: an earlier launch of the epoch failed.
            InternalError: the launch failed.
        """
        # It is put back when the launch succeeds: a failed one leaves it undefined.
        epoch, self._epoch = self._epoch, None
        with reported(step):
            if epoch is None:
                raise StaleEpochError("an earlier step of this epoch failed", epoch=step.epoch)
            pending = epoch.launch(step)
        self._epoch = epoch
        return pending

    def run_step(self, step: Step) -> StepResult:
        """Launch a step and wait for its result. Raises as both."""
        return self.launch(step).finish()


def build_model_runner(
    settings: WorkerSettings, on_progress: Callable[[float], None], rendezvous: Rendezvous | None = None
) -> ModelRunner:
    """Connect to the other ranks and load the model.

    Args:
        on_progress: Called with the loaded part of the weights, 0 to 1, and with 0 while a GPU's memory is not free
            yet; raising in it ends the loading.
        rendezvous: As in `make_parallel`.

    Raises:
        DeviceError: there is no such device, its backend has no kernels for the formats of weights, activations or KV
            cache, or the ranks' choices differ.
        ModelDirectoryError: this worker cannot run what the directory holds.
        PartnerLostError: the failure domain's other processes could not be connected to, or one was lost.
    """
    choice, layout = choose_device(settings.device_request), settings.layout
    device = choice.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ops = load_ops(choice.ops_backend, settings.native_isa)
    ops.use_threads(settings.num_threads or num_usable_cores())
    if settings.activation_quantization == "fp8":
        ops.quantize_activations()
    parallel = make_parallel(layout, rendezvous, is_exact=ops.is_exact, device=device.type)
    with_mtp = settings.draft_proposer == "mtp"
    quantization = choose_quantization(settings.quantization, ops)
    dtype = choose_dtype(settings.dtype, ops)
    stored = choose_kv_dtype(settings.kv_cache_dtype, dtype, ops)
    context = ContextLimit(settings.context_limit)
    seed, packed = settings.weights_seed, settings.packed_weights
    options = LoadOptions(with_mtp, seed, device, quantization, stored, context, packed=packed)
    plan = plan_model(settings.model_dir, ops, dtype, options=options, parallel=parallel)
    check_plan(settings, plan)
    check_drafting(settings, plan, ops, parallel=parallel)
    capture = None if settings.enforce_eager else ops.make_capture(device, plan.model.kv_cache_spec.layers)
    graphs = None if capture is None else GraphSettings(capture, settings.graph_batch_sizes or capture.batch_sizes)
    common_sizes = graphs.batch_sizes if graphs is not None and graphs.capture.holds_collectives else ()
    check_ranks_agree(plan, parallel, activations=settings.activation_quantization, graph_batch_sizes=common_sizes)
    if device.type == "cuda":
        wait_for_memory(settings.gpu_memory_utilization, lambda: on_progress(0.0), CurrentGpu())
    started_at = time.perf_counter()
    loaded = load_model(settings.model_dir, ops, dtype, on_progress, options=options, parallel=parallel)
    duration_s, is_gpu = time.perf_counter() - started_at, device.type == "cuda"
    faster = describe_faster(
        settings.device_request,
        look_at_machine(choice),
        is_gpu=is_gpu,
        backend=ops.name,
        instructions=ops.instructions,
    )
    log_loaded(loaded, ops, duration_s=duration_s, faster=faster)
    # The parts of a matrix that ranks have may cut the groups of its format.
    check_activations(settings, loaded.packed_formats)
    drafting = make_drafting(settings, loaded, ops, lambda: on_progress(1.0), parallel=parallel)
    is_measured = device.type == "cuda" and settings.kv_cache_memory_gib is None
    measure = GpuMemory(settings.gpu_memory_utilization) if is_measured else None
    memory_gib = settings.kv_cache_memory_gib or _DEFAULT_MEMORY_GIB
    size = KvCacheSize(int(memory_gib * _GIB), settings.kv_cache_num_blocks, measure)
    return ModelRunner(loaded, ops, size, drafting=drafting, layout=layout, execution=Execution(graphs))


def numerics_fingerprint(loaded: LoadedModel, ops: Ops, layout: RankLayout = _ALONE) -> str:
    """32 hex digits, equal only on workers with bitwise equal results."""
    cache = loaded.model.kv_cache_spec.layers
    cached = sorted({str(tensor.dtype) for layer in cache for tensor in layer})
    formats = [str(loaded.model.dtype), *sorted(each.value for each in loaded.packed_formats)]
    # Sampling depends on numpy and its own version; everything else on the backend, whose `numerics` covers torch, CPU
    # and threads.
    parts = (
        loaded.weights_digest,
        " ".join(formats),
        " ".join(cached),
        ops.name,
        ops.numerics(),
        _layout_numerics(layout, is_exact=ops.is_exact),
        f"numpy-{np.__version__}",
        f"sampling-{SAMPLING_VERSION}",
    )
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _layout_numerics(layout: RankLayout, *, is_exact: bool) -> str:
    """On an exact backend results do not depend on the placement of experts."""
    has_spread_experts = layout.has_expert_parallel and not is_exact
    return f"tp-{layout.tp_size} ep-{layout.ep_size if has_spread_experts else 1}"
