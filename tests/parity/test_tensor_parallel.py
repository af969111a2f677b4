"""Models split over ranks, each a process: all ranks agree, and generate the same tokens as a single worker.

A split changes the order of sums, so a token may differ where the two best logits are almost equal; for a given group
size no bit depends on anything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.models.loader import LoadOptions, load_model
from services.worker.ops import load_ops
from tests.support.models.generation import Generated, Way, generate
from tests.support.models.mtp_logits import our_mtp_logits
from tests.support.models.paged_model import PagedModel
from tests.support.models.parity import LOGIT_TOLERANCE, SmallModels, load_paged, make_prompts
from tests.support.models.published_formats import PUBLISHED
from tests.support.models.quantized_checkpoints import MXFP4, SCHEMES, Scheme, write_quantized
from tests.support.models.small_configs import ARCHITECTURES, SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model
from tests.support.models.small_mtp import make_small_mtp_model
from tests.support.ranks.rank_pool import RankPool, RankResult

NUM_TOKENS = 12
PROMPTS = make_prompts((1, 40, 16, 5, 33), seed=6)
# The two best logits may swap order if closer than this.
TIE = 1e-3

LATENT = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
    "Kimi_K25ForConditionalGeneration",
)
# Key/value heads that three ranks can split; or a single one that all three share; or latent attention.
THREE_SPLIT: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "hidden_size": 96}
THREE_SHARED: dict[str, Any] = {**THREE_SPLIT, "num_key_value_heads": 1}
THREE_LATENT: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96}


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


def check_like_one_worker(
    results: list[RankResult], model_dir: Path, backend: str, prompts: Sequence[list[int]] = PROMPTS
) -> None:
    """Check that all ranks agree bitwise, and generate the tokens of a single worker."""
    expected = generate(load_paged(model_dir, backend), prompts, NUM_TOKENS, Way())
    for result in results:
        assert result.tokens == results[0].tokens
        assert all(torch.equal(logits, first) for logits, first in zip(result.logits, results[0].logits, strict=True))
        assert result.weights_digest == results[0].weights_digest
    for tokens, logits, alone in zip(results[0].tokens, results[0].logits, expected, strict=True):
        same = num_comparable(tokens, alone)
        close = (logits[:same] - alone.logits[:same]).abs() <= LOGIT_TOLERANCE * alone.logits.abs().max()
        assert close.all()


def num_comparable(tokens: list[int], alone: Generated) -> int:
    """The number of comparable tokens: all, or those up to the first where a tie was broken differently."""
    for place, (token, other) in enumerate(zip(tokens, alone.completion, strict=True)):
        if token != other:
            best, second = alone.logits[place].topk(2).values.tolist()
            assert best - second < TIE
            return place + 1
    return len(tokens)


def write_changed(directory: Path, architecture: str, variant: str, changes: dict[str, Any]) -> Path:
    """Write a small model with different sizes."""
    return write_small_model(build_model(architecture, {**SMALL_CONFIGS[architecture][variant], **changes}), directory)


def ordinary(architecture: str) -> str:
    """The most common variant of an architecture."""
    return next(iter(SMALL_CONFIGS[architecture]))


# What decides how a model is split; the rope and the epsilon of norms, for example, do not.
SIZES = ("head", "hidden", "size", "lora_rank", "expert", "tie_word", "bias", "dense", "group", "sparse", "layer_types")


def every_variant() -> Iterator[Any]:
    """All small models: `make test` runs one per architecture, `make test-slow` some that are split differently."""
    for turn, architecture in enumerate(ARCHITECTURES):
        for number, (variant, config) in enumerate(SMALL_CONFIGS[architecture].items()):
            is_split_differently = any(part in name for name in config for part in SIZES)
            is_chosen = is_split_differently and (turn + number) % 2
            later = pytest.mark.slow if is_chosen else pytest.mark.proof
            yield pytest.param(architecture, variant, marks=(later,) if number else ())


def some_slow(fast: Sequence[str], slow: Sequence[str]) -> list[Any]:
    """All architectures: these in `make test`, those in `make test-slow`, the others in `make proofs`."""
    marks: dict[str, Any] = {**dict.fromkeys(slow, pytest.mark.slow), **dict.fromkeys(fast, ())}
    return [pytest.param(each, marks=marks.get(each, pytest.mark.proof)) for each in ARCHITECTURES]


@pytest.mark.parametrize(("architecture", "variant"), list(every_variant()))
def test_two_ranks_say_what_one_worker_says(
    small_models: SmallModels, ranks: RankPool, architecture: str, variant: str
) -> None:
    model_dir = small_models.get(architecture, variant).directory
    results = ranks.generate(model_dir, PROMPTS, NUM_TOKENS, tp_size=2)
    check_like_one_worker(results, model_dir, "reference")


@pytest.mark.parametrize(
    "architecture", some_slow([], ["LlamaForCausalLM", "GptOssForCausalLM", "DeepseekV32ForCausalLM"])
)
def test_two_ranks_say_it_with_fast_kernels_too(small_models: SmallModels, ranks: RankPool, architecture: str) -> None:
    model_dir = small_models.get(architecture, ordinary(architecture)).directory
    check_like_one_worker(
        ranks.generate(model_dir, PROMPTS, NUM_TOKENS, tp_size=2, backend="cpu"), model_dir, backend="cpu"
    )


@pytest.mark.parametrize(
    "architecture", some_slow(["GptOssForCausalLM"], ["LlamaForCausalLM", "DeepseekV32ForCausalLM"])
)
def test_four_ranks_share_the_key_value_heads_of_two(
    small_models: SmallModels, ranks: RankPool, architecture: str
) -> None:
    model_dir = small_models.get(architecture, ordinary(architecture)).directory
    results = ranks.generate(model_dir, PROMPTS, NUM_TOKENS, tp_size=4)
    check_like_one_worker(results, model_dir, "reference")
    whole = load_paged(model_dir, "reference").model.kv_cache_spec.bytes_per_token
    # Latents are shared by all heads, so they are not split.
    assert results[0].cache_bytes_per_token == (whole if architecture in LATENT else whole // 2)


def three_ranks() -> Iterator[Any]:
    """Sizes that three ranks split unevenly where possible; the vocabulary of 512 always is.

    In turn the architectures split their heads, and share one; the other half are proofs.
    """
    for number, architecture in enumerate(ARCHITECTURES):
        variants = list(SMALL_CONFIGS[architecture])
        if architecture in LATENT:
            is_sparse = architecture in ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
            mark = pytest.mark.slow if is_sparse else pytest.mark.proof
            yield pytest.param(architecture, variants[0], THREE_LATENT, marks=mark)
            continue
        turns = (pytest.mark.slow, pytest.mark.proof)
        yield pytest.param(architecture, variants[2], THREE_SPLIT, marks=turns[number % 2])
        yield pytest.param(architecture, variants[1], THREE_SHARED, marks=turns[1 - number % 2])
    yield pytest.param("LlamaForCausalLM", "biases", {**THREE_SHARED, "intermediate_size": 100, "vocab_size": 331})
    uneven = {"moe_intermediate_size": 25, "intermediate_size": 100, "n_shared_experts": 3}
    yield pytest.param("DeepseekV3ForCausalLM", "biases-tied", {**THREE_LATENT, **uneven})


@pytest.mark.parametrize(("architecture", "variant", "changes"), list(three_ranks()))
def test_three_ranks_say_what_one_worker_says(
    ranks: RankPool, tmp_path: Path, architecture: str, variant: str, changes: dict[str, Any]
) -> None:
    model_dir = write_changed(tmp_path, architecture, variant, changes)
    prompts = [[token % changes.get("vocab_size", 512) for token in prompt] for prompt in PROMPTS]
    results = ranks.generate(model_dir, prompts, NUM_TOKENS, tp_size=3)
    check_like_one_worker(results, model_dir, "reference", prompts)


ODD_WAY = Way(block_size=1, chunk_size=7)


@pytest.mark.parametrize(
    "architecture",
    some_slow(["GlmMoeDsaForCausalLM"], ["LlamaForCausalLM", "GptOssForCausalLM", "DeepseekV32ForCausalLM"]),
)
def test_no_bit_depends_on_the_batch(small_models: SmallModels, ranks: RankPool, architecture: str) -> None:
    model_dir = small_models.get(architecture, ordinary(architecture)).directory
    first, *_ = ranks.generate(model_dir, PROMPTS, NUM_TOKENS, tp_size=2)
    again, *_ = ranks.generate(model_dir, PROMPTS, NUM_TOKENS, tp_size=2, batches=[[3], [1, 4], [0], [2]], way=ODD_WAY)
    assert again.tokens == first.tokens
    assert all(map(torch.equal, again.logits, first.logits))


def test_ranks_select_the_lowest_of_equally_good_positions(ranks: RankPool, tmp_path: Path) -> None:
    model = build_model("GlmMoeDsaForCausalLM", SMALL_CONFIGS["GlmMoeDsaForCausalLM"]["pattern"])
    for name, parameter in model.named_parameters():
        if "indexer.weights_proj" in name:
            parameter.data.zero_()
    model_dir = write_small_model(model, tmp_path)
    results = ranks.generate(model_dir, PROMPTS, NUM_TOKENS, tp_size=2, backend="cpu")
    check_like_one_worker(results, model_dir, "reference")


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "GptOssForCausalLM"])
def test_no_bit_depends_on_where_experts_are(small_models: SmallModels, ranks: RankPool, architecture: str) -> None:
    model_dir = small_models.get(architecture, ordinary(architecture)).directory
    split = ranks.generate(model_dir, PROMPTS, NUM_TOKENS, tp_size=2)
    spread = ranks.generate(model_dir, PROMPTS, NUM_TOKENS, tp_size=2, has_expert_parallel=True)
    for one, other in zip(split, spread, strict=True):
        assert other.tokens == one.tokens
        assert all(map(torch.equal, other.logits, one.logits))
        assert other.weights_digest == one.weights_digest


QUANTIZED: dict[str, tuple[str, dict[str, Any], Scheme]] = {
    "gpt-oss, mxfp4": ("GptOssForCausalLM", {"intermediate_size": 64}, MXFP4),
    "DeepSeek-V3, fp8 blocks": ("DeepseekV3ForCausalLM", {}, SCHEMES["fp8, blocks"]),
    "Qwen3-Next, fp8 blocks": ("Qwen3NextForCausalLM", {}, SCHEMES["fp8, blocks"]),
    "Llama, GPTQ in activation order": ("LlamaForCausalLM", {}, PUBLISHED["gptq, activation order"]),
    "Llama, int4 groups": ("LlamaForCausalLM", {"mlp_bias": True}, SCHEMES["compressed int4, groups"]),
}


@pytest.mark.parametrize("case", QUANTIZED)
def test_a_rank_reads_its_part_of_what_is_quantised(ranks: RankPool, tmp_path: Path, case: str) -> None:
    """The boundaries of the parts do not match the format's blocks and groups, and each rank reads the right values."""
    architecture, changes, scheme = QUANTIZED[case]
    heads = THREE_LATENT if architecture in LATENT else THREE_SPLIT
    plain = write_changed(tmp_path / "plain", architecture, "plain", {**changes, **heads})
    quantized, values = write_quantized(plain, tmp_path, scheme)
    ours, expected = (ranks.generate(each, PROMPTS, NUM_TOKENS, tp_size=3)[0] for each in (quantized, values))
    assert ours.tokens == expected.tokens
    assert all(map(torch.equal, ours.logits, expected.logits))


@pytest.mark.parametrize(
    ("architecture", "variant", "num_layers"),
    [
        ("DeepseekV3ForCausalLM", "yarn-rope", 2),
        ("Glm4MoeForCausalLM", "query-key-norms", 2),
        ("Qwen3_5MoeForCausalLM", "plain", 1),
    ],
)
def test_layers_for_multi_token_prediction_are_split_too(
    ranks: RankPool, tmp_path: Path, architecture: str, variant: str, num_layers: int
) -> None:
    small = make_small_mtp_model(architecture, variant, tmp_path, num_mtp_layers=num_layers)
    results = ranks.generate(small.directory, PROMPTS[1:], 1, tp_size=2, has_mtp=True)
    ops = load_ops("reference")
    options = LoadOptions(with_mtp=True)
    loaded = load_model(small.directory, ops, torch.float32, lambda _: None, options=options)
    paged = PagedModel(loaded.model, ops)
    for number, prompt in enumerate(PROMPTS[1:]):
        expected = our_mtp_logits(paged, prompt, chunk_size=len(prompt))
        for layer, logits in enumerate(expected):
            tolerance = LOGIT_TOLERANCE * float(logits.abs().max())
            torch.testing.assert_close(results[0].mtp_logits[number][layer], logits, atol=tolerance, rtol=0)
            assert torch.equal(results[1].mtp_logits[number][layer], results[0].mtp_logits[number][layer])
