"""Models whose matrices are quantised while they load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.layout import RankLayout
from services.worker.models.loader import LoadedModel, LoadOptions, load_model
from services.worker.ops import Ops, load_ops
from services.worker.ops.matrices import IntMatrix
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.parallel.communicator import Parallel
from tests.support.models.packing_ops import PackingOps
from tests.support.models.paged_model import PagedModel
from tests.support.models.quantized_checkpoints import SCHEMES, write_quantized
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.ranks.thread_ranks import run_ranks

INT8, INT4, MXFP4 = MatrixFormat.INT8, MatrixFormat.INT4, MatrixFormat.MXFP4
PROMPT = [5, 9, 30, 4, 77]


def load(model_dir: Path, ops: Ops, quantization: MatrixFormat | None, **options: Any) -> LoadedModel:
    chosen = LoadOptions(quantization=quantization, **options)
    return load_model(model_dir, ops, torch.float32, lambda _: None, options=chosen)


def logits_of(loaded: LoadedModel, ops: Ops) -> Tensor:
    paged = PagedModel(loaded.model, ops, num_blocks=8)
    return paged.prefill_all(paged.add(PROMPT))


@pytest.mark.parametrize(
    ("quantization", "counts"),
    [
        (None, {None: 17}),
        (INT8, {INT8: 17}),
        # The head has 8 bits.
        (INT4, {INT4: 16, INT8: 1}),
    ],
)
def test_projections_and_head_are_quantised(
    tmp_path: Path, quantization: MatrixFormat | None, counts: dict[MatrixFormat | None, int]
) -> None:
    ops = PackingOps()
    loaded = load(write_tiny_llama(tmp_path, changes={"tie_word_embeddings": False}), ops, quantization)
    assert ops.counts == counts
    assert loaded.packed_formats == {each for each in counts if each is not None}
    assert ops.tied is None


@pytest.mark.parametrize(("quantization", "error"), [(INT8, 0.05), (INT4, 0.5)])
def test_ranks_quantise_their_own_parts_and_together_compute_nearly_the_same(
    tmp_path: Path, quantization: MatrixFormat, error: float
) -> None:
    model_dir, alone = write_tiny_llama(tmp_path, changes={"tie_word_embeddings": True}), PackingOps()
    expected = logits_of(load(model_dir, alone, quantization), alone)

    def compute(rank: Parallel) -> tuple[PackingOps, Tensor]:
        ops, options = PackingOps(), LoadOptions(quantization=quantization)
        loaded = load_model(model_dir, ops, torch.float32, lambda _: None, options=options, parallel=rank)
        return ops, logits_of(loaded, ops)

    for ops, logits in run_ranks([RankLayout(tp_rank=rank, tp_size=2) for rank in range(2)], compute):
        assert ops.counts == alone.counts
        assert ops.tied is not None
        assert alone.tied is not None
        assert ops.tied.shape == (alone.tied.shape[0] // 2, alone.tied.shape[1])
        # Parts of rows have scales of their own, so results differ a little.
        assert (logits - expected).norm() / expected.norm() < error


@pytest.mark.parametrize("quantization", [INT8, INT4])
def test_a_tied_head_and_its_embedding_are_one_matrix(tmp_path: Path, quantization: MatrixFormat) -> None:
    ops = PackingOps()
    load(write_tiny_llama(tmp_path, changes={"tie_word_embeddings": True}), ops, quantization)
    assert isinstance(ops.tied, IntMatrix)
    assert ops.tied.num_bits == 8


@pytest.mark.parametrize(("quantization", "error"), [(INT8, 0.1), (INT4, 0.7)])
def test_a_quantised_model_computes_nearly_the_same(tmp_path: Path, quantization: MatrixFormat, error: float) -> None:
    model_dir, ops = write_tiny_llama(tmp_path), PackingOps()
    expected = logits_of(load(model_dir, ops, None), ops)
    difference = (logits_of(load(model_dir, ops, quantization), ops) - expected).norm() / expected.norm()
    assert 1e-4 < difference < error


@pytest.mark.parametrize(
    ("architecture", "num_dense"),
    [
        # The routers.
        ("Qwen3MoeForCausalLM", 2),
        ("GptOssForCausalLM", 2),
        # A router, and the three projections of both layers' indexers.
        ("DeepseekV32ForCausalLM", 7),
    ],
)
def test_experts_are_quantised_but_routers_and_indexers_are_not(
    tmp_path: Path, architecture: str, num_dense: int
) -> None:
    config = next(iter(SMALL_CONFIGS[architecture].values()))
    model_dir, ops, plain_ops = (
        write_small_model(build_model(architecture, config), tmp_path),
        PackingOps(),
        PackingOps(),
    )
    expected = logits_of(load(model_dir, plain_ops, None), plain_ops)
    difference = logits_of(load(model_dir, ops, INT8), ops) - expected
    assert 1e-4 < difference.norm() / expected.norm() < 0.1
    assert ops.counts == {INT8: plain_ops.counts.total() - num_dense, None: num_dense}


def test_a_checkpoint_that_is_quantised_stays_as_it_is(tmp_path: Path) -> None:
    plain = write_tiny_llama(tmp_path / "plain", changes={"tie_word_embeddings": False})
    quantized, _ = write_quantized(plain, tmp_path, SCHEMES["compressed int4, groups"])
    ops = PackingOps()
    assert load(quantized, ops, INT8).packed_formats == {INT4}
    assert ops.counts == {INT4: 16, None: 1}


def test_dummy_weights_are_quantised(tmp_path: Path) -> None:
    ops = PackingOps()
    model_dir = write_tiny_llama(tmp_path, changes={"tie_word_embeddings": False})
    loaded = load(model_dir, ops, INT4, dummy_seed=3)
    assert ops.counts == {INT4: 16, INT8: 1}
    plain = load(model_dir, load_ops("reference"), None, dummy_seed=3)
    expected = logits_of(plain, load_ops("reference"))
    assert 1e-4 < (logits_of(loaded, ops) - expected).norm() / expected.norm() < 0.5


def test_the_digest_of_the_files_does_not_depend_on_quantisation(tmp_path: Path) -> None:
    model_dir, ops = write_tiny_llama(tmp_path), PackingOps()
    assert len({load(model_dir, ops, each).weights_digest for each in (None, INT8, INT4)}) == 1
