"""Numbers in FP8 E4M3, read and made with arithmetic that every GPU has, so that all of them get the same bits.

    code        sign | exponent, 4 bits | mantissa, 3 bits
    numbers     up to 448; without the sign, the highest code is NaN, and there is no infinity

Source: OCP 8-bit Floating Point Specification, revision 1.0, section 5.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SIGN, _NAN, _LARGEST = tl.constexpr(0x80), tl.constexpr(0x7F), tl.constexpr(0x7E)
# The exponent bias of a float16 is larger by 8 than that of E4M3.
_FACTOR = tl.constexpr(2.0**8)
# A float32 has 20 more bits of mantissa, and an exponent bias that is larger by 120, in units of its last 3 bits.
_SHIFT = tl.constexpr(20)
_BIAS = tl.constexpr(120 << 3)
_LAST_BIT = tl.constexpr(1 << 20)
_SMALLEST_NORMAL = tl.constexpr(2.0**-6)
# Numbers of this size are as far apart as E4M3's subnormals: 2 ** -9.
_SUBNORMAL_STEPS = tl.constexpr(2.0**14)
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def finite_from_e4m3(codes):
    """The numbers of codes, uint8, that are not NaN, in float32.

    A float16 has the same fields with more bits in each. So a code shifted into its fields has the right value,
    subnormal or not, but for the difference of the exponent biases.
    """
    halves = ((codes & _SIGN).to(tl.uint16) << 8) | ((codes & _NAN).to(tl.uint16) << 7)
    return halves.to(tl.float16, bitcast=True).to(tl.float32) * _FACTOR


@triton.jit
def from_e4m3(codes):
    """The numbers of codes, uint8, in float32."""
    return tl.where((codes & _NAN) == _NAN, float("nan"), finite_from_e4m3(codes))


@triton.jit
def to_e4m3(values, inverse_scale):
    """The codes, uint8, of `values * inverse_scale`: rounded to the nearest, ties to even.

    What is beyond the largest number becomes that number. A value that is not finite becomes NaN, so that its row is
    still found.
    """
    values = values.to(tl.float32)
    is_finite = (values.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) < _INFINITY
    scaled = (values * inverse_scale).to(tl.uint32, bitcast=True)
    magnitude = scaled & 0x7FFFFFFF
    rounded = magnitude + (_LAST_BIT // 2 - 1) + ((magnitude >> _SHIFT) & 1)
    normal = tl.minimum((rounded >> _SHIFT) - _BIAS, _LARGEST)
    # The sum's last bits count the steps, rounded by the addition.
    steps = magnitude.to(tl.float32, bitcast=True) + _SUBNORMAL_STEPS
    subnormal = steps.to(tl.uint32, bitcast=True) & _NAN
    is_normal = magnitude.to(tl.float32, bitcast=True) >= _SMALLEST_NORMAL
    codes = tl.where(is_normal, normal, subnormal)
    codes = tl.where(is_finite, codes, _NAN)
    return (codes | ((scaled >> 24) & _SIGN)).to(tl.uint8)
