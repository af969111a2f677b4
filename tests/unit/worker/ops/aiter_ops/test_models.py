"""L1: models on the backend `aiter` generate what they generate on `cpu`, through AITER's own functions and checks.

The kernels are stand-ins in torch. In bfloat16 another token is right where its logit on `cpu` is almost the largest.
Models that choose experts or tokens choose differently between almost equal scores, which may change a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.models.loader import load_model
from services.worker.ops import load_ops
from tests.support.models.generation import Way
from tests.support.models.paged_model import PagedModel
from tests.support.models.parity import make_prompts
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model
from tests.support.ranks.rank_pool import RankPool

pytestmark = pytest.mark.process

NUM_TOKENS = 6
PROMPTS = make_prompts((1, 40, 16, 5, 33), seed=6)
# Chunks of prompts beside decodes, after a prefix that another sequence has computed.
WAY = Way(chunk_size=16, is_mixed=True, has_prefix=True)
# Largest logits are 11 to 15. Measured: 0.13 at most.
TIE = 0.5
# For models without experts, where no choice lies between. Measured: 0.24 at most.
LOGIT_TOLERANCE = 0.5

# Among 30 tokens, where experts or tokens were chosen otherwise. Measured: 1 at most.
MAX_OTHER_CHOICES = 2

# The fused kernel's sizes; the other small models with experts use the grouped product.
FUSED: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 128}
# Heads whose width is no power of two.
WIDE: dict[str, Any] = {"head_dim": 24}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "biases", {}),
    "llama, wide heads": ("LlamaForCausalLM", "plain", WIDE),
    "mistral, window": ("MistralForCausalLM", next(iter(SMALL_CONFIGS["MistralForCausalLM"])), {"sliding_window": 17}),
    "ministral3": ("Ministral3ForCausalLM", "plain", {}),
    "qwen3": ("Qwen3ForCausalLM", "plain", {}),
    "qwen3-moe, fused": ("Qwen3MoeForCausalLM", "plain", FUSED),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "plain", {}),
    "mixtral": ("MixtralForCausalLM", "plain", {}),
    "deepseek-v2": ("DeepseekV2ForCausalLM", "plain", {}),
    "deepseek-v3, fused": ("DeepseekV3ForCausalLM", "plain", FUSED),
    "deepseek-v3.2": ("DeepseekV32ForCausalLM", "plain", {}),
    "gpt-oss": ("GptOssForCausalLM", "plain", {}),
    "glm4-moe": ("Glm4MoeForCausalLM", "plain", {}),
    "glm4-moe-lite": ("Glm4MoeLiteForCausalLM", "plain", {}),
    "glm-5": ("GlmMoeDsaForCausalLM", "types", {}),
    "gemma3": ("Gemma3ForCausalLM", "untied-biases", {}),
}
DENSE = ("llama", "llama, wide heads", "mistral, window", "qwen3", "gemma3")
# Case, ranks, and whether experts are spread over them. Here is one of each kind of kernel; `make test-slow` has norms
# of heads, grouped products, sparse attention, and more that is split over ranks. The rest takes the same calls of
# AITER as one of these, and is left to `make proofs`.
FAST = {
    ("llama", 1, False),
    ("llama", 2, False),
    ("llama, wide heads", 1, False),
    ("mistral, window", 1, False),
    ("qwen3-moe, fused", 1, False),
    ("deepseek-v3, fused", 1, False),
    ("gpt-oss", 1, False),
}
SLOW = {
    ("ministral3", 1, False),
    ("qwen3", 1, False),
    ("gemma3", 1, False),
    ("qwen3-moe", 1, False),
    ("deepseek-v3.2", 1, False),
    ("mixtral", 2, False),
    ("qwen3-moe, fused", 2, True),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def splits() -> list[Any]:
    """Every case on one rank and on two; and experts spread over two."""
    rows = [(case, tp_size, False) for case in CASES for tp_size in (1, 2)]
    rows.append(("qwen3-moe, fused", 2, True))
    assert set(rows) >= FAST | SLOW
    marks = [() if row in FAST else pytest.mark.slow if row in SLOW else pytest.mark.proof for row in rows]
    return [pytest.param(*row, marks=each) for row, each in zip(rows, marks, strict=True)]


@pytest.mark.parametrize(("case", "tp_size", "has_expert_parallel"), splits())
def test_a_model_generates_what_it_generates_on_cpu(
    aiter_ranks: RankPool, tmp_path: Path, case: str, tp_size: int, has_expert_parallel: bool
) -> None:
    architecture, variant, changes = CASES[case]
    # Latent attention takes the interpreter long.
    prompts, num_tokens = (PROMPTS[1:3], 3) if architecture.startswith("Deepseek") else (PROMPTS, NUM_TOKENS)
    config = {**SMALL_CONFIGS[architecture][variant], **changes}
    model_dir = write_small_model(build_model(architecture, config), tmp_path)
    ops = load_ops("cpu")
    expected = PagedModel(load_model(model_dir, ops, torch.bfloat16, lambda _: None).model, ops)

    def check(prompts: Sequence[list[int]], way: Way) -> list[list[int]]:
        ranks = aiter_ranks.generate(
            model_dir,
            prompts,
            num_tokens,
            tp_size=tp_size,
            backend="aiter",
            dtype="bfloat16",
            way=way,
            has_expert_parallel=has_expert_parallel,
        )
        assert all(rank.tokens == ranks[0].tokens for rank in ranks)
        num_other = 0
        for prompt, tokens, logits in zip(prompts, ranks[0].tokens, ranks[0].logits, strict=True):
            rows = logits_on_cpu(expected, prompt, tokens)
            chosen = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            num_other += int((rows.amax(dim=-1) - chosen > TIE).sum())
            if case in DENSE:
                assert (logits.float() - rows).abs().max() <= LOGIT_TOLERANCE
        assert num_other <= (0 if case in DENSE else MAX_OTHER_CHOICES)
        return ranks[0].tokens

    completions = check(prompts, WAY)
    # A preempted sequence loses its blocks; when it resumes, its prompt ends with what it has generated.
    resumed = [
        [*prompt, *tokens[: 1 + index]] for index, (prompt, tokens) in enumerate(zip(prompts, completions, strict=True))
    ]
    check(resumed, replace(WAY, chunk_size=None, has_prefix=False, block_size=32))


def logits_on_cpu(paged: PagedModel, prompt: list[int], completion: list[int]) -> Tensor:
    """What each token of the completion is chosen from, [num_tokens, vocabulary] float32."""
    sequence = paged.add([*prompt, *completion])
    return paged.prefill_all(sequence).float()[len(prompt) - 1 : -1]
