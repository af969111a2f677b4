"""OpenVINO GenAI as a contestant, with int8 weights; runs in the environment `OPENVINO`."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import nncf
import numpy as np
import openvino
import openvino_genai

from tests.bench.peers.cpu_generation import Engine, Loads, generate_with
from tests.bench.peers.protocol import serve

_CACHE_GB = 1


class OpenVinoEngine:
    """A continuous-batching pipeline without prefix caching; all else as it comes."""

    def __init__(self, loads: Loads, model_dir: Path) -> None:
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.cache_size = _CACHE_GB
        scheduling.max_num_seqs = loads.max_num_seqs
        scheduling.max_num_batched_tokens = 2048
        scheduling.enable_prefix_caching = False
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model_dir, scheduling, "CPU")

    def generate(self, prompts: Sequence[Sequence[int]], num_output_tokens: int) -> float:
        """See `Engine`."""
        config = openvino_genai.GenerationConfig(
            max_new_tokens=num_output_tokens, min_new_tokens=num_output_tokens, ignore_eos=True, do_sample=False
        )
        tensors = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        start = time.perf_counter()
        results = self._pipeline.generate(tensors, [config] * len(tensors))
        seconds = time.perf_counter() - start
        assert all(len(result.m_generation_ids[0]) == num_output_tokens for result in results)
        return seconds


def int8_model(gguf_path: Path) -> Path:
    """The directory of the model with its weights compressed to int8 per channel, as `optimum-intel` does by default.

    Created once, beside the file.

    Args:
        gguf_path: The model with matrices in F16.
    """
    directory = gguf_path.with_suffix(".openvino-int8")
    if not directory.exists():
        with tempfile.TemporaryDirectory(dir=gguf_path.parent) as temporary:
            made = Path(temporary) / directory.name
            _convert(gguf_path, Path(temporary), made)
            made.rename(directory)
    return directory


def _convert(gguf_path: Path, work_dir: Path, target: Path) -> None:
    # The pipeline saves the models that it makes of a GGUF file into the file's directory.
    copy = work_dir / gguf_path.name
    copy.hardlink_to(gguf_path)
    openvino_genai.LLMPipeline(copy, "CPU", enable_save_ov_model=True)
    target.mkdir()
    for path in [*work_dir.glob("openvino_tokenizer.*"), *work_dir.glob("openvino_detokenizer.*")]:
        shutil.move(path, target)
    model = openvino.Core().read_model(work_dir / "openvino_model.xml")
    compressed = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
    openvino.save_model(compressed, target / "openvino_model.xml", compress_to_fp16=False)


def _make_engines(loads: Loads, *, gguf_path: str) -> list[Engine]:
    return [OpenVinoEngine(loads, int8_model(Path(gguf_path)))]


if __name__ == "__main__":
    serve({"generate": generate_with(_make_engines)})
