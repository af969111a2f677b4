"""More published formats of checkpoints, each packed as its library packs it: AWQ, GPTQ, Quark, ModelOpt and FP4.

The packers follow the libraries' loops, word by word, so they share nothing with the loader. All sizes of a matrix must
be multiples of 32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.support.models.quantized_checkpoints import E2M1, Quantized, Scheme, fp8_channels, fp8_tensor, int8_channels

GROUP = 32
# AutoAWQ's and Quark's: what of eight output features each four bits of a word have.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
IN_ORDER = tuple(range(8))
_HEAD = ("lm_head",)


def pack_columns(values: Tensor, order: tuple[int, ...]) -> Tensor:
    """Numbers below 16 [n, m] in int32 words [n, m / 8], those of each word in this order from the lowest bits on."""
    words = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
    for column in range(words.shape[1]):
        for place, source in enumerate(order):
            words[:, column] |= values[:, 8 * column + source].long() << (4 * place)
    return words.to(torch.uint32).view(torch.int32)


def pack_down(values: Tensor, num_bits: int) -> Tensor:
    """Numbers [n, m] in int32 words [n * num_bits / 32, m], the first one in the lowest bits."""
    per_word = 32 // num_bits
    words = torch.zeros(values.shape[0] // per_word, values.shape[1], dtype=torch.int64)
    for row in range(values.shape[0]):
        words[row // per_word] |= values[row].long() << (num_bits * (row % per_word))
    return words.to(torch.uint32).view(torch.int32)


def quantize_groups(weight: Tensor, num_bits: int, groups: Tensor, *, is_symmetric: bool) -> tuple[Tensor, ...]:
    """Unsigned codes [out, in], zero points and float16 scales [out, groups], and the values [out, in]."""
    highest, num_groups = (1 << num_bits) - 1, int(groups.max()) + 1
    scales, zeros = torch.empty(len(weight), num_groups), torch.empty(len(weight), num_groups)
    for group in range(num_groups):
        part = weight[:, groups == group]
        if is_symmetric:
            scales[:, group], zeros[:, group] = part.abs().amax(dim=1) / (highest // 2), highest // 2 + 1
        else:
            low, high = part.amin(dim=1).clamp(max=0), part.amax(dim=1).clamp(min=0)
            scales[:, group] = (high - low) / highest
            zeros[:, group] = (-low / scales[:, group]).round().clamp(0, highest)
    scales = scales.half()
    scale, zero = scales.float()[:, groups], zeros[:, groups]
    codes = (weight / scale + zero).round().clamp(0, highest)
    return codes, zeros, scales, (codes - zero) * scale


def consecutive(num_columns: int, group_size: int | None) -> Tensor:
    """The group of each column."""
    return torch.arange(num_columns) // (group_size or num_columns)


def awq(weight: Tensor, group_size: int | None = GROUP) -> Quantized:
    """As `WQLinear_GEMM.from_linear`."""
    groups = consecutive(weight.shape[1], group_size)
    codes, zeros, scales, values = quantize_groups(weight, 4, groups, is_symmetric=False)
    packed = pack_columns(codes.T, ORDER), pack_columns(zeros.T, ORDER), scales.T.contiguous()
    return Quantized(dict(zip((".qweight", ".qzeros", ".scales"), packed, strict=True)), values)


def gptq(
    weight: Tensor,
    *,
    num_bits: int = 4,
    group_size: int | None = GROUP,
    is_symmetric: bool = True,
    zero_shift: int = 1,
    is_shuffled: bool = False,
) -> Quantized:
    """As GPTQModel's `pack`; version 1 subtracts 1 of the zero points. `is_shuffled` is `desc_act`."""
    groups = consecutive(weight.shape[1], group_size)
    if is_shuffled:
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(4))]
    codes, zeros, scales, values = quantize_groups(weight, num_bits, groups, is_symmetric=is_symmetric)
    # Along the output features, lowest bits first.
    words = pack_down(zeros, num_bits).T.contiguous()
    lacking = zero_shift * sum(1 << (num_bits * place) for place in range(32 // num_bits))
    tensors = {
        ".qweight": pack_down(codes.T, num_bits),
        ".qzeros": (words.long() - lacking).to(torch.uint32).view(torch.int32) if lacking else words,
        ".scales": scales.T.contiguous(),
        ".g_idx": groups.int(),
    }
    return Quantized(tensors, values)


def quark_int4(
    weight: Tensor, *, order: tuple[int, ...] = ORDER, is_signed: bool = False, group_size: int = GROUP
) -> Quantized:
    """As `Pack_4_bits` packs a weight per group, which it transposes; signed codes are in two's complement."""
    groups = consecutive(weight.shape[1], group_size)
    codes, zeros, scales, values = quantize_groups(weight, 4, groups, is_symmetric=is_signed)
    if is_signed:
        codes, zeros = (codes - 8).int() & 0xF, (zeros - 8).int() & 0xF
    tensors = {
        ".weight": pack_columns(codes.T, order),
        ".weight_zero_point": pack_columns(zeros.T, order),
        ".weight_scale": scales.T.contiguous(),
    }
    return Quantized(tensors, values)


def quark_int8(weight: Tensor) -> Quantized:
    """A scale and a zero point, which is 0, per output channel."""
    made = int8_channels(weight)
    scales = made.tensors[".weight_scale"].flatten()
    return Quantized(
        {**made.tensors, ".weight_scale": scales, ".weight_zero_point": scales.to(torch.int8) * 0}, made.values
    )


def quark_fp8_channels(weight: Tensor) -> Quantized:
    """A scale per output channel, in one dimension; the activations have a fixed one."""
    made = fp8_channels(weight)
    scales = made.tensors[".weight_scale"].flatten()
    return Quantized({**made.tensors, ".weight_scale": scales, ".input_scale": torch.tensor(0.5)}, made.values)


def e2m1_codes(values: Tensor) -> Tensor:
    """The nearest codes, two of them in each byte, the first one in the low half."""
    codes = (values[..., None] - torch.tensor(E2M1)).abs().argmin(dim=-1)
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)


def of_codes(packed: Tensor) -> Tensor:
    """The numbers of codes, one by one."""
    return torch.tensor(E2M1)[torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).int()]


def mxfp4(weight: Tensor, suffix: str = ".weight") -> Quantized:
    """Two values in a byte, and the exponent of a power of two for each 32 columns."""
    exponents = torch.floor(torch.log2(weight.view(len(weight), -1, 32).abs().amax(dim=2).clamp(min=2.0**-100))) - 2
    powers = exponents.exp2().repeat_interleave(32, dim=1)
    packed = e2m1_codes(weight / powers)
    return Quantized(
        {suffix: packed, ".weight_scale": (exponents + 127).to(torch.uint8)},
        of_codes(packed) * powers,
    )


def nvfp4(weight: Tensor, *, suffix: str, matrix_scale_suffix: str, is_divisor: bool) -> Quantized:
    """Two values in a byte, an E4M3 scale for each 16 columns, and one of the matrix."""
    matrix_scale = weight.abs().max() / (448 * 6)
    largest = weight.view(len(weight), -1, 16).abs().amax(dim=2)
    scales = (largest / 6 / matrix_scale).clamp(min=2.0**-6).to(torch.float8_e4m3fn)
    stored = 1 / matrix_scale if is_divisor else matrix_scale
    both = scales.float() / stored if is_divisor else scales.float() * stored
    packed = e2m1_codes(weight / both.repeat_interleave(16, dim=1))
    tensors = {
        suffix: packed,
        ".weight_scale": scales,
        matrix_scale_suffix: stored.reshape(1) if is_divisor else stored,
    }
    return Quantized(tensors, of_codes(packed) * both.repeat_interleave(16, dim=1))


def _awq(**values: Any) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
        **values,
    }


def _gptq(**values: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "true_sequential": True,
        "checkpoint_format": "gptq",
        **values,
    }


def quark_config(weight: Mapping[str, Any], *, pack_method: str = "reorder", **values: Any) -> dict[str, Any]:
    """As Quark exports it, with one format for all layers."""
    layer = {"bias": None, "input_tensors": None, "output_tensors": None, "weight": {"is_dynamic": False, **weight}}
    return {
        "quant_method": "quark",
        "algo_config": None,
        "exclude": ["lm_head"],
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": pack_method,
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
        "global_quant_config": layer,
        "kv_cache_quant_config": {},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "quant_mode": "eager_mode",
        "version": "0.13",
        **values,
    }


def _per_group(dtype: str, *, symmetric: bool | None, **values: Any) -> dict[str, Any]:
    scheme = {"qscheme": "per_group", "ch_axis": -1, "group_size": GROUP, "symmetric": symmetric, "scale_format": None}
    return {"dtype": dtype, **scheme, **values}


def _fp4(name: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": group}, "ignore": _HEAD}


def _modelopt(name: str, **values: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": name, "ignore": ["lm_head"], "kv_cache_scheme": None, **values}


def _nvfp4_modelopt(weight: Tensor) -> Quantized:
    return nvfp4(weight, suffix=".weight", matrix_scale_suffix=".weight_scale_2", is_divisor=False)


def _nvfp4_compressed(weight: Tensor) -> Quantized:
    return nvfp4(weight, suffix=".weight_packed", matrix_scale_suffix=".weight_global_scale", is_divisor=True)


def _scheme(config: Mapping[str, Any], quantize: Callable[[Tensor], Quantized]) -> Scheme:
    return Scheme(config, quantize, _HEAD)


PUBLISHED: dict[str, Scheme] = {
    "awq": _scheme(_awq(), awq),
    "awq, channels": _scheme(_awq(group_size=-1), lambda weight: awq(weight, None)),
    "gptq": _scheme(_gptq(), gptq),
    "gptq, asymmetric": _scheme(_gptq(sym=False), lambda weight: gptq(weight, is_symmetric=False)),
    "gptq, version 2": _scheme(
        _gptq(sym=False, checkpoint_format="gptq_v2"), lambda weight: gptq(weight, is_symmetric=False, zero_shift=0)
    ),
    "gptq, 8 bits": _scheme(
        _gptq(bits=8, group_size=-1, sym=False),
        lambda weight: gptq(weight, num_bits=8, group_size=None, is_symmetric=False),
    ),
    "gptq, activation order": _scheme(_gptq(desc_act=True), lambda weight: gptq(weight, is_shuffled=True)),
    "quark fp8, tensor": _scheme(
        quark_config({"dtype": "fp8_e4m3", "qscheme": "per_tensor", "ch_axis": None, "symmetric": True}), fp8_tensor
    ),
    "quark fp8, channels": _scheme(
        quark_config({"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0, "symmetric": True}),
        quark_fp8_channels,
    ),
    "quark int8": _scheme(
        quark_config({"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0, "symmetric": True}), quark_int8
    ),
    "quark mxfp4": _scheme(quark_config(_per_group("fp4", symmetric=None, scale_format="e8m0")), mxfp4),
    "quark uint4": _scheme(quark_config(_per_group("uint4", symmetric=False)), quark_int4),
    "quark int4, in order": _scheme(
        quark_config(_per_group("int4", symmetric=True), pack_method="order"),
        lambda weight: quark_int4(weight, order=IN_ORDER, is_signed=True),
    ),
    "modelopt fp8": _scheme(_modelopt("FP8"), fp8_tensor),
    "modelopt nvfp4": _scheme(_modelopt("NVFP4", group_size=16), _nvfp4_modelopt),
    "compressed mxfp4": _scheme(
        _fp4("mxfp4-pack-quantized", strategy="group", group_size=32),
        lambda weight: mxfp4(weight, ".weight_packed"),
    ),
    "compressed nvfp4": _scheme(
        _fp4("nvfp4-pack-quantized", strategy="tensor_group", group_size=16),
        _nvfp4_compressed,
    ),
}
"""By name."""
