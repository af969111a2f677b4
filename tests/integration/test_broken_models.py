"""A broken model directory: the launcher ends by itself, with an exit code and one line that says what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.cell import run_serve
from tests.support.ports import free_port

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM = "model.norm.weight"


def truncate(model: Path) -> None:
    path = model / WEIGHTS
    path.write_bytes(path.read_bytes()[:-10])


def change_dtype(model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    tensors[NORM] = tensors[NORM].long()
    save_file(tensors, model / WEIGHTS)


def lose_a_shard(model: Path) -> None:
    names = sorted(load_file(model / WEIGHTS))
    (model / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-1.safetensors")}))


def change_config(model: Path, **changes: object) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **changes}))


def change_rope_type(model: Path) -> None:
    change_config(model, rope_parameters={"rope_type": "spiral", "rope_theta": 10000.0})


def change_format(model: Path) -> None:
    change_config(model, quantization_config={"quant_method": "awq", "bits": 4})


def change_architecture(model: Path) -> None:
    change_config(model, architectures=["RwkvForCausalLM"])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, [WEIGHTS]),
        # How the process ends is the same for all; `test_loader.py` has what each is told.
        *(
            pytest.param(damage, words, marks=pytest.mark.slow)
            for damage, words in [
                (change_dtype, [f"{NORM} has dtype I64"]),
                (lose_a_shard, [INDEX, "model-1.safetensors"]),
                (change_rope_type, ["config.json", "'spiral'"]),
                (change_format, ["config.json", "'awq' is not supported; supported: compressed-tensors"]),
                (change_architecture, ["config.json", "RwkvForCausalLM", "LlamaForCausalLM"]),
            ]
        ),
    ],
)
def test_a_broken_model_is_told_and_ends_everything(
    tiny_model: Path, tmp_path: Path, damage: Callable[[Path], None], words: list[str]
) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    damage(model)
    result = run_serve(str(model), f"--listen=127.0.0.1:{free_port()}")
    assert result.returncode == 1
    *_, last_line = result.stderr.splitlines()
    assert last_line.startswith("error: the worker exited with code 1: cannot load the model error=")
    assert all(word in last_line for word in words)
    assert "Traceback" not in result.stderr
