"""vLLM's CPU build as a contestant, in one process; runs in the environment `VLLM`, with `variables()`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from vllm import LLM, SamplingParams

from tests.bench.peers.cpu_generation import Engine, Loads, generate_with
from tests.bench.peers.protocol import serve


class VllmEngine:
    """An `LLM` in bfloat16, or as its checkpoint is quantised, without prefix caching."""

    def __init__(self, loads: Loads, model_dir: str) -> None:
        self._llm = LLM(
            model_dir,
            dtype="bfloat16",
            max_model_len=loads.max_num_tokens,
            max_num_seqs=loads.max_num_seqs,
            enable_prefix_caching=False,
        )

    def generate(self, prompts: Sequence[Sequence[int]], num_output_tokens: int) -> float:
        """See `Engine`."""
        sampling = SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        start = time.perf_counter()
        outputs = self._llm.generate(requests, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(output.outputs[0].token_ids) == num_output_tokens for output in outputs)
        return seconds


def _make_engines(loads: Loads, *, model_dir: str) -> list[Engine]:
    return [VllmEngine(loads, model_dir)]


if __name__ == "__main__":
    serve({"generate": generate_with(_make_engines)})
