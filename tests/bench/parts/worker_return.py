"""How soon a killed worker computes again, beside importing its modules and reading its packed file once."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import torch
from safetensors.torch import save_file

from lockstep.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from tests.bench.parts.kept_decode import kept_row
from tests.bench.parts.process_stages import ATTACHED, Stage, StagedCell, start_staged
from tests.bench.parts.report import Row, compare
from tests.bench.parts.run_python import run_python
from tests.support.models.tiny_llama import TINY_CONFIG, tensor_shapes, write_tiny_llama
from tests.support.system.patience import PATIENCE_S
from tests.support.system.processes import ROOT

# 1.1 billion weights, with the default number of layers.
_CHANGES = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32_000,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_TARGET = 1.3
# The modules of a worker that computes.
_IMPORTS = "import services.worker.__main__, services.worker.runner.start.build, services.worker.ops.native.backend"
_READ = """
import sys
buffer = bytearray(1 << 24)
for path in sys.argv[1:]:
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
"""


def write_random_model(directory: Path, num_layers: int) -> Path:
    """Write a model with random weights; layers repeat the same values. Returns `directory`."""
    # Its tokenizer, and then other weights: those of a small model are too small, and its way of drawing takes minutes.
    write_tiny_llama(directory, changes={"num_hidden_layers": 1})
    config = {**TINY_CONFIG, **_CHANGES, "num_hidden_layers": num_layers}
    noise = torch.randn(1 << 24, generator=torch.Generator().manual_seed(1)).mul_(0.02).bfloat16()
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        size = torch.Size(shape).numel()
        values = noise.repeat(-(-size // len(noise)))[:size].reshape(shape)
        tensors[name] = torch.ones_like(values) if len(shape) == 1 else values.clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def return_rows(num_layers: int, repeats: int) -> Iterator[Row]:
    """Stages of a cell's processes, cold and warm, and those of a worker that comes back; a decode of kept weights."""
    with tempfile.TemporaryDirectory() as temp_dir:
        model_dir = write_random_model(Path(temp_dir, "model"), num_layers)
        packed_dir = Path(temp_dir, "packed")
        flags = ["--worker.packed-cache", f"--worker.packed-dir={packed_dir}", "--worker.quantization=int8"]
        with start_staged(model_dir, flags) as cell:
            _ask(cell)
        yield from _stage_rows("cold", cell.stages)
        with start_staged(model_dir, flags) as cell:
            _ask(cell)
            yield from _stage_rows("warm", cell.stages)
            yield from _back_rows(cell, repeats, packed_dir, "a killed worker's")
        with start_staged(model_dir, [*flags, "--spare-workers=1"]) as cell:
            _ask(cell)
            yield from _back_rows(cell, repeats, packed_dir, "with a spare worker, a killed one's", has_spare=True)
        yield kept_row(model_dir, packed_dir)


def _back_rows(
    cell: StagedCell, repeats: int, packed_dir: Path, whose: str, *, has_spare: bool = False
) -> Iterator[Row]:
    """The stages of a worker's last return, and the least of all beside the floors."""
    walls, cpus, floors = [], [], []
    for number in range(repeats):
        if has_spare:
            cell.wait_for_spares(number + 1)
        wall_s, cpu_s, stages = _kill_and_ask(cell)
        walls.append(wall_s)
        cpus.append(cpu_s)
        imports = run_python(["-c", _IMPORTS], ROOT)
        read = run_python(["-c", _READ, *map(str, packed_dir.iterdir())], ROOT)
        floors.append((imports, read))
    yield from _stage_rows("back, from a spare" if has_spare else "back", stages)
    for kind, values, number in (("s", walls, 0), ("CPU s", cpus, 1)):
        import_s, read_s = (min(each[place][number] for each in floors) for place in (0, 1))
        yield Row("importing a worker's modules", import_s, kind)
        yield Row("reading its packed file once", read_s, kind)
        metric = f"{whose} first step, beside both"
        yield compare(metric, min(values), kind, reference=import_s + read_s, at_most=_TARGET)


def _kill_and_ask(cell: StagedCell) -> tuple[float, float, list[Stage]]:
    """Wall time from the kill to the next token, the new worker's processor time by then, and its stages.

    What the stages leave of the wall time is the launcher's, which notices the death and starts a process. A spare's
    processor time counts from when it became the worker. The token is asked for once the death is known: a request that
    was on its way to the worker would be a suspect, and be tried alone after eight steps without it.
    """
    num_stages = len(cell.stages)
    killed_at = time.time()
    cell.kill_worker()
    _ask(cell)
    last = cell.reach("worker", "first step, answered", time.time())
    cell.wait_for(ATTACHED, num_stages)
    stages = [*cell.stages[num_stages:], last]
    return last.began_at + last.since_start_s - killed_at, last.cpu_s, stages


def _ask(cell: StagedCell) -> None:
    """Get one token; a request waits for a worker that is lost."""
    request = tokenizer_pb2.GenerateRequest(
        text="Hello", sampling=common_pb2.SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    )
    with grpc.insecure_channel(cell.address) as channel:
        list(tokenizer_pb2_grpc.TokenizerServiceStub(channel).Generate(request, timeout=PATIENCE_S))


def _stage_rows(kind: str, stages: Sequence[Stage]) -> Iterator[Row]:
    """What each stage took, by process."""
    for process in ("tokenizer", "scheduler", "worker"):
        since_start_s = cpu_s = 0.0
        for stage in (each for each in stages if each.process == process):
            yield Row(f"{kind}, {process}: {stage.name}", stage.since_start_s - since_start_s, "s")
            yield Row(f"{kind}, {process}: {stage.name}", stage.cpu_s - cpu_s, "CPU s")
            since_start_s, cpu_s = stage.since_start_s, stage.cpu_s
