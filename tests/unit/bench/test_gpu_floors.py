"""The arithmetic of the floors, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from tests.bench.gpu.configs import CONFIGS
from tests.bench.gpu.floors import (
    Rates,
    Work,
    decode_size,
    expected_touched,
    expert_bytes,
    linear_bytes,
    prefill_size,
    step_works,
)

BF16 = 2


def total(works: list[Work]) -> tuple[float, float]:
    """Bytes and operations of all works."""
    return sum(work.num_bytes for work in works), sum(work.num_operations for work in works)


def test_each_work_takes_its_bytes_or_its_operations() -> None:
    rates = Rates(bytes_per_s=10.0, operations_per_s=100.0)
    # 3 s of bytes, then 4 s of operations.
    assert rates.floor_s([Work(30.0, 200.0), Work(10.0, 400.0)]) == 7.0


def test_a_dense_decode_step_reads_weights_and_cache_once() -> None:
    # Qwen3-8B: 4096 x (4096 + 2 x 1024 + 4096) + 3 x 4096 x 12288 = 192 937 984 weights a layer.
    weights = 36 * 192_937_984 + 4096 * 151_936
    # 2 x 8 x 128 values a token and layer; each is used by 4 query heads, twice.
    num_bytes, num_operations = total(step_works(CONFIGS["qwen3-8b"], BF16, decode_size(8, 1024)))
    assert num_bytes == 2 * weights + 2 * 36 * 2048 * 8 * 1024
    assert num_operations == 2 * weights * 8 + 36 * 2048 * 8 * 1024 * 4 * 2


def test_a_prefill_needs_the_logits_of_last_tokens_only_and_half_of_a_square() -> None:
    layers, head = 36 * 192_937_984, 4096 * 151_936
    _, num_operations = total(step_works(CONFIGS["qwen3-8b"], BF16, prefill_size(8, 2048)))
    attention = 36 * 4 * 32 * 128 * 8 * (2048 * 2049 // 2)
    assert num_operations == 2 * layers * 8 * 2048 + 2 * head * 8 + attention


def test_packed_weights_count_with_their_scales() -> None:
    assert linear_bytes(CONFIGS["qwen3-8b"], BF16) == 2
    # Blocks of 128 x 128 share four bytes; groups of 128 share two.
    assert linear_bytes(CONFIGS["qwen3-8b-fp8"], BF16) == 1 + 4 / 16384
    assert linear_bytes(CONFIGS["qwen3-8b-int4"], BF16) == 0.5 + 2 / 128
    # In MXFP4 checkpoints only experts are packed: 32 values in 17 bytes.
    assert linear_bytes(CONFIGS["gpt-oss-20b"], BF16) == 2
    assert expert_bytes(CONFIGS["gpt-oss-20b"], BF16) == 17 / 32
    assert expert_bytes(CONFIGS["deepseek-v3-4l"], BF16) == 1 + 4 / 16384


def test_a_step_of_packed_weights_reads_less_but_computes_as_much() -> None:
    layers, head = 36 * 192_937_984, 4096 * 151_936
    size = decode_size(1, 0)
    plain = step_works(CONFIGS["qwen3-8b"], BF16, size)
    fp8 = step_works(CONFIGS["qwen3-8b-fp8"], BF16, size)
    assert total(plain)[1] == total(fp8)[1]
    # The head is plain.
    assert total(fp8)[0] == layers * (1 + 4 / 16384) + 2 * head


def test_of_experts_only_those_that_are_touched_are_read() -> None:
    config = CONFIGS["qwen3-30b-a3b"]
    attention = 2048 * (4096 + 2 * 512 + 4096)
    router, expert = 128 * 2048, 3 * 2048 * 768
    head = 2048 * 151_936
    num_bytes, num_operations = total(step_works(config, BF16, decode_size(8, 0, num_touched=50.0)))
    assert num_bytes == 2 * (48 * (attention + router + 50 * expert) + head)
    # Each of 8 tokens goes through 8 experts.
    assert num_operations == 2 * 8 * (48 * (attention + router + 8 * expert) + head)


def test_latents_are_read_once_for_all_heads() -> None:
    config = CONFIGS["deepseek-v3-4l"]
    projections = 7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    dense, expert, router = 3 * 7168 * 18432, 3 * 7168 * 2048, 256 * 7168
    packed = 4 * projections + dense + 3 * (1 + 8) * expert
    plain = 3 * router + 7168 * 129_280
    latents = 4 * 576 * 4096
    num_bytes, num_operations = total(step_works(config, BF16, decode_size(1, 4096, num_touched=8.0)))
    assert num_bytes == pytest.approx(packed * (1 + 4 / 16384) + 2 * (plain + latents))
    # Products with keys of 576 values, and with values of 512.
    attention = 4 * 2 * 128 * (576 + 512) * 4096
    assert num_operations == 2 * (packed + plain) + attention


def test_half_of_the_layers_of_gpt_oss_see_a_window() -> None:
    config = CONFIGS["gpt-oss-20b"]
    without, with_cache = (total(step_works(config, BF16, decode_size(1, length)))[0] for length in (0, 1024))
    # 2 x 8 x 64 values a token and layer; 12 layers see 128 tokens, 12 all.
    assert with_cache - without == pytest.approx(2 * 1024 * (12 * 128 + 12 * 1024))


def test_chance_touches_all_experts_with_many_tokens() -> None:
    assert expected_touched(128, 8, 1) == pytest.approx(8)
    assert expected_touched(128, 8, 2) == pytest.approx(8 + 120 / 128 * 8)
    assert expected_touched(128, 8, 1000) == pytest.approx(128)
