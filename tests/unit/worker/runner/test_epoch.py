from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import Tensor
from typing_extensions import override

from services.worker.models.loader import LoadedModel
from services.worker.ops import load_ops
from services.worker.runner.cache_memory import KvCacheSize
from services.worker.runner.model_runner import ModelRunner
from shared.errors import StaleEpochError, StepMismatchError
from shared.step.step import Step
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.worker.worker_runner import GIB, WrappedModel, load_exact, make_runner
from tests.support.worker.worker_steps import decode_step, make_enter, prefill_step

PROMPTS = ([5, 9, 2, 44, 17], [3], [8, 1, 60, 33, 21, 4, 4, 90, 12])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_exact(write_tiny_llama(tmp_path_factory.mktemp("model"), changes={"num_hidden_layers": 2}))


def attached(runner: ModelRunner, *, block_size: int) -> ModelRunner:
    runner.attach(block_size=block_size, max_num_seqs=8, max_num_batched_tokens=256)
    return runner


def prefill_of_all(blocks_per_row: int) -> Step:
    return prefill_step(
        *(
            make_enter(row, prompt, range(row * blocks_per_row, (row + 1) * blocks_per_row))
            for row, prompt in enumerate(PROMPTS)
        )
    )


def test_a_new_epoch_starts_empty(loaded: LoadedModel) -> None:
    runner = make_runner(loaded)
    runner.attach(block_size=4, max_num_seqs=8, max_num_batched_tokens=256)
    runner.run_step(prefill_of_all(5))
    runner.run_step(decode_step(step_id=2))
    runner.attach(block_size=16, max_num_seqs=3, max_num_batched_tokens=16)
    with pytest.raises(StepMismatchError):
        runner.run_step(decode_step())


def test_the_number_of_blocks_follows_from_the_memory_unless_it_is_set(loaded: LoadedModel) -> None:
    bytes_per_token = loaded.model.kv_cache_spec.bytes_per_token
    assert attached(make_runner(loaded, num_blocks=None), block_size=16).num_blocks == GIB // (16 * bytes_per_token)
    small = ModelRunner(loaded, load_ops("reference"), KvCacheSize(16 * bytes_per_token - 1))
    assert (small.num_blocks, attached(small, block_size=16).num_blocks) == (0, 0)
    with pytest.raises(StaleEpochError):
        small.run_step(prefill_of_all(5))
    assert attached(small, block_size=8).num_blocks == 1
    assert attached(make_runner(loaded, num_blocks=3), block_size=16).num_blocks == 3


def test_memory_is_measured_with_the_largest_prefill_once_for_a_block_size(loaded: LoadedModel) -> None:
    num_computed = []

    class CountingModel(WrappedModel):
        @override
        def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
            num_computed.append((len(token_ids), int(positions.max()) + 1))
            return super().forward(token_ids, positions)

    def measure(run_largest_prefill: Callable[[], None]) -> int:
        run_largest_prefill()
        return 7 * 16 * loaded.model.kv_cache_spec.bytes_per_token

    counting = replace(loaded, model=CountingModel(loaded.model))
    runner = ModelRunner(counting, load_ops("reference"), KvCacheSize(0, measure=measure))
    limits = {"block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 300}
    assert runner.attach(**limits) == 7
    assert runner.attach(**limits) == 7
    assert num_computed == [(300, min(300, loaded.facts.context_length))]
    assert len(runner.run_step(prefill_of_all(2)).token_ids) == len(PROMPTS)
