"""Pairs of tokens and experts are arranged by expert, in whole tiles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.ops.triton.products import expert_runs as module
from services.worker.ops.triton.products.expert_runs import arrange_pairs


def check(expert_ids: list[list[int]], num_experts: int, tile_rows: int) -> None:
    """Every pair is in a tile of its expert, in rising order, and the rest of the tiles is padding."""
    runs = arrange_pairs(torch.tensor(expert_ids, dtype=torch.int32), num_experts, tile_rows)
    flat = [expert for row in expert_ids for expert in row]
    assert runs.num_tiles == len(flat) // tile_rows + min(num_experts, len(flat))
    tiles = runs.pairs.view(-1, tile_rows).tolist()
    numbers = runs.tile_experts.tolist()
    used = [(expert, tile) for expert, tile in zip(numbers, tiles, strict=True) if expert < num_experts]
    assert numbers[len(used) :] == [num_experts] * (runs.num_tiles - len(used))
    for expert in range(num_experts):
        pairs = [pair for number, tile in used for pair in tile if number == expert]
        own = [pair for pair, chosen in enumerate(flat) if chosen == expert]
        num_padded = -len(own) % tile_rows
        assert pairs == own + [len(flat)] * num_padded
    assert numbers == sorted(numbers)


@given(
    num_experts=st.integers(1, 9),
    num_chosen=st.integers(1, 4),
    num_tokens=st.integers(1, 40),
    is_skewed=st.booleans(),
    tile_rows=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25)
def test_every_pair_is_in_a_tile_of_its_expert(
    num_experts: int, num_chosen: int, num_tokens: int, is_skewed: bool, tile_rows: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    most = 1 if is_skewed else num_experts
    ids = torch.randint(0, most, (num_tokens, num_chosen), generator=generator)
    check(ids.tolist(), num_experts, tile_rows)


def test_more_pairs_than_a_program_reads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAIRS", 8)
    ids = torch.randint(0, 3, (45, 2), generator=torch.Generator().manual_seed(1))
    check(ids.tolist(), num_experts=4, tile_rows=2)


@pytest.mark.parametrize("number", [-1, 3, 2**30])
def test_a_pair_whose_expert_does_not_exist_is_left_out(number: int) -> None:
    check([[0, number], [2, 0], [number, number]], num_experts=3, tile_rows=2)
