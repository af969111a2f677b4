"""Tokens drawn in batches under thousands of seeds have the distribution that their options describe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from shared.request.sampling_params import SamplingOptions
from tests.support.kernels.sampling import Recipe, chi_squared, chi_squared_limit, make_rows, sample, walk

NUM_SEEDS = 8_000
BATCH = 512
LOGITS = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -0.5, 0.2, 1.4])
WIDTH = len(LOGITS)
PENALIZED = SamplingOptions(repetition_penalty=1.5, logit_bias=((3, 1.5),), min_p=0.1)


def shares(logits: npt.NDArray[np.floating], recipe: Recipe) -> npt.NDArray[np.float64]:
    """The shares of a single draw, by sorting everything."""
    weights: npt.NDArray[np.float64] = np.exp(logits.astype(np.float64) / recipe.temperature)
    weights /= weights.sum()
    if recipe.options is not None:
        weights[weights < recipe.options.min_p * weights.max()] = 0
    order = np.argsort(-weights, kind="stable")
    weights[order[recipe.top_k or WIDTH :]] = 0
    weights /= weights.sum()
    held_before = np.cumsum(weights[order]) - weights[order]
    weights[order[held_before >= recipe.top_p]] = 0
    weights /= weights.sum()
    return weights


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        Recipe(temperature=0.6),
        Recipe(temperature=1.9, choice=5),
        Recipe(top_k=4),
        Recipe(top_p=0.8),
        Recipe(options=SamplingOptions(min_p=0.15)),
        Recipe(temperature=1.3, top_k=6, top_p=0.9, options=SamplingOptions(min_p=0.1)),
    ],
)
def test_a_draw_has_the_distribution_of_its_options(recipe: Recipe) -> None:
    drawn = []
    for first_seed in range(0, NUM_SEEDS, BATCH):
        seeds = range(first_seed, min(first_seed + BATCH, NUM_SEEDS))
        recipes = [replace(recipe, seed=seed) for seed in seeds]
        state = recipe.make_state([0], WIDTH)
        states = {} if state is None else dict.fromkeys(range(len(recipes)), state)
        rows = make_rows(recipes, [9] * len(recipes), states=states)
        drawn.append(sample(LOGITS.expand(len(recipes), -1).contiguous(), rows).token_ids)
    expected = shares(LOGITS.numpy(), recipe)
    seen = np.bincount(np.concatenate(drawn), minlength=WIDTH)
    assert chi_squared(seen, expected) < chi_squared_limit(expected)


def expected_pairs(table: npt.NDArray[np.float32], recipe: Recipe) -> npt.NDArray[np.float64]:
    """The joint shares of the first two tokens after a prompt of token 0, [WIDTH * WIDTH]."""
    pairs = np.zeros((WIDTH, WIDTH))
    for first, share in enumerate(shares(_processed(table[0], recipe, [0]), recipe)):
        pairs[first] = share * shares(_processed(table[first], recipe, [0, first]), recipe)
    return pairs.reshape(-1)


def _processed(logits: npt.NDArray[np.float32], recipe: Recipe, tokens: list[int]) -> npt.NDArray[np.floating]:
    state = recipe.make_state([0], WIDTH)
    if state is None:
        return logits
    for token_id in tokens[1:]:
        state.append(token_id)
    return state.process(logits, len(tokens))


@pytest.mark.parametrize(
    ("recipe", "num_seeds"),
    [(Recipe(temperature=1.1), NUM_SEEDS), (Recipe(top_k=6, top_p=0.95, options=PENALIZED), NUM_SEEDS // 4)],
)
def test_random_drafts_change_no_token_and_so_keep_the_distribution(recipe: Recipe, num_seeds: int) -> None:
    table = torch.stack([LOGITS.roll(shift) for shift in range(WIDTH)])
    recipes = [replace(recipe, seed=seed) for seed in range(num_seeds)]
    random = np.random.default_rng(0)

    def at_random(_number: int, _known: list[int]) -> Sequence[int]:
        return [int(WIDTH * share) for share in random.random(3)]

    plain, _ = walk(table, recipes, 2)
    drafted, _ = walk(table, recipes, 2, propose=at_random)
    assert drafted == plain
    expected = expected_pairs(table.numpy(), recipe)
    seen = np.bincount([first * WIDTH + second for first, second in drafted], minlength=WIDTH * WIDTH)
    assert chi_squared(seen, expected) < chi_squared_limit(expected)
