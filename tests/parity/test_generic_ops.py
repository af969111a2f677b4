"""What of transformers' code is an op of ours, and what only looks like one."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.activations import ACT2FN

from services.worker.layers.shard import Shard
from services.worker.models.generic.build import build_skeleton, read_class
from services.worker.models.generic.one_op import Norm, find_network, find_norm
from services.worker.models.generic.products import Product
from services.worker.models.generic.rotary import Rotations, register
from services.worker.ops import Activation, load_ops
from services.worker.weights.dummy_weights import DummyWeights
from tests.support.models.generic_configs import GENERIC_CONFIGS
from tests.support.models.small_configs import CONTEXT_LENGTH

HIDDEN = 32
INNER = 48
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LlamaNorm(nn.Module):
    """Rounds before it multiplies with the weight."""

    offset = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.variance_epsilon = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.normed(x.float()).to(x.dtype)

    def normed(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class OlmoNorm(LlamaNorm):
    """Multiplies in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * self.normed(x.float())).to(x.dtype)


class GemmaNorm(LlamaNorm):
    offset = 1

    def forward(self, x: Tensor) -> Tensor:
        return (self.normed(x.float()) * (1.0 + self.weight.float())).to(x.dtype)


class CentredNorm(LlamaNorm):
    def normed(self, x: Tensor) -> Tensor:
        return super().normed(x - x.mean(-1, keepdim=True))


class NormOfTokens(LlamaNorm):
    def normed(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + self.variance_epsilon)


class OtherEpsNorm(LlamaNorm):
    def normed(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class HalfNorm(LlamaNorm):
    def normed(self, x: Tensor) -> Tensor:
        return torch.cat([super().normed(x[..., : HIDDEN // 2]), x[..., HIDDEN // 2 :]], dim=-1)


class WideNorm(LlamaNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight.float() * self.normed(x.float())


class GatedNorm(LlamaNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x if gate is None else x * gate)


class ShiftedNorm(LlamaNorm):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(HIDDEN))


def on_meta(make: type[nn.Module], dtype: torch.dtype) -> Any:
    with torch.device("meta"):
        return make().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [LlamaNorm, OlmoNorm, GemmaNorm])
def test_a_norm_is_found_and_computed_by_the_op(make: type[LlamaNorm], dtype: torch.dtype) -> None:
    module = on_meta(make, dtype)
    form = find_norm(module, dtype)
    assert form is not None
    assert (form.eps, form.offset) == (module.variance_epsilon, module.offset)
    module = module.to_empty(device="cpu")
    nn.init.normal_(module.weight)
    norm = Norm(load_ops("cpu"), form, module)
    heads = torch.randn(1, 5, 3, HIDDEN).to(dtype)
    for x in (heads[:, :, 0], heads, heads.transpose(1, 2)):
        with torch.no_grad():
            expected, found = module(x), norm(x)
        torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        assert (found.dtype, found[0].stride()) == (expected.dtype, expected[0].stride())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [CentredNorm, NormOfTokens, OtherEpsNorm, HalfNorm, WideNorm, GatedNorm, ShiftedNorm])
def test_what_looks_like_a_norm_stays(make: type[nn.Module], dtype: torch.dtype) -> None:
    if (make, dtype) != (WideNorm, torch.float32):
        assert find_norm(on_meta(make, dtype), dtype) is None


def test_a_norm_computes_itself_what_the_op_does_not_take() -> None:
    module = LlamaNorm().bfloat16()
    form = find_norm(on_meta(LlamaNorm, torch.bfloat16), torch.bfloat16)
    assert form is not None
    norm = Norm(load_ops("cpu"), form, module)
    for x in (torch.randn(1, 3, HIDDEN), torch.randn(2, 3, HIDDEN).bfloat16(), torch.randn(3, HIDDEN).bfloat16()):
        with torch.no_grad():
            assert torch.equal(norm(x), module(x))


class Network(nn.Module):
    act = "silu"

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (Product(*each) for each in ((HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN)))
        self.act_fn = ACT2FN[self.act]

    def forward(self, x: Tensor) -> Any:
        return self.down(self.act_fn(self.gate(x)) * self.up(x))


class GeluNetwork(Network):
    act = "gelu_pytorch_tanh"


class OtherOrderNetwork(Network):
    def forward(self, x: Tensor) -> Any:
        up = self.up(x)
        return self.down(up * self.act_fn(self.gate(x)))


class JoinedNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = Product(HIDDEN, 2 * INNER), Product(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Any:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(up * F.silu(gate))


class SwappedNetwork(JoinedNetwork):
    def forward(self, x: Tensor) -> Any:
        up, gate = self.gate_up(x).chunk(2, dim=-1)
        return self.down(up * F.silu(gate))


class InterleavedNetwork(JoinedNetwork):
    def forward(self, x: Tensor) -> Any:
        joined = self.gate_up(x)
        return self.down(joined[..., 1::2] * F.silu(joined[..., ::2]))


class ErfNetwork(Network):
    act = "gelu"


class ClampedNetwork(Network):
    def forward(self, x: Tensor) -> Any:
        return self.down(self.act_fn(self.gate(x).clamp(max=7)) * self.up(x))


class ScaledNetwork(Network):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * 0.5


class ScaledInput(Network):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x * 2)


class ResidualNetwork(Network):
    def forward(self, x: Tensor) -> Any:
        return x + super().forward(x)


class PlainNetwork(Network):
    def forward(self, x: Tensor) -> Any:
        return self.down(self.act_fn(self.gate(x)))


class RepeatedNetwork(Network):
    def forward(self, x: Tensor) -> Any:
        return self.down(self.act_fn(self.gate(x)) * self.up(x) + 0 * self.up(x))


class MixingNetwork(Network):
    def forward(self, x: Tensor) -> Any:
        return self.down((self.act_fn(self.gate(x)) * self.up(x)).flip(1))


class LearnedNetwork(Network):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.factor


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("make", "activation"),
    [
        (Network, Activation.SILU),
        (GeluNetwork, Activation.GELU_TANH),
        (OtherOrderNetwork, Activation.SILU),
        (JoinedNetwork, Activation.SILU),
    ],
)
def test_a_gated_network_is_found(make: type[nn.Module], activation: Activation, dtype: torch.dtype) -> None:
    network: Any = make()
    form = find_network(network, dtype)
    assert form is not None
    assert (form.activation, form.down) == (activation, network.down)
    assert (form.gate, form.up) == ((network.gate_up, None) if make is JoinedNetwork else (network.gate, network.up))
    assert all(each.kernel is None for each in network.children() if isinstance(each, Product))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "make",
    [
        SwappedNetwork,
        InterleavedNetwork,
        ErfNetwork,
        ClampedNetwork,
        ScaledNetwork,
        ScaledInput,
        ResidualNetwork,
        PlainNetwork,
        RepeatedNetwork,
        MixingNetwork,
        LearnedNetwork,
    ],
)
def test_what_looks_like_a_gated_network_stays(make: type[nn.Module], dtype: torch.dtype) -> None:
    assert find_network(make(), dtype) is None


# Their norms subtract the mean or have no weight; their networks have no gate, or one with another function.
OTHERS = {
    "ApertusMLP",
    "ArceeMLP",
    "Cohere2LayerNorm",
    "Cohere2MoeLayerNorm",
    "CohereLayerNorm",
    "GPT2MLP",
    "GPTBigCodeMLP",
    "GPTNeoXMLP",
    "Jais2MLP",
    "LayerNorm",
    "ModernBertDecoderMLP",
    "NanoChatMLP",
    "NanoChatRMSNorm",
    "NemotronLayerNorm1P",
    "NemotronMLP",
    "OlmoLayerNorm",
    "PersimmonMLP",
    "PhiMLP",
    "RMSNorm",
    "Starcoder2MLP",
}


@pytest.mark.parametrize("architecture", sorted(GENERIC_CONFIGS))
def test_every_such_module_of_a_family_is_found(architecture: str) -> None:
    model_class: Any = getattr(transformers, architecture)
    config = model_class.config_class(**GENERIC_CONFIGS[architecture]).to_dict()
    dtype = torch.bfloat16
    made_class, made = read_class(config, architecture)
    skeleton = build_skeleton(made_class, made, Shard(load_ops("cpu"), DummyWeights(1, dtype)), CONTEXT_LENGTH)
    found = {module for module, _ in skeleton.norms}
    others = {
        type(module).__name__
        for module in skeleton.base.modules()
        if module not in found and type(module).__name__.endswith(("Norm", "MLP"))
    }
    assert others <= OTHERS
    assert all(type(module).__name__.endswith("RMSNorm") for module in found)


def rotate_half(x: Tensor) -> Tensor:
    one, other = x.chunk(2, dim=-1)
    return torch.cat([-other, one], dim=-1)


def halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    size = cos.shape[-1]

    def rotate(x: Tensor) -> Tensor:
        turned = (x[..., :size] * cos + rotate_half(x[..., :size]) * sin).to(x.dtype)
        return torch.cat([turned, x[..., size:]], dim=-1)

    return rotate(q), rotate(k)


def pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def rotate(x: Tensor) -> Tensor:
        columns = torch.stack([x[..., ::2], x[..., 1::2]], dim=-2).flatten(-2)
        turned, _ = halves(columns, columns, cos, sin)
        return turned.view(*x.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)

    return rotate(q), rotate(k)


def backwards(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return halves(q, k, cos, -sin)


def only_query(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return halves(q, k, cos, sin)[0], k


def wider(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return tuple(each.double() for each in halves(q, k, cos, sin))


def with_cosines(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return (*halves(q, k, cos, sin), cos)


def side_by_side(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat(halves(q, k, cos, sin), dim=1)


def failing(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    raise ValueError("no such columns")


def rotation_arguments(
    dtype: torch.dtype, *, factor_dtype: torch.dtype | None = None, rotary_dim: int = 16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k = torch.randn(1, 7, 4, 16).to(dtype).transpose(1, 2), torch.randn(1, 2, 7, 16).to(dtype)
    angles = torch.randn(1, 7, rotary_dim // 2)
    factors = [torch.cat([each, each], dim=-1).to(factor_dtype or dtype) for each in (angles.cos(), angles.sin())]
    return q, k, factors[0], factors[1]


@pytest.mark.parametrize("backend", ["cpu", "native", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("own", "rotary_dim", "is_wide"),
    [(halves, 16, False), (halves, 8, False), (halves, 16, True), (pairs, 16, False)],
)
def test_a_rotation_is_found_and_computed_by_the_op(
    own: Any, rotary_dim: int, is_wide: bool, dtype: torch.dtype, backend: str
) -> None:
    rotations = Rotations(load_ops(backend))
    factor_dtype = torch.float32 if is_wide else dtype
    arguments = rotation_arguments(dtype, factor_dtype=factor_dtype, rotary_dim=rotary_dim)
    copies = [each.clone() for each in arguments]
    rotated = rotations.try_rotate(own, *arguments)
    assert rotated is not None
    assert all(torch.equal(*each) for each in zip(arguments, copies, strict=True))
    tolerance = 4 * torch.finfo(dtype).eps
    for found, expected in zip(rotated, own(*arguments), strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("own", [backwards, only_query, wider, with_cosines, side_by_side, failing])
def test_what_looks_like_a_rotation_stays(own: Any) -> None:
    assert Rotations(load_ops("cpu")).try_rotate(own, *rotation_arguments(torch.float32)) is None


def test_a_rotation_whose_halves_differ_stays() -> None:
    q, k, cos, sin = rotation_arguments(torch.float32)
    rotations = Rotations(load_ops("cpu"))
    assert rotations.try_rotate(halves, q, k, cos.sort(-1).values, sin) is None
    assert rotations.try_rotate(halves, q, k, cos, sin.sort(-1).values) is None
    assert rotations.try_rotate(halves, q.expand(2, -1, -1, -1), k, cos, sin) is None
    assert rotations.try_rotate(halves, q, k, cos, sin) is not None


def test_only_a_step_of_ours_rotates_with_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    file = types.ModuleType("modeling_file")
    file.apply_rotary_pos_emb = halves  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, file.__name__, file)
    monkeypatch.setattr(LlamaNorm, "__module__", file.__name__)
    for _ in range(2):
        register(LlamaNorm())
    replaced: Any = file.apply_rotary_pos_emb
    arguments = rotation_arguments(torch.float32)
    expected = halves(*arguments)
    with Rotations(load_ops("native")).of_step():
        inside, turned = replaced(*arguments), replaced(*arguments, unsqueeze_dim=1)
    outside = replaced(*arguments)
    for number in range(2):
        assert torch.equal(outside[number], expected[number])
        assert torch.equal(turned[number], expected[number])
        torch.testing.assert_close(inside[number], expected[number])
    assert inside[0].transpose(1, 2).is_contiguous()
