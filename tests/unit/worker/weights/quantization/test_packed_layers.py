"""Layers whose format is kept: their values, which parts can be packed, and damage that is found in scales."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from services.worker.ops.matrices import Fp8Matrix, IntMatrix, Matrix, Mxfp4Matrix, dense
from services.worker.ops.matrix_rows import MatrixFormat, format_of
from services.worker.weights.checkpoint import CheckpointWeights
from services.worker.weights.model_weights import WeightFormats
from services.worker.weights.planned_weights import PlannedWeights
from services.worker.weights.quantization.config import QuantizationConfig
from services.worker.weights.weight_files import WeightFiles
from shared.model_files.model_dir import ModelDirectoryError
from tests.support.models.quantized_checkpoints import SCHEMES, Quantized, mxfp4_stack

LAYER = "model.layers.1.self_attn.q_proj"
# The last group of 16 is smaller, and the last word is not full.
SHAPE = (75, 170)
MXFP4 = {"quant_method": "mxfp4"}
# Bits, and columns in a group.
INTEGERS = {
    "compressed int8, W8A8": (8, 170),
    "compressed int8, asymmetric": (8, 170),
    "compressed int8, weights alone": (8, 170),
    "compressed int4, groups": (4, 16),
    "compressed int4, asymmetric": (4, 16),
    "compressed int4, channels": (4, 170),
}


@contextmanager
def weights_of(
    directory: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], *kept: MatrixFormat
) -> Iterator[CheckpointWeights]:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    formats = WeightFormats(kept=frozenset(kept or MatrixFormat))
    stored = QuantizationConfig.from_json({"quantization_config": config})
    with WeightFiles(directory) as files:
        yield CheckpointWeights(files, torch.float32, stored, formats=formats)


def matrix(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def tensors_of(quantized: Quantized, name: str = LAYER) -> dict[str, Tensor]:
    return {name + suffix: tensor for suffix, tensor in quantized.tensors.items()}


def assert_equal_values(packed: Matrix, expected: Tensor) -> None:
    # An offset is a rounded product, of at most 128 times the scale.
    torch.testing.assert_close(dense(packed, torch.float32), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", INTEGERS)
def test_a_layer_of_integers_keeps_them_whole_and_in_slices_of_whole_groups(tmp_path: Path, name: str) -> None:
    quantized, draw = SCHEMES[name].quantize(matrix(SHAPE)), random.Random(name)
    num_bits, group_size = INTEGERS[name]
    with weights_of(tmp_path, tensors_of(quantized), SCHEMES[name].config) as weights:
        whole = weights.linear(LAYER, SHAPE)
        assert isinstance(whole, IntMatrix)
        assert (whole.num_bits, whole.group_size, whole.shape) == (num_bits, group_size, SHAPE)
        assert_equal_values(whole, quantized.values)
        for _ in range(20):
            first_row, first_group = draw.randrange(SHAPE[0]), draw.randrange(-(-SHAPE[1] // group_size))
            rows, columns = (
                slice(first_row, draw.randint(first_row + 1, SHAPE[0])),
                slice(first_group * group_size, None),
            )
            part = weights.linear(LAYER, SHAPE, rows=rows, columns=columns)
            assert isinstance(part, IntMatrix)
            assert all(each.is_contiguous() for each in (part.codes, part.scales))
            assert_equal_values(part, quantized.values[rows, columns])
        weights.check_complete()
        assert weights.packed_formats == {MatrixFormat.INT8 if num_bits == 8 else MatrixFormat.INT4}


@pytest.mark.parametrize(
    ("name", "columns", "is_packed"),
    [
        ("compressed int4, groups", slice(16, 42), True),
        ("compressed int4, groups", slice(24, 48), False),
        ("compressed int4, groups", slice(16, 41), False),
        ("compressed int4, channels", slice(14, 42), True),
        ("compressed int4, channels", slice(13, 41), False),
        ("compressed int8, W8A8", slice(13, 42), True),
    ],
)
def test_a_part_that_cuts_a_group_or_a_byte_is_dense(
    tmp_path: Path, name: str, columns: slice, is_packed: bool
) -> None:
    quantized = SCHEMES[name].quantize(matrix(SHAPE))
    with weights_of(tmp_path, tensors_of(quantized), SCHEMES[name].config) as weights:
        part = weights.linear(LAYER, SHAPE, columns=columns)
        assert isinstance(part, IntMatrix) is is_packed
        assert_equal_values(part, quantized.values[:, columns])
        assert isinstance(weights.dense(LAYER, SHAPE), Tensor)


def test_whole_groups_are_packed_in_any_order_of_columns_and_parts_of_them_are_not(tmp_path: Path) -> None:
    shuffled = SCHEMES["compressed int4, activation order"]
    quantized = SCHEMES["compressed int4, groups"].quantize(matrix((8, 64)))
    listed = {**tensors_of(quantized), f"{LAYER}.weight_g_idx": (torch.arange(64) // 16).int()}
    with weights_of(tmp_path, listed, shuffled.config) as weights:
        packed = weights.linear(LAYER, (8, 64))
        assert isinstance(packed, IntMatrix)
        assert packed.column_order is None
    quantized = shuffled.quantize(matrix((8, 64)))
    with weights_of(tmp_path, tensors_of(quantized), shuffled.config) as weights:
        packed = weights.linear(LAYER, (8, 64), rows=slice(2, 7))
        assert isinstance(packed, IntMatrix)
        assert packed.column_order is not None
        assert_equal_values(packed, quantized.values[2:7])
        # A rank's part of the inputs has parts of groups, and experts share their rows.
        for dense_part in (weights.linear(LAYER, (8, 64), columns=slice(16, 48)), weights.expert(LAYER, (8, 64))):
            assert isinstance(dense_part, Tensor)
        assert_equal_values(weights.linear(LAYER, (8, 64), columns=slice(16, 48)), quantized.values[:, 16:48])
        weights.check_complete()


@pytest.mark.parametrize("name", [name for name in SCHEMES if "fp8" in name and name != "fp8, e5m2"])
def test_fp8_is_kept_in_slices_of_whole_blocks(tmp_path: Path, name: str) -> None:
    quantized = SCHEMES[name].quantize(matrix(SHAPE))
    with weights_of(tmp_path, tensors_of(quantized), SCHEMES[name].config) as weights:
        packed = weights.linear(LAYER, SHAPE, rows=slice(13, 70))
        assert isinstance(packed, Fp8Matrix)
        assert torch.equal(dense(packed, torch.float32), quantized.values[13:70])
        cut = weights.linear(LAYER, SHAPE, columns=slice(13, 42))
        assert isinstance(cut, Fp8Matrix) is ("blocks" not in name)
        assert torch.equal(dense(cut, torch.float32), quantized.values[:, 13:42])
        assert weights.packed_formats == {MatrixFormat.FP8}
        weights.check_complete()


@pytest.mark.parametrize("name", [name for name in SCHEMES if "fp8" in name and name != "fp8, e5m2"])
def test_a_plan_says_which_parts_of_fp8_stay_packed(tmp_path: Path, name: str) -> None:
    scheme = SCHEMES[name]
    config, formats = (
        QuantizationConfig.from_json({"quantization_config": scheme.config}),
        WeightFormats(frozenset(MatrixFormat)),
    )
    with weights_of(tmp_path, tensors_of(scheme.quantize(matrix(SHAPE))), scheme.config) as weights:
        for columns in (slice(None), slice(13, 42), slice(16, 32), slice(7, 16), slice(0, 13)):
            planned = PlannedWeights(torch.float32, config, formats=formats)
            planned.linear(LAYER, SHAPE, columns=columns)
            part = weights.linear(LAYER, SHAPE, columns=columns)
            assert (planned.packed_formats == {MatrixFormat.FP8}) is isinstance(part, Fp8Matrix)


@pytest.mark.parametrize(("code", "scale"), [(0x7F, 1.0), (0xFF, 1.0), (0, torch.nan), (0, 1e36)])
def test_a_value_of_fp8_that_is_not_finite_is_detected(tmp_path: Path, code: int, scale: float) -> None:
    weight = matrix((4, 6)).to(torch.float8_e4m3fn)
    weight.view(torch.uint8)[2, 3] = code
    tensors = {f"{LAYER}.weight": weight, f"{LAYER}.weight_scale": torch.tensor(scale)}
    with weights_of(tmp_path, tensors, {"quant_method": "fp8"}) as weights:
        assert isinstance(weights.linear(LAYER, (4, 6)), Fp8Matrix)
        with pytest.raises(ModelDirectoryError, match="not finite"):
            weights.check_complete()


def test_mxfp4_experts_are_kept_in_slices_of_whole_groups(tmp_path: Path) -> None:
    name, shape, stack = "experts.up", (3, 96, 50), mxfp4_stack(matrix((3, 96, 50)))
    with weights_of(tmp_path, tensors_of(stack, name), MXFP4) as weights:
        for expert in range(3):
            packed = weights.stacked(name, shape, expert, rows=slice(7, 40), columns=slice(32, 96))
            assert isinstance(packed, Mxfp4Matrix)
            assert torch.equal(dense(packed, torch.float32), stack.values[expert].T[7:40, 32:96])
        cut = weights.stacked(name, shape, 1, columns=slice(16, 48))
        assert isinstance(cut, Tensor)
        assert torch.equal(cut, stack.values[1].T[:, 16:48])
        weights.check_complete()


def test_what_a_backend_does_not_compute_is_dense(tmp_path: Path) -> None:
    for name, kept in (("compressed int4, groups", MatrixFormat.INT8), ("compressed int8, W8A8", MatrixFormat.INT4)):
        quantized = SCHEMES[name].quantize(matrix(SHAPE))
        with weights_of(tmp_path, tensors_of(quantized), SCHEMES[name].config, kept) as weights:
            assert isinstance(weights.linear(LAYER, SHAPE), Tensor)
            assert not weights.packed_formats


@pytest.mark.parametrize("quantized", [MatrixFormat.INT8, MatrixFormat.INT4])
def test_an_embedding_is_never_quantised_and_a_head_has_8_bits(tmp_path: Path, quantized: MatrixFormat) -> None:
    save_file({f"{LAYER}.weight": matrix(SHAPE)}, tmp_path / "model.safetensors")
    with WeightFiles(tmp_path) as files:
        weights = CheckpointWeights(files, torch.float32, formats=WeightFormats(quantized=quantized))
        layer, head = weights.linear(LAYER, SHAPE), weights.head(LAYER, SHAPE, rows=slice(5, 40))
        table = weights.embedding(LAYER, SHAPE, rows=slice(5, 40))
        assert isinstance(table, Tensor)
        assert torch.equal(table, matrix(SHAPE)[5:40])
        assert isinstance(weights.dense(LAYER, SHAPE), Tensor)
        weights.check_complete()
    assert (format_of(layer), format_of(head), head.shape) == (quantized, MatrixFormat.INT8, (35, SHAPE[1]))


def test_an_embedding_and_a_head_that_are_stored_packed_keep_their_format(tmp_path: Path) -> None:
    scheme = SCHEMES["compressed int8, weights alone"]
    with weights_of(tmp_path, tensors_of(scheme.quantize(matrix(SHAPE))), scheme.config) as weights:
        assert format_of(weights.embedding(LAYER, SHAPE)) is MatrixFormat.INT8
        assert format_of(weights.head(LAYER, SHAPE)) is MatrixFormat.INT8


def test_a_packed_matrix_belongs_to_the_caller(tmp_path: Path) -> None:
    quantized = SCHEMES["compressed int8, W8A8"].quantize(matrix(SHAPE))
    with weights_of(tmp_path, tensors_of(quantized), SCHEMES["compressed int8, W8A8"].config) as weights:
        first = weights.linear(LAYER, SHAPE)
        assert isinstance(first, IntMatrix)
        first.codes.zero_()
        first.scales.zero_()
        assert_equal_values(weights.linear(LAYER, SHAPE), quantized.values)
    assert not first.codes.any()


@pytest.mark.parametrize(
    ("name", "suffix", "change", "message"),
    [
        ("compressed int8, W8A8", ".weight_scale", lambda t: t[:-1], r"wrong shape: .*weight_scale has shape \[7, 1\]"),
        ("compressed int8, W8A8", ".weight_scale", lambda t: t.T, r"wrong shape: .*weight_scale has shape \[1, 8\]"),
        ("compressed int8, W8A8", ".weight", lambda t: t.to(torch.int16), "wrong dtype: .*I16, not I8"),
        ("compressed int8, W8A8", ".weight", lambda t: t[:, :-1], "wrong shape: .*weight has shape"),
        ("compressed int8, W8A8", ".weight_scale", lambda t: t * torch.inf, f"not finite: {LAYER}"),
        ("compressed int8, W8A8", ".weight_scale", lambda t: t * 0 + 3e38, f"not finite: {LAYER}"),
        ("compressed int8, asymmetric", ".weight_zero_point", lambda t: t.float(), "wrong dtype: .*zero_point"),
        ("compressed int8, asymmetric", ".weight_zero_point", lambda t: t[:3], "wrong shape: .*zero_point"),
        ("compressed int4, groups", ".weight_scale", lambda t: t[:, :-1], r"wrong shape: .*\[8, 3\], not \[8, 4\]"),
        ("compressed int4, groups", ".weight_scale", lambda t: t.log() * torch.nan, f"not finite: {LAYER}"),
        ("compressed int4, groups", ".weight_packed", lambda t: t[:, :-1], "wrong shape: .*weight_packed"),
        ("compressed int4, groups", ".weight_packed", lambda t: t.view(torch.uint8), "wrong .*weight_packed"),
        ("compressed int4, groups", ".weight_shape", lambda t: t * 2, "malformed: .*weight_shape says"),
        ("compressed int4, groups", ".weight_shape", lambda t: t * 0 - 1, "malformed: .*weight_shape says"),
        ("compressed int4, groups", ".weight_shape", lambda t: t[:1], "wrong shape: .*weight_shape"),
        ("compressed int4, asymmetric", ".weight_zero_point", lambda t: t[:, 1:], "wrong shape: .*zero_point"),
        ("compressed int4, activation order", ".weight_g_idx", lambda t: t + 1, "malformed: .*names a group outside"),
        ("compressed int4, activation order", ".weight_g_idx", lambda t: t[1:], "wrong shape: .*weight_g_idx"),
    ],
)
def test_a_damaged_layer_is_refused_and_never_packed(
    tmp_path: Path, name: str, suffix: str, change: Any, message: str
) -> None:
    tensors = tensors_of(SCHEMES[name].quantize(matrix((8, 64))))
    tensors[LAYER + suffix] = change(tensors[LAYER + suffix])
    with weights_of(tmp_path, tensors, SCHEMES[name].config) as weights:
        assert tuple(weights.linear(LAYER, (8, 64)).shape) == (8, 64)
        with pytest.raises(ModelDirectoryError, match=message):
            weights.check_complete()


def test_groups_of_another_size_than_configured_are_refused(tmp_path: Path) -> None:
    config = {**SCHEMES["compressed int4, groups"].config}
    group = config["config_groups"]["group_0"]
    config["config_groups"] = {"group_0": {**group, "weights": {**group["weights"], "group_size": 48}}}
    tensors = tensors_of(SCHEMES["compressed int4, groups"].quantize(matrix((8, 64))))
    with weights_of(tmp_path, tensors, config) as weights:
        weights.linear(LAYER, (8, 64))
        with pytest.raises(ModelDirectoryError, match=r"weight_scale has shape \[8, 4\], not \[8, 2\]"):
            weights.check_complete()


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("_scales", lambda t: t.fill_(255), "not finite: experts.up"),
        # The largest value times 2 ** 127.
        ("_scales", lambda t: t.fill_(254), "not finite: experts.up"),
        ("_scales", lambda t: t[:, :, :-1], "wrong shape: experts.up_scales"),
        ("_blocks", lambda t: t[:, :, :, :-1], "wrong shape: experts.up_blocks"),
        ("_blocks", lambda t: t.view(torch.int8), "wrong dtype: experts.up_blocks has dtype I8, not U8"),
    ],
)
def test_damaged_mxfp4_experts_are_refused(tmp_path: Path, suffix: str, change: Any, message: str) -> None:
    tensors = tensors_of(mxfp4_stack(matrix((2, 64, 5))), "experts.up")
    tensors["experts.up" + suffix] = change(tensors["experts.up" + suffix])
    with weights_of(tmp_path, tensors, MXFP4) as weights:
        weights.stacked("experts.up", (2, 64, 5), 1)
        with pytest.raises(ModelDirectoryError, match=message):
            weights.check_complete()
