"""Reading tensors and parts of them, what is recorded about them, and which may remain unread."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from services.worker.weights.checkpoint import CheckpointWeights
from services.worker.weights.weight_files import WeightFiles
from shared.model_files.model_dir import ModelDirectoryError

TENSORS = {
    "table.weight": torch.arange(60, dtype=torch.float32).view(20, 3),
    "up_proj.weight": torch.arange(35, dtype=torch.float32).view(5, 7).bfloat16(),
    "norm.weight": torch.full((4,), 1.1, dtype=torch.float16),
    "scalar": torch.tensor(3.0),
}


@contextmanager
def weights_of(
    directory: Path, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32
) -> Iterator[tuple[CheckpointWeights, WeightFiles]]:
    save_file(tensors, directory / "model.safetensors")
    with WeightFiles(directory) as files:
        yield CheckpointWeights(files, dtype), files


def read_all(weights: CheckpointWeights) -> None:
    for name, tensor in TENSORS.items():
        weights.read(name, tuple(tensor.shape))


def test_a_tensor_is_read_in_the_models_dtype_or_in_the_requested_one(tmp_path: Path) -> None:
    with weights_of(tmp_path, TENSORS, torch.bfloat16) as (weights, _):
        assert torch.equal(weights.read("norm.weight", (4,)), torch.full((4,), 1.1).half().bfloat16())
        assert torch.equal(weights.read("norm.weight", (4,), dtype=torch.float32), torch.full((4,), 1.1).half().float())
        assert weights.read("scalar", ()).item() == 3
        assert ("scalar" in weights, "vector" in weights) == (True, False)


def test_a_scale_is_the_first_of_its_names_that_is_stored_or_1(tmp_path: Path) -> None:
    tensors = {"a.scale": torch.tensor(0.375).bfloat16(), "b.scale": torch.tensor([2.0])}
    with weights_of(tmp_path, tensors, torch.bfloat16) as (weights, _):
        scales = [weights.scale(names) for names in (["c", "a.scale"], ["b.scale", "a.scale"], ["c", "d"])]
        assert torch.equal(torch.stack(scales), torch.tensor([[0.375], [2.0], [1.0]]))
        weights.check_complete()


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e-45])
def test_a_scale_that_is_no_positive_number_is_refused(tmp_path: Path, value: float) -> None:
    with weights_of(tmp_path, {"a.scale": torch.tensor(value)}) as (weights, _):
        assert weights.scale(["a.scale"]).shape == (1,)
        with pytest.raises(ModelDirectoryError, match=r"malformed: a.scale \(a scale of "):
            weights.check_complete()


def test_scales_of_each_head_are_refused(tmp_path: Path) -> None:
    with weights_of(tmp_path, {"a.scale": torch.ones(8)}) as (weights, _):
        weights.scale(["a.scale"])
        with pytest.raises(ModelDirectoryError, match=r"a.scale has shape \[8\], not \[\] or \[1\]"):
            weights.check_complete()


def test_parts_equal_those_of_the_whole(tmp_path: Path) -> None:
    with weights_of(tmp_path, TENSORS) as (weights, _):
        assert torch.equal(weights.read("table.weight", (20, 3), rows=slice(4, 9)), TENSORS["table.weight"][4:9])
        up = TENSORS["up_proj.weight"].float()
        assert torch.equal(weights.dense("up_proj", (5, 7), rows=slice(2, None)), up[2:])
        assert torch.equal(weights.dense("up_proj", (5, 7), columns=slice(3, 4)), up[:, 3:4])
        assert weights.linear("up_proj", (5, 7), rows=slice(2, 2)).shape == (0, 7)


def test_a_returned_tensor_belongs_to_the_caller(tmp_path: Path) -> None:
    with weights_of(tmp_path, TENSORS) as (weights, _):
        first = weights.read("table.weight", (20, 3)).fill_(7)
        assert torch.equal(weights.read("table.weight", (20, 3)), TENSORS["table.weight"])
    assert (first == 7).all()


def test_the_digest_covers_what_was_read_in_any_order(tmp_path: Path) -> None:
    def digest_of(*names: str, tensors: dict[str, Tensor] = TENSORS) -> str:
        with weights_of(tmp_path, tensors) as (weights, files):
            for name in names:
                weights.read(name, tuple(tensors[name].shape))
            return files.digest()

    table, norm = "table.weight", "norm.weight"
    assert digest_of(table, norm) == digest_of(norm, table, norm)
    assert len({digest_of(table), digest_of(norm), digest_of(table, norm), digest_of()}) == 4
    changed = {**TENSORS, table: TENSORS[table].clone()}
    changed[table][15, 0] += 1
    assert digest_of(norm, tensors=changed) == digest_of(norm)
    assert digest_of(table, tensors=changed) != digest_of(table)


def test_the_digest_of_parts_is_that_of_the_whole(tmp_path: Path) -> None:
    tensors = {**TENSORS, "experts.up": torch.arange(24, dtype=torch.float32).view(3, 2, 4)}

    def digest_of(part: slice, dtype: torch.dtype) -> str:
        with weights_of(tmp_path, tensors, dtype) as (weights, files):
            weights.read("table.weight", (20, 3), rows=part)
            weights.linear("up_proj", (5, 7), columns=part)
            weights.stacked("experts.up", (3, 2, 4), 1, rows=part)
            return files.digest()

    whole = digest_of(slice(None), torch.float32)
    assert digest_of(slice(1), torch.bfloat16) == whole
    # A rank that holds none of it.
    assert digest_of(slice(0), torch.float32) == whole


def test_progress_counts_a_tensor_when_a_part_of_it_is_first_read(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(8, 8), "b.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    shares: list[float] = []
    with WeightFiles(tmp_path, shares.append) as files:
        weights = CheckpointWeights(files, torch.float32)
        weights.linear("a", (8, 8), rows=slice(4))
        weights.linear("a", (8, 8), rows=slice(4))
        weights.linear("a", (8, 8), rows=slice(4, 8), columns=slice(2))
        weights.read("b.weight", (64,))
    assert shares == [0.5, 1.0]


def test_ignored_tensors_may_be_left_unread(tmp_path: Path) -> None:
    tensors = {**TENSORS, "model.layers.61.norm.weight": torch.ones(2), "rotary.inv_freq": torch.ones(2)}
    with weights_of(tmp_path, tensors) as (weights, _):
        read_all(weights)
        weights.ignore(suffixes=["inv_freq"])
        with pytest.raises(ModelDirectoryError, match=r"unexpected .*: model\.layers\.61\.norm\.weight$"):
            weights.check_complete()
    with weights_of(tmp_path, tensors) as (weights, _):
        read_all(weights)
        weights.ignore(prefixes=["model.layers.61."])
        weights.ignore(suffixes=["inv_freq"])
        weights.check_complete()
    with weights_of(tmp_path, tensors) as (weights, _):
        read_all(weights)
        weights.ignore(patterns=[r"layers\.61\.", r"^rotary"])
        weights.check_complete()


def test_after_a_problem_shapes_are_still_right_and_everything_else_is_still_checked(tmp_path: Path) -> None:
    with weights_of(tmp_path, TENSORS) as (weights, _):
        assert weights.linear("down_proj", (6, 9), rows=slice(3)).shape == (3, 9)
        assert weights.stacked("experts.up", (2, 3, 4), 0, columns=slice(2)).shape == (4, 2)
        assert weights.read("norm.weight", (5,), dtype=torch.float64).dtype == torch.float64
        read_all(weights)
        with pytest.raises(ModelDirectoryError) as error_info:
            weights.check_complete()
    expected = "missing: down_proj.weight, experts.up; wrong shape: norm.weight has shape [4], not [5]"
    assert str(error_info.value).endswith(expected)


def test_more_memory_than_files_could_fill_is_refused(tmp_path: Path) -> None:
    with weights_of(tmp_path, TENSORS) as (weights, _), pytest.raises(ModelDirectoryError, match="too small"):
        weights.linear("up_proj", (10**9, 10**9))


def test_the_experts_of_a_missing_layer_count_as_one_problem(tmp_path: Path) -> None:
    with weights_of(tmp_path, TENSORS) as (weights, _):
        for expert in range(64):
            weights.stacked("experts.up", (64, 512, 512), expert)
        with pytest.raises(ModelDirectoryError, match=r"do not match: missing: experts\.up; unexpected"):
            weights.check_complete()
