"""The decode kernel computes what the reference backend does, with drafts and with contexts in several splits.

Left to `make proofs`: combinations of sizes, windows, sinks and splits of which every pair is in another one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from services.worker.ops import AttentionParams
from services.worker.ops.triton.attention import context_splits
from services.worker.ops.triton.attention import decode as module
from services.worker.ops.triton.attention.context_splits import SplitLimits, choose_num_splits
from services.worker.ops.triton.attention.decode import DecodeConfig, decode_attention
from tests.support.kernels.attention_batches import Batch, random
from tests.support.kernels.paged_attention import FP8, PagedStep, check_attention, make_step
from tests.support.pairwise import every_pair

# A row that sees nothing of a split has a sum of 0.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")

PLAIN = AttentionParams(0.3)
SINKS = 3 * random(4, seed=9)
# Block size, query heads, key/value heads and the width of a head: groups of 1, 3 and 8.
SHAPES = ((1, 8, 1, 64), (3, 3, 1, 80), (16, 6, 2, 128), (16, 2, 2, 16), (1, 6, 2, 80), (3, 16, 2, 16))

KINDS = (AttentionParams(0.3, None, SINKS), AttentionParams(0.3, 7, SINKS), AttentionParams(0.3, 60))
BOTH = (False, True)


@pytest.fixture(params=BOTH, ids=["whole", "split"])
def is_split(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether contexts are split, however short they are."""
    split: bool = request.param
    # Few splits, as each program takes about a millisecond in the interpreter.
    limits = SplitLimits(min_tokens=8 if split else 10**6, max_splits=4)
    monkeypatch.setattr(context_splits, "SPLIT_LIMITS", limits)
    return split


@every_pair(shape=SHAPES, is_split=BOTH, indirect=["is_split"])
@pytest.mark.usefixtures("is_split")
def test_a_token_and_its_drafts_see_the_whole_context_up_to_each(shape: tuple[int, int, int, int]) -> None:
    block_size, num_heads, num_kv_heads, head_dim = shape
    step = make_step(Batch(block_size, [0, 140, 61, 7], [1, 1, 9, 3], 1), num_heads, num_kv_heads, head_dim)
    check_attention(step, decode_attention, PLAIN)


@every_pair(block_size=[1, 3, 16], params=KINDS, is_split=BOTH, indirect=["is_split"])
@pytest.mark.usefixtures("is_split")
def test_windows_and_sinks_over_several_splits(block_size: int, params: AttentionParams) -> None:
    check_attention(make_step(Batch(block_size, [0, 150, 63], [9, 2, 9], 2)), decode_attention, params)


@pytest.mark.usefixtures("is_split")
def test_values_may_be_narrower_than_keys() -> None:
    step = PagedStep(Batch(16, [100, 5], [2, 1], 5), num_heads=4, num_kv_heads=2, key_dim=48, value_dim=24)
    check_attention(step, decode_attention, PLAIN)


@pytest.mark.parametrize("params", KINDS)
@pytest.mark.usefixtures("is_split")
def test_numbers_of_a_cache_in_fp8_are_codes_times_their_scale(params: AttentionParams) -> None:
    # 24 columns are padded in a product.
    step = make_step(Batch(3, [0, 71, 30], [3, 9, 1], 2), head_dim=24, kv_dtype=FP8)
    check_attention(step, decode_attention, params)


@pytest.mark.usefixtures("is_split")
@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_one_sequences_nan_stays_its_own() -> None:
    step = make_step(Batch(16, [150, 133, 5], [1, 2, 1], 6))
    expected = step.expected(PLAIN)
    step.query[1:3] = math.nan
    for tensor in step.cache:
        tensor[step.metadata.block_tables[1].long()] = math.nan
    output = step.run(decode_attention, PLAIN)
    assert output[1:3].isnan().all()
    torch.testing.assert_close(output[[0, 3]], expected[[0, 3]], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
@pytest.mark.usefixtures("is_split")
@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_a_nan_in_a_cache_in_fp8_is_found_by_its_own_sequence_alone(part: int) -> None:
    step = make_step(Batch(16, [20, 33, 5], [1, 2, 1], 6), kv_dtype=FP8)
    expected = step.expected(PLAIN)
    step.cache[part][step.metadata.block_tables[1, 0].long(), 3] = math.nan
    output = step.run(decode_attention, PLAIN)
    assert output[1:3].isnan().all()
    torch.testing.assert_close(output[[0, 3]], expected[[0, 3]], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("tokens", [16, 128])
@pytest.mark.parametrize("max_splits", [2, 4])
def test_the_size_of_a_tile_and_the_number_of_splits_change_no_result(tokens: int, max_splits: int) -> None:
    limits = SplitLimits(wanted_programs=1000, min_tokens=8, max_splits=max_splits)
    launch = partial(decode_attention, config=DecodeConfig(tokens, num_warps=8, num_stages=3), limits=limits)
    check_attention(make_step(Batch(16, [0, 150, 70], [1, 1, 1], 2)), launch, PLAIN)


@pytest.mark.parametrize("max_rows", [16, 32])
def test_programs_share_the_queries_of_a_long_run(max_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_ROWS", max_rows)
    step = make_step(Batch(16, [70, 20], [30, 9], 7), num_heads=6, num_kv_heads=2)
    check_attention(step, decode_attention, AttentionParams(0.3, window=40))


@pytest.mark.parametrize("params", KINDS)
@pytest.mark.usefixtures("is_split")
def test_padding_without_a_context_changes_no_other_row(params: AttentionParams) -> None:
    step = make_step(Batch(16, [150, 33, 70], [1, 1, 1], 7))
    expected = step.expected(params)
    # As a graph pads its batch: the host's lengths do not change.
    step.metadata.context_lens[1] = 0
    output = step.run(decode_attention, params)
    assert output[1].isfinite().all()
    torch.testing.assert_close(output[[0, 2]], expected[[0, 2]], atol=2e-5, rtol=2e-5)


def test_the_device_decides_how_long_contexts_are(is_split: bool) -> None:
    step, longer = (make_step(Batch(16, cached, [1, 1], 8)) for cached in ([65, 1], [300, 290]))
    bounds = longer.sequences()
    sequences = replace(step.sequences(), max_context_len=bounds.max_context_len, max_query_len=bounds.max_query_len)
    assert (choose_num_splits(4, sequences.max_context_len) > 1) is is_split
    output = torch.empty_like(step.expected(PLAIN))
    decode_attention(step.query, step.cache, output, sequences, PLAIN)
    torch.testing.assert_close(output, step.expected(PLAIN), atol=2e-5, rtol=2e-5)


def test_there_are_as_many_splits_as_fill_a_gpu_and_as_the_context_is_worth() -> None:
    assert choose_num_splits(8, 32768) == 64
    assert choose_num_splits(8, 1000) == 3
    assert choose_num_splits(64, 32768) == 8
    assert choose_num_splits(2048, 32768) == 1
    assert choose_num_splits(8, 1) == 1
