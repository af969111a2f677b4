"""transformers' continuous batching with random weights, as a process that serves two loads and ends.

It reads one line, `{"model_dir": …, "device": …, "warm_up": […], "requests": [[prompt, num_output_tokens], …]}`, and
answers with one: the seconds that the requests took, and what it computed them with.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch


def main() -> None:
    """Serve the warm-up, then the requests."""
    # Output of libraries must not mix with the answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    load: dict[str, Any] = json.loads(sys.stdin.readline())
    print(json.dumps(_serve(load)), file=answers, flush=True)


def _serve(load: dict[str, Any]) -> dict[str, Any]:
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    is_gpu = load["device"] == "cuda"
    config = AutoConfig.from_pretrained(load["model_dir"])
    torch.set_default_dtype(torch.bfloat16 if is_gpu else torch.float32)
    with torch.device(load["device"]):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    # With flash attention in place of SDPA where it is installed. Without a GPU there are no graphs, and little memory.
    sizes = {} if is_gpu else {"num_blocks": 64, "max_batch_tokens": 256}
    options = ContinuousBatchingConfig(
        use_cuda_graph=is_gpu, use_async_batching=is_gpu, allow_block_sharing=False, **sizes
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=options, block=True
    ) as manager:
        _run(manager, load["warm_up"])
        started_at = time.monotonic()
        _run(manager, load["requests"])
        seconds = time.monotonic() - started_at
        attention = model.config._attn_implementation
    return {"seconds": seconds, "version": transformers.__version__, "attention": attention, "graphs": is_gpu}


def _run(manager: Any, requests: list[tuple[list[int], int]]) -> None:
    """Serve all requests; each must get all of its tokens."""
    id_to_count = {
        manager.add_request(prompt, max_new_tokens=count, eos_token_id=-1): count for prompt, count in requests
    }
    while id_to_count:
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            wanted = id_to_count.pop(result.request_id)
            if result.error is not None or len(result.generated_tokens) != wanted:
                raise RuntimeError(f"{len(result.generated_tokens)} of {wanted} tokens: {result.error}")
        elif result is None and not manager.is_running():
            raise RuntimeError("the manager's thread ended")


if __name__ == "__main__":
    main()
