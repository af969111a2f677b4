"""What computes a rank's step: a graph or single kernels, beside the steps of coupled ranks."""

from __future__ import annotations

from services.worker.batch.enter_checks import require
from services.worker.batch.step_input import StepInput
from services.worker.forward.forward_context import UNCOUPLED, DpMetadata
from services.worker.layout import RankLayout
from services.worker.runner.graphs.step_graphs import DecodeGraph, DraftGraph, StepGraphs
from shared.errors import StepMismatchError
from shared.step.step import Step

StepGraph = DecodeGraph | DraftGraph


class Coupling:
    """Chooses a step's graph; coupled ranks are told theirs, and what the others compute."""

    def __init__(self, layout: RankLayout, graphs: StepGraphs | None) -> None:
        self._num_ranks, self._dp_rank = layout.dp_size if layout.is_coupled else 0, layout.dp_rank
        self._graphs = graphs

    def plan(self, step: Step, step_input: StepInput) -> tuple[DpMetadata, StepGraph | None]:
        """What coupled ranks compute in this step, and the graph that computes this rank's part; None if none does.

        If a number of tokens differed, partners would be left waiting in a collective.

        Raises:
            StepMismatchError: the numbers do not fit, there is no such graph, or it does not hold the step.
        """
        counts = step.num_tokens_across_dp
        require(
            len(counts) == self._num_ranks,
            "num_tokens_across_dp must have one entry per coupled DP rank",
            num_ranks=len(counts),
        )
        require(bool(counts) or not step.graph_batch_size, "graph_batch_size needs coupled ranks")
        if not counts:
            return UNCOUPLED, None if self._graphs is None else self._graphs.graph_for(step_input)
        require(min(counts) > 0, "num_tokens_across_dp has a rank that computes nothing")
        require(
            counts[self._dp_rank] == step_input.num_tokens,
            "num_tokens_across_dp differs from the number of tokens that the step computes",
            num_tokens=step_input.num_tokens,
        )
        dp = DpMetadata(counts, step.graph_batch_size)
        return dp, self._common_graph(step.graph_batch_size, step_input) if step.graph_batch_size else None

    def _common_graph(self, size: int, step_input: StepInput) -> DecodeGraph:
        if self._graphs is None or size not in self._graphs.decodes.sizes:
            raise StepMismatchError("graph_batch_size is not one of the captured sizes")
        is_decode = not step_input.is_prefill and step_input.draft_counts is None
        require(is_decode and step_input.num_tokens <= size, "the step does not fit its graph")
        return DecodeGraph(self._graphs.decodes, size)
