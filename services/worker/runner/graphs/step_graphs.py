"""All that is captured of a process's steps."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

from services.worker.batch.enter_checks import BatchLimits
from services.worker.batch.step_input import StepInput
from services.worker.drafts.drafted_states import ModelStates
from services.worker.forward.capture import NotRepeatableError
from services.worker.forward.forward_context import AttentionMetadata, DpMetadata, ForwardContext
from services.worker.forward.kv_cache import KvCache
from services.worker.layout import RankLayout
from services.worker.runner.graphs.draft_graphs import DraftGraphs
from services.worker.runner.graphs.graph_runner import DecodeGraphs, GraphSettings, StepFunctions
from services.worker.runner.rank import Rank
from services.worker.sampling.sampler import Sampler

logger = logging.getLogger(__name__)


class DecodeGraph(NamedTuple):
    """The graph of one batch size of plain decodes, or of dummies."""

    graphs: DecodeGraphs
    size: int


class DraftGraph(NamedTuple):
    """The graph of one batch size of decodes with drafts."""

    graphs: DraftGraphs
    size: int


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """Graphs that name the addresses of one KV cache."""

    decodes: DecodeGraphs
    drafts: DraftGraphs | None
    """None without drafts, or where padding costs as much as tokens."""
    limits: BatchLimits

    def graph_for(self, step_input: StepInput) -> DecodeGraph | DraftGraph | None:
        """The graph that computes a step of ranks that are not coupled; None if none does."""
        num_seqs = len(step_input.slots)
        if step_input.is_plain_decode:
            size = self.decodes.size_for(num_seqs)
            return None if size is None else DecodeGraph(self.decodes, size)
        if self.drafts is None or step_input.draft_counts is None or step_input.is_prefill:
            return None
        size = self.drafts.size_for(num_seqs)
        return None if size is None else DraftGraph(self.drafts, size)

    def fits(self, limits: BatchLimits, layout: RankLayout) -> bool:
        """Whether the graphs also serve another epoch, with the same KV cache; see `Replays` for coupled ranks."""
        mine = self.limits
        # Only drafts have graphs that a step's number of tokens limits.
        holds_steps = self.drafts is None or limits.max_num_batched_tokens == mine.max_num_batched_tokens
        is_same = (limits.max_num_seqs, limits.block_size) == (mine.max_num_seqs, mine.block_size)
        return is_same and holds_steps and not layout.is_coupled


def capture_steps(
    rank: Rank,
    kv_cache: KvCache,
    limits: BatchLimits,
    settings: GraphSettings,
    *,
    num_draft_tokens: int,
    states: ModelStates | None = None,
) -> StepGraphs | None:
    """Capture what decodes within `limits` need; None if the model's cannot be captured."""
    if not (rank.layout.is_alone or settings.capture.holds_collectives):
        logger.info("decode steps are not captured", extra={"reason": "ranks exchange tensors"})
        return None
    settings.capture.begin()
    model, sampler = rank.model, Sampler(rank.ops, rank.device)

    cache = None if states is None else states.cache

    def make_context(attention: AttentionMetadata, dp: DpMetadata) -> ForwardContext:
        plan = rank.ops.plan_attention(attention, kv_cache)
        return ForwardContext(plan, kv_cache, dp, rank.progress, states=cache)

    functions = StepFunctions(
        forward=model.forward,
        draw=lambda hidden, rows: sampler.draw(model.compute_logits(hidden), rows),
        make_context=make_context,
        states=states,
    )
    try:
        # The largest first: the others then find its memory.
        drafts = None
        if num_draft_tokens and settings.capture.has_device:
            drafts = DraftGraphs(functions, limits, settings, num_draft_tokens=num_draft_tokens, device=rank.device)
        decodes = DecodeGraphs(functions, limits, settings, rank.device, layout=rank.layout)
        return StepGraphs(decodes, drafts, limits)
    except NotRepeatableError as error:
        logger.info("decode steps are not captured", extra={"reason": str(error)})
        return None
