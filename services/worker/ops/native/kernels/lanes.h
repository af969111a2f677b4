// Sixteen lanes of float32 or int32: one AVX-512 register, or a pair of AVX2's. Kernels are written once for both.
#pragma once

#include <immintrin.h>

#include <cstring>
#include <initializer_list>

#include "abi.h"

namespace lockstep::products {

constexpr int kLanes = 16;

// Four bytes at any address.
inline int32_t load_word(const void* source) {
    int32_t word;
    std::memcpy(&word, source, sizeof word);
    return word;
}

#ifdef __AVX512VNNI__

struct Floats {
    __m512 v;
};
struct Ints {
    __m512i v;
};
// 64 bytes, four in each lane.
struct Bytes {
    __m512i v;
};

inline Floats zeros() { return {_mm512_setzero_ps()}; }
inline Floats fill(float value) { return {_mm512_set1_ps(value)}; }
inline Ints fill_ints(int32_t value) { return {_mm512_set1_epi32(value)}; }
// The same four bytes in every lane.
inline Bytes repeat_word(const void* source) { return {_mm512_set1_epi32(load_word(source))}; }

inline Floats load(const float* source) { return {_mm512_loadu_ps(source)}; }
inline Bytes load_bytes(const uint8_t* source) { return {_mm512_loadu_si512(source)}; }
inline void store(float* target, Floats a) { _mm512_storeu_ps(target, a.v); }

inline Floats add(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats mul(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
// a * b + c
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats sub(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats div(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
// NaN where `b` is.
inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
// To the nearest whole number.
inline Floats round(Floats a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a * 2 ** power, for whole powers up to 126 and down to -126.
inline Floats scale_by_power(Floats a, Floats power) { return {_mm512_scalef_ps(a.v, power.v)}; }
inline Floats absolute(Floats a) { return {_mm512_abs_ps(a.v)}; }
inline float max_lane(Floats a) { return _mm512_reduce_max_ps(a.v); }
inline float sum_lanes(Floats a) { return _mm512_reduce_add_ps(a.v); }

inline Ints load_ints(const int32_t* source) { return {_mm512_loadu_si512(source)}; }
inline Ints add(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Ints sub(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline Ints shift_left(Ints a, unsigned count) { return {_mm512_slli_epi32(a.v, count)}; }
// Signs stay.
inline Ints shift_right(Ints a, unsigned count) { return {_mm512_srai_epi32(a.v, count)}; }
inline int32_t sum_lanes(Ints a) { return _mm512_reduce_add_epi32(a.v); }
inline Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
// To the nearest, even among equals.
inline Ints round_to_ints(Floats a) { return {_mm512_cvtps_epi32(a.v)}; }
// The low byte of each lane.
inline void store_low_bytes(int8_t* target, Ints a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm512_cvtepi32_epi8(a.v));
}

inline Bytes low_nibbles(Bytes a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline Bytes high_nibbles(Bytes a) { return low_nibbles({_mm512_srli_epi16(a.v, 4)}); }
// table[a], for bytes a below 16.
inline Bytes look_up(__m128i table, Bytes a) { return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), a.v)}; }

inline Bytes shift_left(Bytes a, int count) { return {_mm512_slli_epi16(a.v, static_cast<unsigned>(count))}; }
inline Bytes shift_right(Bytes a, int count) { return {_mm512_srli_epi16(a.v, static_cast<unsigned>(count))}; }
// (a & mask) | b
inline Bytes masked_or(Bytes a, int mask, Bytes b) {
    return {_mm512_ternarylogic_epi32(a.v, _mm512_set1_epi8(static_cast<char>(mask)), b.v, 0xEA)};
}

inline Floats load_int8(const uint8_t* source) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}
inline Floats load_halves(const uint8_t* source) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)))};
}
// 2 ** (byte - 127); exact for a byte of 0 too, a subnormal number.
inline Floats load_powers(const uint8_t* source) {
    const __m512i exponents = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
    return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_slli_epi32(exponents, 23), _mm512_set1_epi32(0x400000)))};
}
inline Floats load(const bf16* source) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
// The first and the second bfloat16 of each lane.
inline Floats even_bf16(Bytes a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
inline Floats odd_bf16(Bytes a) {
    return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))))};
}

inline __mmask16 first_lanes(int count) { return static_cast<__mmask16>((1u << count) - 1); }
// The first `count` values, up to 16; zeros in the other lanes.
inline Floats load_first(const float* source, int count) { return {_mm512_maskz_loadu_ps(first_lanes(count), source)}; }
inline Floats load_first(const bf16* source, int count) {
    const __m256i bits = _mm256_maskz_loadu_epi16(first_lanes(count), source);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}

// To the nearest, even among equals; a NaN stays one.
inline __m256i round_to_bf16(Floats a) {
#ifdef USE_AMX
    // Subnormal numbers become 0, as they count in products.
    return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v));
#else
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, is_nan, quiet), 16));
#endif
}
inline void store_first(float* target, Floats a, int count) { _mm512_mask_storeu_ps(target, first_lanes(count), a.v); }
inline void store_first(bf16* target, Floats a, int count) {
    _mm256_mask_storeu_epi16(target, first_lanes(count), round_to_bf16(a));
}

#else  // AVX2

struct Floats {
    __m256 low, high;
};
struct Ints {
    __m256i low, high;
};
// 64 bytes, four in each lane.
struct Bytes {
    __m256i low, high;
};

inline Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats fill(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline Ints fill_ints(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
inline Bytes repeat_word(const void* source) {
    const __m256i word = _mm256_set1_epi32(load_word(source));
    return {word, word};
}

inline Floats load(const float* source) { return {_mm256_loadu_ps(source), _mm256_loadu_ps(source + 8)}; }
inline __m256i load_32_bytes(const void* source) { return _mm256_loadu_si256(static_cast<const __m256i*>(source)); }
inline Bytes load_bytes(const uint8_t* source) { return {load_32_bytes(source), load_32_bytes(source + 32)}; }
inline void store(float* target, Floats a) {
    _mm256_storeu_ps(target, a.low);
    _mm256_storeu_ps(target + 8, a.high);
}

inline Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Floats mul(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
// a * b + c
inline Floats fma(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats sub(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Floats div(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
// NaN where `b` is.
inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
// To the nearest whole number.
inline Floats round(Floats a) {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.low, kMode), _mm256_round_ps(a.high, kMode)};
}
inline __m256 scale_by_power(__m256 a, __m256 power) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127));
    return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
// a * 2 ** power, for whole powers up to 126 and down to -126.
inline Floats scale_by_power(Floats a, Floats power) {
    return {scale_by_power(a.low, power.low), scale_by_power(a.high, power.high)};
}
inline Floats absolute(Floats a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
inline float max_lane(Floats a) {
    const __m256 eight = _mm256_max_ps(a.low, a.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline float sum_lanes(Floats a) {
    const __m256 eight = _mm256_add_ps(a.low, a.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline Ints add(Ints a, Ints b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
inline int32_t sum_lanes(Ints a) {
    const __m256i eight = _mm256_add_epi32(a.low, a.high);
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
}
inline Floats to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
// To the nearest, even among equals.
inline Ints round_to_ints(Floats a) { return {_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)}; }
// The lanes must be in the range of a byte.
inline void store_low_bytes(int8_t* target, Ints a) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.low, a.high), 0xD8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), bytes);
}

inline Bytes low_nibbles(Bytes a) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(a.low, mask), _mm256_and_si256(a.high, mask)};
}
inline Bytes high_nibbles(Bytes a) { return low_nibbles({_mm256_srli_epi16(a.low, 4), _mm256_srli_epi16(a.high, 4)}); }
// table[a], for bytes a below 16.
inline Bytes look_up(__m128i table, Bytes a) {
    const __m256i both = _mm256_broadcastsi128_si256(table);
    return {_mm256_shuffle_epi8(both, a.low), _mm256_shuffle_epi8(both, a.high)};
}

inline Bytes shift_left(Bytes a, int count) { return {_mm256_slli_epi16(a.low, count), _mm256_slli_epi16(a.high, count)}; }
inline Bytes shift_right(Bytes a, int count) {
    return {_mm256_srli_epi16(a.low, count), _mm256_srli_epi16(a.high, count)};
}
// (a & mask) | b
inline Bytes masked_or(Bytes a, int mask, Bytes b) {
    const __m256i wide = _mm256_set1_epi8(static_cast<char>(mask));
    return {_mm256_or_si256(_mm256_and_si256(a.low, wide), b.low), _mm256_or_si256(_mm256_and_si256(a.high, wide), b.high)};
}

inline __m128i load_16_bytes(const void* source) { return _mm_loadu_si128(static_cast<const __m128i*>(source)); }
inline Floats load_int8(const uint8_t* source) {
    const __m128i bytes = load_16_bytes(source);
    const __m256i low = _mm256_cvtepi8_epi32(bytes), high = _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes));
    return {_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)};
}
inline Floats load_halves(const uint8_t* source) {
    return {_mm256_cvtph_ps(load_16_bytes(source)), _mm256_cvtph_ps(load_16_bytes(source + 16))};
}
inline __m256 powers(__m128i bytes) {
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23);
    return _mm256_castsi256_ps(_mm256_max_epi32(bits, _mm256_set1_epi32(0x400000)));
}
// 2 ** (byte - 127); exact for a byte of 0 too, a subnormal number.
inline Floats load_powers(const uint8_t* source) {
    const __m128i bytes = load_16_bytes(source);
    return {powers(bytes), powers(_mm_unpackhi_epi64(bytes, bytes))};
}
inline __m256 widen_bf16(__m128i bits) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline Floats load(const bf16* source) {
    return {widen_bf16(load_16_bytes(source)), widen_bf16(load_16_bytes(source + 8))};
}
// The first and the second bfloat16 of each lane.
inline Floats even_bf16(Bytes a) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(a.low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(a.high, 16))};
}
inline Floats odd_bf16(Bytes a) {
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xFFFF0000u));
    return {_mm256_castsi256_ps(_mm256_and_si256(a.low, mask)), _mm256_castsi256_ps(_mm256_and_si256(a.high, mask))};
}

// The first `count` values, up to 16; zeros in the other lanes.
template <class T>
inline Floats load_first(const T* source, int count) {
    T values[kLanes] = {};
    std::memcpy(values, source, static_cast<size_t>(count) * sizeof(T));
    return load(values);
}

// To the nearest, even among equals; a NaN stays one. The results are in the low halves of the lanes.
inline __m256i round_to_bf16(__m256 a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
}
inline void store_first(float* target, Floats a, int count) {
    float values[kLanes];
    store(values, a);
    std::memcpy(target, values, static_cast<size_t>(count) * sizeof(float));
}
inline void store_first(bf16* target, Floats a, int count) {
    bf16 values[kLanes];
    const __m256i words = _mm256_packus_epi32(round_to_bf16(a.low), round_to_bf16(a.high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(values), _mm256_permute4x64_epi64(words, 0xD8));
    std::memcpy(target, values, static_cast<size_t>(count) * sizeof(bf16));
}

#endif

// 1 / (1 + 2 ** -x), within 3e-7 of it relatively; NaN where `x` is.
inline Floats sigmoid_of_power(Floats x) {
    const Floats bounded = min(fill(126.0f), max(fill(-126.0f), x));
    const Floats whole = round(bounded), rest = sub(whole, bounded);
    // The Taylor series of 2 ** rest for |rest| <= 1 / 2: powers of log(2) over factorials.
    Floats power = fill(1.5403530e-4f);
    for (const float factor : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f}) {
        power = fma(power, rest, fill(factor));
    }
    return div(fill(1.0f), add(fill(1.0f), scale_by_power(power, sub(zeros(), whole))));
}

}  // namespace lockstep::products
