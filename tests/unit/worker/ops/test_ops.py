"""Every backend computes what `Ops` promises, compared with plain torch in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import get_protocol_members

from services.worker.ops import BACKEND_NAMES, Activation, Ops, load_ops
from services.worker.ops.matrices import IntMatrix

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8

FLAT = ("cpu", "native", "reference", "triton")
# Lists only what it computes otherwise than `triton`.
EXACT = "triton-exact"

every_backend = pytest.mark.parametrize("ops", [load_ops(name) for name in BACKEND_NAMES], ids=BACKEND_NAMES)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=1e-5, rtol=1e-5)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown ops backend 'tpu'; available: aiter, cpu, native, reference, triton"):
        load_ops("tpu")


@pytest.mark.parametrize("name", FLAT)
def test_a_backend_says_in_its_own_class_what_computes_each_op(name: str) -> None:
    ops = load_ops(name)
    assert get_protocol_members(Ops) - vars(type(ops)).keys() - vars(ops).keys() == set()


def test_the_exact_backend_says_only_what_it_computes_otherwise() -> None:
    exact, other = (
        {name: getattr(each, "__func__", each) for name, each in vars(type(load_ops(backend))).items()}
        for backend in (EXACT, "triton")
    )
    listed = {name for name in exact if not name.startswith("__")}
    assert listed <= other.keys()
    assert [name for name in listed if exact[name] == other[name]] == []


@every_backend
def test_a_backend_describes_what_its_numerics_depend_on(ops: Ops) -> None:
    assert ops.numerics().startswith(f"{ops.name} torch-{torch.__version__}")


def test_the_reference_has_no_graphs_on_a_gpu_whose_host_lengths_would_be_those_of_the_capture() -> None:
    gpu = torch.device("cuda")
    assert load_ops("reference").make_capture(gpu, []) is None
    assert load_ops("triton").make_capture(gpu, []) is not None


@every_backend
@pytest.mark.parametrize("num_rows", [1, 3, 40])
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_multiplies_by_the_transposed_weight(ops: Ops, num_rows: int, has_bias: bool) -> None:
    x, weight, bias = random(num_rows, 24), random(40, 24, seed=1), random(40, seed=2) if has_bias else None
    kernel = ops.prepare_linear(weight, bias, torch.float32)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_close(kernel(x), expected)


@every_backend
def test_linear_keeps_no_reference_to_the_weight(ops: Ops) -> None:
    weight = random(40, 24)
    kernel = ops.prepare_linear(weight, None, torch.float32)
    expected = kernel(random(2, 24, seed=1))
    weight.zero_()
    assert torch.equal(kernel(random(2, 24, seed=1)), expected)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_weights_multiply_like_their_dense_values(ops: Ops, dtype: torch.dtype) -> None:
    codes = torch.randint(-128, 128, (40, 24), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    weight, x = IntMatrix(8, codes, random(40, 3, seed=2) / 100, group_size=8), random(5, 24).to(dtype)
    expected = F.linear(x.double(), weight.to_dense(torch.float32).double())
    output = ops.prepare_linear(weight, None, dtype)(x)
    assert output.dtype == dtype
    # Activations have 8 bits at least, and a sum has 24 of them.
    torch.testing.assert_close(output.double(), expected, atol=0.1, rtol=0.02)


@every_backend
@pytest.mark.parametrize("is_tied", [False, True])
def test_an_embedding_has_the_rows_of_its_weight(ops: Ops, is_tied: bool) -> None:
    weight, token_ids = random(40, 24), torch.tensor([3, 39, 0, 3])
    if is_tied:
        embedding, head = ops.prepare_tied(weight, torch.float32)
        assert_close(head(random(2, 24, seed=1)), random(2, 24, seed=1).double() @ weight.double().T)
    else:
        embedding = ops.prepare_embedding(weight, torch.float32)
    assert torch.equal(embedding(token_ids), weight[token_ids])


@every_backend
def test_a_quantized_embedding_has_the_models_dtype(ops: Ops) -> None:
    codes = torch.arange(-48, 48).view(12, 8).to(torch.int8)
    weight = IntMatrix(8, codes, random(12, 2, seed=2), group_size=4, offsets=random(12, 2, seed=3))
    embedding, _ = ops.prepare_tied(weight, torch.bfloat16)
    token_ids = torch.tensor([11, 0, 4])
    assert torch.equal(embedding(token_ids), weight.to_dense(torch.bfloat16)[token_ids])


def test_cpu_multiplies_without_torchs_private_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.ops.cpu.linear._HAS_PACKED_LINEAR", False)
    ops, x, weight, bias = load_ops("cpu"), random(5, 24), random(40, 24, seed=1), random(40, seed=2)
    assert_close(
        ops.prepare_linear(weight, bias, torch.float32)(x), F.linear(x.double(), weight.double(), bias.double())
    )
    assert "plain" in ops.numerics()


@every_backend
def test_rms_norm_divides_by_the_root_mean_square(ops: Ops) -> None:
    x, weight = random(5, 24), random(24, seed=1)
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 0.1).sqrt() * weight.double()
    assert_close(ops.rms_norm(x, weight, 0.1), expected)


@every_backend
def test_add_rms_norm_writes_the_sum_into_the_residual(ops: Ops) -> None:
    x, residual, weight = random(5, 24), random(5, 24, seed=1), random(24, seed=2)
    total = x + residual
    normed = ops.add_rms_norm(x, residual, weight, 0.1)
    assert torch.equal(residual, total)
    assert_close(normed, ops.rms_norm(total, weight, 0.1))


@every_backend
def test_per_head_linear_multiplies_each_head_by_its_own_transposed_weight(ops: Ops) -> None:
    # Heads laid out in a wider tensor, and a weight that is a view.
    x, weight = random(5, NUM_HEADS, 24)[..., :16], random(NUM_HEADS, 16, 40, seed=1).transpose(1, 2)
    expected = torch.einsum("thi,hoi->tho", x.double(), weight.double())
    assert_close(ops.prepare_per_head_linear(weight)(x), expected)


@every_backend
def test_layer_norm_centres_and_scales_each_row(ops: Ops) -> None:
    x, weight, bias = random(5, 40)[:, :24], random(24, seed=1), random(24, seed=2)
    assert_close(
        ops.layer_norm(x, weight, bias, 0.1), F.layer_norm(x.double(), (24,), weight.double(), bias.double(), 0.1)
    )


@every_backend
def test_act_and_mul_gates_the_second_half(ops: Ops) -> None:
    x = random(5, 24)
    gate, up = x.double().chunk(2, dim=1)
    assert_close(ops.act_and_mul(x.clone(), Activation.SILU), F.silu(gate) * up)
    assert_close(ops.act_and_mul(x.clone(), Activation.GELU_TANH), F.gelu(gate, approximate="tanh") * up)


@every_backend
def test_scale_multiplies_in_place_and_rounds_once(ops: Ops) -> None:
    x = random(5, 24).bfloat16()
    expected = (x.float() * 33.75).bfloat16()
    assert torch.equal(ops.scale(x, 33.75), expected)
    assert torch.equal(x, expected)


@every_backend
def test_norms_multiply_by_a_weight_in_float32_before_they_round(ops: Ops) -> None:
    x, residual, weight = random(5, 24).bfloat16(), random(5, 24, seed=1).bfloat16(), random(24, seed=2)
    expected = F.rms_norm(x.float(), (24,), weight, 0.1).bfloat16()
    assert_within_a_rounding(ops.rms_norm(x, weight, 0.1), expected)
    heads = x.view(5, 3, 8)
    expected = F.rms_norm(heads.float(), (8,), weight[:8], 0.1).bfloat16()
    assert_within_a_rounding(ops.rms_norm(heads, weight[:8], 0.1), expected)
    total = residual + x
    expected = F.rms_norm(total.float(), (24,), weight, 0.1).bfloat16()
    assert_within_a_rounding(ops.add_rms_norm(x.clone(), residual, weight, 0.1), expected)
    assert torch.equal(residual, total)


def assert_within_a_rounding(result: Tensor, expected: Tensor) -> None:
    """Nearly all are equal: float32 sums in another order may round to the neighbour."""
    torch.testing.assert_close(result, expected, atol=0, rtol=2**-7)
    assert (result != expected).float().mean() < 0.05


@every_backend
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [HEAD_DIM, HEAD_DIM - 4])
def test_rope_rotates_the_pairs_of_a_heads_first_columns_by_their_tokens_position(
    ops: Ops, rotary_dim: int, is_interleaved: bool
) -> None:
    angles = torch.outer(torch.arange(50.0), torch.tensor([1.0, 0.3, 0.1, 0.03])[: rotary_dim // 2])
    tables = ops.prepare_rope(angles.cos(), angles.sin(), is_interleaved=is_interleaved)
    positions = torch.tensor([0, 7, 49, 7])
    # Laid out as by the fused projection: with other columns after each row.
    fused = random(4, NUM_HEADS + 3, HEAD_DIM)
    untouched = fused.clone()
    columns = torch.arange(rotary_dim).view(*((-1, 2) if is_interleaved else (2, -1)))
    first, second = columns.T if is_interleaved else columns
    heads = fused[:, :NUM_HEADS].double()
    pairs = torch.complex(heads[..., first], heads[..., second])
    turned = pairs * torch.polar(torch.ones(4, 1, len(first)).double(), angles[positions].double().unsqueeze(1))
    ops.rope(fused[:, :NUM_HEADS], ops.select_rope(tables, positions))
    assert_close(fused[:, :NUM_HEADS, first], turned.real)
    assert_close(fused[:, :NUM_HEADS, second], turned.imag)
    assert torch.equal(fused[:, :NUM_HEADS, rotary_dim:], untouched[:, :NUM_HEADS, rotary_dim:])
    assert torch.equal(fused[:, NUM_HEADS:], untouched[:, NUM_HEADS:])


@every_backend
def test_greedy_takes_the_lowest_of_equal_columns(ops: Ops) -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0, 5.0], [-1.0, -1.0, -2.0, -1.0]])
    token_ids, largest = ops.greedy_sample(logits)
    assert (token_ids.tolist(), largest.tolist()) == ([1, 0], [5.0, -1.0])


@every_backend
def test_greedy_treats_nan_as_the_largest(ops: Ops) -> None:
    _, largest = ops.greedy_sample(torch.tensor([[0.0, math.nan, 9.0], [1.0, 2.0, 3.0]]))
    assert largest.isnan().tolist() == [True, False]
