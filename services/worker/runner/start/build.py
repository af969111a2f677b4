"""Makes a process's runner from its settings."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from services.worker.config import WorkerSettings
from services.worker.device import choose_device
from services.worker.layers.context_limit import ContextLimit
from services.worker.models.loader import LoadOptions, load_model
from services.worker.models.planning import plan_model
from services.worker.ops import load_ops
from services.worker.parallel.distributed import make_parallel
from services.worker.parallel.rendezvous import Rendezvous
from services.worker.runner.cache_memory import GpuMemory, KvCacheSize
from services.worker.runner.graphs.graph_runner import GraphSettings
from services.worker.runner.model_runner import Execution, ModelRunner
from services.worker.runner.start.drafting import check_drafting, make_drafting
from services.worker.runner.start.faster_kernels import describe_faster, look_at_machine
from services.worker.runner.start.memory_wait import CurrentGpu, wait_for_memory
from services.worker.runner.start.number_formats import (
    check_ranks_agree,
    choose_dtype,
    choose_kv_dtype,
    choose_quantization,
    log_loaded,
)
from services.worker.runner.start.plan_checks import check_activations, check_plan
from shared.process.cores import num_usable_cores

_GIB = 1024**3
_DEFAULT_MEMORY_GIB = 1.0


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
    quantization = choose_quantization(settings.quantization, ops, task=settings.task)
    dtype = choose_dtype(settings.dtype, ops)
    stored = choose_kv_dtype(settings.kv_cache_dtype, dtype, ops)
    options = LoadOptions(
        with_mtp,
        settings.weights_seed,
        device,
        quantization,
        stored,
        _choose_context(settings),
        implementation=settings.model_impl,
        packed=settings.packed_weights,
        task=settings.task,
    )
    plan = plan_model(settings.model_dir, ops, dtype, options=options, parallel=parallel)
    check_plan(settings, plan)
    check_drafting(settings, plan, ops, parallel=parallel)
    # What torch computes between our kernels is not in a capture, and a model that embeds decodes nothing.
    is_eager = settings.enforce_eager or plan.model.implementation == "transformers" or settings.task == "embed"
    capture = None if is_eager else ops.make_capture(device, plan.model.kv_cache_spec.layers)
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
    # A file may have FP8 in both encodings.
    check_activations(settings, loaded.packed_formats)
    drafting = make_drafting(settings, loaded, ops, lambda: on_progress(1.0), parallel=parallel)
    is_measured = device.type == "cuda" and settings.kv_cache_memory_gib is None
    measure = GpuMemory(settings.gpu_memory_utilization) if is_measured else None
    memory_gib = settings.kv_cache_memory_gib or _DEFAULT_MEMORY_GIB
    size = KvCacheSize(int(memory_gib * _GIB), settings.kv_cache_num_blocks, measure)
    return ModelRunner(loaded, ops, size, drafting=drafting, layout=layout, execution=Execution(graphs))


def _choose_context(settings: WorkerSettings) -> ContextLimit:
    """The context of the settings, or else the one that a recipe for vectors gives to the model.

    Raises:
        ModelDirectoryError: as from `WorkerSettings.read_recipe`.
    """
    recipe = settings.read_recipe()
    if settings.context_limit is not None or recipe is None or recipe.max_tokens is None:
        return ContextLimit(settings.context_limit)
    # A sequence is a prompt and one more token.
    return ContextLimit(recipe.max_tokens + 1, may_exceed_model=True)
