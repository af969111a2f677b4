"""Quantises checkpoints with transformers' quantiser of FP8 blocks: `write.py < jobs`, a JSON list.

A job is `[result_dir, model_dir, arguments of FineGrainedFP8Config]`. A line is written for each: `[result_dir, null or
what the library said]`. Beside the checkpoint is `values.safetensors`: what the library itself loads the weights as.
It is unchanged but for its check that there is a GPU, which its quantiser does not need.
"""

import json
import sys
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer


def write(result_dir: str, model_dir: str, options: dict[str, Any]) -> None:
    config = FineGrainedFP8Config(modules_to_not_convert=["lm_head"], **options)
    with patch.object(FineGrainedFP8HfQuantizer, "validate_environment"):
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, quantization_config=config)
    model.save_pretrained(result_dir)
    # Without a GPU it dequantises.
    loaded = AutoModelForCausalLM.from_pretrained(result_dir, dtype=torch.float32)
    values = {name: each for name, each in loaded.state_dict().items() if name.endswith("_proj.weight")}
    save_file(values, f"{result_dir}/values.safetensors")


for result_dir, model_dir, options in json.load(sys.stdin):
    said = None
    try:
        write(result_dir, model_dir, options)
    except Exception as error:  # noqa: BLE001
        said = f"{type(error).__name__}: {error}"
    sys.stdout.write("\n" + json.dumps([result_dir, said]) + "\n")
    sys.stdout.flush()
