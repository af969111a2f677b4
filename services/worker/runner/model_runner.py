"""Runs steps on the device."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from services.worker.batch.enter_checks import BatchLimits, require
from services.worker.batch.replay import ReplayScorer
from services.worker.batch.step_input import StepInput
from services.worker.config import WorkerSettings
from services.worker.device import choose_device, propose_steps
from services.worker.forward.forward_context import (
    UNCOUPLED,
    AttentionMetadata,
    DpMetadata,
    ForwardContext,
    Progress,
    forward_context,
)
from services.worker.forward.kv_cache import KvCache, KvCacheSpec, num_blocks_for
from services.worker.forward.staging import to_device
from services.worker.layout import RankLayout
from services.worker.models.loader import LoadedModel, LoadOptions, ModelFacts, load_model
from services.worker.ops import Ops, load_ops
from services.worker.parallel.distributed import Rendezvous, make_parallel
from services.worker.runner.cache_memory import GpuMemory, KvCacheSize
from services.worker.runner.graph_runner import CudaCapture, DecodeGraphs, GraphSettings
from services.worker.runner.input_batch import InputBatch
from services.worker.runner.matchers import GrammarMatchers
from services.worker.runner.number_formats import check_ranks_agree, choose_dtype, choose_quantization
from services.worker.runner.prompt_logprobs import PromptScorer
from services.worker.sampling.sampler import SampledTokens, Sampler
from services.worker.spec_decode.drafting import make_drafting
from services.worker.spec_decode.drafts import ComputedStep, Drafting
from services.worker.step import Int32Column, PromptLogprobs, Step, StepOutput
from shared.cores import num_usable_cores
from shared.errors import StaleEpochError
from shared.limits import GRAPH_BATCH_SIZES
from shared.model_dir import ModelDirectoryError

_GIB = 1024**3
_DEFAULT_MEMORY_GIB = 1.0
_NO_TOKENS = SampledTokens(np.empty(0, np.int32), np.empty(0, np.int32))
_ALONE = RankLayout()


class ModelRunner:
    """One model on one device, with its KV cache, batch and sampler.

    One thread calls `attach` and `run_step`; any thread may read the facts. Invariant: between steps the batch holds
    the next input token of every sequence that can be decoded.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        ops: Ops,
        kv_cache_size: KvCacheSize,
        *,
        drafting: Drafting | None = None,
        layout: RankLayout = _ALONE,
        graphs: GraphSettings | None = None,
    ) -> None:
        """`loaded` was loaded with `ops` and for `layout`; without `drafting` no tokens are drafted, without
        `graphs` every step runs eagerly.
        """
        self._model = loaded.model
        self.device = loaded.device
        self._ops = ops
        self._sampler = Sampler(ops)
        self._drafting = drafting
        self._matchers = GrammarMatchers(loaded.model_dir, loaded.facts.logits_width, loaded.facts.eos_token_ids)
        self._kv_cache_size = kv_cache_size
        self._graph_settings = graphs
        self._kv_cache: KvCache | None = None
        self._graphs: DecodeGraphs | None = None
        self._batch: InputBatch | None = None
        self._scorer = PromptScorer(self._ops, self._model.compute_logits)
        self._replay_scorer = ReplayScorer(ops, self._model.compute_logits)
        self._progress = Progress()
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

    def attach(self, *, block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """Start an epoch with an empty batch.

        The KV cache is kept from the last epoch if its blocks have this size, and so are graphs if they fit.

        Returns:
            The number of KV blocks; 0 if the memory does not hold one, and then no step can be run.
        """
        self._batch = None
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
        if self._graph_settings is not None and (self._graphs is None or not self._graphs.fits(limits)):
            self._graphs = None
            self._graphs = DecodeGraphs(self._model.forward, self._context, limits, self._graph_settings, self.device)
        drafter = None if self._drafting is None else self._drafting.begin(limits, cache)
        self._batch = InputBatch(limits, make_matcher=self._matchers.make, drafter=drafter)
        self._scorer = PromptScorer(self._ops, self._model.compute_logits)
        return limits.num_blocks

    def run_step(self, step: Step) -> StepOutput:
        """Update the batch, run the model, sample.

        Raises:
            StepMismatchError: the step does not fit the batch; nothing was computed.
            StaleEpochError: an earlier step of the epoch failed.
        """
        # It is put back when the step succeeds: a failed step leaves it undefined.
        batch, self._batch = self._batch, None
        if batch is None:
            raise StaleEpochError("an earlier step of this epoch failed", epoch=step.epoch)
        output = self._compute(batch, step)
        self._batch = batch
        self._progress.advance()
        return output

    @torch.inference_mode()
    def _compute(self, batch: InputBatch, step: Step) -> StepOutput:
        started_ns = time.perf_counter_ns()
        step_input = batch.apply(step)
        dp = self._dp_metadata(step, len(step_input.token_ids))
        hidden = self._run_model(step_input, dp)
        prompt_logprobs = self._score_prompts(step_input, hidden)
        num_replayed, num_replay_mismatches = self._score_replays(step_input, hidden)
        sampled = self._sample(step_input, hidden)
        token_ids = _usable_tokens(sampled)
        batch.record_sampled(step_input.row_slots, token_ids, sampled.counts)
        if self._drafting is not None and len(hidden):
            self._drafting.proposer.observe(ComputedStep(step_input, hidden, token_ids, sampled.counts))
        return StepOutput(
            epoch=step.epoch,
            step_id=step.step_id,
            token_ids=sampled.token_ids,
            not_finite_rows=_result_rows(step_input, sampled.not_finite_rows),
            failed_grammar_rows=_result_rows(step_input, sampled.failed_grammar_rows),
            device_time_us=(time.perf_counter_ns() - started_ns) // 1000,
            counts=_result_counts(step_input, sampled),
            num_draft_tokens=len(step_input.sampling.draft_token_ids),
            logprobs=sampled.logprobs,
            prompt_logprobs=prompt_logprobs,
            num_replayed_tokens=num_replayed,
            num_replay_mismatches=num_replay_mismatches,
        )

    def _dp_metadata(self, step: Step, num_tokens: int) -> DpMetadata:
        """What coupled ranks compute in this step, checked against this rank's `num_tokens`.

        If it differed, partners would be left waiting in a collective.

        Raises:
            StepMismatchError: the numbers do not fit.
        """
        counts, layout = step.num_tokens_across_dp, self.layout
        require(
            len(counts) == (layout.dp_size if layout.is_coupled else 0),
            "num_tokens_across_dp must have one entry per coupled DP rank",
            num_ranks=len(counts),
        )
        require(bool(counts) or not step.is_dummy, "a dummy step needs coupled ranks")
        if counts:
            require(min(counts) > 0, "num_tokens_across_dp has a rank that computes nothing")
            require(
                counts[layout.dp_rank] == num_tokens,
                "num_tokens_across_dp differs from the number of tokens that the step computes",
                num_tokens=num_tokens,
            )
        return DpMetadata(counts, step.graph_batch_size)

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
        num_tokens, length = limits.max_num_batched_tokens, min(limits.max_num_batched_tokens, limits.context_length)
        starts = np.append(np.arange(0, num_tokens, length, dtype=np.int32), np.int32(num_tokens))
        lengths = np.diff(starts)
        attention = AttentionMetadata(
            is_prefill=True,
            slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=self.device),
            # All of a context is read from the one block.
            block_tables=to_device(np.zeros((len(lengths), -(-length // limits.block_size)), np.int32), self.device),
            context_lens=to_device(lengths, self.device),
            cu_seqlens_q=to_device(starts, self.device),
            query_lens=tuple(lengths.tolist()),
            context_lens_host=tuple(lengths.tolist()),
            max_query_len=length,
            max_context_len=length,
        )
        positions = to_device(np.arange(num_tokens, dtype=np.int64) % length, self.device)
        with forward_context(ForwardContext.for_step(self._ops, attention, cache)):
            hidden = self._model.forward(torch.zeros_like(positions), positions)
        self._model.compute_logits(hidden[: limits.max_num_seqs])

    def _context(self, attention: AttentionMetadata, dp: DpMetadata = UNCOUPLED) -> ForwardContext:
        assert self._kv_cache is not None, "a step without a KV cache"
        return ForwardContext.for_step(self._ops, attention, self._kv_cache, dp=dp, progress=self._progress)

    def _prepare_model(self, step_input: StepInput, dp: DpMetadata) -> ForwardContext:
        attention = AttentionMetadata(
            is_prefill=step_input.is_prefill,
            slot_mapping=to_device(step_input.slot_mapping, self.device),
            block_tables=to_device(step_input.block_tables, self.device),
            context_lens=to_device(step_input.context_lens, self.device),
            cu_seqlens_q=to_device(step_input.cu_seqlens_q, self.device),
            query_lens=tuple(step_input.query_lens.tolist()),
            context_lens_host=tuple(step_input.context_lens.tolist()),
            max_query_len=int(step_input.query_lens.max()),
            max_context_len=int(step_input.context_lens.max()),
        )
        return self._context(attention, dp)

    def _run_model(self, step_input: StepInput, dp: DpMetadata) -> Tensor:
        """[num_tokens, hidden]; empty without tokens."""
        if not len(step_input.token_ids):
            # Every sequence to decode already has all its tokens.
            return torch.empty(0)
        if self._graphs is not None and self._graphs.can_run(step_input):
            return self._graphs.run(step_input)
        with forward_context(self._prepare_model(step_input, dp)):
            return self._model.forward(
                to_device(step_input.token_ids, self.device), to_device(step_input.positions, self.device)
            )

    def _score_prompts(self, step_input: StepInput, hidden: Tensor) -> PromptLogprobs:
        if not step_input.scored_chunks:
            return ()
        return self._scorer.score(step_input.scored_chunks, step_input.token_ids, hidden)

    def _score_replays(self, step_input: StepInput, hidden: Tensor) -> tuple[int, int]:
        if not step_input.replayed_chunks:
            return 0, 0
        return self._replay_scorer.score(step_input.replayed_chunks, step_input.token_ids, hidden)

    def _sample(self, step_input: StepInput, hidden: Tensor) -> SampledTokens:
        if not len(step_input.row_slots):
            # No prompt of the step is complete yet.
            return _NO_TOKENS
        logit_tokens = step_input.logit_tokens()
        if logit_tokens is not None:
            hidden = hidden[to_device(logit_tokens, self.device)]
        return self._sampler.sample(self._model.compute_logits(hidden), step_input.sampling)


def build_model_runner(settings: WorkerSettings, on_progress: Callable[[float], None]) -> ModelRunner:
    """Meet the other ranks and load the model.

    Args:
        on_progress: Called with the loaded part of the weights, 0 to 1; raising in it ends the loading.

    Raises:
        DeviceError: there is no such device, its backend has no kernels for what weights should be quantised to, or
            the ranks' choices differ.
        ModelDirectoryError: this worker cannot run what the directory holds.
        RuntimeError: the rendezvous with the failure domain's other processes failed.
    """
    torch.set_num_threads(settings.num_threads or num_usable_cores())
    choice, layout = choose_device(settings.device_request), settings.layout
    device = choice.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ops = load_ops(choice.ops_backend)
    parallel = make_parallel(layout, _rendezvous(settings), is_exact=ops.is_exact, device=device.type)
    with_mtp = settings.draft_proposer == "mtp"
    quantization = choose_quantization(settings.quantization, ops)
    options = LoadOptions(with_mtp, settings.weights_seed, device, quantization)
    dtype = choose_dtype(settings.dtype, ops)
    loaded = load_model(settings.model_dir, ops, dtype, on_progress, options=options, parallel=parallel)
    check_ranks_agree(loaded, parallel)
    if layout.has_expert_parallel and not loaded.model.has_experts:
        raise ModelDirectoryError(f"{settings.model_dir}: the model has no experts for --ep to split")
    drafting = make_drafting(settings, loaded, ops, lambda: on_progress(1.0))
    is_measured = device.type == "cuda" and settings.kv_cache_memory_gib is None
    measure = GpuMemory(settings.gpu_memory_utilization) if is_measured else None
    memory_gib = settings.kv_cache_memory_gib or _DEFAULT_MEMORY_GIB
    size = KvCacheSize(int(memory_gib * _GIB), settings.kv_cache_num_blocks, measure)
    # The exchange of experts' tokens needs their numbers on the host, which no graph can wait for.
    has_graphs = device.type == "cuda" and not settings.enforce_eager and not layout.has_expert_parallel
    graphs = GraphSettings(CudaCapture(), settings.graph_batch_sizes or GRAPH_BATCH_SIZES) if has_graphs else None
    return ModelRunner(loaded, ops, size, drafting=drafting, layout=layout, graphs=graphs)


def _rendezvous(settings: WorkerSettings) -> Rendezvous | None:
    if settings.rendezvous is None:
        return None
    return Rendezvous(settings.rendezvous, settings.domain_start_id, settings.collective_host)


def numerics_fingerprint(loaded: LoadedModel, ops: Ops, layout: RankLayout = _ALONE) -> str:
    """32 hex digits, equal only on workers with bitwise equal results."""
    formats = [str(loaded.model.dtype), *sorted(each.value for each in loaded.packed_formats)]
    # Sampling depends on numpy; everything else on the backend, whose `numerics` covers torch, CPU and threads.
    parts = (
        loaded.weights_digest,
        " ".join(formats),
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


def _usable_tokens(sampled: SampledTokens) -> Int32Column:
    """Meaningless tokens are replaced by token 0, which every model has."""
    if not len(sampled.not_finite_rows):
        return sampled.token_ids
    # A row that is not finite has one token.
    places = sampled.not_finite_rows
    if sampled.counts is not None:
        places = (np.cumsum(sampled.counts, dtype=np.int32) - sampled.counts)[places]
    token_ids = sampled.token_ids.copy()
    token_ids[places] = 0
    return token_ids


def _result_counts(step_input: StepInput, sampled: SampledTokens) -> Int32Column | None:
    if step_input.row_numbers is None:
        return sampled.counts
    counts = np.zeros(step_input.num_result_rows, np.int32)
    counts[step_input.row_numbers] = 1 if sampled.counts is None else sampled.counts
    return counts


def _result_rows(step_input: StepInput, rows: Int32Column) -> Int32Column:
    return rows if step_input.row_numbers is None else step_input.row_numbers[rows].astype(np.int32)
