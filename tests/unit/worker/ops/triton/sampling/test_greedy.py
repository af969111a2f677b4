"""The largest logits on the device against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.worker.ops.triton.sampling.greedy import greedy_sample

INF = float("inf")


def random_logits(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("vocabulary", [1, 33, 1000, 20_000])
def test_the_largest_logit_and_its_column_are_torchs(vocabulary: int) -> None:
    logits = random_logits(5, vocabulary)
    logits[1], logits[2, -1], logits[3, vocabulary // 2], logits[4] = -INF, INF, -INF, -1e30
    token_ids, largest = greedy_sample(logits)
    expected = logits.max(-1)
    assert token_ids.tolist() == expected.indices.tolist()
    assert largest.tolist() == expected.values.tolist()


def test_equal_logits_go_to_the_lowest_column() -> None:
    logits = random_logits(3, 20_000).round()
    logits[2] = torch.tensor([-0.0, 0.0]).repeat(10_000)
    token_ids, _ = greedy_sample(logits)
    assert token_ids.tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]
    assert token_ids[2] == 0


def test_nan_counts_as_the_largest() -> None:
    logits = random_logits(2, 9000)
    logits[0, 8999], logits[0, 8000], logits[1, 4] = INF, float("nan"), -float("nan")
    token_ids, largest = greedy_sample(logits)
    assert token_ids.tolist() == [8000, 4]
    assert largest.isnan().all()


def test_rows_may_have_a_stride() -> None:
    wide = random_logits(4, 300)
    token_ids, _ = greedy_sample(wide[:, :200])
    assert token_ids.tolist() == wide[:, :200].argmax(-1).tolist()
