"""Experts spread over all ranks, here threads, in steps of one size: what they compute by exchanging rows, or alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from services.worker.forward.forward_context import forward_context
from services.worker.layers.expert_parallel import ExpertParallel, local_experts
from services.worker.layers.gathered_experts import GatheredExperts
from services.worker.layers.linear import Linear
from services.worker.layers.moe import Router, SparseMlp
from services.worker.ops import (
    BACKEND_NAMES,
    ExpertWeights,
    Ops,
    RouterScore,
    RoutingRule,
    SwigluClamp,
    load_ops,
)
from services.worker.ops.triton.backend import TritonOps
from services.worker.ops.triton.exact_backend import TritonExactOps
from services.worker.parallel.communicator import SINGLE, Parallel
from tests.support.kernels.interpreted_products import multiply_in_order
from tests.support.ranks.shape_communicator import ShapeCommunicator
from tests.support.ranks.spread_experts import HIDDEN_SIZE, Layer, ep_layouts, step_context
from tests.support.ranks.thread_ranks import run_ranks

_interpreter = threading.Lock()


def one_at_a_time(ops: Ops) -> Ops:
    """`ops`, whose kernels run in Triton's interpreter, which serves one thread at a time."""

    def with_locked_kernels(prepare: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: _locked(prepare(*args))

    for name in ("prepare_linear", "prepare_experts"):
        setattr(ops, name, with_locked_kernels(getattr(ops, name)))
    for name in ("route", "combine_experts"):
        setattr(ops, name, _locked(getattr(ops, name)))
    return ops


def _locked(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _interpreter:
            return function(*args, **kwargs)

    return call


OPS: dict[str, Ops] = {
    **{name: load_ops(name) for name in BACKEND_NAMES},
    "triton": one_at_a_time(TritonOps()),
    "triton-exact": one_at_a_time(TritonExactOps()),
}
# The interpreter is slow.
every_backend = pytest.mark.parametrize(
    "ops",
    [
        pytest.param(ops, id=name, marks=[pytest.mark.slow] if name == "triton-exact" else [])
        for name, ops in OPS.items()
    ],
)
cpu_backends = pytest.mark.parametrize("ops", [OPS[name] for name in BACKEND_NAMES], ids=BACKEND_NAMES)
SIZE = 4
# Three ranks of a group cannot share four tokens evenly.
CELLS = [
    pytest.param(ops, dp_size, tp_size, id=f"{name}-{dp_size}-{tp_size}")
    for name, ops in OPS.items()
    for dp_size, tp_size in ((2, 2), (1, 2), (2, 1), (4, 1), (1, 3))
    if name in BACKEND_NAMES or (dp_size, tp_size) == (2, 2)
]


@pytest.fixture(autouse=True)
def ordered_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """See `multiply_in_order`."""
    multiply_in_order(monkeypatch)


def make_layer(dp_size: int, *, size: int = SIZE, num_experts: int = 6, seed: int = 1) -> Layer:
    """Every DP rank has equally many tokens."""
    return Layer(num_experts, min(3, num_experts), (size,) * dp_size, seed=seed)


def run_layer(layer: Layer, ops: Ops, tp_size: int, *, is_graph: bool) -> list[Tensor]:
    """Each rank's outputs in a step that runs from a graph, or eagerly."""
    across = layer.num_tokens_across_dp
    context = step_context(ops, across if len(across) > 1 else (), graph_batch_size=across[0] if is_graph else 0)
    layouts = ep_layouts(len(across), tp_size)

    def run(parallel: Parallel) -> Tensor:
        experts = layer.load(ops, parallel)
        assert isinstance(experts, ExpertParallel)
        return experts(*layer.step(parallel.layout.dp_rank))

    with forward_context(context):
        return run_ranks(layouts, run, is_exact=ops.is_exact)


@pytest.mark.parametrize(("ops", "dp_size", "tp_size"), CELLS)
def test_a_graph_computes_what_an_exchange_of_rows_does(ops: Ops, dp_size: int, tp_size: int) -> None:
    layer = make_layer(dp_size)
    outputs = run_layer(layer, ops, tp_size, is_graph=True)
    eager = run_layer(layer, ops, tp_size, is_graph=False)
    for rank, output in enumerate(outputs):
        torch.testing.assert_close(output, eager[rank], atol=1e-4, rtol=1e-5)
        assert not ops.is_exact or torch.equal(output, eager[rank])
        # All ranks of a group have the same bits.
        assert torch.equal(output, outputs[rank // tp_size * tp_size])


@given(
    dp_size=st.integers(1, 3),
    tp_size=st.integers(1, 3),
    size=st.integers(1, 9),
    num_experts=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    clamp=st.sampled_from([None, SwigluClamp(1.702, 1.5)]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=10)
def test_on_the_reference_backend_a_graph_changes_no_bit(
    *,
    dp_size: int,
    tp_size: int,
    size: int,
    num_experts: int,
    dtype: torch.dtype,
    clamp: SwigluClamp | None,
    seed: int,
) -> None:
    tp_size = max(tp_size, 3 - dp_size)
    ops, layer = load_ops("reference"), make_layer(dp_size, size=size, num_experts=num_experts, seed=seed)
    layer = replace(layer, dtype=dtype, clamp=clamp)
    across = layer.num_tokens_across_dp if dp_size > 1 else ()

    def run(parallel: Parallel) -> bool:
        step = layer.step(parallel.layout.dp_rank)
        # A group that has all experts to itself.
        expected = layer.load(ops, replace(parallel, ep=None))(*step)
        return torch.equal(layer.load(ops, parallel)(*step), expected)

    with forward_context(step_context(ops, across, graph_batch_size=size)):
        assert all(run_ranks(ep_layouts(dp_size, tp_size), run))


@cpu_backends
@pytest.mark.parametrize("num_experts", [1, 3])
def test_there_may_be_more_ranks_than_experts(ops: Ops, num_experts: int) -> None:
    layer = make_layer(2, num_experts=num_experts)
    for rank, output in enumerate(run_layer(layer, ops, 2, is_graph=True)):
        expected = layer.load(ops, SINGLE)(*layer.step(rank // 2))
        torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-5)


@every_backend
@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:All-NaN slice")
def test_a_padded_row_of_garbage_reaches_no_other_row_of_any_rank(ops: Ops) -> None:
    layer, gate = make_layer(2), torch.randn(6, HIDDEN_SIZE, generator=torch.Generator().manual_seed(9))
    padding, real = slice(2, SIZE), slice(0, 2)

    def run(parallel: Parallel) -> tuple[Tensor, Tensor]:
        router = Router(ops, Linear(ops, gate, torch.float32), RoutingRule(2, RouterScore.SOFTMAX), dtype=torch.float32)
        mixture, x = SparseMlp(router, layer.load(ops, parallel)), layer.tokens(parallel.layout.dp_rank)
        expected = mixture(x)
        x = x.clone()
        x[padding] = torch.tensor([[torch.nan], [torch.inf]])
        return expected, mixture(x)

    with forward_context(step_context(ops, layer.num_tokens_across_dp, graph_batch_size=SIZE)):
        outputs = run_ranks(ep_layouts(2, 1), run, is_exact=ops.is_exact)
    for expected, output in outputs:
        torch.testing.assert_close(output[real], expected[real])
        assert output[padding].isnan().all()


@every_backend
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_choice_that_is_no_experts_number_adds_nothing(ops: Ops) -> None:
    layer = make_layer(2)

    def run(parallel: Parallel) -> tuple[Tensor, Tensor]:
        experts, (x, expert_ids, weights) = layer.load(ops, parallel), layer.step(parallel.layout.dp_rank)
        expected = experts(x, expert_ids, weights)
        x, expert_ids = x.clone(), expert_ids.clone()
        x[3], expert_ids[3] = torch.nan, torch.tensor([-1, 6, 2**31 - 1])
        return expected, experts(x, expert_ids, weights)

    with forward_context(step_context(ops, layer.num_tokens_across_dp, graph_batch_size=SIZE)):
        for expected, output in run_ranks(ep_layouts(2, 1), run, is_exact=ops.is_exact):
            torch.testing.assert_close(output[:3], expected[:3])
            assert not output[3].any()


def test_other_tokens_than_the_graphs_are_refused() -> None:
    layer, ops = make_layer(1), load_ops("cpu")
    with (
        forward_context(step_context(ops, (), graph_batch_size=SIZE + 1)),
        pytest.raises(AssertionError, match="step's graph"),
    ):
        run_ranks(ep_layouts(1, 2), lambda parallel: layer.load(ops, parallel)(*layer.step(0)))


@pytest.mark.parametrize("is_exact", [False, True])
def test_nothing_is_read_from_the_device(monkeypatch: pytest.MonkeyPatch, is_exact: bool) -> None:
    """The device is `meta`, whose tensors have no values: whatever reads one fails."""
    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda *_: lambda *_, **__: None)
    meta = torch.device("meta")
    ops: Ops = TritonExactOps() if is_exact else TritonOps()
    tp, ep = ShapeCommunicator(1, 2), ShapeCommunicator(3, 4)
    weights = [
        ExpertWeights(torch.empty(20, HIDDEN_SIZE, device=meta), torch.empty(HIDDEN_SIZE, 10, device=meta))
        for _ in local_experts(6, ep.rank, ep.size)
    ]
    parts = [ops.prepare_experts(weights, None, torch.float32) for _ in range(2 if is_exact else 1)]
    experts = ExpertParallel(ops, parts, num_experts=6, tp=tp, ep=ep)
    x = torch.empty(7, HIDDEN_SIZE, device=meta)
    choices = torch.empty(7, 3, dtype=torch.int32, device=meta), torch.empty(7, 3, device=meta)
    with forward_context(step_context(load_ops("reference"), (7, 7), graph_batch_size=7)):
        assert experts(x, *choices).shape == x.shape
    # Four of seven tokens and one row of padding; then what all ranks' tokens get.
    summed = (4 * 4 * 3, 2, HIDDEN_SIZE) if is_exact else (4 * 4, HIDDEN_SIZE)
    assert ep.shapes == [(4, 6), (4, HIDDEN_SIZE), summed]
    assert tp.shapes == [(4, HIDDEN_SIZE)]
    with (
        forward_context(step_context(load_ops("reference"), (7, 7))),
        pytest.raises(NotImplementedError, match="bincount"),
    ):
        experts(x, *choices)


def test_ranks_of_a_single_group_gather_no_tokens() -> None:
    ranks = ShapeCommunicator(0, 2)

    def kernel(x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        assert (expert_ids.dtype, weights.dtype) == (torch.int32, torch.float32)
        # Not all kernels take strides.
        assert all(each.is_contiguous() for each in (x, expert_ids, weights))
        return torch.zeros_like(x)

    experts = GatheredExperts(load_ops("cpu"), [kernel], local=range(3), tp=ranks, ep=ranks)
    experts(*make_layer(1).step(0))
    assert ranks.shapes == [(SIZE, HIDDEN_SIZE), (SIZE // 2, HIDDEN_SIZE)]
