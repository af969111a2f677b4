from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.config import WorkerSettings
from services.worker.device import DeviceError
from services.worker.layout import RankLayout
from services.worker.models.loader import LoadedModel, LoadOptions, load_model
from services.worker.ops import BACKEND_NAMES, load_ops
from services.worker.runner import numerics
from services.worker.runner.model_runner import ModelRunner
from services.worker.runner.numerics import numerics_fingerprint
from services.worker.runner.start.build import build_model_runner
from services.worker.sampling.sampler import SAMPLING_VERSION
from shared.errors import StaleEpochError, StepMismatchError
from shared.model_files.model_dir import ModelDirectoryError
from shared.step.step import Step
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.worker.worker_runner import WrappedModel, generate_alone, load_exact, make_runner
from tests.support.worker.worker_steps import decode_step, make_chunk, make_enter, mixed_step, prefill_step

PROMPTS = ([5, 9, 2, 44, 17], [3], [8, 1, 60, 33, 21, 4, 4, 90, 12])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_exact(write_tiny_llama(tmp_path_factory.mktemp("model"), changes={"num_hidden_layers": 2}))


def attached(runner: ModelRunner, *, block_size: int = 4) -> ModelRunner:
    runner.attach(block_size=block_size, max_num_seqs=8, max_num_batched_tokens=256)
    return runner


def tokens_of(runner: ModelRunner, *steps: Step) -> list[list[int]]:
    return [runner.run_step(step).token_ids.tolist() for step in steps]


def prefill_of_all(blocks_per_row: int) -> Step:
    return prefill_step(
        *(
            make_enter(row, prompt, range(row * blocks_per_row, (row + 1) * blocks_per_row))
            for row, prompt in enumerate(PROMPTS)
        )
    )


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_row_gets_the_same_tokens_in_a_batch_as_alone(loaded: LoadedModel, block_size: int) -> None:
    runner = attached(make_runner(loaded), block_size=block_size)
    tokens = tokens_of(runner, prefill_of_all(-(-20 // block_size)), *[decode_step()] * 6)
    rows = [list(row) for row in zip(*tokens, strict=True)]
    assert rows == [generate_alone(loaded, prompt, 7) for prompt in PROMPTS]


def test_rows_that_sit_out_a_step_continue_where_they_were(loaded: LoadedModel) -> None:
    runner = attached(make_runner(loaded))
    expected = [generate_alone(loaded, prompt, 3) for prompt in PROMPTS]
    assert tokens_of(runner, prefill_of_all(5), decode_step(rows=[2, 0]), decode_step(rows=[1]), decode_step()) == [
        [expected[0][0], expected[1][0], expected[2][0]],
        [expected[2][1], expected[0][1]],
        [expected[1][1]],
        [expected[0][2], expected[1][2], expected[2][2]],
    ]


def test_a_preempted_sequence_continues_after_it_was_recomputed(loaded: LoadedModel) -> None:
    runner = attached(make_runner(loaded))
    expected = generate_alone(loaded, PROMPTS[0], 5)
    before = tokens_of(runner, prefill_of_all(5), decode_step())
    again = make_enter(6, [*PROMPTS[0], before[0][0], before[1][0]], range(40, 45))
    after = tokens_of(runner, prefill_step(again, leave=[0]), decode_step(rows=[6]), decode_step(rows=[6]))
    assert [step[0] for step in before + after] == expected


def test_a_cached_prefix_is_read_from_the_blocks_that_another_sequence_wrote(loaded: LoadedModel) -> None:
    runner = attached(make_runner(loaded))
    prompt = [*PROMPTS[2], 7, 7]
    tokens_of(runner, prefill_of_all(5))
    # Blocks 10 and 11 hold the first eight tokens of the third prompt.
    cached = make_enter(5, prompt[8:], [10, 11, 50, 51], num_cached_tokens=8)
    assert tokens_of(runner, prefill_step(cached), decode_step(rows=[5])) == [
        [token_id] for token_id in generate_alone(loaded, prompt, 2)
    ]


def test_a_prompt_in_chunks_beside_decodes_gives_the_same_tokens_as_whole(loaded: LoadedModel) -> None:
    runner = attached(make_runner(loaded))
    expected = [generate_alone(loaded, prompt, 4) for prompt in (PROMPTS[0], PROMPTS[2])]
    first = make_enter(3, PROMPTS[0], range(5))
    second = make_enter(1, PROMPTS[2][:3], range(5, 10), num_later_tokens=6)
    tokens = tokens_of(
        runner,
        prefill_step(first),
        # A step of chunks only, none of them the last: no row gets a token.
        prefill_step(second),
        mixed_step(chunks=[make_chunk(1, PROMPTS[2][3:4], 5)]),
        mixed_step(chunks=[make_chunk(1, PROMPTS[2][4:])]),
        decode_step(),
    )
    assert tokens == [
        [expected[0][0]],
        [],
        [expected[0][1]],
        [expected[0][2], expected[1][0]],
        [expected[0][3], expected[1][1]],
    ]


def test_a_failing_step_voids_only_its_own_epoch(loaded: LoadedModel) -> None:
    runner = attached(make_runner(loaded))
    runner.run_step(prefill_of_all(5))
    with pytest.raises(StepMismatchError):
        runner.run_step(decode_step(leave=[7]))
    with pytest.raises(StaleEpochError):
        runner.run_step(decode_step())
    assert len(tokens_of(attached(runner), prefill_of_all(5))[0]) == 3


class NotFiniteModel(WrappedModel):
    """Has NaN in the first row's logits."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = super().compute_logits(hidden).clone()
        logits[0] = torch.nan
        return logits


def test_a_non_finite_row_is_reported_and_does_not_affect_its_neighbours(loaded: LoadedModel) -> None:
    runner = attached(make_runner(replace(loaded, model=NotFiniteModel(loaded.model))))
    outputs = [runner.run_step(step) for step in (prefill_of_all(5), decode_step(), decode_step())]
    assert [output.not_finite_rows.tolist() for output in outputs] == [[0]] * 3
    rows = [list(row) for row in zip(*(output.token_ids.tolist() for output in outputs), strict=True)]
    assert rows[1:] == [generate_alone(loaded, prompt, 3) for prompt in PROMPTS[1:]]


def test_a_layout_is_in_the_fingerprint_only_if_results_depend_on_it(loaded: LoadedModel) -> None:
    def fingerprints(backend: str, *layouts: RankLayout) -> set[str]:
        return {numerics_fingerprint(loaded, load_ops(backend), layout) for layout in layouts}

    # Replicas, and ranks of one group.
    alike = [RankLayout(rank, 2, tp_rank, 2) for rank in range(2) for tp_rank in range(2)]
    spread = [replace(layout, has_expert_parallel=True) for layout in alike]
    for backend in BACKEND_NAMES:
        assert len(fingerprints(backend, *alike)) == len(fingerprints(backend, *spread)) == 1
        assert len(fingerprints(backend, RankLayout(), alike[0])) == 2
    assert len(fingerprints("reference", *alike, *spread)) == 1
    # Their sums are computed in another order.
    assert len(fingerprints("cpu", *alike, *spread)) == 2


def test_expert_parallelism_is_refused_for_a_model_without_experts(tmp_path: Path) -> None:
    settings = WorkerSettings(model_dir=write_tiny_llama(tmp_path), ep=True)
    with pytest.raises(ModelDirectoryError, match="no experts"):
        build_model_runner(settings, lambda _: None)


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "int8"])
def test_a_cache_of_any_type_gives_the_tokens_of_a_confident_model(tmp_path: Path, kv_cache_dtype: str) -> None:
    model_dir = write_tiny_llama(tmp_path)
    flags: dict[str, Any] = {
        "kv_cache_dtype": kv_cache_dtype,
        "ops_backend": "native",
        "dtype": "float32",
        "quantization": "none",
        "kv_cache_num_blocks": 64,
        "num_threads": 1,
    }
    runner = attached(build_model_runner(WorkerSettings(model_dir=model_dir, **flags), lambda _: None))
    tokens = tokens_of(runner, prefill_of_all(5), decode_step(), decode_step())
    expected = [generate_alone(load_exact(model_dir), prompt, 3) for prompt in PROMPTS]
    assert [list(row) for row in zip(*tokens, strict=True)] == expected


def test_a_cache_that_the_backend_cannot_store_is_refused(tmp_path: Path) -> None:
    settings = WorkerSettings(model_dir=write_tiny_llama(tmp_path), ops_backend="reference", kv_cache_dtype="int8")
    with pytest.raises(DeviceError, match="--kv-cache-dtype int8: the kernels of reference have only float32"):
        build_model_runner(settings, lambda _: None)


def test_the_type_of_the_cache_is_in_the_fingerprint(tmp_path: Path) -> None:
    ops, model_dir = load_ops("native"), write_tiny_llama(tmp_path)
    loaded = [
        load_model(model_dir, ops, torch.float32, lambda _: None, options=LoadOptions(kv_dtype=dtype))
        for dtype in (None, torch.float32, torch.bfloat16, torch.int8)
    ]
    fingerprints = [numerics_fingerprint(model, ops) for model in loaded]
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints)) == 3


def test_the_version_of_the_sampling_is_in_the_fingerprint(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = numerics_fingerprint(loaded, load_ops("reference"))
    monkeypatch.setattr(numerics, "SAMPLING_VERSION", SAMPLING_VERSION + 1)
    assert numerics_fingerprint(loaded, load_ops("reference")) != before


def test_the_fingerprint_distinguishes_what_results_depend_on(loaded: LoadedModel) -> None:
    reference, cpu = load_ops("reference"), load_ops("cpu")
    fingerprints = [
        numerics_fingerprint(loaded, reference),
        numerics_fingerprint(loaded, cpu),
        numerics_fingerprint(replace(loaded, weights_digest="other"), reference),
    ]
    assert len(set(fingerprints)) == len(fingerprints)
    assert make_runner(loaded).numerics_fingerprint == fingerprints[0]
