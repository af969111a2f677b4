// Blocks of a chunk's rows, by a tile unit; and how rows are cut for vectors and tiles alike.
#pragma once

#include "amx.h"
#include "attention.h"

namespace lockstep {

// Vectors of columns computed together.
constexpr int kColumns = kWidth == 16 ? 4 : 2;

// What is multiplied, in words of 4 bytes: a float32, or the bfloat16 of two successive depths.
template <typename N>
constexpr int64_t kPerWord = sizeof(float) / sizeof(N);

template <typename N>
constexpr int64_t words(int64_t size) {
    return (size + kPerWord<N> - 1) / kPerWord<N>;
}

// Calls `body(column, vectors)` for all of `width` columns, rounded up to whole vectors.
template <typename Body>
void for_columns(int64_t width, Body body) {
    int64_t column = 0;
    for (; column + (kColumns - 1) * kWidth < width; column += kColumns * kWidth) {
        body(column, std::integral_constant<int, kColumns>());
    }
    for (; column < width; column += kWidth) {
        body(column, std::integral_constant<int, 1>());
    }
}

#ifdef USE_AMX

static_assert(kChunkBlock == amx::kRows && kColumns == 4);

// A step of the tile unit: so many words of 4 bytes of each row.
constexpr int64_t kStepWords = amx::kRowBytes / sizeof(float);

inline amx::Shapes whole_tiles() {
    amx::Shapes shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.set(tile, amx::kRows, amx::kRowBytes);
    return shapes;
}

// Sums in tiles 0 to COLUMNS - 1: [kChunkBlock, COLUMNS vectors] += left @ right, as `multiply` with pairs of bfloat16.
template <int COLUMNS>
void multiply_tiles(const float* left, int64_t left_stride, const float* right, int64_t right_stride, int64_t steps) {
    const int64_t left_bytes = left_stride * sizeof(float), right_bytes = right_stride * sizeof(float);
    for (int64_t step = 0; step < steps; ++step) {
        const float* from = right + step * kStepWords * right_stride;
        amx::load<4>(left + step * kStepWords, left_bytes);
        amx::load<6>(from, right_bytes);
        amx::dot_bf16<0, 4, 6>();
        if constexpr (COLUMNS == 4) {
            amx::load<7>(from + kStepWords, right_bytes);
            amx::dot_bf16<1, 4, 7>();
            amx::load<6>(from + 2 * kStepWords, right_bytes);
            amx::dot_bf16<2, 4, 6>();
            amx::load<7>(from + 3 * kStepWords, right_bytes);
            amx::dot_bf16<3, 4, 7>();
        }
    }
}

// Calls `body(tile)` for the tiles of sums.
template <int COLUMNS, typename Body>
void for_sums(Body body) {
    body(std::integral_constant<int, 0>());
    if constexpr (COLUMNS == 4) {
        body(std::integral_constant<int, 1>());
        body(std::integral_constant<int, 2>());
        body(std::integral_constant<int, 3>());
    }
}

// Scores [kChunkBlock, kTile] of rows from `row` on with a tile of keys, not yet multiplied by their scales.
inline void score_block(const Scratch& scratch, int64_t row, float* scores) {
    const int64_t steps = padded(words<bf16>(scratch.key_width)) / kStepWords;
    const float* query = scratch.query + row * scratch.key_width;
    for_sums<4>([](auto tile) { amx::zero<tile>(); });
    multiply_tiles<4>(query, scratch.key_width, scratch.keys, kTile, steps);
    for_sums<4>([&](auto tile) { amx::store<tile>(scores + tile * kStepWords, kTile * sizeof(float)); });
}

// The highest of each of 16 rows of 16 values, in the order of the rows.
inline Vec highest_of_rows(Vec (&rows)[kChunkBlock]) {
    // Each step halves the vectors, and what a vector has of each row: first neighbours, then pairs, then quarters.
    const auto high_pairs = [](Vec a, Vec b) { return max(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); };
    const auto high_quarters = [](Vec a, Vec b) {
        return max(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
    };
    const auto high_of_four = [&](int row) {
        const __m512d a = _mm512_castps_pd(high_pairs(rows[row], rows[row + 1]));
        const __m512d b = _mm512_castps_pd(high_pairs(rows[row + 2], rows[row + 3]));
        return max(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    };
    return high_quarters(high_quarters(high_of_four(0), high_of_four(4)), high_quarters(high_of_four(8), high_of_four(12)));
}

// Turns the scores [kChunkBlock, kTile] of the block of rows from `row` on into weights, as `weigh` does for one that sees
// the whole tile; scores are not yet multiplied by their scales. All rows' states change together, without a branch that
// the processor could guess wrong. Returns whether sums of weighted values are to be multiplied by their factors.
inline bool weigh_whole_rows(
    const Scratch& scratch, int64_t row, float* scores, const float* scales, const float* value_scales) {
    constexpr int kParts = kTile / kWidth;
    static_assert(kParts == 4);
    Vec most[kChunkBlock];
    for (int64_t r = 0; r < kChunkBlock; ++r) {
        const float* from = scores + r * kTile;
        Vec parts[kParts];
        for (int i = 0; i < kParts; ++i) parts[i] = mul(load(from + i * kWidth), load(scales + i * kWidth));
        most[r] = max(max(parts[0], parts[1]), max(parts[2], parts[3]));
    }
    const Vec former = load(scratch.highest + row), highest = max(highest_of_rows(most), former);
    const uint32_t same = equal_bits(former, highest);
    const Vec factor = _mm512_mask_mov_ps(exp2(sub(former, highest)), static_cast<__mmask16>(same), broadcast(1.0f));
    store(scratch.highest + row, highest);
    store(scratch.factors + row, factor);
    // Nothing but infinities: their differences would be NaN.
    const uint32_t empty = equal_bits(highest, broadcast(-INFINITY));
    alignas(64) float subtracted[kChunkBlock];
    store(subtracted, _mm512_mask_mov_ps(highest, static_cast<__mmask16>(empty), zeros()));
    for (int64_t r = 0; r < kChunkBlock; ++r) {
        float* from = scores + r * kTile;
        auto* weights = reinterpret_cast<bf16*>(from);
        float* total = scratch.totals + (row + r) * kWidth;
        Vec parts[kParts];
        for (int i = 0; i < kParts; ++i) {
            parts[i] = power<bf16>(sub(mul(load(from + i * kWidth), load(scales + i * kWidth)), broadcast(subtracted[r])));
        }
        for (int i = 0; i < kParts; ++i) {
            store(weights + i * kWidth, value_scales == nullptr ? parts[i] : mul(parts[i], load(value_scales + i * kWidth)));
        }
        const Vec former_total = mul(load(total), broadcast(scratch.factors[row + r]));
        store(total, add(former_total, add(add(parts[0], parts[1]), add(parts[2], parts[3]))));
    }
    return same != (1u << kWidth) - 1;
}

// Adds a tile's values to the sums of the block of rows from `row` on, with their weights [kChunkBlock, kTile words].
inline void add_block(const Step& step, const Scratch& scratch, int64_t row, const float* weights) {
    const int64_t width = scratch.value_width;
    for_columns(step.value_dim, [&](int64_t column, auto columns) {
        float* sums = scratch.sum + row * width + column;
        for_sums<columns>([&](auto tile) { amx::load<tile>(sums + tile * kStepWords, width * sizeof(float)); });
        multiply_tiles<columns>(weights, kTile, scratch.values + column, width, words<bf16>(kTile) / kStepWords);
        for_sums<columns>([&](auto tile) { amx::store<tile>(sums + tile * kStepWords, width * sizeof(float)); });
    });
}

#endif

}  // namespace lockstep
