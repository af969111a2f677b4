"""The counter-based noise, compared with an independent Philox and its published test vectors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.drawing.noise import NoisePurpose, gumbel, noise_words

MASK = 2**64 - 1


def philox4x64(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x64-10 word by word. Source: Salmon et al., SC 2011, section 4.3; Random123's philox.h."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (product1 >> 64) ^ c1 ^ k0, product1 & MASK, (product0 >> 64) ^ c3 ^ k1, product0 & MASK
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return c0, c1, c2, c3


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
        ),
        (
            (MASK, MASK, MASK, MASK),
            (MASK, MASK),
            (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
        ),
        (
            (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
            (0x452821E638D01377, 0xBE5466CF34E90C6C),
            (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
        ),
    ],
)
def test_this_files_philox_matches_the_published_vectors(
    counter: tuple[int, int, int, int], key: tuple[int, int], answer: tuple[int, int, int, int]
) -> None:
    # Random123's tests/kat_vectors, lines "philox4x64 10".
    assert philox4x64(counter, key) == answer


@given(
    seed=st.integers(0, MASK),
    position=st.integers(0, 2**40) | st.sampled_from([0, 1]),
    column=st.integers(0, 300),
    purpose=st.sampled_from(NoisePurpose),
    choice=st.integers(0, 2**32 - 1),
)
def test_a_columns_word_is_a_function_of_key_and_counter(
    seed: int, position: int, column: int, purpose: NoisePurpose, choice: int
) -> None:
    words = noise_words(seed, position, 301, purpose=purpose, choice=choice)
    expected = philox4x64((column // 4, position, 0, 0), (seed, purpose << 32 | choice))
    assert int(words[column]) == expected[column % 4]


def test_noise_of_fewer_columns_is_a_prefix_of_that_of_more() -> None:
    assert np.array_equal(noise_words(5, 9, 1000)[:7], noise_words(5, 9, 7))


def test_the_bits_of_a_word_become_a_gumbel_variate() -> None:
    words = np.array([0, 1 << 11, 1 << 63, 2**64 - (1 << 11) - 1], dtype=np.uint64)
    uniforms = np.array([2.0**-54, 3 * 2.0**-54, 0.5 + 2.0**-54, 1 - 3 * 2.0**-54])
    np.testing.assert_allclose(gumbel(words), -np.log(-np.log(uniforms)), rtol=1e-12)


def test_gumbel_variates_have_the_expected_mean_and_deviation() -> None:
    values = gumbel(noise_words(1, 1, 200_000))
    assert abs(values.mean() - np.euler_gamma) < 0.01
    assert abs(values.std() - np.pi / np.sqrt(6)) < 0.01
