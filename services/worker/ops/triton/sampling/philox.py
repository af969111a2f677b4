"""Counter-based noise on the device: the bits of `services.worker.drawing.noise`.

Philox4x64-10 with key (seed, choice), since the purpose `NoisePurpose.TOKEN` is 0, and counter
(column // 4, position, 0, 0). Each of its four words belongs to one column.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4.3.
"""

from __future__ import annotations

import triton
import triton.language as tl

_MULTIPLIER_0 = tl.constexpr(0xD2E7470EE14C6C93)
_MULTIPLIER_1 = tl.constexpr(0xCA5A826395121157)
_INCREMENT_0 = tl.constexpr(0x9E3779B97F4A7C15)
_INCREMENT_1 = tl.constexpr(0xBB67AE8584CAA73B)
_NUM_ROUNDS = tl.constexpr(10)


@triton.jit
def noise_of_blocks(seed, choice, position, blocks):
    """The four words of each block of four columns, in the columns' order: one tuple of uint64 tensors.

    `seed`, `choice` and `position` are int64 scalars; `blocks` holds the columns divided by 4.
    """
    key0 = seed.to(tl.uint64, bitcast=True)
    key1 = choice.to(tl.uint64, bitcast=True)
    zeros = blocks.to(tl.uint64) * 0
    c0, c1, c2, c3 = blocks.to(tl.uint64), zeros + position.to(tl.uint64, bitcast=True), zeros, zeros
    for _ in tl.static_range(_NUM_ROUNDS):
        high0, low0 = tl.umulhi(c0, zeros + _MULTIPLIER_0), c0 * _MULTIPLIER_0
        high1, low1 = tl.umulhi(c2, zeros + _MULTIPLIER_1), c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0 += _INCREMENT_0
        key1 += _INCREMENT_1
    return c0, c1, c2, c3


@triton.jit
def in_column_order(word0, word1, word2, word3):
    """The words of n blocks as one tensor [4 * n]: four neighbours per block."""
    pairs = tl.join(tl.join(word0, word2), tl.join(word1, word3))
    return tl.reshape(pairs, [4 * word0.shape[0]])


@triton.jit
def word_of_column(seed, choice, position, column):
    """The word of each column on its own; `column` may be a scalar."""
    word0, word1, word2, word3 = noise_of_blocks(seed, choice, position, column // 4)
    lane = column % 4
    return tl.where(lane < 2, tl.where(lane == 0, word0, word1), tl.where(lane == 2, word2, word3))


@triton.jit
def gumbel(words):
    """Standard Gumbel variates in float64: `noise.gumbel`, operation by operation."""
    # Scaling by a power of two is exact, so fusing it with another operation changes nothing.
    uniform = ((words >> 11).to(tl.int64).to(tl.float64) + 0.5) * 1.1102230246251565e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def least_exponential(words):
    """Float32 numbers at most 1 + 2**-21 times `exp(-gumbel(words))`, and at least 0.99 times if that is below 0.7.

    With u the uniform number and v = 1 - u, the variate's exponential is -log(1 - v) = v + v**2 / 2 + v**3 / 3 + ...,
    whose terms are all positive: the first five are a lower bound. So is v from the 32 upper bits of the inverted word,
    rounded down. The conversion and Horner's rule err by less than 2**-21 of the result.
    """
    rest = ((words >> 32).to(tl.uint32) ^ 0xFFFFFFFF).to(tl.float32) * 2.0**-32
    return rest * (1.0 + rest * (1 / 2 + rest * (1 / 3 + rest * (1 / 4 + rest * (1 / 5)))))
