// Attention of a few query rows for each key: keys and values are converted to float32 in registers as they are read.
#include "attention.h"

namespace lockstep {
namespace {

// Rows computed together; the accumulators fill the registers.
constexpr int kRows = kWidth == 16 ? 4 : 3;
// Vectors of an output row computed together.
constexpr int kColumns = 4;

// Scores of ROWS rows with `count` keys, a multiple of 4.
template <typename T, int ROWS>
void score(const float* query, int64_t width, int64_t dim, const T* const* keys, int64_t count, float* scores) {
    const int64_t whole = dim / kWidth * kWidth;
    for (int64_t j = 0; j < count; j += 4) {
        Vec sum[ROWS][4];
        for (int r = 0; r < ROWS; ++r) {
            sum[r][0] = sum[r][1] = sum[r][2] = sum[r][3] = zeros();
        }
        const auto multiply = [&](int64_t i, Vec k0, Vec k1, Vec k2, Vec k3) {
            for (int r = 0; r < ROWS; ++r) {
                const Vec q = load(query + r * width + i);
                sum[r][0] = fma(q, k0, sum[r][0]);
                sum[r][1] = fma(q, k1, sum[r][1]);
                sum[r][2] = fma(q, k2, sum[r][2]);
                sum[r][3] = fma(q, k3, sum[r][3]);
            }
        };
        const T *k0 = keys[j], *k1 = keys[j + 1], *k2 = keys[j + 2], *k3 = keys[j + 3];
        for (int64_t i = 0; i < whole; i += kWidth) {
            multiply(i, load(k0 + i), load(k1 + i), load(k2 + i), load(k3 + i));
        }
        if (const int64_t rest = dim - whole) {
            multiply(whole, load_part(k0 + whole, rest), load_part(k1 + whole, rest), load_part(k2 + whole, rest),
                     load_part(k3 + whole, rest));
        }
        for (int r = 0; r < ROWS; ++r) {
            _mm_storeu_ps(scores + r * kTile + j, sums(sum[r][0], sum[r][1], sum[r][2], sum[r][3]));
        }
    }
}

// Adds COLUMNS vectors of the weighted values to ROWS rows. The last vector has `rest` elements.
template <typename T, int ROWS, int COLUMNS>
void add_columns(const float* weights, const float* factors, const T* const* values, int64_t count, int64_t column,
                 int64_t rest, float* output, int64_t width) {
    Vec sum[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; ++r) {
        for (int c = 0; c < COLUMNS; ++c) {
            sum[r][c] = mul(load(output + r * width + column + c * kWidth), broadcast(factors[r]));
        }
    }
    for (int64_t j = 0; j < count; ++j) {
        const T* row = values[j] + column;
        Vec weight[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            weight[r] = broadcast(weights[r * kTile + j]);
        }
        for (int c = 0; c < COLUMNS; ++c) {
            const Vec value = c + 1 < COLUMNS || rest == kWidth ? load(row + c * kWidth) : load_part(row + c * kWidth, rest);
            for (int r = 0; r < ROWS; ++r) {
                sum[r][c] = fma(weight[r], value, sum[r][c]);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        for (int c = 0; c < COLUMNS; ++c) {
            store(output + r * width + column + c * kWidth, sum[r][c]);
        }
    }
}

template <typename T, int ROWS>
void add_values(const float* weights, const float* factors, const T* const* values, int64_t count, int64_t dim,
                float* output, int64_t width) {
    int64_t column = 0;
    for (; column + kColumns * kWidth <= dim; column += kColumns * kWidth) {
        add_columns<T, ROWS, kColumns>(weights, factors, values, count, column, kWidth, output, width);
    }
    for (; column < dim; column += kWidth) {
        const int64_t rest = std::min(kWidth, dim - column);
        add_columns<T, ROWS, 1>(weights, factors, values, count, column, rest, output, width);
    }
}

// Calls `body` with a constant for the number of rows, for all of `num_rows`.
template <typename Body>
void for_row_blocks(int64_t num_rows, Body body) {
    for (int64_t row = 0; row < num_rows; row += kRows) {
        switch (std::min<int64_t>(kRows, num_rows - row)) {
            case 1:
                body(row, std::integral_constant<int, 1>());
                break;
            case 2:
                body(row, std::integral_constant<int, 2>());
                break;
            case 3:
                body(row, std::integral_constant<int, 3>());
                break;
            default:
                body(row, std::integral_constant<int, kRows>());
        }
    }
}

// Multiplies the scores or weights of rows by the scales of their keys or values.
void scale_tile(const float* scales, const int64_t* slots, int64_t count, int64_t num_kv_heads, int64_t num_rows,
                float* tile) {
    float of_tile[kTile];
    for (int64_t j = 0; j < count; ++j) {
        of_tile[j] = scales[slots[j] * num_kv_heads];
    }
    for (int64_t r = 0; r < num_rows; ++r) {
        for (int64_t j = 0; j < count; ++j) {
            tile[r * kTile + j] *= of_tile[j];
        }
    }
}

}  // namespace

template <typename T>
void attend_decode(const AttentionArgs& args, const Piece& piece, float* memory) {
    const Step& step = *args.step;
    const int64_t num_rows = piece.rows_per_kv_head(), value_stride = args.value_stride();
    Scratch scratch;
    scratch.lay_out(memory, piece.num_rows(), step.head_dim, step.value_dim, false);
    begin(args, piece, scratch);
    const int32_t* table = step.block_tables + piece.sequence * step.table_stride;
    for (int64_t first = piece.key_begin; first < piece.key_end; first += kTile) {
        const int64_t count = std::min<int64_t>(kTile, piece.key_end - first), even = (count + 3) / 4 * 4;
        int64_t slots[kTile];
        find_slots(table, step.block_size, first, count, slots);
        for (int64_t j = count; j < even; ++j) {
            slots[j] = slots[count - 1];
        }
        for (int64_t i = 0; i < piece.num_kv_heads; ++i) {
            const int64_t kv_head = piece.first_kv_head + i, row = i * num_rows;
            const T *keys[kTile], *values[kTile];
            for (int64_t j = 0; j < even; ++j) {
                const int64_t head = slots[j] * step.num_kv_heads + kv_head;
                keys[j] = static_cast<const T*>(args.key_cache) + head * step.head_dim;
                values[j] = static_cast<const T*>(args.value_cache) + head * value_stride;
            }
            float* scores = scratch.scores + row * kTile;
            for_row_blocks(num_rows, [&](int64_t r, auto rows) {
                const float* query = scratch.query + (row + r) * scratch.key_width;
                score<T, rows>(query, scratch.key_width, step.head_dim, keys, even, scores + r * kTile);
            });
            if constexpr (sizeof(T) == 1) {
                scale_tile(args.key_scales + kv_head, slots, count, step.num_kv_heads, num_rows, scores);
            }
            for (int64_t r = 0; r < num_rows; ++r) {
                const Range seen = seen_by(piece, r / piece.num_group_heads, step.window);
                weigh(scores + r * kTile, count, {seen.begin - first, seen.end - first}, scratch.state(row + r));
            }
            if constexpr (sizeof(T) == 1) {
                scale_tile(args.value_scales + kv_head, slots, count, step.num_kv_heads, num_rows, scores);
            }
            for_row_blocks(num_rows, [&](int64_t r, auto rows) {
                float* output = scratch.sum + (row + r) * scratch.value_width;
                add_values<T, rows>(scores + r * kTile, scratch.factors + row + r, values, count, step.value_dim, output,
                                    scratch.value_width);
            });
        }
    }
    finish(args, piece, scratch);
}

template void attend_decode<float>(const AttentionArgs&, const Piece&, float*);
template void attend_decode<bf16>(const AttentionArgs&, const Piece&, float*);
template void attend_decode<int8_t>(const AttentionArgs&, const Piece&, float*);

}  // namespace lockstep
