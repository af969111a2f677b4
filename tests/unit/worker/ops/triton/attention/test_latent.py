"""The latent kernel computes what its definition says, over whole contexts and over selected positions.

Of shapes, kinds of steps and splits every pair is computed; the other combinations are left to `make proofs`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from services.worker.ops.triton.attention import context_splits
from services.worker.ops.triton.attention import latent as module
from services.worker.ops.triton.attention.context_splits import SplitLimits
from services.worker.ops.triton.attention.latent import LatentConfig, latent_attention
from services.worker.ops.triton.attention.plan import TritonPlan
from services.worker.ops.triton.backend import TritonOps
from tests.support.kernels.attention_batches import Batch
from tests.support.kernels.latent_batches import SCALE, VALUE_DIM, LatentStep, Tokens, assert_close, pad_as_in_graph
from tests.support.pairwise import every_pair

# A row that sees nothing of a split has a sum of 0.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")

BOTH = (False, True)


@pytest.fixture(params=BOTH, ids=["whole", "split"])
def is_split(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether contexts are split, however short they are."""
    split: bool = request.param
    # Few splits, as each program takes about a millisecond in the interpreter.
    limits = SplitLimits(min_tokens=8 if split else 10**6, max_splits=4)
    monkeypatch.setattr(context_splits, "SPLIT_LIMITS", limits)
    return split


def make_step(batch: Batch, num_heads: int = 3, *, is_prefill: bool = True) -> LatentStep:
    return LatentStep(batch, is_prefill=is_prefill, tokens=Tokens.random(batch, num_heads=num_heads))


def random_positions(batch: Batch, count: int) -> Tensor:
    """For each token up to `count` different positions up to its own in any order, and -1 between them."""
    generator = torch.Generator().manual_seed(5)
    selected = torch.full((batch.num_tokens, count), -1)
    for row, position in enumerate(last_positions(batch)):
        places = torch.randperm(count, generator=generator)[: 1 + row % count]
        positions = torch.randperm(position + 1, generator=generator)[: len(places)]
        selected[row, places[: len(positions)]] = positions
    return selected


def last_positions(batch: Batch) -> Iterator[int]:
    """The position of each of the step's tokens."""
    for cached, new in zip(batch.num_cached, batch.num_new, strict=True):
        yield from range(cached, cached + new)


def attend_to(step: LatentStep, selected: Tensor) -> Tensor:
    """What the backend computes over `selected`."""
    latents, plan = step.cache.layers[0][0], TritonPlan(step.metadata)
    ops = TritonOps()
    ops.write_cache(step.batch.new_rows(step.tokens.latents), latents, plan)
    return ops.mla_attention(step.tokens.query, latents, plan, scale=SCALE, value_dim=VALUE_DIM, selected=selected)


@every_pair(shape=[(1, 8), (3, 3), (16, 24), (16, 1)], is_prefill=BOTH, is_split=BOTH, indirect=["is_split"])
@pytest.mark.usefixtures("is_split")
def test_a_token_sees_the_latents_up_to_its_own(shape: tuple[int, int], is_prefill: bool) -> None:
    block_size, num_heads = shape
    step = make_step(Batch(block_size, [0, 70, 20], [1, 1, 9], 1), num_heads, is_prefill=is_prefill)
    output = step.attend(TritonOps())
    assert output.shape == (11, num_heads, VALUE_DIM)
    assert output.is_contiguous()
    assert_close(output, step.expected())


@every_pair(block_size=[1, 16], is_prefill=BOTH, is_split=BOTH, indirect=["is_split"])
@pytest.mark.usefixtures("is_split")
def test_only_selected_positions_are_seen(block_size: int, is_prefill: bool) -> None:
    step = make_step(Batch(block_size, [0, 70, 0, 33], [1, 2, 12, 1], 1), is_prefill=is_prefill)
    selected = random_positions(step.batch, 40)
    expected = step.expected_at(lambda _seq, row, _position: selected[row][selected[row] >= 0].tolist())
    assert_close(attend_to(step, selected), expected)


@pytest.mark.parametrize(("rows", "tokens", "num_heads"), [(16, 16, 24), (32, 16, 20), (64, 64, 5)])
@pytest.mark.usefixtures("is_split")
def test_the_size_of_a_tile_changes_no_result(
    rows: int, tokens: int, num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LatentConfig(rows, tokens, num_warps=4, num_stages=1)
    monkeypatch.setattr(module, "choose_latent_config", lambda *_, **__: config)
    step = make_step(Batch(16, [33, 0, 70], [4, 14, 1], 2), num_heads)
    assert_close(step.attend(TritonOps()), step.expected())


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.usefixtures("is_split")
@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_one_sequences_nan_stays_its_own(is_sparse: bool) -> None:
    step = make_step(Batch(16, [50, 33, 5], [1, 2, 12], 6))
    selected = random_positions(step.batch, 32) if is_sparse else None
    expected = attend_to(step, selected) if selected is not None else step.attend(TritonOps())
    step.tokens.query[1:3] = step.tokens.latents[1][:] = math.nan
    step.cache.layers[0][0][step.metadata.block_tables[1, :3].long()] = math.nan
    output = attend_to(step, selected) if selected is not None else step.attend(TritonOps())
    assert output[1:3].isnan().all()
    assert torch.equal(output[[0, *range(3, 15)]], expected[[0, *range(3, 15)]])


@every_pair(is_sparse=BOTH, context_len=[0, 1], is_split=BOTH, indirect=["is_split"])
@pytest.mark.usefixtures("is_split")
@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_a_row_of_padding_changes_no_other_row(is_sparse: bool, context_len: int) -> None:
    step = make_step(Batch(16, [50, 33, 20], [1, 1, 1], 7), is_prefill=False)
    selected = random_positions(step.batch, 32) if is_sparse else None
    expected = attend_to(step, selected) if selected is not None else step.attend(TritonOps())
    step.metadata = pad_as_in_graph(step.metadata, 1, context_len)
    if selected is not None:
        selected[1] = -1
    output = attend_to(step, selected) if selected is not None else step.attend(TritonOps())
    assert torch.equal(output[[0, 2]], expected[[0, 2]])


def test_the_device_decides_how_long_contexts_are(is_split: bool) -> None:
    step = make_step(Batch(16, [65, 1, 20], [1, 2, 12], 8))
    expected = step.attend(TritonOps())
    chunks = TritonPlan(step.metadata).chunks
    assert chunks is not None
    longer = replace(
        chunks,
        num_tokens=chunks.num_tokens + 5,
        max_query_len=chunks.max_query_len + 2,
        max_context_len=1000 if is_split else chunks.max_context_len,
    )
    output = torch.full_like(expected, math.nan)
    latent_attention(step.tokens.query, step.cache.layers[0][0], output, longer, scale=SCALE, selected=None)
    assert output[:3].isnan().all()
    torch.testing.assert_close(output[3:], expected[3:])
