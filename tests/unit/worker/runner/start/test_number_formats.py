"""The dtype and the quantisation that the settings and the backend mean, and that ranks agree on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker.config import WorkerSettings
from services.worker.device import DeviceError
from services.worker.layers.context_limit import ContextLimit
from services.worker.layout import RankLayout
from services.worker.models.loader import LoadOptions, load_model
from services.worker.models.planning import plan_model
from services.worker.ops import load_ops
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.ops.native import backend as native
from services.worker.ops.native.isa import Isa, available_isas
from services.worker.parallel.communicator import Parallel
from services.worker.runner.numerics import numerics_fingerprint
from services.worker.runner.start.build import build_model_runner
from services.worker.runner.start.number_formats import (
    check_ranks_agree,
    choose_dtype,
    choose_kv_dtype,
    choose_quantization,
    log_loaded,
)
from shared.model_files.model_dir import ModelDirectoryError
from tests.support.models.packing_ops import PackingOps
from tests.support.models.quantized_checkpoints import SCHEMES, write_quantized
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.ranks.thread_ranks import run_ranks


@pytest.fixture
def no_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor for which `native` has none."""
    monkeypatch.setattr(native, "available_isas", list)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_without_kernels_nothing_is_quantised_and_numbers_are_float32(backend: str) -> None:
    ops = load_ops(backend)
    assert (choose_dtype("auto", ops), choose_quantization("auto", ops)) == (torch.float32, None)


@pytest.mark.parametrize("backend", ["cpu", "reference", "native"])
def test_a_cache_is_stored_as_the_model_or_as_kernels_can(backend: str) -> None:
    ops = load_ops(backend)
    assert choose_kv_dtype("auto", torch.float32, ops) is None
    assert choose_kv_dtype("bfloat16", torch.bfloat16, ops) is torch.bfloat16
    if backend == "native":
        assert choose_kv_dtype("int8", torch.float32, ops) is torch.int8
    else:
        with pytest.raises(DeviceError, match=f"--kv-cache-dtype int8: the kernels of {backend} have only float32"):
            choose_kv_dtype("int8", torch.float32, ops)


@pytest.mark.parametrize("backend", ["triton", "triton-exact", "reference"])
def test_a_cache_may_be_stored_in_fp8(backend: str) -> None:
    assert choose_kv_dtype("fp8", torch.float32, load_ops(backend)) is torch.float8_e4m3fn


@pytest.mark.parametrize("backend", ["cpu", "native"])
def test_a_backend_without_kernels_for_fp8_refuses_it(backend: str) -> None:
    ops = load_ops(backend)
    with pytest.raises(DeviceError, match=f"--kv-cache-dtype fp8: the kernels of {ops.name} have only bfloat16"):
        choose_kv_dtype("fp8", torch.bfloat16, ops)


def test_the_fingerprint_depends_on_the_scales_of_a_cache_in_fp8(tmp_path: Path) -> None:
    model_dir, ops = write_tiny_llama(tmp_path), load_ops("reference")

    def fingerprint(*, is_coded: bool) -> str:
        options = LoadOptions(kv_dtype=torch.float8_e4m3fn if is_coded else None)
        return numerics_fingerprint(load_model(model_dir, ops, torch.float32, lambda _: None, options=options), ops)

    without_scales = [fingerprint(is_coded=is_coded) for is_coded in (False, True)]
    tensors = load_file(model_dir / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.5)
    save_file(tensors, model_dir / "model.safetensors")
    with_scales = [fingerprint(is_coded=is_coded) for is_coded in (False, True)]
    assert without_scales[0] == with_scales[0]
    assert len({*without_scales, *with_scales}) == 3


def test_native_kernels_quantise_to_int8_and_take_bfloat16_where_the_processor_does() -> None:
    ops = load_ops("native")
    if ops.name != "native":
        pytest.skip("this machine cannot build native kernels")
    assert choose_quantization("auto", ops) is MatrixFormat.INT8
    has_bfloat16 = Isa.AVX512_BF16 in available_isas()
    assert choose_dtype("auto", ops) is (torch.bfloat16 if has_bfloat16 else torch.float32)


def test_what_is_set_is_not_chosen() -> None:
    ops = PackingOps()
    assert choose_dtype("bfloat16", ops) is torch.bfloat16
    assert [choose_quantization(each, ops) for each in ("auto", "none", "int8", "int4")] == [
        MatrixFormat.INT8,
        None,
        MatrixFormat.INT8,
        MatrixFormat.INT4,
    ]


@pytest.mark.usefixtures("no_native_kernels")
@pytest.mark.parametrize(("asked", "used"), [("native", "cpu"), ("reference", "reference")])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_format_without_kernels_is_refused(tmp_path: Path, asked: str, used: str, quantization: str) -> None:
    values = {"model_dir": tmp_path, "ops_backend": asked, "quantization": quantization}
    with pytest.raises(DeviceError, match=f"--quantization {quantization}: the backend {used} has no kernels"):
        build_model_runner(WorkerSettings.model_validate(values), lambda _: None)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_activations_are_not_quantised_without_kernels(tmp_path: Path, backend: str) -> None:
    values = {"model_dir": tmp_path, "ops_backend": backend, "activation_quantization": "fp8"}
    with pytest.raises(DeviceError, match=r"--activation-quantization fp8: the backend \w+ has no kernels for it"):
        build_model_runner(WorkerSettings.model_validate(values), lambda _: None)


@pytest.mark.usefixtures("no_native_kernels")
def test_activations_are_not_quantised_by_the_kernels_that_take_over(tmp_path: Path) -> None:
    settings = WorkerSettings(model_dir=tmp_path, ops_backend="native", activation_quantization="fp8")
    with pytest.raises(DeviceError, match="--activation-quantization fp8: the backend cpu has no kernels for it"):
        build_model_runner(settings, lambda _: None)


def test_activations_are_not_quantised_for_a_model_without_fp8(tmp_path: Path) -> None:
    settings = WorkerSettings(
        model_dir=write_tiny_llama(tmp_path), ops_backend="triton", device="cpu", activation_quantization="fp8"
    )
    with pytest.raises(ModelDirectoryError, match="no matrices in FP8 for --activation-quantization fp8"):
        build_model_runner(settings, lambda _: None)


@pytest.mark.parametrize("backend", ["triton", "triton-exact"])
def test_the_fingerprint_depends_on_the_activations(tmp_path: Path, backend: str) -> None:
    model_dir, _ = write_quantized(write_tiny_llama(tmp_path / "plain"), tmp_path / "fp8", SCHEMES["fp8, channels"])
    values = {"model_dir": model_dir, "ops_backend": backend, "device": "cpu"}
    fingerprints = {
        build_model_runner(WorkerSettings.model_validate({**values, **flags}), lambda _: None).numerics_fingerprint
        for flags in ({}, {"activation_quantization": "none"}, {"activation_quantization": "fp8"})
    }
    assert len(fingerprints) == 2


def test_the_fingerprint_depends_on_the_quantisation(tmp_path: Path) -> None:
    model_dir, ops = write_tiny_llama(tmp_path), PackingOps()
    fingerprints = set()
    for quantization in (None, MatrixFormat.INT8, MatrixFormat.INT4):
        options = LoadOptions(quantization=quantization)
        loaded = load_model(model_dir, ops, torch.float32, lambda _: None, options=options)
        fingerprints.add(numerics_fingerprint(loaded, ops))
    assert len(fingerprints) == 3


@pytest.mark.parametrize(
    ("quantization", "weights"),
    [(None, "float32"), (MatrixFormat.INT8, "int8"), (MatrixFormat.INT4, "int4+int8")],
)
def test_one_line_says_what_the_model_computes_in(
    tmp_path: Path, quantization: MatrixFormat | None, weights: str, caplog: pytest.LogCaptureFixture
) -> None:
    ops, options = PackingOps(), LoadOptions(quantization=quantization)
    loaded = load_model(write_tiny_llama(tmp_path), ops, torch.float32, lambda _: None, options=options)
    with caplog.at_level(logging.INFO, "services.worker"):
        log_loaded(loaded, ops, duration_s=1.26, faster="native: --ops-backend is reference")
    (record,) = caplog.records
    assert record.message == "the model is loaded"
    assert (
        record.__dict__.items()
        >= {
            "weights": weights,
            "dtype": "float32",
            "backend": "reference",
            "instructions": torch.backends.cpu.get_cpu_capability().lower(),
            "libraries": f"torch-{torch.__version__}",
            "threads": torch.get_num_threads(),
            "seconds": 1.3,
            "faster": "native: --ops-backend is reference",
        }.items()
    )


def test_ranks_with_different_formats_refuse_to_serve(tmp_path: Path) -> None:
    model_dir, ops = write_tiny_llama(tmp_path), PackingOps()

    def problem(parallel: Parallel, *options: LoadOptions, activations: Sequence[str] = ("none", "none")) -> str | None:
        rank = parallel.layout.tp_rank
        plan = plan_model(model_dir, ops, torch.float32, options=options[rank], parallel=parallel)
        try:
            check_ranks_agree(plan, parallel, activations=activations[rank])
        except DeviceError as error:
            return str(error)
        return None

    layouts = [RankLayout(tp_rank=rank, tp_size=2) for rank in range(2)]
    plain, int8 = LoadOptions(), LoadOptions(quantization=MatrixFormat.INT8)
    halved = LoadOptions(kv_dtype=torch.bfloat16)
    assert run_ranks(layouts, lambda rank: problem(rank, int8, int8)) == [None, None]
    assert run_ranks(layouts, lambda rank: problem(rank, int8, plain)) == [
        "ranks differ in their formats: rank 0 computes with --dtype float32, --quantization int8, "
        "--kv-cache-dtype float32, --activation-quantization none",
        "ranks differ in their formats: rank 1 computes with --dtype float32, --quantization none, "
        "--kv-cache-dtype float32, --activation-quantization none",
    ]
    assert all(run_ranks(layouts, lambda rank: problem(rank, plain, halved)))
    short = LoadOptions(context=ContextLimit(100))
    assert run_ranks(layouts, lambda rank: problem(rank, short, plain)) == [
        "ranks differ in --max-model-len: rank 0 serves a context of 100 tokens",
        "ranks differ in --max-model-len: rank 1 serves a context of 512 tokens",
    ]
    assert all(run_ranks(layouts, lambda rank: problem(rank, plain, plain, activations=("none", "fp8"))))


def test_ranks_with_different_graphs_refuse_to_serve(tmp_path: Path) -> None:
    model_dir, ops = write_tiny_llama(tmp_path), load_ops("reference")

    def problem(parallel: Parallel, *sizes: tuple[int, ...]) -> str | None:
        plan = plan_model(model_dir, ops, torch.float32, parallel=parallel)
        try:
            check_ranks_agree(plan, parallel, graph_batch_sizes=sizes[parallel.layout.tp_rank])
        except DeviceError as error:
            return str(error)
        return None

    layouts = [RankLayout(tp_rank=rank, tp_size=2) for rank in range(2)]
    assert run_ranks(layouts, lambda rank: problem(rank, (1, 8), (1, 8))) == [None, None]
    assert run_ranks(layouts, lambda rank: problem(rank, (1, 8), ())) == [
        "ranks differ in --graph-batch-sizes or --enforce-eager: rank 0 captures 1,8",
        "ranks differ in --graph-batch-sizes or --enforce-eager: rank 1 captures none",
    ]
