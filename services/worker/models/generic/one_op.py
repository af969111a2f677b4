"""Parts of modelling code that are one op of ours: root-mean-square norms, and what gated networks do between products.

Nothing is known of a class but its results. A module is tried on random values on the CPU, before weights are read, so
that all devices and ranks decide alike: where its results are those of the op, the op takes its place, else it stays.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations, product

import torch
from torch import Tensor, nn
from typing_extensions import override

from services.worker.models.generic.products import Product
from services.worker.ops import Activation, Ops, composed

# What modelling code raises for a value that is not there, or not as it expects.
CODE_ERRORS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)

_SEED = 1
_NUM_ROWS = 8
# Values of a network's gate, so many that every range of them is met.
_NUM_VALUES = 1 << 14
_LARGEST_GATE = 30.0
_LARGEST_EPS = 0.1
# Below it, differences count as those of this value.
_SMALL = 0.1


@dataclass(frozen=True, slots=True)
class NormForm:
    """How a module's result is `Ops.rms_norm` of its argument."""

    eps: float
    offset: int
    """What is added to the weight: 1 where it is stored as a difference from 1."""
    is_wide: bool
    """Whether the weight is added to and multiplied with in float32."""

    def weight(self, stored: Tensor) -> Tensor:
        """The op's weight, a new tensor."""
        return (stored.detach().float() if self.is_wide else stored.detach()) + self.offset


class Norm:
    """The forward pass of a norm, in the place of its module's own."""

    def __init__(self, ops: Ops, form: NormForm, module: nn.Module) -> None:
        """Take the weight of `module`, which has been read."""
        stored = module.get_parameter("weight")
        self._ops = ops
        self._eps = form.eps
        self._weight = form.weight(stored)
        self._dtype = stored.dtype
        self._own: Callable[[Tensor], Tensor] = module.forward

    def __call__(self, x: Tensor) -> Tensor:
        """[1, T, hidden], [1, T, heads, D] or [1, heads, T, D] to a new tensor of its shape, and order in memory."""
        if x.dtype != self._dtype or not 3 <= x.dim() <= 4 or len(x) != 1 or x.stride(-1) != 1:
            return self._own(x)
        rows = x[0]
        if x.dim() == 3 or rows.stride(0) >= rows.stride(1):
            return self._ops.rms_norm(rows, self._weight, self._eps)[None]
        return self._ops.rms_norm(rows.transpose(0, 1), self._weight, self._eps).transpose(0, 1)[None]


@dataclass(frozen=True, slots=True)
class NetworkForm:
    """How a module is `down(activation(gate(x)) * up(x))`."""

    activation: Activation
    gate: Product
    """Or gate and up, side by side."""
    up: Product | None
    down: Product


class GatedNetwork(nn.Module):
    """In the place of a gated feed-forward network."""

    def __init__(self, ops: Ops, activation: Activation, gate_up: Product, down: Product) -> None:
        super().__init__()
        self._ops = ops
        self._activation = activation
        self.gate_up = gate_up
        self.down = down

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to a new tensor of its shape."""
        gate_up: Tensor = self.gate_up(x)
        shape = (*x.shape[:-1], self.down.in_features)
        if self.gate_up.kernel is None:
            activated = gate_up.new_empty(shape)
        else:
            rows = gate_up.view(-1, self.gate_up.out_features)
            activated = self._ops.act_and_mul(rows, self._activation).view(shape)
        result: Tensor = self.down(activated)
        return result


@torch.no_grad()
def find_norm(module: nn.Module, dtype: torch.dtype) -> NormForm | None:
    """How a module on `meta` normalises; None if it does something else."""
    stored = module._parameters.get("weight")
    is_alone = len(module._parameters) == 1 and not module._buffers and not module._modules
    if stored is None or stored.dim() != 1 or stored.dtype != dtype or not is_alone or not _takes_one(module):
        return None
    generator = torch.Generator().manual_seed(_SEED)
    tried = copy.deepcopy(module).to_empty(device="cpu")
    weight = torch.randn(len(stored), generator=generator, dtype=torch.float32).to(dtype)
    tried.get_parameter("weight").copy_(weight)
    # Rows so small that the epsilon matters, and so large that it does not; their means are not 0.
    sizes = torch.logspace(-4, 2, _NUM_ROWS, dtype=torch.float32)[:, None]
    x = ((torch.randn(_NUM_ROWS, len(stored), generator=generator, dtype=torch.float32) + 0.5) * sizes).to(dtype)
    try:
        found = tried(x[None])
    except CODE_ERRORS:
        return None
    if not isinstance(found, Tensor) or found.shape != (1, *x.shape) or found.dtype != dtype:
        return None
    forms = list(_norm_forms(module))
    errors = [_error(found[0], composed.rms_norm(x, form.weight(weight), form.eps)) for form in forms]
    best = min(range(len(forms)), key=errors.__getitem__, default=None)
    return forms[best] if best is not None and errors[best] <= tolerance_of(dtype) else None


@torch.no_grad()
def find_network(module: nn.Module, dtype: torch.dtype) -> NetworkForm | None:
    """How a module, whose products have no kernels yet, is a gated network; None if it is something else."""
    products = [each for each in module.children() if isinstance(each, Product)]
    num_products = sum(isinstance(each, Product) for each in module.modules())
    has_values = next(module.parameters(), None) is not None or next(module.buffers(), None) is not None
    if not 2 <= len(products) <= 3 or len(products) != num_products or has_values or not _takes_one(module):
        return None
    for activation, (*first, down) in product(Activation, permutations(products)):
        width = down.in_features
        if first[0].out_features != (width if len(first) == 2 else 2 * width):
            continue
        form = NetworkForm(activation, first[0], first[1] if len(first) == 2 else None, down)
        # In float32 too, where functions differ that are alike in fewer bits.
        if all(_is_network(module, form, each) for each in {torch.float32, dtype}):
            return form
    return None


def _takes_one(module: nn.Module) -> bool:
    return len(inspect.signature(module.forward).parameters) == 1


def _norm_forms(module: nn.Module) -> Iterator[NormForm]:
    numbers = {value for value in vars(module).values() if isinstance(value, float) and 0 < value < _LARGEST_EPS}
    for eps, offset, is_wide in product(sorted(numbers), (0, 1), (False, True)):
        yield NormForm(eps, offset, is_wide)


def _is_network(module: nn.Module, form: NetworkForm, dtype: torch.dtype) -> bool:
    """Whether a module gives each product what `form` says, and the last one's result."""
    generator = torch.Generator().manual_seed(_SEED)
    width = form.down.in_features
    num_rows = -(-_NUM_VALUES // width)
    gate = torch.linspace(-_LARGEST_GATE, _LARGEST_GATE, num_rows * width, dtype=torch.float32)
    gate = gate.view(num_rows, width).to(dtype)
    up, x, last = (
        torch.randn(num_rows, size, generator=generator, dtype=torch.float32).to(dtype)
        for size in (width, form.gate.in_features, form.down.out_features)
    )
    is_joined = form.up is None
    answers = {form.gate: torch.cat([gate, up], dim=1) if is_joined else gate, form.down: last}
    if form.up is not None:
        answers[form.up] = up
    asked, result = _ask(module, x[None], answers)
    if len(asked) != len(answers) or form.down not in asked or not isinstance(result, Tensor):
        return False
    activated = asked.pop(form.down)
    expected = composed.activate(gate.float(), form.activation) * up.float()
    return (
        all(torch.equal(each, x) for each in asked.values())
        and activated.shape == expected.shape
        and torch.equal(result, last[None])
        and _error(activated, expected) <= tolerance_of(dtype)
    )


def _ask(module: nn.Module, x: Tensor, answers: Mapping[Product, Tensor]) -> tuple[dict[Product, Tensor], object]:
    """Compute with `answers` as results of products: what they were asked to multiply, and the module's result.

    The result is None where the module fails.
    """
    asked: dict[Product, Tensor] = {}

    def kernel_of(each: Product) -> Callable[[Tensor], Tensor]:
        def multiply(rows: Tensor) -> Tensor:
            if each in asked:
                raise RuntimeError("a product is asked twice")
            asked[each] = rows.clone()
            return answers[each].clone()

        return multiply

    try:
        for each in answers:
            each.kernel = kernel_of(each)
        return asked, module(x)
    except CODE_ERRORS:
        return asked, None
    finally:
        for each in answers:
            each.kernel = None


def _error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to values that are not small."""
    expected = expected.float()
    return float(((found.float() - expected).abs() / expected.abs().clamp(min=_SMALL)).max())


def tolerance_of(dtype: torch.dtype) -> float:
    """What roundings may do: modelling code rounds factors that the op has in float32."""
    return 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
