"""Runs steps on the device."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from services.worker.batch.enter_checks import BatchLimits
from services.worker.config import WorkerSettings
from services.worker.device import choose_device, propose_steps
from services.worker.forward.forward_context import AttentionMetadata, ForwardContext, Progress, forward_context
from services.worker.forward.kv_cache import KvCache, KvCacheSpec, num_blocks_for
from services.worker.forward.staging import to_device
from services.worker.layout import RankLayout
from services.worker.models.loader import LoadedModel, LoadOptions, ModelFacts, load_model
from services.worker.ops import DecodeRows, Ops, load_ops
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.parallel.distributed import make_parallel
from services.worker.parallel.rendezvous import Rendezvous
from services.worker.runner.batch_runner import BatchRunner
from services.worker.runner.cache_memory import DeviceMemory, GpuMemory, KvCacheSize, device_memory
from services.worker.runner.device_batch import DeviceBatch
from services.worker.runner.graphs.graph_runner import GraphSettings
from services.worker.runner.graphs.step_graphs import StepGraphs, capture_steps
from services.worker.runner.input_batch import InputBatch
from services.worker.runner.matchers import GrammarMatchers
from services.worker.runner.memory_wait import CurrentGpu, wait_for_memory
from services.worker.runner.number_formats import (
    check_ranks_agree,
    choose_dtype,
    choose_kv_dtype,
    choose_quantization,
    log_loaded,
)
from services.worker.runner.rank import Rank
from services.worker.runner.step_totals import StepTotals
from services.worker.runner.steps.pending_step import PendingStep
from services.worker.runner.stream import Stream, make_stream
from services.worker.spec_decode.drafting import make_drafting
from services.worker.spec_decode.drafts import Drafting
from services.worker.step import Step, StepOutput
from shared.errors import StaleEpochError
from shared.model_dir import ModelDirectoryError
from shared.process.cores import num_usable_cores

logger = logging.getLogger(__name__)

_GIB = 1024**3
_DEFAULT_MEMORY_GIB = 1.0
# More tokens take the kernels of some of these sizes, or of the most tokens.
_LARGEST_COMPILED = 1024
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
        self._model = loaded.model
        self.device = loaded.device
        self._stream = execution.stream or make_stream(loaded.device)
        self._ops = ops
        self._drafting = drafting
        self._matchers = GrammarMatchers(loaded.model_dir, loaded.facts.logits_width, loaded.facts.eos_token_ids)
        self._kv_cache_size = kv_cache_size
        self._graph_settings = execution.graphs
        self._kv_cache: KvCache | None = None
        self._graphs: StepGraphs | None = None
        self._epoch: BatchRunner | None = None
        self._progress = Progress()
        self.step_totals = StepTotals()
        self.facts: ModelFacts = loaded.facts
        self.layout: RankLayout = layout
        self.ops_backend: str = ops.name
        self.is_exact: bool = ops.is_exact
        self.step_proposal = propose_steps(self.device.type)
        self.numerics_fingerprint: str = numerics_fingerprint(loaded, ops, layout)

    @property
    def progress(self) -> int:
        """Layers and steps computed, over all epochs. From any thread."""
        return self._progress.count

    @property
    def num_draft_tokens(self) -> int:
        """Most tokens drafted for a sequence in a step; 0 without drafting."""
        return 0 if self._drafting is None else self._drafting.num_draft_tokens

    @property
    def num_blocks(self) -> int:
        """The KV blocks of the present epoch, or of the last one; 0 before the first. From any thread."""
        return 0 if self._kv_cache is None else self._kv_cache.num_blocks

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the present epoch's KV cache, or of the last one's; 0 before the first. From any thread."""
        cache = self._kv_cache
        return 0 if cache is None else cache.num_blocks * cache.block_size * cache.spec.bytes_per_token

    def device_memory(self) -> DeviceMemory | None:
        """What the process has of its GPU's memory; None on a CPU. From any thread."""
        return device_memory(self.device)

    @property
    def graph_batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes, ascending, for which there are graphs of decode steps, or will be. From any thread."""
        graphs = self._graphs
        return () if graphs is None else graphs.decodes.sizes

    def attach(self, *, block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """Start an epoch with an empty batch, once the launched steps have been computed.

        The KV cache is kept from the last epoch if its blocks have this size, and so are graphs if they fit.

        Returns:
            The number of KV blocks; 0 if the memory does not hold one, and then no step can be run.

        Raises:
            InvalidRequestError: the backend cannot read blocks of this size; the last epoch goes on.
        """
        self._ops.check_block_size(block_size)
        self._epoch = None
        self._stream.synchronize()
        limits = BatchLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_blocks=self.num_blocks,
            context_length=self.facts.context_length,
            logits_width=self.facts.logits_width,
        )
        cache = self._kv_cache
        if cache is None or cache.block_size != block_size:
            # Free the old cache first: there may be no memory for two. Graphs name its addresses.
            self._graphs = None
            self._kv_cache = cache = None
            limits = replace(limits, num_blocks=self._count_blocks(limits))
            if not limits.num_blocks:
                return 0
            self._kv_cache = cache = KvCache(self._model.kv_cache_spec, limits.num_blocks, block_size, self.device)
            # A CPU's kernels are compiled ahead, and so are torch's, of which ops that draw on the host are composed.
            # Of coupled ranks an epoch may reach only some; see `Replays`.
            if self.device.type != "cpu" and not self._ops.draws_on_host and not self.layout.is_coupled:
                self._compile_prefills(limits, cache)
        rank = Rank(self._model, self._ops, self.device, self._stream, self.layout, self._progress)
        if self._graph_settings is not None and (self._graphs is None or not self._graphs.fits(limits, self.layout)):
            # Free the old ones first.
            self._graphs = None
            settings, num_drafts = self._graph_settings, self.num_draft_tokens
            self._graphs = capture_steps(rank, cache, limits, settings, num_draft_tokens=num_drafts)
            if self._graphs is None:
                self._graph_settings = None
        drafter = None if self._drafting is None else self._drafting.begin(limits, cache)
        self._epoch = BatchRunner(
            rank,
            InputBatch(
                limits,
                make_matcher=self._matchers.make,
                eos_token_ids=self.facts.eos_token_ids,
                drafter=drafter,
            ),
            cache,
            graphs=self._graphs,
            proposer=None if self._drafting is None else self._drafting.proposer,
        )
        return limits.num_blocks

    def launch(self, step: Step) -> PendingStep:
        """Update the batch and have the device compute the step; see `BatchRunner` for when this waits.

        Raises:
            StepMismatchError: the step does not fit the batch; nothing was computed.
            StaleEpochError: an earlier launch of the epoch failed.
        """
        # It is put back when the launch succeeds: a failed one leaves it undefined.
        epoch, self._epoch = self._epoch, None
        if epoch is None:
            raise StaleEpochError("an earlier step of this epoch failed", epoch=step.epoch)
        pending = epoch.launch(step)
        self._epoch = epoch
        return pending

    def run_step(self, step: Step) -> StepOutput:
        """Launch a step and wait for its result. Raises as both."""
        return self.launch(step).finish()

    def _count_blocks(self, limits: BatchLimits) -> int:
        """The configured number of KV blocks, or how many fit into the memory, possibly 0."""
        size = self._kv_cache_size
        if size.num_blocks is not None:
            return size.num_blocks
        layers = self._model.kv_cache_spec.layers
        if self._drafting is not None:
            # The proposer's cache has the same blocks and comes out of the same memory.
            layers += self._drafting.proposer.kv_cache_spec.layers
        memory_bytes = size.memory_bytes
        if size.measure is not None:
            memory_bytes = size.measure(partial(self._run_largest_prefill, limits))
        return num_blocks_for(memory_bytes, KvCacheSpec(layers), limits.block_size)

    @torch.inference_mode()
    def _run_largest_prefill(self, limits: BatchLimits) -> None:
        """Compute a prefill of as many tokens as a step may have, and the logits of as many rows; stores no KV."""
        cache = KvCache(self._model.kv_cache_spec, 1, limits.block_size, self.device)
        hidden = self._run_prefill(limits.max_num_batched_tokens, limits.context_length, cache)
        self._model.compute_logits(hidden[: limits.max_num_seqs])

    @torch.inference_mode()
    def _compile_prefills(self, limits: BatchLimits, cache: KvCache) -> None:
        """Compute prefills of many sizes, so that none waits for the compiler when there are requests; stores no KV.

        Kernels differ by powers of two up to some size, and by whether a context may be long.
        """
        powers = [1 << bits for bits in range(1, _LARGEST_COMPILED.bit_length())]
        most = limits.max_num_batched_tokens
        sizes = {min(power + more, most) for power in powers for more in (0, 1)}
        for size in sorted(sizes | {most}):
            for longest in (size, limits.context_length):
                self._run_prefill(size, limits.context_length, cache, longest=longest)
        # The kernel that makes the inputs of decodes is in no graph.
        DeviceBatch(self._ops, limits, self.device).pad(DecodeRows.padding(1, 1, self.device))

    def _run_prefill(
        self, num_tokens: int, context_length: int, cache: KvCache, *, longest: int | None = None
    ) -> Tensor:
        """Compute prompts of `num_tokens` together, as long as they may be, without storing their KV; hidden states.

        Args:
            longest: A bound for every context, as of a step with longer ones; None means what they are.
        """
        length = min(num_tokens, context_length)
        starts = np.append(np.arange(0, num_tokens, length, dtype=np.int32), np.int32(num_tokens))
        lengths = np.diff(starts)
        longest = length if longest is None else longest
        attention = AttentionMetadata(
            is_prefill=True,
            slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=self.device),
            # All of a context is read from the one block.
            block_tables=to_device(np.zeros((len(lengths), -(-length // cache.block_size)), np.int32), self.device),
            context_lens=to_device(lengths, self.device),
            cu_seqlens_q=to_device(starts, self.device),
            query_lens=tuple(lengths.tolist()),
            context_lens_host=(longest,) * len(lengths),
            max_query_len=length,
            max_context_len=longest,
        )
        positions = to_device(np.arange(num_tokens, dtype=np.int64) % length, self.device)
        context = ForwardContext.for_step(self._ops, attention, cache, progress=self._progress)
        with forward_context(context):
            return self._model.forward(torch.zeros_like(positions), positions)


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
        RuntimeError: the failure domain's other processes could not be connected to.
    """
    choice, layout = choose_device(settings.device_request), settings.layout
    device = choice.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ops = load_ops(choice.ops_backend, settings.native_isa, settings.aiter_decode)
    ops.use_threads(settings.num_threads or num_usable_cores())
    if settings.activation_quantization == "fp8":
        ops.quantize_activations()
    parallel = make_parallel(layout, rendezvous, is_exact=ops.is_exact, device=device.type)
    with_mtp = settings.draft_proposer == "mtp"
    quantization = choose_quantization(settings.quantization, ops)
    dtype = choose_dtype(settings.dtype, ops)
    stored = choose_kv_dtype(settings.kv_cache_dtype, dtype, ops)
    options = LoadOptions(with_mtp, settings.weights_seed, device, quantization, stored)
    if device.type == "cuda":
        wait_for_memory(settings.gpu_memory_utilization, lambda: on_progress(0.0), CurrentGpu())
    started_at = time.perf_counter()
    loaded = load_model(settings.model_dir, ops, dtype, on_progress, options=options, parallel=parallel)
    capture = None if settings.enforce_eager else ops.make_capture(device, loaded.model.kv_cache_spec.layers)
    graphs = None if capture is None else GraphSettings(capture, settings.graph_batch_sizes or capture.batch_sizes)
    common_sizes = graphs.batch_sizes if graphs is not None and graphs.capture.holds_collectives else ()
    check_ranks_agree(loaded, parallel, activations=settings.activation_quantization, graph_batch_sizes=common_sizes)
    log_loaded(loaded, ops, duration_s=time.perf_counter() - started_at)
    if layout.has_expert_parallel and not loaded.model.has_experts:
        raise ModelDirectoryError(f"{settings.model_dir}: the model has no experts for --ep to split")
    if settings.activation_quantization == "fp8" and MatrixFormat.FP8 not in loaded.packed_formats:
        raise ModelDirectoryError(f"{settings.model_dir}: no matrices in FP8 for --activation-quantization fp8")
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
    # Sampling depends on numpy; everything else on the backend, whose `numerics` covers torch, CPU and threads.
    parts = (
        loaded.weights_digest,
        " ".join(formats),
        " ".join(cached),
        ops.name,
        ops.numerics(),
        _layout_numerics(layout, is_exact=ops.is_exact),
        f"numpy-{np.__version__}",
    )
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _layout_numerics(layout: RankLayout, *, is_exact: bool) -> str:
    """On an exact backend results do not depend on the placement of experts."""
    has_spread_experts = layout.has_expert_parallel and not is_exact
    return f"tp-{layout.tp_size} ep-{layout.ep_size if has_spread_experts else 1}"
