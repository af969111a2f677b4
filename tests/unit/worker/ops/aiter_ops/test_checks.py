"""Every op beside the reference backend: with stand-ins for AITER's kernels (L1), and on an AMD GPU (L3) if present.

The command for an owner of an AMD GPU runs the same checks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.worker.device import AITER_GPUS, gpu_architecture
from services.worker.ops import load_ops
from tests.bench import rocm_smoke
from tests.support.aiter.checks import CHECKS, TOLERANCE, Bench
from tests.support.aiter.process import aiter_environment
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model
from tests.support.system.processes import ROOT

# The process ends without what AITER would print at its end.
RUN_CHECKS = """
import json, os, torch
from tests.support.aiter import triton_standins

triton_standins.install()
from services.worker.ops import load_ops
from tests.support.aiter.checks import CHECKS, Bench

bench = Bench(load_ops("aiter"), torch.device("cpu"))
found = {name: check(bench) for name, check in CHECKS.items()}
print(json.dumps(found), flush=True)
os._exit(0)
"""
RUN_SMOKE = """
import json, os, sys, torch
from dataclasses import asdict
from pathlib import Path
from tests.support.aiter import triton_standins

triton_standins.install()
from services.worker.ops import load_ops
from tests.bench import rocm_smoke
from tests.support.aiter.checks import Bench

rocm_smoke.BATCH_SIZES = (1, 2)
bench = Bench(load_ops("aiter"), torch.device("cpu"))
rows = rocm_smoke.measure(bench, Path(sys.argv[1]), "cpu", num_steps=2)
print(json.dumps([asdict(row) for row in rows]), flush=True)
os._exit(0)
"""


def run(script: str, directory: Path, *arguments: str) -> str:
    """The last line that a process with AITER and the stand-ins prints."""
    environment = {**os.environ, **aiter_environment(directory), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def rocm_bench() -> Bench:
    """The backend on this machine's GPU."""
    if torch.version.hip is None or not torch.cuda.is_available() or gpu_architecture(0) not in AITER_GPUS:
        pytest.skip(f"no {' or '.join(AITER_GPUS)} present")
    return Bench(load_ops("aiter"), torch.device("cuda"))


@pytest.mark.process
def test_every_op_with_stand_ins_computes_what_the_reference_does(tmp_path: Path) -> None:
    differences: dict[str, float] = json.loads(run(RUN_CHECKS, tmp_path))
    assert differences.keys() == CHECKS.keys()
    assert {name: each for name, each in differences.items() if each > TOLERANCE} == {}


@pytest.mark.rocm
@pytest.mark.parametrize("name", CHECKS)
def test_an_op_on_an_amd_gpu_computes_what_the_reference_does(rocm_bench: Bench, name: str) -> None:
    assert CHECKS[name](rocm_bench) <= TOLERANCE


@pytest.mark.rocm
@pytest.mark.parametrize("is_eager", [True, False])
def test_the_real_model_on_an_amd_gpu_generates_what_it_generates_on_cpu(
    rocm_bench: Bench, real_model: Path, is_eager: bool
) -> None:
    prompts = rocm_smoke.make_prompts(real_model)
    completions = rocm_smoke.generate(rocm_smoke.make_runner(real_model, "cuda", is_eager=is_eager), prompts)
    assert rocm_smoke.count_wrong(real_model, prompts, completions) == 0


@pytest.mark.slow
@pytest.mark.process
def test_the_command_for_an_amd_gpu_finds_everything_right_with_stand_ins(tmp_path: Path) -> None:
    config = {**SMALL_CONFIGS["LlamaForCausalLM"]["plain"], "max_position_embeddings": 1024}
    model_dir = write_small_model(build_model("LlamaForCausalLM", config), tmp_path / "model")
    rows = json.loads(run(RUN_SMOKE, tmp_path / "environment", str(model_dir)))
    assert len(rows) == len(CHECKS) + 2 * (1 + 2)
    assert [row for row in rows if row["met"] is False] == []
