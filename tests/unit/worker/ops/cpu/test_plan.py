"""The `cpu` backend's layout of a step: little padding, few rounds, and views where memory allows."""

from __future__ import annotations

import random

import torch

from services.worker.forward.kv_cache import KvCache, KvCacheSpec, attention_cache
from services.worker.ops.cpu.plan import AttentionLayout, CpuPlan
from tests.support.models.paged_model import attention_metadata

BLOCK_SIZE = 16
# 1536 bytes per token, so 2048 tokens per bucket.
CACHE = KvCache(KvCacheSpec((attention_cache(3, 64, torch.float32),)), num_blocks=16, block_size=BLOCK_SIZE)


def make_plan(query_lens: list[int], context_lens: list[int], *, is_prefill: bool, first_block: int = 0) -> CpuPlan:
    tables = []
    for length in context_lens:
        size = -(-length // BLOCK_SIZE)
        tables.append(list(range(first_block, first_block + size)))
        first_block += size
    metadata = attention_metadata(tables, query_lens, context_lens, block_size=BLOCK_SIZE, is_prefill=is_prefill)
    return CpuPlan(metadata, CACHE)


def make_layout(query_lens: list[int], context_lens: list[int], *, is_prefill: bool) -> AttentionLayout:
    return make_plan(query_lens, context_lens, is_prefill=is_prefill).layout()


def test_a_single_prompt_is_read_in_place() -> None:
    plan = make_plan([100], [100], is_prefill=True)
    layout = plan.layout()
    (bucket,) = layout.causal
    assert (bucket.token_rows, bucket.num_rows, bucket.length) == (slice(0, 100), 1, 100)
    assert (layout.gathered, layout.output_rows, plan.written()[0]) == ((), None, None)


def test_a_single_sequence_in_adjacent_blocks_is_decoded_in_place() -> None:
    layout = make_plan([1], [100], is_prefill=False, first_block=5).layout()
    (bucket,) = layout.gathered
    assert (bucket.slots, bucket.mask, layout.output_rows) == (slice(80, 180), None, None)


def test_rows_of_similar_length_are_decoded_in_one_round_and_in_order() -> None:
    layout = make_layout([1] * 16, [*range(110, 118), *range(117, 109, -1)], is_prefill=False)
    (bucket,) = layout.gathered
    assert (bucket.num_rows, bucket.length, bucket.query_rows) == (16, 117, slice(0, 16))
    assert layout.output_rows is None


def test_one_long_row_does_not_pad_the_short_ones() -> None:
    layout = make_layout([1] * 16, [4000, *[100] * 15], is_prefill=False)
    assert [(bucket.num_rows, bucket.length) for bucket in layout.gathered] == [(1, 4000), (15, 100)]


def test_one_long_prompt_does_not_pad_the_short_ones() -> None:
    lengths = [100, 2000, 100, 100]
    layout = make_layout(lengths, lengths, is_prefill=True)
    assert [(bucket.num_rows, bucket.length) for bucket in layout.causal] == [(1, 2000), (3, 100)]


def test_mixed_lengths_cost_little_padding_and_few_rounds() -> None:
    draw = random.Random(5)
    lengths = [draw.randint(10, 500) for _ in range(64)]
    layout = make_layout([1] * 64, lengths, is_prefill=False)
    padded = sum(bucket.num_rows * bucket.length for bucket in layout.gathered)
    assert padded <= 1.15 * sum(lengths) + 384 * len(layout.gathered)
    assert len(layout.gathered) <= 2 * sum(lengths) / 2048


def test_a_bucket_stays_within_its_bound() -> None:
    layout = make_layout([1] * 10, [500] * 10, is_prefill=False)
    assert [bucket.num_rows for bucket in layout.gathered] == [4, 4, 2]


def test_rows_with_drafts_share_a_round_and_do_not_split_the_others() -> None:
    query_lens = [1, 5] * 8
    layout = make_layout(query_lens, [200 + index for index in range(16)], is_prefill=False)
    # One row is padded to five queries, which costs less than the limit.
    assert [(bucket.num_rows, bucket.num_queries, bucket.length) for bucket in layout.gathered] == [
        (9, 5, 215),
        (7, 1, 212),
    ]


def test_a_longer_row_in_a_group_is_read_in_full() -> None:
    layout = make_layout([5, 4], [40, 60], is_prefill=False)
    (bucket,) = layout.gathered
    assert (bucket.num_rows, bucket.num_queries, bucket.length) == (2, 5, 60)


def test_long_rows_with_fewer_drafts_do_not_pad_a_short_one() -> None:
    layout = make_layout([5, 4, 4], [40, 1000, 1000], is_prefill=False)
    assert [(bucket.num_rows, bucket.num_queries, bucket.length) for bucket in layout.gathered] == [
        (1, 5, 40),
        (2, 4, 1000),
    ]


def test_prompts_with_and_without_a_cached_prefix_share_a_step() -> None:
    layout = make_layout([30, 40, 30], [30, 72, 30], is_prefill=True)
    (causal,), (gathered,) = layout.causal, layout.gathered
    assert (causal.num_rows, causal.length) == (2, 30)
    assert (gathered.query_rows, gathered.num_queries, gathered.length) == (slice(30, 70), 40, 72)
    assert layout.output_rows is not None
    # Joined prompts are the first round: tokens of the second sequence are after those of the third.
    assert layout.output_rows.tolist() == [*range(30), *range(60, 100), *range(30, 60)]


def test_a_decode_reads_only_its_window() -> None:
    plan = make_plan([1, 1], [100, 90], is_prefill=False)
    (bucket,) = plan.layout(20).gathered
    # Positions 80 to 99 of blocks 0 to 6, and 70 to 89 of blocks 7 to 12.
    assert isinstance(bucket.slots, torch.Tensor)
    assert bucket.slots.tolist() == [*range(80, 100), *range(7 * 16 + 70, 7 * 16 + 90)]
    assert (bucket.length, bucket.mask) == (20, None)


def test_a_window_longer_than_every_context_needs_no_separate_layout() -> None:
    plan = make_plan([1, 1], [100, 90], is_prefill=False)
    assert plan.layout(100) is plan.layout()
    assert plan.layout(99) is plan.layout(99)
    assert plan.layout(99) is not plan.layout()


def test_prompts_within_their_window_are_read_in_place() -> None:
    layout = make_plan([100, 30], [100, 30], is_prefill=True).layout(64)
    (causal,), pieces = layout.causal, layout.gathered
    assert (causal.token_rows, causal.length) == (slice(100, 130), 30)
    # 64 queries of the first 64 tokens, then 36 that also see the 63 tokens before them.
    assert sorted((piece.num_rows, piece.num_queries, piece.length) for piece in pieces) == [(1, 36, 99), (1, 64, 64)]


def test_a_prefill_far_longer_than_its_window_costs_little_more_than_the_window() -> None:
    layout = make_plan([4000], [4000], is_prefill=True).layout(128)
    scored = sum(bucket.num_rows * bucket.num_queries * bucket.length for bucket in layout.gathered)
    assert layout.causal == ()
    assert scored <= 2 * 4000 * 128
