// Products of integers, for all formats of codes and scales.
#pragma once

#include <algorithm>

#include "rows.h"
#include "tiles.h"

namespace lockstep::products {

// A step's weights: columns 0 to 3 and 4 to 7, each of the tile's first and second 16 rows.
struct StepWeights {
    Bytes parts[2][2];
};

#ifdef __AVX512VNNI__

// sum + products of unsigned weights with signed activations, four in each lane, of both halves of a step.
inline Ints dot_unsigned(Ints sum, Bytes first, Bytes x_first, Bytes second, Bytes x_second) {
    sum.v = _mm512_dpbusd_epi32(sum.v, first.v, x_first.v);
    return {_mm512_dpbusd_epi32(sum.v, second.v, x_second.v)};
}
inline Ints dot_int8(Ints sum, Bytes first, Bytes x_first, Bytes second, Bytes x_second) {
    return dot_unsigned(sum, first, x_first, second, x_second);
}

#else

// Weights below 64, so that four products fit in 16 bits: 4 * 63 * 127.
inline __m256i dot_unsigned(__m256i sum, __m256i first, __m256i x_first, __m256i second, __m256i x_second) {
    const __m256i some = _mm256_maddubs_epi16(first, x_first), others = _mm256_maddubs_epi16(second, x_second);
    const __m256i pairs = _mm256_add_epi16(some, others);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline Ints dot_unsigned(Ints sum, Bytes first, Bytes x_first, Bytes second, Bytes x_second) {
    return {
        dot_unsigned(sum.low, first.low, x_first.low, second.low, x_second.low),
        dot_unsigned(sum.high, first.high, x_first.high, second.high, x_second.high)};
}

// The weight's sign moves to the activation, which is never -128: |weight| is at most 128 as an unsigned byte, and two
// products fit in 16 bits, as 2 * 128 * 127 is below 2 ** 15.
inline __m256i dot_int8(__m256i sum, __m256i weights, __m256i x) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline Ints dot_int8(Ints sum, Bytes first, Bytes x_first, Bytes second, Bytes x_second) {
    return {
        dot_int8(dot_int8(sum.low, first.low, x_first.low), second.low, x_second.low),
        dot_int8(dot_int8(sum.high, first.high, x_first.high), second.high, x_second.high)};
}

#endif

// Each of these loads a step out of a group's codes.
struct Int8Codes {
    static constexpr Kind kKind = Kind::kInt8;
    static StepWeights load(const uint8_t* codes, int step) {
        codes += step * kStep * kTileRows;
        return {{{load_bytes(codes), load_bytes(codes + 64)}, {load_bytes(codes + 128), load_bytes(codes + 192)}}};
    }
    static Ints dot(Ints sum, Bytes first, Bytes x_first, Bytes second, Bytes x_second) {
        return dot_int8(sum, first, x_first, second, x_second);
    }
};

struct Int4Codes {
    static constexpr Kind kKind = Kind::kInt4;
    static constexpr int kStepBytes = kStep * kTileRows / 2;
    static StepWeights load(const uint8_t* codes, int step) {
        codes += step * kStepBytes;
        const Bytes upper = load_bytes(codes), lower = load_bytes(codes + 64);
        return {{{low_nibbles(upper), low_nibbles(lower)}, {high_nibbles(upper), high_nibbles(lower)}}};
    }
    static Ints dot(Ints sum, Bytes first, Bytes x_first, Bytes second, Bytes x_second) {
        return dot_unsigned(sum, first, x_first, second, x_second);
    }
};

// Codes with upper bits: `kBits` of them, in a byte for 8 / kBits places.
template <Kind kCodes, int kBits>
struct WideCodes {
    static constexpr Kind kKind = kCodes;
    // Steps that share the bytes of upper bits.
    static constexpr int kRun = 8 / kBits / 4;
    static StepWeights load(const uint8_t* codes, int step) {
        const uint8_t* run = codes + step / kRun * (kRun * Int4Codes::kStepBytes + 2 * kTileRows);
        StepWeights weights = Int4Codes::load(run, step % kRun);
        const Bytes upper = load_bytes(run + kRun * Int4Codes::kStepBytes);
#pragma GCC unroll 4
        for (int part = 0; part < 4; ++part) {
            // Where the bits are, and where they belong.
            const int place = (step % kRun * 4 + part) * kBits;
            const Bytes moved = place <= 4 ? shift_left(upper, 4 - place) : shift_right(upper, place - 4);
            Bytes& codes_of_part = weights.parts[part / 2][part % 2];
            codes_of_part = masked_or(moved, ((1 << kBits) - 1) << 4, codes_of_part);
        }
        return weights;
    }
    static Ints dot(Ints sum, Bytes first, Bytes x_first, Bytes second, Bytes x_second) {
        return dot_unsigned(sum, first, x_first, second, x_second);
    }
};
using Int5Codes = WideCodes<Kind::kInt5, 1>;
using Int6Codes = WideCodes<Kind::kInt6, 2>;

inline StepWeights look_up(__m128i table, StepWeights codes) {
    for (auto& half : codes.parts) {
        for (Bytes& part : half) part = look_up(table, part);
    }
    return codes;
}

struct Iq4Codes {
    static constexpr Kind kKind = Kind::kIq4;
    static StepWeights load(const uint8_t* codes, int step) {
        const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kIq4Values));
        return look_up(_mm_add_epi8(values, _mm_set1_epi8(static_cast<char>(kInt8Zero))), Int4Codes::load(codes, step));
    }
    static Ints dot(Ints sum, Bytes first, Bytes x_first, Bytes second, Bytes x_second) {
        return dot_int8(sum, first, x_first, second, x_second);
    }
};

struct Mxfp4Codes {
    static constexpr Kind kKind = Kind::kMxfp4;
    // Twice MXFP4's values, which are integers then, plus 12.
    static __m128i table() {
        return _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    }
    static StepWeights load(const uint8_t* codes, int step) { return look_up(table(), Int4Codes::load(codes, step)); }
    static Ints dot(Ints sum, Bytes first, Bytes x_first, Bytes second, Bytes x_second) {
        return dot_unsigned(sum, first, x_first, second, x_second);
    }
};

// The scales of a group, which are at `source`, for a half of the tile. Factors are those of the float16 in `units`.
template <Scales kScales>
Floats load_scales(const uint8_t* source, [[maybe_unused]] const Floats (&units)[2], int half) {
    if constexpr (has_factors(kScales)) return mul(units[half], load_int8(source + half * kLanes));
    if constexpr (kScales == Scales::kFloat32) return load(reinterpret_cast<const float*>(source) + half * kLanes);
    if constexpr (kScales == Scales::kFloat16) return load_halves(source + half * 2 * kLanes);
    if constexpr (kScales == Scales::kPower) return load_powers(source + half * kLanes);
    return zeros();
}

// Add the offsets at `source`, in a header, times the sums of the activations of their columns: `x_sums`, which are
// `row_words` from row to row.
template <Scales kScales, int kRows>
void add_offsets(Offsets kind, const uint8_t* source, const float* x_sums, int64_t row_words, Floats (&totals)[kRows][2]) {
    for (int half = 0; half < 2; ++half) {
        if constexpr (has_factors(kScales)) {
            Floats sums[kRows];
            for (Floats& sum : sums) sum = zeros();
            for (int factor = 0; factor < kFactoredColumns / group_columns(kScales); ++factor) {
                const Floats factors = load_int8(source + kTileRows * (2 + factor) + half * kLanes);
                for (int r = 0; r < kRows; ++r) sums[r] = fma(fill(x_sums[r * row_words + factor]), factors, sums[r]);
            }
            const Floats units = load_halves(source + half * 2 * kLanes);
            for (int r = 0; r < kRows; ++r) totals[r][half] = fma(sums[r], units, totals[r][half]);
        } else {
            const bool is_half = kind == Offsets::kFloat16;
            const Floats offsets = is_half ? load_halves(source + half * 2 * kLanes)
                                           : load(reinterpret_cast<const float*>(source) + half * kLanes);
            for (int r = 0; r < kRows; ++r) totals[r][half] = fma(fill(x_sums[r * row_words]), offsets, totals[r][half]);
        }
    }
}

template <class Codes, Scales kScales, int kRows>
void multiply_int_tile(const TileCall& call, float* sums) {
    // It asks for memory once for each part of a group.
    constexpr int kGroup = group_columns(kScales), kParts = kGroup == 64 ? 2 : 1, kSteps = kGroup / kParts / kStep;
    const Matrix& m = call.matrix;
    const int64_t groups = num_groups(m);
    // Groups before the next header.
    [[maybe_unused]] int64_t left = 0;
    [[maybe_unused]] const int64_t groups_per_header = divide_up(header_columns(m), kGroup);
    Floats units[2] = {zeros(), zeros()};
    const int64_t next_bytes = divide_up(call.next_bytes, groups * kParts);
    const QuantizedRow row = quantized_row(m, const_cast<uint8_t*>(call.rows));
    const int64_t row_words = call.row_bytes / 4;
    const uint8_t *codes = call.tile, *next = call.next, *scales = nullptr;
    const uint8_t* x = call.rows;
    [[maybe_unused]] const float* x_sums = row.sums;
    Floats totals[kRows][2];
    for (auto& total : totals) total[0] = total[1] = zeros();
    for (int64_t group = 0; group < groups; ++group) {
        if constexpr (kScales != Scales::kRow) {
            if (left-- == 0) {
                scales = codes;
                if constexpr (has_factors(kScales)) {
                    for (int half = 0; half < 2; ++half) units[half] = load_halves(codes + half * 2 * kLanes);
                    scales += 2 * kTileRows;
                }
                if (m.offsets != Offsets::kNone) {
                    add_offsets<kScales>(m.offsets, codes + scale_bytes(kScales), x_sums, row_words, totals);
                    x_sums += has_factors(kScales) ? groups_per_header : 1;
                }
                codes += header_bytes(m);
                left = groups_per_header - 1;
            } else if constexpr (has_factors(kScales)) {
                scales += kTileRows;
            }
        }
        Ints dots[kRows][2];
        for (int r = 0; r < kRows; ++r) dots[r][0] = dots[r][1] = fill_ints(row.starts[r * row_words + group]);
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) {
            prefetch(next, next_bytes);
            next += next_bytes;
#pragma GCC unroll 4
            for (int step = part * kSteps; step < (part + 1) * kSteps; ++step) {
                const StepWeights weights = Codes::load(codes, step);
                for (int r = 0; r < kRows; ++r) {
                    const uint8_t* x_row = x + step * kStep + r * call.row_bytes;
                    const Bytes x_first = repeat_word(x_row), x_second = repeat_word(x_row + 4);
                    for (int half = 0; half < 2; ++half) {
                        dots[r][half] = Codes::dot(
                            dots[r][half], weights.parts[0][half], x_first, weights.parts[1][half], x_second);
                    }
                }
            }
        }
        codes += packed_bytes(Codes::kKind, kGroup);
        x += kGroup;
        for (int r = 0; r < kRows; ++r) {
            const Floats x_scale = fill(row.scales[r * row_words + group]);
            for (int half = 0; half < 2; ++half) {
                const Floats scale =
                    kScales == Scales::kRow ? x_scale : mul(x_scale, load_scales<kScales>(scales, units, half));
                totals[r][half] = fma(to_floats(dots[r][half]), scale, totals[r][half]);
            }
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int half = 0; half < 2; ++half) store(sums + r * kTileRows + half * kLanes, totals[r][half]);
    }
}

template <class Codes, Scales kScales>
TileKernels int_kernels() {
    static constexpr TileKernel kByRows[] = {
        multiply_int_tile<Codes, kScales, 1>, multiply_int_tile<Codes, kScales, 2>,
        multiply_int_tile<Codes, kScales, 3>, multiply_int_tile<Codes, kScales, 4>,
#ifdef __AVX512VNNI__
        multiply_int_tile<Codes, kScales, 5>, multiply_int_tile<Codes, kScales, 6>,
        multiply_int_tile<Codes, kScales, 7>, multiply_int_tile<Codes, kScales, 8>,
#endif
    };
    static_assert(sizeof kByRows / sizeof *kByRows == kMaxIntRows);
    return {kByRows, kMaxIntRows};
}

}  // namespace lockstep::products
