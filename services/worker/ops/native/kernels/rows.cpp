#include "rows.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace lockstep::products {

namespace {

#if defined(MULTIPLY_BF16) || defined(USE_AMX)
constexpr bool kMultipliesBf16 = true;
#else
constexpr bool kMultipliesBf16 = false;
#endif

// A group without larger values is zeros: its scale would have no inverse.
constexpr float kSmallest = 1e-30f;

template <class T>
Floats load_up_to(const T* source, int64_t count) {
    if (count >= kLanes) return load(source);
    return count > 0 ? load_first(source, static_cast<int>(count)) : zeros();
}

// Quantise to the nearest of 255 levels; returns the sum of the codes. `count` values are loaded, the rest of the group is
// zeros.
template <int kColumns, class T>
int32_t quantize_group(const T* x, int64_t count, Kind kind, int8_t* codes, float* scale) {
    constexpr int kParts = kColumns / kLanes;
    Floats values[kParts];
    Floats largest = zeros(), poison = zeros();
    for (int part = 0; part < kParts; ++part) {
        values[part] = load_up_to(x + part * kLanes, count - part * kLanes);
        largest = max(largest, absolute(values[part]));
        poison = fma(values[part], zeros(), poison);
    }
    const float bound = max_lane(largest);
    const Floats inverse = fill(bound > kSmallest ? 127.0f / bound : 0.0f);
    Ints sum = fill_ints(0);
    for (int part = 0; part < kParts; ++part) {
        // A NaN becomes a code like any other: the scale will be NaN.
        const Floats levels = max(min(mul(values[part], inverse), fill(127.0f)), fill(-127.0f));
        const Ints rounded = round_to_ints(levels);
        store_low_bytes(codes + part * kLanes, rounded);
        sum = add(sum, rounded);
    }
    // The poison is zero, but NaN if a value is not finite.
    *scale = bound / 127.0f * weight_unit(kind) + sum_lanes(poison);
    return sum_lanes(sum);
}

template <int kColumns, class T>
void quantize_row(const Matrix& m, const T* x, uint8_t* target) {
    const QuantizedRow row = quantized_row(m, target);
    const int64_t groups = num_groups(m);
    const int64_t groups_per_scale = divide_up(m.group_size, kColumns);
    const auto zero = static_cast<uint32_t>(-zero_point(m));
    float total = 0.0f;
    for (int64_t group = 0; group < groups; ++group) {
        const int64_t first = group * kColumns;
        float* scale = row.scales + group;
        const int32_t sum =
            quantize_group<kColumns>(x + first, m.num_columns - first, m.kind, row.codes + first, scale);
        row.starts[group] = static_cast<int32_t>(zero * static_cast<uint32_t>(sum));
        total += *scale * static_cast<float>(sum);
        if (group + 1 == groups || (group + 1) % groups_per_scale == 0) {
            if (m.offsets != Offsets::kNone) row.sums[group / groups_per_scale] = total;
            total = 0.0f;
        }
    }
}

#ifdef USE_AMX

// The most that a code of two planes can be.
constexpr float kMostCode = 127.0f * 128.0f;

// The largest magnitude among values, or one that is not finite: without their signs, their bits have their order.
float largest_magnitude(const float* x, int64_t count) {
    __m512i largest = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += kLanes) {
        const __m512i bits = _mm512_castps_si512(load_up_to(x + i, count - i).v);
        largest = _mm512_max_epu32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF)));
    }
    return std::bit_cast<float>(_mm512_reduce_max_epu32(largest));
}
float largest_magnitude(const bf16* x, int64_t count) {
    __m512i largest = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += 2 * kLanes) {
        const __mmask32 mask = count - i >= 2 * kLanes ? ~__mmask32{0} : (__mmask32{1} << (count - i)) - 1;
        const __m512i bits = _mm512_maskz_loadu_epi16(mask, x + i);
        largest = _mm512_max_epu16(largest, _mm512_and_si512(bits, _mm512_set1_epi16(0x7FFF)));
    }
    const __m512i halves = _mm512_max_epu16(largest, _mm512_srli_epi32(largest, 16));
    return std::bit_cast<float>(_mm512_reduce_max_epu32(_mm512_slli_epi32(halves, 16)));
}

// The codes of 32 columns in 16 bits: in each quarter first four of the first 16 columns, and then four of the others.
template <class T>
__m512i quantize_words(const T* x, int64_t count, Floats inverse) {
    const Ints first = round_to_ints(mul(load_up_to(x, count), inverse));
    return _mm512_packs_epi32(first.v, round_to_ints(mul(load_up_to(x + kLanes, count - kLanes), inverse)).v);
}

template <class T>
void quantize_planes(const Matrix& m, const T* x, uint8_t* target) {
    const PlanesRow row = planes_row(m, target);
    const int64_t columns = num_groups(m) * group_columns(m.scales);
    const float bound = largest_magnitude(x, m.num_columns);
    const Floats inverse = fill(bound > kSmallest ? kMostCode / bound : 0.0f);
    // Puts the quarters' parts in the order of their columns.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i ones = _mm512_set1_epi16(1);
    Ints sum = fill_ints(0);
    static_assert(group_columns(Scales::kRow) == 4 * kLanes);
    for (int64_t column = 0; column < columns; column += 4 * kLanes) {
        __m512i high[2], low[2];
        for (int part = 0; part < 2; ++part) {
            const int64_t first = column + part * 2 * kLanes;
            const __m512i codes = quantize_words(x + first, m.num_columns - first, inverse);
            // From -64 to 63 is left for the lower plane.
            high[part] = _mm512_srai_epi16(_mm512_add_epi16(codes, _mm512_set1_epi16(64)), 7);
            low[part] = _mm512_sub_epi16(codes, _mm512_slli_epi16(high[part], 7));
            sum = add(sum, Ints{_mm512_madd_epi16(codes, ones)});
        }
        const __m512i high_bytes = _mm512_packs_epi16(high[0], high[1]), low_bytes = _mm512_packs_epi16(low[0], low[1]);
        _mm512_store_si512(row.high + column, _mm512_permutexvar_epi32(order, high_bytes));
        _mm512_store_si512(row.low + column, _mm512_permutexvar_epi32(order, low_bytes));
    }
    // Codes of values that are not finite are any.
    *row.scale = std::isfinite(bound) ? bound / kMostCode : NAN;
    *row.sum = *row.scale * static_cast<float>(sum_lanes(sum));
}

#endif

template <class T>
void widen_row(const Matrix& m, const T* x, float* row) {
    int64_t column = 0;
    for (; column + kLanes <= m.num_columns; column += kLanes) store(row + column, load(x + column));
    const int rest = static_cast<int>(m.num_columns - column);
    // The padding of an odd number of columns must be zero.
    if (rest > 0) store_first(row + column, load_first(x + column, rest), rest + (rest & 1));
}

template <class T>
void prepare(const Matrix& m, const T* x, uint8_t* row) {
    if (is_float(m)) {
        widen_row(m, x, reinterpret_cast<float*>(row));
#ifdef USE_AMX
    } else if (has_planes(m)) {
        quantize_planes(m, x, row);
#endif
    } else if (m.scales == Scales::kRow) {
        quantize_row<group_columns(Scales::kRow)>(m, x, row);
    } else if (m.scales == Scales::kFactors16) {
        quantize_row<group_columns(Scales::kFactors16)>(m, x, row);
    } else {
        quantize_row<group_columns(Scales::kFloat32)>(m, x, row);
    }
}

// Weights of the padding are zero, but so must be these, or a NaN could be among them.
void pad_row(const Matrix& m, bf16* row) {
    std::fill(row + m.num_columns, row + round_up(m.num_columns, kBf16Columns), bf16{0});
}

}  // namespace

bool reads_in_place(const Matrix& m) {
    return m.kind == Kind::kFloat32 || (m.kind == Kind::kBfloat16 && kMultipliesBf16 && m.num_columns % kBf16Columns == 0);
}

void prepare_row(const Matrix& m, const float* x, uint8_t* row) {
    if (m.kind == Kind::kBfloat16 && kMultipliesBf16) {
        // Experts' inner values, which the processor multiplies as bfloat16.
        auto* target = reinterpret_cast<bf16*>(row);
        pad_row(m, target);
        for (int64_t column = 0; column < m.num_columns; column += kLanes) {
            const int count = static_cast<int>(m.num_columns - column < kLanes ? m.num_columns - column : kLanes);
            store_first(target + column, load_first(x + column, count), count);
        }
        return;
    }
    prepare(m, x, row);
}

void prepare_row(const Matrix& m, const bf16* x, uint8_t* row) {
    if (m.kind == Kind::kBfloat16 && kMultipliesBf16) {
        pad_row(m, reinterpret_cast<bf16*>(row));
        std::memcpy(row, x, static_cast<size_t>(m.num_columns) * sizeof(bf16));
        return;
    }
    prepare(m, x, row);
}

}  // namespace lockstep::products
