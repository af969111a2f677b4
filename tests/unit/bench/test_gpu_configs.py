"""The configurations of the GPU benchmark, without memory for their weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from services.worker.models.loader import LoadOptions, load_model
from services.worker.models.planning import plan_model
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.ops.triton.backend import TritonOps
from tests.bench.gpu.configs import CONFIGS
from tests.bench.gpu.floors import num_experts

PUBLISHED = [name for name in CONFIGS if not name.startswith("tiny")]
PACKED = {
    "qwen3-8b-fp8": MatrixFormat.FP8,
    "qwen3-8b-int4": MatrixFormat.INT4,
    "deepseek-v3-4l": MatrixFormat.FP8,
    "gpt-oss-20b": MatrixFormat.MXFP4,
}
FEW_EXPERTS = {"num_experts": 16, "n_routed_experts": 16, "num_local_experts": 16}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_gpu_would_get_the_model_in_its_format(name: str, tmp_path: Path) -> None:
    config = {**CONFIGS[name], "num_hidden_layers": 2}
    config |= {key: few for key, few in FEW_EXPERTS.items() if key in config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = LoadOptions(dummy_seed=0, device=torch.device("meta"))
    loaded = load_model(tmp_path, TritonOps(), torch.bfloat16, lambda _: None, options=options)
    assert loaded.packed_formats == ({PACKED[name]} if name in PACKED else set())
    plan = plan_model(tmp_path, TritonOps(), torch.bfloat16, options=options)
    assert (plan.has_experts, plan.packed_formats) == (num_experts(config) > 0, loaded.packed_formats)
    assert loaded.facts.logits_width == config["vocab_size"]
    # The long context of the benchmark fits.
    assert loaded.facts.context_length > 32768 + 100
