// Attention over the paged cache, read in place by block table: how a step is cut into pieces, and a piece's state.
//
// A piece has some query rows and some of the keys that they see. A row is one query head of one token; all query heads of a
// key/value head are in the same piece, as far as they fit. Its result is final if it has all keys; otherwise the pieces
// with the same rows leave partial results, and the last one to finish merges them (flash decoding, arXiv:2307.08691,
// section 3.1).
//
// Softmax is online (arXiv:2205.14135, section 3.1), in powers of 2: scores include the factor log2(e). A masked key's
// weight is exactly 0, and keys outside of a piece are never read, so a NaN in a foreign slot cannot spread. One in a key or
// value of a sequence may reach all of its rows in the step.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "simd.h"

namespace lockstep {

// Keys that are scored before the next rescaling.
constexpr int64_t kTile = 64;
// A sequence with more new tokens is a chunk: its keys are worth transposing, as many queries use them. At most 8 drafts
// follow a decode's token.
constexpr int64_t kMaxDecodeTokens = 9;
// Likewise with more query rows for each key/value head, whatever the number of tokens.
constexpr int64_t kMaxDecodeRows = 32;
// Rows of a piece, so that its state stays in the cache of a core.
constexpr int64_t kMaxRows = 64;
constexpr int64_t kMaxChunkRows = 192;
// Rows of a chunk that are computed together, at most.
constexpr int64_t kChunkBlock = 16;

struct Piece {
    int32_t sequence;
    // The row of the step, and its position in the sequence.
    int32_t first_token, first_position, num_tokens;
    int32_t first_kv_head, num_kv_heads;
    // Among the query heads of each key/value head.
    int32_t first_group_head, num_group_heads;
    int32_t key_begin, key_end;
    int32_t is_chunk;
    // Of the pieces with these rows. Partial results begin at the row `first_partial` of the buffer.
    int32_t part, num_parts, first_partial, counter;
    int32_t padding;

    int64_t rows_per_kv_head() const { return int64_t{num_tokens} * num_group_heads; }
    int64_t num_rows() const { return num_kv_heads * rows_per_kv_head(); }
};

// What layers with the same window and the same heads share in a step.
struct Step {
    const int32_t* block_tables;
    int64_t table_stride, block_size;
    const Piece* pieces;
    int64_t num_pieces, num_threads;
    float* scratch;
    int64_t scratch_size;
    float* partials;
    int32_t* counters;
    // 0: no window.
    int64_t window;
    int64_t num_heads, num_kv_heads, head_dim, value_dim;

    int64_t group_size() const { return num_heads / num_kv_heads; }
};

struct AttentionArgs {
    const Step* step;
    const void* query;
    int64_t query_token_stride, query_head_stride, format;
    // [slots, num_kv_heads, head_dim] and [slots, num_kv_heads, value_dim]. If they are the same, a key's first elements are
    // its value. Scales are those of a cache in 8 bits, [slots, num_kv_heads].
    const void* key_cache;
    const void* value_cache;
    const float* key_scales;
    const float* value_scales;
    int64_t cache_format;
    // [num_heads]; null: none.
    const float* sinks;
    void* output;
    double scale;

    // Of the caches' heads.
    int64_t value_stride() const { return value_cache == key_cache ? step->head_dim : step->value_dim; }
};

inline int64_t padded(int64_t size) { return (size + 15) / 16 * 16; }

// What online softmax keeps of a row.
struct RowState {
    float& highest;
    // A vector, whose sum is that of the weights.
    float* total;
    // What the row's sum of weighted values is to be multiplied by.
    float& factor;
};

// A thread's memory for one piece. Rows are padded to whole vectors.
struct Scratch {
    int64_t key_width, value_width;
    float* query;
    float* sum;      // of weighted values
    float* highest;  // score so far
    float* totals;   // [rows, kWidth], of the weights
    float* factors;  // see RowState
    float* scores;   // [rows, kTile], then the weights; of a chunk only two blocks of rows
    float* keys;     // chunks only: [head_dim, kTile]
    float* values;   // chunks only: [kTile, value_width]
    float* rows;     // chunks only: [kTile, key_width or value_width]

    // The floats needed. Rows of a chunk are computed in blocks, which may end after the last of them.
    int64_t lay_out(float* memory, int64_t num_rows, int64_t head_dim, int64_t value_dim, bool is_chunk) {
        float* const start = memory;
        key_width = padded(head_dim), value_width = padded(value_dim);
        const auto take = [&memory](int64_t size) {
            float* const taken = memory;
            memory += padded(size);
            return taken;
        };
        query = take(num_rows * key_width);
        sum = take((num_rows + (is_chunk ? kChunkBlock - 1 : 0)) * value_width);
        highest = take(num_rows), totals = take(num_rows * kWidth), factors = take(num_rows);
        scores = take((is_chunk ? 2 * kChunkBlock : num_rows) * kTile);
        if (is_chunk) {
            keys = take(key_width * kTile), values = take(kTile * value_width);
            rows = take(kTile * std::max(key_width, value_width));
        }
        return memory - start;
    }

    RowState state(int64_t row) const { return {highest[row], totals + row * kWidth, factors[row]}; }
};

// Floats of a row's partial result: the highest score, the sum of the weights, and the sum of the weighted values.
inline int64_t partial_size(int64_t value_dim) { return 16 + padded(value_dim); }

// The keys [begin, end) that a token sees.
struct Range {
    int64_t begin, end;
};

inline Range seen_by(const Piece& piece, int64_t token, int64_t window) {
    const int64_t end = piece.first_position + token + 1;
    return {window ? std::max<int64_t>(0, end - window) : 0, end};
}

// The slots of `count` keys of a sequence, from its key `first`.
inline void find_slots(const int32_t* table, int64_t block_size, int64_t first, int64_t count, int64_t* slots) {
    int64_t block = first / block_size, offset = first % block_size;
    for (int64_t j = 0; j < count; ++j) {
        slots[j] = table[block] * block_size + offset;
        if (++offset == block_size) {
            offset = 0, ++block;
        }
    }
}

// The scales of a tile's heads, times `factor`; 0 after `count`.
inline void read_scales(const float* scales, const int64_t* heads, int64_t count, float factor, float* to) {
    for (int64_t j = 0; j < count; ++j) {
        to[j] = scales[heads[j]] * factor;
    }
    std::fill_n(to + count, kTile - count, 0.0f);
}

// Whether none of the scores [width] is above `highest`, or NaN.
template <typename Width>
bool none_above(const float* scores, Width width, float highest) {
    uint32_t bits = (1u << kWidth) - 1;
    const uint32_t all = bits;
    for (int64_t j = 0; j < width; j += kWidth) {
        bits &= at_most_bits(load(scores + j), broadcast(highest));
    }
    return bits == all;
}

template <typename Width>
float highest_of(const float* scores, Width width, float former) {
    Vec most = broadcast(former);
    for (int64_t j = 0; j < width; j += kWidth) {
        most = max(most, load(scores + j));
    }
    return max_of(most);
}

// What a score weighs, given its distance from the highest: as precise as weights of the type N are.
template <typename N>
Vec power(Vec distance) {
#if defined(MULTIPLY_BF16) || defined(USE_AMX)
    if constexpr (sizeof(N) == sizeof(bf16)) return rough_exp2(distance);
#endif
    return exp2(distance);
}

// Turns the scores [width] of a row, whole vectors, into weights, and updates the row's state. Scores of -infinity weigh 0.
template <typename N, typename Width>
__attribute__((always_inline)) inline void weigh_vectors(const float* scores, Width width, const float* value_scales,
                                                         RowState row, N* weights) {
    const float former = row.highest;
    row.factor = 1.0f;
    if (former == -INFINITY || !none_above(scores, width, former)) {
        row.highest = highest_of(scores, width, former);
        row.factor = former == row.highest ? 1.0f : exp2(former - row.highest);
    }
    // Nothing seen so far: a difference of infinities would be NaN.
    const Vec subtracted = broadcast(row.highest == -INFINITY ? 0.0f : row.highest);
    Vec total = mul(load(row.total), broadcast(row.factor));
    for (int64_t j = 0; j < width; j += kWidth) {
        const Vec part = power<N>(sub(load(scores + j), subtracted));
        store(weights + j, value_scales == nullptr ? part : mul(part, load(value_scales + j)));
        total = add(total, part);
    }
    store(row.total, total);
}

// Turns a row's scores for a tile's `count` keys into weights, 0 outside of `seen`, and updates the row's state. Weights are
// multiplied by the scales [kTile] of the values, if they have any. They may begin where the scores do.
template <typename N>
void weigh(float* scores, int64_t count, Range seen, const float* value_scales, RowState row, N* weights) {
    if (count == kTile && seen.begin <= 0 && seen.end >= kTile) {
        // A width that is known when this is compiled: the scores stay in registers.
        return weigh_vectors(scores, std::integral_constant<int64_t, kTile>(), value_scales, row, weights);
    }
    const int64_t width = (count + kWidth - 1) / kWidth * kWidth;
    for (int64_t j = 0; j < std::min(seen.begin, width); ++j) {
        scores[j] = -INFINITY;
    }
    for (int64_t j = std::max<int64_t>(seen.end, 0); j < width; ++j) {
        scores[j] = -INFINITY;
    }
    weigh_vectors(scores, width, value_scales, row, weights);
}

// Cuts a step into pieces.
struct PlanArgs {
    const int32_t* cu_seqlens_q;
    const int32_t* context_lens;
    int64_t num_seqs;
    int64_t window, num_heads, num_kv_heads, head_dim, value_dim, num_threads;
    Piece* pieces;
    int64_t capacity;
    // Pieces, of which only the first `capacity` are written; threads worth using; floats of scratch for a thread; floats of
    // partial results; counters.
    int64_t* sizes;
};

void plan(const PlanArgs& args);

// `next_piece` is what this thread probably has next; null: nothing, or a chunk.
template <typename T>
void attend_decode(const AttentionArgs& args, const Piece& piece, const Piece* next_piece, float* memory);

template <typename T>
void attend_chunk(const AttentionArgs& args, const Piece& piece, float* memory);

// Reads a piece's query rows, multiplied by `factor`, and resets their states.
void begin(const AttentionArgs& args, const Piece& piece, float factor, Scratch& scratch);

// Writes a piece's result, or its partial result, which the last of the pieces with these rows merges.
void finish(const AttentionArgs& args, const Piece& piece, const Scratch& scratch);

}  // namespace lockstep
