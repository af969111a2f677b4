"""The loop without services: every answer is whole, whatever fits at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.gpu.serving.in_process import PlainLoop
from tests.bench.gpu.serving.requests import draw_requests, num_output_tokens
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.worker.worker_runner import load_exact, make_runner


@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(64, 8), (6, 8), (64, 2)])
def test_every_answer_is_whole(tmp_path: Path, num_blocks: int, max_num_seqs: int) -> None:
    runner = make_runner(load_exact(write_tiny_llama(tmp_path)), num_blocks=num_blocks)
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 40}
    runner.attach(block_size=16, **limits)
    requests = draw_requests(9, (1, 20), seed=4)
    assert PlainLoop(runner, **limits).serve(requests) == num_output_tokens(requests)


def test_a_request_that_never_fits_is_refused(tmp_path: Path) -> None:
    runner = make_runner(load_exact(write_tiny_llama(tmp_path)), num_blocks=2)
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 40}
    runner.attach(block_size=16, **limits)
    with pytest.raises(ValueError, match="does not fit"):
        PlainLoop(runner, **limits).serve(draw_requests(1, (30, 30), seed=1))


def test_requests_are_those_of_the_seed_and_within_the_lengths() -> None:
    requests = draw_requests(200, (3, 9), seed=5)
    assert requests == draw_requests(200, (3, 9), seed=5)
    assert requests != draw_requests(200, (3, 9), seed=6)
    assert {len(each.prompt) for each in requests} == {each.num_output_tokens for each in requests} == set(range(3, 10))
