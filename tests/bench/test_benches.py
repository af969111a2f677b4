"""Every benchmark runs, in its shortest form and without peers that need a separate environment."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.system.processes import ROOT, module_environment

MODEL = str(ROOT / "models" / "smollm2-135m-instruct")
# What transformers can read.
FLOAT32_MODEL = f"{MODEL}-float32"
SCRIPT_TO_FLAGS = {
    "cpu_peers": [
        FLOAT32_MODEL,
        *("--formats", "fp32", "--only", "formats", "--peers", "transformers", "--requests=1,2"),
        *("--prompt-tokens=8", "--output-tokens=4", "--prefill=16", "--repeats=1"),
    ],
    "drafts": [MODEL, "--num-seqs=1", "--num-prompts=1", "--num-tokens=4", "--repeats=1"],
    "front_end": [MODEL, "--quick", "--without-peers"],
    "floods": [MODEL, "--share=0.02", "--seconds=2", "--slots=4", "--floods", "streams", "prompts", "http"],
    "formats": ["--hidden=256", "--layers=1", "--formats", "AWQ"],
    "generic": ["--quick", "--repeats=1", "--threads=1"],
    "host_time": ["--layers=2", "--num-rows", "1", "8", "512", "--steps=2"],
    "grammar": [MODEL, "--quick", "--without-peers"],
    "http": [MODEL, "--quick", "--without-peers"],
    "interference": [MODEL, "--num-streams=2", "--num-prompts=1", "--num-prompt-tokens=300"],
    "gpu": [
        *("--device=cpu", "--shapes", "tiny", "--kv-cache-gib=0.02", "--model", FLOAT32_MODEL),
        "--stages=ops,tune,decode,packed,tokens,trace,start,serve",
    ],
    "items": [
        *(FLOAT32_MODEL, "--documents=2", "--query-tokens=16", "--document-tokens=4"),
        *("--texts=4", "--repeats=1", "--without-peers"),
    ],
    "loading": ["--tensors=2", "--threads=1", "--repeats=1"],
    # Without the simulated comparison, which has its own tests.
    "lockstep": ["--quick", "--num-ranks=2", "--only", "wall", "cpu"],
    "native_attention": ["--quick", "--num-threads=1"],
    "native_ops": [
        *("--models", "135M", "--rows", "1", "3"),
        *("--layers=1", "--read-mib=16", "--repeats=1"),
    ],
    "overload": [MODEL, "--calls=50", "--resets=200", "--watches=50"],
    "quality": [FLOAT32_MODEL, "--quick", "--without-peers", "--formats", "fp32", "bf16"],
    "recurrent": [
        *("--quick", "--without-peers", "--rows", "1", "3", "--prompt-tokens=20", "--prefill=70"),
        *("--steps=2", "--repeats=1", "--requests=2", "--answer-tokens=9"),
    ],
    "revisions": ["HEAD", "HEAD", "--pairs=1"],
    # The other sections need peers.
    "scheduler": ["--quick", "--only=curves"],
    "serve": [
        FLOAT32_MODEL,
        *("--concurrency", "1", "2"),
        *("--reference", "--idle=1", "--temperature=1", "--rounds=1"),
        *("--num-prompt-tokens=8", "--num-output-tokens=4"),
    ],
    "soak": [MODEL, "--minutes=0.1"],
    "start": [MODEL, "--repeats=1", "--returning-layers=1"],
    "step_rate": ["--quick", "--step-ms=2", "--num-seqs=16"],
    "tls": ["--quick"],
}
LONGEST = {"cpu_peers", "drafts", "gpu", "http", "interference", "overload", "quality", "soak"}
# Its rows need an AMD GPU; tests/unit/worker/ops/aiter_ops runs the rest of it.
ROCM_SCRIPT = "rocm_smoke"
NO_GPU = 3


def test_no_script_is_left_out() -> None:
    files = {path.stem for path in Path(__file__).parent.glob("*.py")}
    files |= {path.parent.name for path in Path(__file__).parent.glob("*/__main__.py")}
    assert files - {Path(__file__).stem} == SCRIPT_TO_FLAGS.keys() | {ROCM_SCRIPT}


@pytest.mark.slow
def test_without_an_amd_gpu_its_script_says_so() -> None:
    command = [sys.executable, "-m", f"tests.bench.{ROCM_SCRIPT}", MODEL]
    done = subprocess.run(command, cwd=ROOT, env=module_environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (NO_GPU, "")
    assert done.stderr == "nothing was checked: torch sees no AMD GPU\n"


def scripts() -> list[Any]:
    """All of them; those that take longest are left to `make proofs`."""
    return [
        pytest.param(script, marks=pytest.mark.proof if script in LONGEST else pytest.mark.slow)
        for script in SCRIPT_TO_FLAGS
    ]


@pytest.mark.parametrize("script", scripts())
def test_a_script_runs_and_every_figure_is_a_number(script: str, tmp_path: Path) -> None:
    json_path = tmp_path / "rows.json"
    command = [sys.executable, "-m", f"tests.bench.{script}", *SCRIPT_TO_FLAGS[script], f"--json={json_path}"]
    subprocess.run(command, cwd=ROOT, env=module_environment(), check=True)
    rows = json.loads(json_path.read_text(encoding="utf-8"))
    assert rows
    for row in rows:
        # Of a benchmark whose cases may fail by themselves.
        assert row["unit"] != "failures", row
        figures = [row["value"], *(row[name] for name in ("reference", "ratio") if row[name] is not None)]
        assert all(map(math.isfinite, figures)), row
