"""Runs steps on the device."""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.device import propose_steps
from services.worker.drafts.drafter import Drafting
from services.worker.forward.forward_context import Progress
from services.worker.layout import RankLayout
from services.worker.models.loader import LoadedModel, ModelFacts
from services.worker.ops import Ops
from services.worker.runner.batch_runner import BatchRunner
from services.worker.runner.cache_memory import DeviceMemory, KvCacheSize, device_memory
from services.worker.runner.cache_room import CacheRoom
from services.worker.runner.epoch import Epochs
from services.worker.runner.graphs.graph_runner import GraphSettings
from services.worker.runner.numerics import numerics_fingerprint
from services.worker.runner.rank import Rank
from services.worker.runner.step_totals import StepTotals
from services.worker.runner.steps.pending_step import PendingStep, reported
from services.worker.runner.stream import Stream, make_stream
from shared.errors import StaleEpochError
from shared.model_files.implementations import Implementation
from shared.step.step import Step, StepResult

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
        self.implementation: Implementation = loaded.model.implementation
        # transformers' code computes a row differently beside other rows.
        self.is_exact: bool = ops.is_exact and loaded.model.implementation == "lockstep"
        self.step_proposal = propose_steps(self.device.type)
        self.numerics_fingerprint: str = numerics_fingerprint(loaded, ops, layout)

    @property
    def progress(self) -> int:
        """Layers and steps computed, over all epochs. From any thread."""
        return self._rank.progress.num_layers + self.step_totals.num_steps

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
