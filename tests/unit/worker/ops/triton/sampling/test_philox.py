"""The noise on the device, bit by bit against numpy's."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.drawing import noise
from services.worker.ops.triton.sampling.philox import (
    gumbel,
    in_column_order,
    least_exponential,
    noise_of_blocks,
    word_of_column,
)

# The interpreter computes with numpy.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")

NUM_COLUMNS = 256
EDGE_WORDS = [0, 2047, 1 << 11, 1 << 63, (1 << 63) - 1, 2**64 - (1 << 12), 2**64 - (1 << 11) - 1]


@triton.jit  # type: ignore[untyped-decorator]
def _words_kernel(key, words, alone, num_blocks: tl.constexpr):  # type: ignore[no-untyped-def]
    seed, choice, position = tl.load(key), tl.load(key + 1), tl.load(key + 2)
    columns = tl.arange(0, 4 * num_blocks)
    word0, word1, word2, word3 = noise_of_blocks(seed, choice, position, tl.arange(0, num_blocks))
    tl.store(words + columns, in_column_order(word0, word1, word2, word3).to(tl.int64, bitcast=True))
    tl.store(alone + columns, word_of_column(seed, choice, position, columns).to(tl.int64, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator]
def _gumbel_kernel(words, exact, least, num_words: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.arange(0, num_words)
    word = tl.load(words + columns).to(tl.uint64, bitcast=True)
    tl.store(exact + columns, gumbel(word))
    tl.store(least + columns, least_exponential(word))


def device_words(seed: int, choice: int, position: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    key = np.array([seed, choice, position], np.uint64).view(np.int64)
    words, alone = torch.empty(2, NUM_COLUMNS, dtype=torch.int64)
    _words_kernel[(1,)](torch.from_numpy(key), words, alone, num_blocks=NUM_COLUMNS // 4)
    return words.numpy().view(np.uint64), alone.numpy().view(np.uint64)


def device_gumbel(words: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float32]]:
    padded = np.resize(words, triton.next_power_of_2(len(words)))
    exact, least = torch.empty(len(padded), dtype=torch.float64), torch.empty(len(padded))
    _gumbel_kernel[(1,)](torch.from_numpy(padded.view(np.int64)), exact, least, num_words=len(padded))
    return exact.numpy()[: len(words)], least.numpy()[: len(words)]


@given(seed=st.integers(0, 2**64 - 1), choice=st.integers(0, 2**32 - 1), position=st.integers(0, 2**40))
@settings(max_examples=20)
def test_a_columns_word_is_numpys(seed: int, choice: int, position: int) -> None:
    expected = noise.noise_words(seed, position, NUM_COLUMNS, choice=choice)
    words, alone = device_words(seed, choice, position)
    assert np.array_equal(words, expected)
    assert np.array_equal(alone, expected)


def test_gumbel_variates_are_numpys_bit_by_bit() -> None:
    words = np.concatenate((noise.noise_words(3, 5, 20_000), np.array(EDGE_WORDS, np.uint64)))
    exact, _ = device_gumbel(words)
    assert np.array_equal(exact, noise.gumbel(words))


def test_least_exponentials_are_lower_bounds_and_close_to_what_may_win() -> None:
    # Numbers at all distances from 0 and 1, besides ordinary ones.
    near_0 = np.uint64(0x0123456789ABCDEF) >> np.arange(53, dtype=np.uint64)
    words = np.concatenate((noise.noise_words(4, 1, 20_000), near_0, ~near_0, np.array(EDGE_WORDS, np.uint64)))
    exact, least = device_gumbel(words)
    exponentials = np.exp(-exact)
    assert (least <= exponentials * (1 + 2.0**-21)).all()
    # Beside these few, 32 bits are too few to be close.
    is_close = (exponentials < 0.7) & (exponentials > 2.0**-24)
    assert np.count_nonzero(is_close) > 5000
    assert (least >= exponentials * 0.99)[is_close].all()
