"""Prompts become vectors: the last hidden state or the mean of all, with equal bits for any chunks."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.worker.batch.step_input import PooledChunk
from services.worker.models.loader import LoadedModel, LoadOptions, load_model
from services.worker.ops import load_ops
from services.worker.runner.cache_memory import KvCacheSize
from services.worker.runner.model_runner import ModelRunner
from services.worker.runner.pooling import PromptPooler
from shared.errors import StepMismatchError
from shared.request.sampling_params import Pooling, SamplingOptions
from shared.step.codec import encode_result, parse_result
from shared.step.step import StepResult
from tests.support.models.paged_model import PagedModel
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.tokenizer.embedders import make_base_class
from tests.support.worker.worker_driver import Request, WorkerDriver
from tests.support.worker.worker_runner import GIB, WrappedModel, make_runner
from tests.support.worker.worker_steps import make_enter, prefill_step

PROMPTS = [[5, 9, 2, 44, 17, 60, 33, 21, 4, 4, 90, 12, 5, 9, 3], [7], [8, 8, 31] * 5]
HIDDEN = 6


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), changes={"num_hidden_layers": 2})


class Bare(WrappedModel):
    """Shows its hidden states as logits."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden


def load_headless(model_dir: Path, backend: str = "reference") -> LoadedModel:
    options = LoadOptions(task="embed")
    return load_model(model_dir, load_ops(backend), torch.float32, lambda _: None, options=options)


@pytest.fixture(scope="module")
def loaded(model_dir: Path) -> LoadedModel:
    return load_headless(model_dir)


@torch.inference_mode()
def expected_vector(loaded: LoadedModel, prompt: list[int], pooling: Pooling) -> npt.NDArray[np.float32]:
    """The definition, from a prefill of the prompt alone."""
    paged = PagedModel(Bare(loaded.model), load_ops("reference"))
    hidden = paged.prefill_all(paged.add(prompt))
    vector = hidden[-1] if pooling is Pooling.LAST else hidden.double().mean(0)
    return np.asarray(vector.float().numpy())


def vectors_of(driver: WorkerDriver, pooling: Pooling) -> list[npt.NDArray[np.float32]]:
    """The vectors of all prompts, in steps of the driver's; each request has a slot of its own."""
    driver.generate([Request(prompt, 1, options=SamplingOptions(pooling=pooling)) for prompt in PROMPTS])
    slot_to_vector = {slot: vector for result in driver.outputs for slot, vector in result.vectors}
    return [vector for _, vector in sorted(slot_to_vector.items())]


@pytest.mark.parametrize("pooling", Pooling)
def test_a_vector_is_what_its_pooling_says(loaded: LoadedModel, pooling: Pooling) -> None:
    vectors = vectors_of(WorkerDriver(make_runner(loaded), max_chunk=1000), pooling)
    for prompt, vector in zip(PROMPTS, vectors, strict=True):
        np.testing.assert_allclose(vector, expected_vector(loaded, prompt, pooling), atol=1e-6)


@pytest.mark.parametrize("pooling", Pooling)
def test_neither_chunks_nor_neighbours_change_a_bit(loaded: LoadedModel, pooling: Pooling) -> None:
    whole = vectors_of(WorkerDriver(make_runner(loaded), max_chunk=1000), pooling)
    for seed, max_chunk in enumerate((1, 2, 5)):
        driver = WorkerDriver(make_runner(loaded), seed=seed, max_chunk=max_chunk)
        for vector, other in zip(whole, vectors_of(driver, pooling), strict=True):
            assert np.array_equal(vector, other)


@pytest.mark.parametrize(
    "backend", ["cpu", "native", *(pytest.param(name, marks=pytest.mark.slow) for name in ("triton", "triton-exact"))]
)
@pytest.mark.parametrize("pooling", Pooling)
def test_every_backend_makes_the_same_vectors(
    model_dir: Path, loaded: LoadedModel, backend: str, pooling: Pooling
) -> None:
    ops = load_ops(backend)
    other = load_headless(model_dir, backend)
    runner = ModelRunner(other, ops, KvCacheSize(GIB, 64))
    vectors = vectors_of(WorkerDriver(runner, max_chunk=5, block_size=16), pooling)
    for prompt, vector in zip(PROMPTS, vectors, strict=True):
        np.testing.assert_allclose(vector, expected_vector(loaded, prompt, pooling), atol=1e-4)


def test_a_base_class_has_the_vectors_of_the_whole_model(model_dir: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    base = write_tiny_llama(tmp_path / "base", changes={"num_hidden_layers": 2})
    make_base_class(base)
    driver = WorkerDriver(make_runner(load_headless(base)), max_chunk=1000)
    whole = vectors_of(WorkerDriver(make_runner(loaded), max_chunk=1000), Pooling.LAST)
    assert np.array_equal(vectors_of(driver, Pooling.LAST), whole)


def test_only_token_0_is_drawn_and_the_head_is_not_loaded(loaded: LoadedModel) -> None:
    driver = WorkerDriver(make_runner(loaded))
    options = SamplingOptions(pooling=Pooling.LAST)
    answers = driver.generate([Request(prompt, 1, options=options) for prompt in PROMPTS])
    assert [answer.tokens for answer in answers] == [[0]] * len(PROMPTS)
    assert loaded.model.compute_logits(torch.ones(2, loaded_size(loaded))).shape == (2, 1)


def loaded_size(loaded: LoadedModel) -> int:
    return expected_vector(loaded, [1], Pooling.LAST).size


def test_hidden_states_that_are_not_finite_are_told(loaded: LoadedModel) -> None:
    hidden = torch.ones(3, HIDDEN)
    hidden[1, 2] = torch.inf
    logits = loaded.model.compute_logits(hidden)
    assert torch.isfinite(logits).flatten().tolist() == [True, False, True]
    chunk = PooledChunk(0, 0, 3, 0, Pooling.MEAN, has_later_tokens=False)
    vectors = PromptPooler().pool([chunk], hidden)
    assert vectors is not None
    assert torch.isnan(vectors.values[0]).tolist() == [column == 2 for column in range(HIDDEN)]


def test_a_mean_of_a_cached_prefix_is_refused(loaded: LoadedModel) -> None:
    runner = make_runner(loaded)
    runner.attach(block_size=4, max_num_seqs=2, max_num_batched_tokens=64)
    options = SamplingOptions(pooling=Pooling.MEAN)
    enter = make_enter(0, [5, 6, 7], [0, 1], num_cached_tokens=4, max_num_tokens=8, options=options)
    with pytest.raises(StepMismatchError, match="mean"):
        runner.launch(prefill_step(enter))


@given(
    st.lists(st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=2), min_size=1, max_size=12),
    st.sets(st.integers(1, 11)),
)
def test_the_sum_of_any_chunks_is_the_same(rows: list[list[float]], cuts: set[int]) -> None:
    hidden = torch.tensor(rows)
    bounds = [0, *sorted(cut for cut in cuts if cut < len(rows)), len(rows)]
    pooler = PromptPooler()
    results = []
    for start, end in itertools.pairwise(bounds):
        chunk = PooledChunk(3, 0, end - start, start, Pooling.MEAN, has_later_tokens=end < len(rows))
        results.append(pooler.pool([chunk], hidden[start:end]))
    whole = PromptPooler().pool([PooledChunk(3, 0, len(rows), 0, Pooling.MEAN, has_later_tokens=False)], hidden)
    assert whole is not None
    assert results[-1] is not None
    assert results[:-1] == [None] * (len(bounds) - 2)
    assert torch.equal(results[-1].values, whole.values)
    torch.testing.assert_close(whole.values[0], hidden.double().mean(0).float(), rtol=1e-6, atol=1e-9)


def test_a_result_keeps_its_vectors_on_the_wire() -> None:
    values = np.array([0.5, -2.0], np.float32)
    no = np.empty(0, np.int32)
    result = parse_result(encode_result(StepResult(1, 2, np.zeros(1, np.int32), no, vectors=((3, values),))))
    [(slot, received)] = result.vectors
    assert (slot, received.tolist()) == (3, [0.5, -2.0])
