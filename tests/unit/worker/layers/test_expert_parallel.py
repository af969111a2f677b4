"""Experts spread over all ranks of a cell, here threads: they compute the same as experts in one place, in rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.forward.forward_context import forward_context
from services.worker.layers.expert_parallel import ExpertParallel, local_experts
from services.worker.layers.linear import Linear
from services.worker.layers.moe import Router, SparseMlp
from services.worker.ops import BACKEND_NAMES, Ops, RouterScore, RoutingRule, SwigluClamp, load_ops
from services.worker.parallel.communicator import SINGLE, Communicator, Parallel
from tests.support.ranks.spread_experts import HIDDEN_SIZE, Layer, ep_layouts, step_context
from tests.support.ranks.thread_ranks import run_ranks

every_backend = pytest.mark.parametrize("ops", [load_ops(name) for name in BACKEND_NAMES], ids=BACKEND_NAMES)


@pytest.mark.parametrize(("num_experts", "ep_size"), [(8, 1), (8, 4), (7, 3), (2, 5), (128, 6)])
def test_experts_are_spread_evenly_and_each_has_one_rank(num_experts: int, ep_size: int) -> None:
    runs = [local_experts(num_experts, rank, ep_size) for rank in range(ep_size)]
    assert [expert for run in runs for expert in run] == list(range(num_experts))
    lengths = [len(run) for run in runs]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


def spread(layer: Layer, ops: Ops, parallel: Parallel, tokens_per_round: int) -> Tensor:
    """The outputs for a rank's tokens with experts spread over all ranks."""
    experts = layer.load(ops, parallel)
    assert isinstance(experts, ExpertParallel)
    experts._tokens_per_round = tokens_per_round
    return experts(*layer.step(parallel.layout.dp_rank))


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    num_experts = draw(st.integers(1, 9))
    return Layer(
        num_experts,
        draw(st.integers(1, num_experts)),
        tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))),
        clamp=draw(st.sampled_from([None, SwigluClamp(1.702, 1.5)])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=draw(st.integers(0, 1000)),
    )


@given(layer=layers(), tp_size=st.integers(1, 3), tokens_per_round=st.sampled_from([1, 2, 512]))
@settings(max_examples=15)
def test_spreading_experts_changes_no_bit_on_the_reference_backend(
    layer: Layer, tp_size: int, tokens_per_round: int
) -> None:
    ops, across = load_ops("reference"), layer.num_tokens_across_dp
    assume(len(across) * tp_size > 1)

    def run(parallel: Parallel) -> bool:
        # A group that has all experts to itself.
        alone = layer.load(ops, replace(parallel, ep=None))
        expected = alone(*layer.step(parallel.layout.dp_rank))
        return torch.equal(spread(layer, ops, parallel, tokens_per_round), expected)

    with forward_context(step_context(ops, across if len(across) > 1 else ())):
        assert all(run_ranks(ep_layouts(len(across), tp_size), run))


@every_backend
@pytest.mark.parametrize(("dp_size", "tp_size"), [(1, 2), (2, 1), (2, 2), (4, 1), (1, 3)])
def test_spread_experts_compute_the_same_as_one_rank(ops: Ops, dp_size: int, tp_size: int) -> None:
    layer = Layer(6, 3, tuple(range(1, 2 * dp_size, 2)), seed=dp_size)
    alone = layer.load(ops, SINGLE)
    with forward_context(step_context(ops, layer.num_tokens_across_dp if dp_size > 1 else ())):
        outputs = run_ranks(
            ep_layouts(dp_size, tp_size), lambda parallel: spread(layer, ops, parallel, 512), is_exact=ops.is_exact
        )
    for rank, output in enumerate(outputs):
        torch.testing.assert_close(output, alone(*layer.step(rank // tp_size)), atol=1e-4, rtol=1e-5)
        # All ranks of a group have the same bits.
        assert torch.equal(output, outputs[rank // tp_size * tp_size])


@pytest.mark.parametrize("num_experts", [1, 3])
def test_there_may_be_more_ranks_than_experts(num_experts: int) -> None:
    ops, layer = load_ops("reference"), Layer(num_experts, 1, (2, 5))
    with forward_context(step_context(ops, (2, 5))):
        outputs = run_ranks(ep_layouts(2, 2), lambda parallel: spread(layer, ops, parallel, 512))
    for rank, output in enumerate(outputs):
        torch.testing.assert_close(output, layer.load(ops, SINGLE)(*layer.step(rank // 2)))


class Recorder:
    """A communicator that records how many rows each `all_to_all` sent."""

    def __init__(self, communicator: Communicator) -> None:
        self.rank = communicator.rank
        self.size = communicator.size
        self.all_reduce = communicator.all_reduce
        self.all_gather = communicator.all_gather
        self.gather_rows = communicator.gather_rows
        self.reduce_scatter_rows = communicator.reduce_scatter_rows
        self.num_rows_sent: list[int] = []
        self._communicator = communicator

    def all_to_all(self, x: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        """See `Communicator`."""
        self.num_rows_sent.append(len(x))
        return self._communicator.all_to_all(x, send_counts, receive_counts)


def test_rounds_are_bounded_and_the_longest_rank_determines_their_number() -> None:
    ops, layer = load_ops("reference"), Layer(4, 2, (1, 11))

    def run(parallel: Parallel) -> list[int]:
        assert parallel.ep is not None
        recorder = Recorder(parallel.ep)
        spread(layer, ops, replace(parallel, ep=recorder), tokens_per_round=3)
        return recorder.num_rows_sent

    with forward_context(step_context(ops, layer.num_tokens_across_dp)):
        sent = run_ranks(ep_layouts(2, 1), run)
    # Each round exchanges the counts of all experts, the tokens' rows, and the outputs.
    counts, rows, outputs = ([of_rank[start::3] for of_rank in sent] for start in range(3))
    assert counts == [[4] * 4] * 2
    assert rows == [[2, 0, 0, 0], [6, 6, 6, 4]]
    assert [sum(of_round) for of_round in zip(*outputs, strict=True)] == [8, 6, 6, 4]


def test_more_tokens_than_planned_are_not_dropped_silently() -> None:
    layer, ops = Layer(4, 2, (3,)), load_ops("cpu")
    with forward_context(step_context(ops, (2, 2))), pytest.raises(AssertionError, match="more tokens"):
        run_ranks(ep_layouts(1, 2), lambda parallel: spread(layer, ops, parallel, 512))


def test_a_nan_of_one_token_does_not_spread_on_any_rank() -> None:
    layer, ops = Layer(4, 2, (3, 2)), load_ops("cpu")

    def run(parallel: Parallel) -> tuple[Tensor, Tensor]:
        experts, (x, expert_ids, weights) = layer.load(ops, parallel), layer.step(parallel.layout.dp_rank)
        expected = experts(x, expert_ids, weights)
        if parallel.layout.dp_rank == 0:
            x[1] = torch.nan
        return expected, experts(x, expert_ids, weights)

    with forward_context(step_context(ops, layer.num_tokens_across_dp)):
        (expected, output), others = run_ranks(ep_layouts(2, 1), run)
    assert output[1].isnan().all()
    torch.testing.assert_close(output[[0, 2]], expected[[0, 2]])
    torch.testing.assert_close(*others)


def test_a_mixture_with_a_shared_expert_has_the_same_bits_when_spread() -> None:
    ops, layer = load_ops("reference"), Layer(6, 2, (4, 1))
    gate = layer.random(6, HIDDEN_SIZE, part=7000)

    def mixture(parallel: Parallel) -> Tensor:
        router = Router(ops, Linear(ops, gate, torch.float32), RoutingRule(2, RouterScore.SOFTMAX), dtype=torch.float32)
        return SparseMlp(router, layer.load(ops, parallel), shared=torch.sin)(layer.tokens(parallel.layout.dp_rank))

    with forward_context(step_context(ops, layer.num_tokens_across_dp)):
        outputs = run_ranks(ep_layouts(2, 1), lambda parallel: (mixture(parallel), mixture(replace(parallel, ep=None))))
    assert all(torch.equal(*pair) for pair in outputs)
