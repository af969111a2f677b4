"""Log-probabilities on the device against those of the reference backend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.worker.ops import load_ops
from services.worker.ops.triton.sampling.token_logprobs import token_logprobs

MINUS_INF = float("-inf")


def assert_same_logprobs(logits: Tensor, token_ids: list[int] | list[list[int]], num_top: int) -> None:
    drawn = torch.tensor(token_ids).view(len(logits), -1)
    entries, values, ranks = token_logprobs(logits, drawn, num_top)
    expected = load_ops("reference").token_logprobs(logits, drawn, num_top)
    torch.testing.assert_close(entries, expected[0], rtol=0, atol=0)
    torch.testing.assert_close(values, expected[1], rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(ranks, expected[2], rtol=0, atol=0)


def random_logits(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("vocabulary", [1, 33, 1000, 5000])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_values_ranks_and_likeliest_tokens_are_numpys(vocabulary: int, num_top: int) -> None:
    logits = random_logits(3, vocabulary)
    assert_same_logprobs(logits, [0, vocabulary // 2, vocabulary - 1], num_top)


@pytest.mark.parametrize("num_top", [0, 3])
def test_a_row_may_have_several_tokens(num_top: int) -> None:
    logits = random_logits(3, 5000, seed=5)
    assert_same_logprobs(logits, [[7, 4999, 7], [2047, 2048, 0], [1, 2, 3]], num_top)
    assert_same_logprobs(logits.round(), [[*range(100 * row, 100 * row + 21)] for row in range(3)], num_top)


@pytest.mark.parametrize("num_top", [2, 20])
def test_ties_go_to_the_lower_token(num_top: int) -> None:
    rounded = random_logits(2, 300, seed=1).round()
    equal = torch.zeros(1, 300)
    equal[0, ::2] = -0.0
    assert_same_logprobs(torch.cat((rounded, equal)), [7, 299, 150], num_top)


def test_the_likeliest_tokens_may_share_one_group() -> None:
    logits = random_logits(2, 5000, seed=2)
    logits[:, 4090:4110] += 50
    assert_same_logprobs(logits, [4100, 17], 20)


def test_impossible_tokens_have_no_probability() -> None:
    logits = torch.full((2, 5000), MINUS_INF)
    logits[0, 3] = 1e30
    logits[1, 4000:4003] = torch.tensor([-1e30, 2.0, 2.5])
    assert_same_logprobs(logits, [4000, 4000], 20)


def test_a_rows_bytes_do_not_depend_on_its_batch() -> None:
    logits = random_logits(4, 5000, seed=3)
    _, together, _ = token_logprobs(logits, torch.tensor([[1], [2], [3], [4]]), 5)
    _, alone, _ = token_logprobs(logits[2:3], torch.tensor([[3]]), 5)
    assert together[2].tolist() == alone[0].tolist()


def test_rows_may_have_a_stride() -> None:
    wide = random_logits(3, 700, seed=4)
    entries, values, ranks = token_logprobs(wide[:, :500], torch.tensor([[4], [5], [6]]), 3)
    expected = token_logprobs(wide[:, :500].contiguous(), torch.tensor([[4], [5], [6]]), 3)
    assert all(torch.equal(got, wanted) for got, wanted in zip((entries, values, ranks), expected, strict=True))
