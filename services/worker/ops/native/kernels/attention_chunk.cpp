// Attention of many query rows for each key: tiles of keys and values are converted once, the keys transposed, and
// multiplied with blocks of rows (arXiv:2205.14135, algorithm 1).
#include "attention.h"

namespace lockstep {
namespace {

// Rows and vectors computed together; the accumulators fill the registers.
constexpr int kRows = kWidth == 16 ? 6 : 4;
constexpr int kColumns = kWidth == 16 ? 4 : 2;

// output[ROWS, COLUMNS vectors] = left[ROWS, depth] @ right[depth, ...], added to `factors` times the output if there are
// any.
template <int ROWS, int COLUMNS>
void multiply_block(const float* left, int64_t left_stride, const float* right, int64_t right_stride, int64_t depth,
                    const float* factors, float* output, int64_t output_stride) {
    Vec sum[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; ++r) {
        for (int c = 0; c < COLUMNS; ++c) {
            const float* former = output + r * output_stride + c * kWidth;
            sum[r][c] = factors == nullptr ? zeros() : mul(load(former), broadcast(factors[r]));
        }
    }
    for (int64_t k = 0; k < depth; ++k) {
        Vec row[COLUMNS];
        for (int c = 0; c < COLUMNS; ++c) {
            row[c] = load(right + k * right_stride + c * kWidth);
        }
        for (int r = 0; r < ROWS; ++r) {
            const Vec factor = broadcast(left[r * left_stride + k]);
            for (int c = 0; c < COLUMNS; ++c) {
                sum[r][c] = fma(factor, row[c], sum[r][c]);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        for (int c = 0; c < COLUMNS; ++c) {
            store(output + r * output_stride + c * kWidth, sum[r][c]);
        }
    }
}

// The same for all columns, `width` of them, rounded up to whole vectors.
template <int ROWS>
void multiply_rows(const float* left, int64_t left_stride, const float* right, int64_t right_stride, int64_t depth,
                   const float* factors, float* output, int64_t output_stride, int64_t width) {
    int64_t column = 0;
    for (; column + (kColumns - 1) * kWidth < width; column += kColumns * kWidth) {
        multiply_block<ROWS, kColumns>(left, left_stride, right + column, right_stride, depth, factors, output + column,
                                       output_stride);
    }
    for (; column < width; column += kWidth) {
        multiply_block<ROWS, 1>(left, left_stride, right + column, right_stride, depth, factors, output + column,
                                output_stride);
    }
}

// Writes [dim, kTile] from kTile rows [.., dim].
void transpose(const float* rows, int64_t stride, int64_t dim, float* columns) {
    for (int64_t i = 0; i < dim; i += 4) {
        for (int64_t j = 0; j < kTile; j += 4) {
            __m128 a = _mm_loadu_ps(rows + j * stride + i), b = _mm_loadu_ps(rows + (j + 1) * stride + i);
            __m128 c = _mm_loadu_ps(rows + (j + 2) * stride + i), d = _mm_loadu_ps(rows + (j + 3) * stride + i);
            _MM_TRANSPOSE4_PS(a, b, c, d);
            _mm_storeu_ps(columns + i * kTile + j, a);
            _mm_storeu_ps(columns + (i + 1) * kTile + j, b);
            _mm_storeu_ps(columns + (i + 2) * kTile + j, c);
            _mm_storeu_ps(columns + (i + 3) * kTile + j, d);
        }
    }
}

// Reads kTile of the cache's heads as float32. Rows after `count` are 0.
template <typename T>
void read_tile(const T* cache, int64_t stride, const float* scales, const int64_t* heads, int64_t count, int64_t dim,
               float* rows, int64_t width) {
    for (int64_t j = 0; j < count; ++j) {
        const T* from = cache + heads[j] * stride;
        float* to = rows + j * width;
        const Vec scale = broadcast(sizeof(T) == 1 ? scales[heads[j]] : 1.0f);
        for_vectors(dim, [&](int64_t i, int64_t size) {
            const Vec values = load_up_to(from + i, size);
            store(to + i, sizeof(T) == 1 ? mul(values, scale) : values);
        });
    }
    std::fill_n(rows + count * width, (kTile - count) * width, 0.0f);
}

// Rows [first, end) of a piece that see keys of a tile.
struct Rows {
    int64_t first, end;
};

Rows rows_that_see(const Piece& piece, int64_t first_key, int64_t count, int64_t window) {
    const int64_t first = std::max<int64_t>(0, first_key - piece.first_position);
    int64_t end = piece.num_tokens;
    if (window) {
        end = std::min(end, first_key + count - 1 + window - piece.first_position);
    }
    return {first * piece.num_group_heads, std::max<int64_t>(0, end) * piece.num_group_heads};
}

template <int ROWS>
void attend_rows(const AttentionArgs& args, const Piece& piece, const Scratch& scratch, int64_t row, int64_t first_key,
                 int64_t count) {
    float* scores = scratch.scores;
    multiply_rows<ROWS>(scratch.query + row * scratch.key_width, scratch.key_width, scratch.keys, kTile, args.step->head_dim,
                        nullptr, scores, kTile, count);
    for (int64_t r = 0; r < ROWS; ++r) {
        const Range seen = seen_by(piece, (row + r) / piece.num_group_heads, args.step->window);
        weigh(scores + r * kTile, count, {seen.begin - first_key, seen.end - first_key}, scratch.state(row + r));
    }
    multiply_rows<ROWS>(scores, kTile, scratch.values, scratch.value_width, count, scratch.factors + row,
                        scratch.sum + row * scratch.value_width, scratch.value_width, args.step->value_dim);
}

}  // namespace

template <typename T>
void attend_chunk(const AttentionArgs& args, const Piece& piece, float* memory) {
    const Step& step = *args.step;
    Scratch scratch;
    scratch.lay_out(memory, piece.num_rows(), step.head_dim, step.value_dim, true);
    begin(args, piece, scratch);
    const int32_t* table = step.block_tables + piece.sequence * step.table_stride;
    for (int64_t first = piece.key_begin; first < piece.key_end; first += kTile) {
        const int64_t count = std::min<int64_t>(kTile, piece.key_end - first);
        int64_t heads[kTile];
        find_slots(table, step.block_size, first, count, heads);
        for (int64_t j = 0; j < count; ++j) {
            heads[j] = heads[j] * step.num_kv_heads + piece.first_kv_head;
        }
        read_tile(static_cast<const T*>(args.key_cache), step.head_dim, args.key_scales, heads, count, step.head_dim,
                  scratch.rows, scratch.key_width);
        transpose(scratch.rows, scratch.key_width, step.head_dim, scratch.keys);
        read_tile(static_cast<const T*>(args.value_cache), args.value_stride(), args.value_scales, heads, count,
                  step.value_dim, scratch.values, scratch.value_width);
        const Rows rows = rows_that_see(piece, first, count, step.window);
        int64_t row = rows.first;
        for (; row + kRows <= rows.end; row += kRows) {
            attend_rows<kRows>(args, piece, scratch, row, first, count);
        }
        for (; row + 2 <= rows.end; row += 2) {
            attend_rows<2>(args, piece, scratch, row, first, count);
        }
        for (; row < rows.end; ++row) {
            attend_rows<1>(args, piece, scratch, row, first, count);
        }
    }
    finish(args, piece, scratch);
}

template void attend_chunk<float>(const AttentionArgs&, const Piece&, float*);
template void attend_chunk<bf16>(const AttentionArgs&, const Piece&, float*);
template void attend_chunk<int8_t>(const AttentionArgs&, const Piece&, float*);

}  // namespace lockstep
