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

// As `weigh` of a row that sees the whole tile, with scores that are not yet multiplied by their scales.
inline void weigh_whole(float* scores, const float* scales, const float* value_scales, RowState row) {
    constexpr int kParts = kTile / kWidth;
    Vec parts[kParts];
    for (int i = 0; i < kParts; ++i) parts[i] = mul(load(scores + i * kWidth), load(scales + i * kWidth));
    static_assert(kParts == 4);
    const Vec most = max(max(parts[0], parts[1]), max(parts[2], parts[3]));
    const float former = row.highest;
    row.factor = 1.0f;
    if (former == -INFINITY || at_most_bits(most, broadcast(former)) != (1u << kWidth) - 1) {
        row.highest = std::max(former, max_of(most));
        row.factor = former == row.highest ? 1.0f : exp2(former - row.highest);
    }
    // Nothing but infinities: their differences would be NaN.
    const Vec subtracted = broadcast(row.highest == -INFINITY ? 0.0f : row.highest);
    Vec total = mul(load(row.total), broadcast(row.factor));
    auto* weights = reinterpret_cast<bf16*>(scores);
    for (int i = 0; i < kParts; ++i) {
        const Vec part = power<bf16>(sub(parts[i], subtracted));
        store(weights + i * kWidth, value_scales == nullptr ? part : mul(part, load(value_scales + i * kWidth)));
        total = add(total, part);
    }
    store(row.total, total);
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
