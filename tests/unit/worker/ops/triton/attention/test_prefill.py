"""The prefill kernel computes what the reference backend does, over chunks after cached prefixes.

Left to `make proofs`: sizes of blocks and tiles with windows that meet another size here.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from services.worker.ops import AttentionParams
from services.worker.ops.triton.attention.prefill import PrefillConfig, choose_prefill_config, prefill_attention
from tests.support.kernels.attention_batches import Batch, random
from tests.support.kernels.paged_attention import FP8, PagedStep, check_attention, make_step
from tests.support.pairwise import some_of

PLAIN = AttentionParams(0.3)
# Block size, query heads, key/value heads and the width of a head: groups of 1, 3 and 8.
SHAPES = ((1, 8, 1, 64), (3, 3, 1, 80), (16, 6, 2, 128), (16, 2, 2, 16), (1, 6, 2, 80), (3, 16, 2, 16))


@pytest.mark.parametrize(("block_size", "num_heads", "num_kv_heads", "head_dim"), SHAPES)
def test_chunks_see_their_prefix_and_themselves_up_to_each_token(
    block_size: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    step = make_step(Batch(block_size, [0, 70, 3, 33], [42, 1, 9, 33], 1), num_heads, num_kv_heads, head_dim)
    check_attention(step, prefill_attention, PLAIN)


@some_of([(1, 1), (3, 7), (16, 64), (1, 1000), (16, 7), (3, 64)], block_size=[1, 3, 16], window=[1, 7, 64, 1000])
def test_a_window_hides_what_is_before_it(block_size: int, window: int) -> None:
    step = make_step(Batch(block_size, [0, 100, 20], [80, 35, 9], 2))
    check_attention(step, prefill_attention, AttentionParams(0.3, window=window))


@some_of(
    [((16, 16), None), ((16, 16), 5), ((128, 16), None), ((64, 32), 5), ((128, 64), None), ((128, 64), 5)],
    size=[(16, 16), (128, 16), (64, 32), (128, 64)],
    window=[None, 5],
)
def test_the_size_of_a_tile_changes_no_result(size: tuple[int, int], window: int | None) -> None:
    rows, tokens = size
    launch = partial(prefill_attention, config=PrefillConfig(rows, tokens, num_warps=4, num_stages=2))
    step = make_step(Batch(16, [0, 60], [70, 30], 2), num_heads=6)
    check_attention(step, launch, AttentionParams(0.3, window=window))


@pytest.mark.parametrize("window", [None, 20])
def test_sinks_join_the_sum(window: int | None) -> None:
    step = make_step(Batch(16, [0, 70], [40, 30], 3))
    check_attention(step, prefill_attention, AttentionParams(0.3, window=window, sinks=3 * random(4, seed=9)))


@pytest.mark.parametrize("num_seqs", [1, 2, 5, 16])
def test_every_sequence_of_a_batch_is_found(num_seqs: int) -> None:
    new = [1 + 37 * seq % 40 for seq in range(num_seqs)]
    check_attention(make_step(Batch(16, [0] * num_seqs, new, 4)), prefill_attention, PLAIN)


def test_values_may_be_narrower_than_keys() -> None:
    step = PagedStep(Batch(16, [20], [70], 5), num_heads=4, num_kv_heads=2, key_dim=48, value_dim=24)
    check_attention(step, prefill_attention, PLAIN)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("sinks", [None, 3 * random(4, seed=9)], ids=["plain", "sinks"])
def test_numbers_of_a_cache_in_fp8_are_codes_times_their_scale(window: int | None, sinks: Tensor | None) -> None:
    # 24 columns are padded in a product.
    step = make_step(Batch(3, [0, 70, 3], [40, 30, 20], 3), head_dim=24, kv_dtype=FP8)
    check_attention(step, prefill_attention, AttentionParams(0.3, window=window, sinks=sinks))


@pytest.mark.parametrize("window", [None, 20])
def test_padding_without_a_context_changes_no_other_row(window: int | None) -> None:
    params = AttentionParams(0.3, window=window)
    step = make_step(Batch(16, [20, 0, 5], [30, 100, 50], 6))
    expected = step.expected(params)
    step.metadata.context_lens[1] = 0
    output = step.run(prefill_attention, params)
    torch.testing.assert_close(output[:30], expected[:30], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(output[130:], expected[130:], atol=2e-5, rtol=2e-5)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_one_sequences_nan_stays_its_own() -> None:
    step = make_step(Batch(16, [20, 33, 5], [30, 40, 50], 6))
    expected = step.expected(PLAIN)
    own = slice(30, 70)
    step.query[own] = math.nan
    for tensor in step.cache:
        tensor[step.metadata.block_tables[1].long()] = math.nan
    output = step.run(prefill_attention, PLAIN)
    assert output[own].isnan().all()
    torch.testing.assert_close(output[:30], expected[:30], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(output[70:], expected[70:], atol=2e-5, rtol=2e-5)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_a_nan_in_a_cache_in_fp8_is_found_by_its_own_sequence_alone(part: int) -> None:
    step = make_step(Batch(16, [20, 33, 5], [10, 20, 10], 6), kv_dtype=FP8)
    expected = step.expected(PLAIN)
    step.cache[part][step.metadata.block_tables[1, 0].long(), 3] = math.nan
    output = step.run(prefill_attention, PLAIN)
    assert output[10:30].isnan().all()
    torch.testing.assert_close(output[:10], expected[:10], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(output[30:], expected[30:], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("key_columns", "itemsize"), [(16, 2), (128, 2), (256, 2), (128, 4)])
def test_a_tile_holds_at_least_one_token(key_columns: int, itemsize: int) -> None:
    for group, has_codes in product((1, 3, 8, 64), (False, True)):
        config = choose_prefill_config(key_columns, itemsize, group, has_codes=has_codes)
        assert config.rows >= group
        assert min(config.rows, config.tokens) >= 16
