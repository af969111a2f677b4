// Vectors of floats: 16 of them with AVX-512, 8 with AVX2. Loads convert to float32, stores convert from it.
//
// A `_part` function reads or writes only the first `count` elements, 0 < count <= kWidth; the rest of a vector is 0.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "abi.h"

namespace lockstep {

inline float to_float(float value) { return value; }

inline float to_float(bf16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

#if defined(__AVX512F__)

constexpr int64_t kWidth = 16;
using Vec = __m512;

inline Vec zeros() { return _mm512_setzero_ps(); }
inline Vec broadcast(float value) { return _mm512_set1_ps(value); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
// a * b + c
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// Where `b` is NaN, so is the result.
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec abs(Vec a) { return _mm512_abs_ps(a); }

inline Vec widen(__m256i halves) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16)); }
inline Vec widen(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }

inline Vec load(const float* from) { return _mm512_loadu_ps(from); }
inline Vec load(const bf16* from) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }
inline Vec load(const int8_t* from) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))); }

inline __mmask16 first(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }

inline Vec load_part(const float* from, int64_t count) { return _mm512_maskz_loadu_ps(first(count), from); }
inline Vec load_part(const bf16* from, int64_t count) { return widen(_mm256_maskz_loadu_epi16(first(count), from)); }
inline Vec load_part(const int8_t* from, int64_t count) { return widen(_mm_maskz_loadu_epi8(first(count), from)); }

// Rounds to the nearest, to even between two; a NaN stays one.
inline __m256i narrow(Vec values) {
#if defined(__AVX512BF16__)
    return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values));
#else
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(quiet, 16));
#endif
}

inline void store(float* to, Vec values) { _mm512_storeu_ps(to, values); }
inline void store(bf16* to, Vec values) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(values)); }
// Rounds; the values are in [-127, 127].
inline void store(int8_t* to, Vec values) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(values)));
}

inline void store_part(float* to, Vec values, int64_t count) { _mm512_mask_storeu_ps(to, first(count), values); }
inline void store_part(bf16* to, Vec values, int64_t count) {
    _mm256_mask_storeu_epi16(to, first(count), narrow(values));
}
inline void store_part(int8_t* to, Vec values, int64_t count) {
    _mm_mask_storeu_epi8(to, first(count), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(values)));
}

#ifdef MULTIPLY_BF16
// sum + left * right for pairs of bfloat16.
inline Vec dot_pairs(Vec left, Vec right, Vec sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(left), reinterpret_cast<__m512bh>(right));
}
#endif
#if defined(MULTIPLY_BF16) || defined(USE_AMX)
// Elements of two rows as pairs.
inline Vec pair(const bf16* first, const bf16* second) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second));
    return _mm512_castsi512_ps(
        _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16)));
}
#endif

// Bit i says whether element i is NaN, whether elements i are equal, or whether that of `a` is at most that of `b`.
inline uint32_t nan_bits(Vec values) { return _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q); }
inline uint32_t equal_bits(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline uint32_t at_most_bits(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }

inline float sum(Vec values) { return _mm512_reduce_add_ps(values); }
inline float max_of(Vec values) { return _mm512_reduce_max_ps(values); }

// The sums of four vectors.
inline __m128 sums(Vec a, Vec b, Vec c, Vec d) {
    const Vec ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const Vec cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const Vec all = add(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// value * 2^power, with `power` a whole number.
inline Vec scale_by_power(Vec values, Vec power) { return _mm512_scalef_ps(values, power); }
// The values, but 0 where `tested` is below `limit`.
inline Vec zero_below(Vec values, Vec tested, Vec limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(tested, limit, _CMP_NLT_UQ), values);
}
inline Vec round(Vec values) {
    return _mm512_roundscale_ps(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

#if defined(MULTIPLY_BF16) || defined(USE_AMX)
// 2^x, within 3e-6 of it relatively, for x at most 0; NaN stays NaN. 0 below 2^-126.
//
// A polynomial of the least relative error in [0, 1] which is 1 at 0.
inline Vec rough_exp2(Vec x) {
    const Vec rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    Vec value = broadcast(1.34266877e-2f);
    value = fma(value, rest, broadcast(5.22424665e-2f));
    value = fma(value, rest, broadcast(2.41280210e-1f));
    value = fma(value, rest, broadcast(6.93044844e-1f));
    value = fma(value, rest, broadcast(1.0f));
    // Times 2^floor(x).
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, broadcast(-126.0f), _CMP_NLT_UQ), value, x);
}
#endif

#else

constexpr int64_t kWidth = 8;
using Vec = __m256;

inline Vec zeros() { return _mm256_setzero_ps(); }
inline Vec broadcast(float value) { return _mm256_set1_ps(value); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
// a * b + c
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
// Where `b` is NaN, so is the result.
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec abs(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }

inline Vec load(const float* from) { return _mm256_loadu_ps(from); }
inline Vec load(const bf16* from) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline Vec load(const int8_t* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}

template <typename T>
Vec load_part(const T* from, int64_t count) {
    T values[kWidth] = {};
    std::memcpy(values, from, count * sizeof(T));
    return load(values);
}

// Rounds to the nearest, to even between two; a NaN stays one.
inline __m128i narrow(Vec values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256 is_nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
    const __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i chosen = _mm256_blendv_epi8(rounded, nan, _mm256_castps_si256(is_nan));
    const __m256i halves = _mm256_srli_epi32(chosen, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}

inline void store(float* to, Vec values) { _mm256_storeu_ps(to, values); }
inline void store(bf16* to, Vec values) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), narrow(values)); }
// Rounds; the values are in [-127, 127].
inline void store(int8_t* to, Vec values) {
    const __m256i wide = _mm256_cvtps_epi32(values);
    const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(halves, halves));
}

template <typename T>
void store_part(T* to, Vec values, int64_t count) {
    T stored[kWidth];
    store(stored, values);
    std::memcpy(to, stored, count * sizeof(T));
}

// Bit i says whether element i is NaN, whether elements i are equal, or whether that of `a` is at most that of `b`.
inline uint32_t nan_bits(Vec values) { return _mm256_movemask_ps(_mm256_cmp_ps(values, values, _CMP_UNORD_Q)); }
inline uint32_t equal_bits(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
inline uint32_t at_most_bits(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LE_OQ)); }

inline float sum(Vec values) {
    __m128 part = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    part = _mm_add_ps(part, _mm_movehl_ps(part, part));
    return _mm_cvtss_f32(_mm_add_ss(part, _mm_movehdup_ps(part)));
}

inline float max_of(Vec values) {
    __m128 part = _mm_max_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    part = _mm_max_ps(part, _mm_movehl_ps(part, part));
    return _mm_cvtss_f32(_mm_max_ss(part, _mm_movehdup_ps(part)));
}

// The sums of four vectors.
inline __m128 sums(Vec a, Vec b, Vec c, Vec d) {
    const Vec all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

// value * 2^power, with `power` a whole number in [-126, 128], where 2^128 counts as infinity.
inline Vec scale_by_power(Vec values, Vec power) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127));
    return mul(values, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
// The values, but 0 where `tested` is below `limit`.
inline Vec zero_below(Vec values, Vec tested, Vec limit) {
    return _mm256_and_ps(values, _mm256_cmp_ps(tested, limit, _CMP_NLT_UQ));
}
inline Vec round(Vec values) { return _mm256_round_ps(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

#endif

constexpr float kLog2E = 1.44269504088896340736f;

// 2^x, within 2e-7 of it relatively; infinity from 2^128 on; NaN stays NaN. 0 below 2^-126: such numbers are denormal, and
// slow a processor down by a factor of 100.
inline Vec exp2(Vec x) {
    const Vec lowest = broadcast(-126.0f);
    const Vec bounded = min(broadcast(128.0f), max(lowest, x));
    const Vec whole = round(bounded);
    const Vec rest = sub(bounded, whole);
    // The Taylor series of 2^rest for |rest| <= 1/2: its factors are powers of log(2) over factorials.
    Vec value = broadcast(1.5403530e-4f);
    value = fma(value, rest, broadcast(1.3333558e-3f));
    value = fma(value, rest, broadcast(9.6181291e-3f));
    value = fma(value, rest, broadcast(5.5504109e-2f));
    value = fma(value, rest, broadcast(2.4022651e-1f));
    value = fma(value, rest, broadcast(6.9314718e-1f));
    value = fma(value, rest, broadcast(1.0f));
    return zero_below(scale_by_power(value, whole), x, lowest);
}

inline float exp2(float x) { return x < -126.0f ? 0.0f : std::exp2(x); }

inline Vec exp(Vec x) { return exp2(mul(x, broadcast(kLog2E))); }

// x * sigmoid(x)
inline Vec silu(Vec x) { return div(x, add(broadcast(1.0f), exp(sub(zeros(), x)))); }

template <typename T>
Vec load_up_to(const T* from, int64_t count) {
    return count >= kWidth ? load(from) : load_part(from, count);
}

template <typename T>
void store_up_to(T* to, Vec values, int64_t count) {
    if (count >= kWidth) {
        store(to, values);
    } else {
        store_part(to, values, count);
    }
}

// Calls `body(start, count)` for the vectors of [0, size): `count` is kWidth, or less in the last one.
template <typename Body>
void for_vectors(int64_t size, Body body) {
    int64_t start = 0;
    for (; start + kWidth <= size; start += kWidth) {
        body(start, kWidth);
    }
    if (start < size) {
        body(start, size - start);
    }
}

}  // namespace lockstep
