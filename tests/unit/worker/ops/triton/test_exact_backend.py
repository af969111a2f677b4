"""On the `triton-exact` backend a row has the same bits alone and among others.

Whole models are compared in `tests/parity/test_exactness.py`. Left to `make proofs`: products of 2048 rows, which have
more tiles of the same size.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from services.worker.device import DeviceError
from services.worker.ops import AttentionParams, ExpertGroups, ExpertWeights, Ops, RouterScore, RoutingRule, load_ops
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.ops.triton.attention.exact_plan import ExactPlan
from services.worker.ops.triton.exact_backend import TritonExactOps
from services.worker.ops.triton.products import tile_sizes
from tests.support.kernels.attention_batches import Batch, random
from tests.support.kernels.interpreted_products import compute_float8
from tests.support.kernels.packed_matrices import KINDS, PLAIN_NUMBERS, MatrixKind
from tests.support.kernels.paged_attention import FP8, PagedStep
from tests.support.models.paged_model import attention_metadata

# More than a tile of the largest size has.
NUM_ROWS = 170
# Some of the first rows, of the last ones, and of those between.
RUNS = (slice(0, 1), slice(77, 78), slice(5, 21), slice(100, 164), slice(-1, None))

pytestmark = pytest.mark.usefixtures("ordered_products")


def check_rows(outputs: Tensor, compute: Callable[..., Tensor], *columns: Tensor) -> None:
    """Compute some of the rows without the others: `compute` maps `columns` to `outputs`."""
    for run in RUNS:
        assert torch.equal(compute(*(column[run] for column in columns)), outputs[run])


@pytest.mark.parametrize("num_rows", [NUM_ROWS, pytest.param(2048, marks=pytest.mark.proof)])
@pytest.mark.parametrize("kind", [PLAIN_NUMBERS, KINDS[-1]], ids=str)
def test_a_products_row_has_the_same_bits_among_1_16_64_and_more(
    kind: MatrixKind, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A product of few rows would be split, one of all rows would not.
    monkeypatch.setattr(tile_sizes, "_WANTED_PROGRAMS", 16)
    monkeypatch.setattr(tile_sizes, "_FEWEST_STEPS", 1)
    kernel = TritonExactOps().prepare_linear(kind.make(33, 64), random(33), torch.float32)
    x = random(num_rows, 64, seed=1)
    check_rows(kernel(x), kernel, x)


def test_so_it_has_where_elements_are_narrow_and_tiles_are_large() -> None:
    weight, x = random(70, 128).half(), random(NUM_ROWS, 128, seed=1).half()
    kernel = TritonExactOps().prepare_linear(weight, None, torch.float16)
    output = kernel(x)
    check_rows(output, kernel, x)
    torch.testing.assert_close(output, F.linear(x.float(), weight.float()).half(), atol=0.02, rtol=0.01)


def test_so_it_has_where_rows_are_quantised_to_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    # After the order of `ordered_products`, in which widened numbers are then added up.
    compute_float8(monkeypatch)
    ops, kind = TritonExactOps(), MatrixKind(MatrixFormat.FP8, 128)
    ops.quantize_activations()
    kernel = ops.prepare_linear(kind.make(9, 160), None, torch.float32)
    x = random(NUM_ROWS, 160, seed=1)
    output = kernel(x)
    assert not torch.equal(output[:2], TritonExactOps().prepare_linear(kind.make(9, 160), None, torch.float32)(x[:2]))
    check_rows(output, kernel, x)


def test_a_tied_head_is_exact_and_has_no_copy_of_the_embedding() -> None:
    weight, x = random(75, 24), random(NUM_ROWS, 24, seed=1)
    _, head = TritonExactOps().prepare_tied(weight, torch.float32)
    check_rows(head(x), head, x)
    weight.zero_()
    assert not head(x[:1]).any()


def test_a_heads_product_is_exact() -> None:
    weight, x = random(3, 40, 24), random(NUM_ROWS, 3, 24, seed=1)
    kernel = TritonExactOps().prepare_per_head_linear(weight)
    check_rows(kernel(x), kernel, x)


@pytest.mark.parametrize("score", RouterScore)
def test_routing_is_exact(score: RouterScore) -> None:
    rule = RoutingRule(6, score, groups=ExpertGroups(3, 2, 2), renormalizes=True, scale=2.5)
    # An odd number of experts, so that rows have all alignments.
    ops, logits = TritonExactOps(), random(80, 33)

    def route(rows: Tensor) -> Tensor:
        return torch.cat(ops.route(rows, rule), dim=1)

    check_rows(route(logits), route, logits)


def test_experts_are_exact_and_so_are_sums_of_rows_that_ran_elsewhere() -> None:
    ops, num_experts, num_tokens = TritonExactOps(), 5, NUM_ROWS
    experts = [
        ExpertWeights(random(64, 48, seed=2 * number) / 7, random(48, 32, seed=2 * number + 1) / 6)
        for number in range(num_experts)
    ]
    kernel = ops.prepare_experts(experts, None, torch.float32)
    x, weights = random(num_tokens, 48, seed=1), random(num_tokens, 2, seed=2)
    expert_ids = random(num_tokens, num_experts, seed=3).topk(2).indices.int()
    outputs = kernel(x, expert_ids, weights)
    check_rows(outputs, kernel, x, expert_ids, weights)
    # As ranks do: each pair's output without a weight, then the sums, by rising expert.
    numbers, order = expert_ids[:40].flatten().sort(stable=True)
    ones = torch.ones(len(order), 1)
    rows = kernel(x[order // 2], numbers.unsqueeze(1), ones)
    combined = ops.combine_experts(rows, order // 2, weights[:40].flatten()[order], num_tokens=40)
    assert torch.equal(combined, outputs[:40])


@pytest.mark.parametrize(
    ("dtype", "window", "has_sinks"),
    [
        (torch.float32, None, False),
        (torch.float32, 7, True),
        (torch.float16, None, True),
        (torch.float16, 7, False),
        (torch.float16, 50, True),
    ],
)
def test_a_token_attends_alike_in_chunks_of_every_length(
    dtype: torch.dtype, window: int | None, *, has_sinks: bool
) -> None:
    length, num_heads = 150, 6
    step = PagedStep(Batch(3, [0], [length], 1), num_heads=num_heads, num_kv_heads=2, key_dim=16, value_dim=16)
    params = AttentionParams(0.3, window=window, sinks=random(num_heads, seed=9) if has_sinks else None)
    check_attention_alike(step, tuple(tensor.to(dtype) for tensor in step.cache), params, dtype)


def test_so_it_does_over_a_cache_in_fp8() -> None:
    step = PagedStep(Batch(3, [0], [150], 1), num_heads=6, num_kv_heads=2, key_dim=16, value_dim=16, kv_dtype=FP8)
    check_attention_alike(step, step.cache, AttentionParams(0.3, window=50), torch.float16)


def check_attention_alike(
    step: PagedStep, cache: tuple[Tensor, ...], params: AttentionParams, dtype: torch.dtype
) -> None:
    """Compute some of the 150 tokens' attention in other chunks."""
    ops, query = TritonExactOps(), step.query.to(dtype)
    whole = ops.decode_attention(query, cache, ExactPlan(step.metadata), params)
    table = step.metadata.block_tables[0].tolist()
    for end, query_len in ((1, 1), (3, 2), (64, 64), (65, 1), (110, 45), (111, 1), (150, 9), (150, 1)):
        metadata = attention_metadata([table], [query_len], [end], block_size=3, is_prefill=query_len > 1)
        run = slice(end - query_len, end)
        assert torch.equal(ops.decode_attention(query[run], cache, ExactPlan(metadata), params), whole[run])


def test_the_selection_has_one_order_whatever_the_longest_context_is() -> None:
    batch = Batch(4, [0, 30], [5, 2], 1)
    plan, query = ExactPlan(batch.metadata()), random(7, 2, 16)
    cache = random(batch.num_blocks, 4, 16, seed=1)
    selected = TritonExactOps().select_context(query, random(7, 2, seed=2), cache, plan, num_selected=40)
    assert selected is not None
    assert selected[2].tolist() == [2, 1, 0] + [-1] * 37
    assert selected[6].tolist() == [*range(31, -1, -1)] + [-1] * 8


def test_it_is_exact_and_says_what_its_numbers_depend_on() -> None:
    ops: Ops = load_ops("triton-exact")
    assert ops.is_exact
    numerics = ops.numerics()
    assert numerics.startswith(f"triton-exact torch-{torch.__version__} triton-")
    ops.quantize_activations()
    assert ops.numerics() == f"{numerics} fp8-activations"


def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(DeviceError, match="--ops-backend triton-exact needs a GPU"):
        load_ops("triton-exact")
