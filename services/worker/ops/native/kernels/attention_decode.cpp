// Attention of a few query rows for each key: keys and values are converted to float32 in registers as they are read.
#include "attention.h"

namespace lockstep {
namespace {

// Rows computed together; the accumulators fill the registers.
constexpr int kRows = kWidth == 16 ? 4 : 3;
// Vectors of an output row computed together.
constexpr int kColumns = 4;

// Asks for a row ahead of its use: in short blocks the processor does not foresee what comes next. Inlined, as g++ drops
// calls of functions that only prefetch.
template <typename T>
__attribute__((always_inline)) inline void prefetch(const T* row, int64_t dim) {
    for (int64_t i = 0; i < dim; i += 64 / sizeof(T)) {
        _mm_prefetch(row + i, _MM_HINT_T0);
    }
}

// What a key/value head has in the cache for some tokens: a row for each.
template <typename T>
struct CacheRows {
    const T* first;
    int64_t stride;
    const int64_t* numbers;

    const T* operator[](int64_t token) const { return first + numbers[token] * stride; }
};

// Scores of ROWS rows with `count` keys, a multiple of 4. While it computes, memory brings the keys `next`, as many; null:
// none.
template <typename T, int ROWS>
void score(const float* query, int64_t width, int64_t dim, const CacheRows<T>& keys, const CacheRows<T>* next,
           int64_t count, float* scores) {
    const int64_t whole = dim / kWidth * kWidth;
    for (int64_t j = 0; j < count; j += 4) {
        for (int64_t k = j; next != nullptr && k < j + 4; ++k) {
            prefetch((*next)[k], dim);
        }
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

// Adds COLUMNS vectors of the weighted values to ROWS rows. The last vector has `rest` elements. `next` is as in `score`.
template <typename T, int ROWS, int COLUMNS>
void add_columns(const float* weights, const float* factors, const CacheRows<T>& values, const CacheRows<T>* next,
                 int64_t count, int64_t column, int64_t rest, float* output, int64_t width) {
    Vec sum[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; ++r) {
        for (int c = 0; c < COLUMNS; ++c) {
            sum[r][c] = mul(load(output + r * width + column + c * kWidth), broadcast(factors[r]));
        }
    }
    for (int64_t j = 0; j < count; ++j) {
        if (next != nullptr) {
            prefetch((*next)[j] + column, (COLUMNS - 1) * kWidth + rest);
        }
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
void add_values(const float* weights, const float* factors, const CacheRows<T>& values, const CacheRows<T>* next,
                int64_t count, int64_t dim, float* output, int64_t width) {
    int64_t column = 0;
    for (; column + kColumns * kWidth <= dim; column += kColumns * kWidth) {
        add_columns<T, ROWS, kColumns>(weights, factors, values, next, count, column, kWidth, output, width);
    }
    for (; column < dim; column += kWidth) {
        const int64_t rest = std::min(kWidth, dim - column);
        add_columns<T, ROWS, 1>(weights, factors, values, next, count, column, rest, output, width);
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

// Successive keys of a piece, and where the first of its key/value heads has them in the cache. After the last of `count` it
// is named again.
struct Tile {
    const Piece* piece;
    int64_t first, count;
    int64_t heads[kTile];
};

template <typename T>
class Decode {
  public:
    Decode(const AttentionArgs& args, const Piece& piece, const Piece* next_piece, float* memory)
        : args_(args), step_(*args.step), piece_(piece), next_piece_(next_piece), num_rows_(piece.rows_per_kv_head()) {
        scratch_.lay_out(memory, piece.num_rows(), step_.head_dim, step_.value_dim, false);
    }

    void run() {
        Tile tile = find_tile(piece_, piece_.key_begin);
        prefetch_tile(tile);
        begin(args_, piece_, static_cast<float>(args_.scale * kLog2E), scratch_);
        while (tile.piece == &piece_ && tile.count > 0) {
            const Tile next = find_next(tile);
            for (int64_t i = 0; i < piece_.num_kv_heads; ++i) {
                attend_head(tile, next, i);
            }
            tile = next;
        }
        finish(args_, piece_, scratch_);
    }

  private:
    // Empty after the last key.
    Tile find_tile(const Piece& piece, int64_t first) const {
        Tile tile;
        tile.piece = &piece;
        tile.first = first;
        tile.count = std::min<int64_t>(kTile, piece.key_end - first);
        if (tile.count <= 0) {
            return tile;
        }
        const int32_t* table = step_.block_tables + piece.sequence * step_.table_stride;
        find_slots(table, step_.block_size, first, tile.count, tile.heads);
        for (int64_t j = 0; j < tile.count; ++j) {
            tile.heads[j] = tile.heads[j] * step_.num_kv_heads + piece.first_kv_head;
        }
        std::fill(tile.heads + tile.count, tile.heads + kTile, tile.heads[tile.count - 1]);
        return tile;
    }

    // The next tile, which may be the first of the next piece; empty if nothing is known to follow.
    Tile find_next(const Tile& tile) const {
        const Tile next = find_tile(piece_, tile.first + tile.count);
        return next.count > 0 || next_piece_ == nullptr ? next : find_tile(*next_piece_, next_piece_->key_begin);
    }

    // Of the tile's key/value head `i`.
    CacheRows<T> keys(const Tile& tile, int64_t i) const {
        return {static_cast<const T*>(args_.key_cache) + i * step_.head_dim, step_.head_dim, tile.heads};
    }
    CacheRows<T> values(const Tile& tile, int64_t i) const {
        return {static_cast<const T*>(args_.value_cache) + i * args_.value_stride(), args_.value_stride(), tile.heads};
    }

    void prefetch_tile(const Tile& tile) const {
        for (int64_t i = 0; i < piece_.num_kv_heads; ++i) {
            for (int64_t j = 0; j < tile.count; ++j) {
                prefetch(keys(tile, i)[j], step_.head_dim);
                prefetch(values(tile, i)[j], step_.value_dim);
            }
        }
    }

    // The query rows of the piece's key/value head `i`. While it computes, memory brings that head of the next tile.
    void attend_head(const Tile& tile, const Tile& next, int64_t i) {
        const int64_t count = tile.count, first_row = i * num_rows_;
        const bool has_next = next.count > 0 && i < next.piece->num_kv_heads;
        const CacheRows<T> own_keys = keys(tile, i), next_keys = keys(next, i);
        const CacheRows<T> own_values = values(tile, i), next_values = values(next, i);
        float* scores = scratch_.scores + first_row * kTile;
        for_row_blocks(num_rows_, [&](int64_t r, auto rows) {
            const float* query = scratch_.query + (first_row + r) * scratch_.key_width;
            const CacheRows<T>* asked = has_next && r == 0 ? &next_keys : nullptr;
            // Keys are scored by fours.
            const int64_t even = (count + 3) / 4 * 4;
            score<T, rows>(query, scratch_.key_width, step_.head_dim, own_keys, asked, even, scores + r * kTile);
        });
        float value_scales[kTile];
        if constexpr (kHasScales) {
            scale_scores(args_.key_scales + i, tile, scores);
            read_scales(args_.value_scales + i, tile.heads, count, 1.0f, value_scales);
        }
        for (int64_t r = 0; r < num_rows_; ++r) {
            const Range seen = seen_by(piece_, r / piece_.num_group_heads, step_.window);
            const Range of_tile = {seen.begin - tile.first, seen.end - tile.first};
            float* row = scores + r * kTile;
            weigh(row, count, of_tile, kHasScales ? value_scales : nullptr, scratch_.state(first_row + r), row);
        }
        for_row_blocks(num_rows_, [&](int64_t r, auto rows) {
            const int64_t row = first_row + r;
            const CacheRows<T>* asked = has_next && r == 0 ? &next_values : nullptr;
            add_values<T, rows>(scores + r * kTile, scratch_.factors + row, own_values, asked, count, step_.value_dim,
                                scratch_.sum + row * scratch_.value_width, scratch_.value_width);
        });
    }

    void scale_scores(const float* key_scales, const Tile& tile, float* scores) const {
        float scales[kTile];
        read_scales(key_scales, tile.heads, tile.count, 1.0f, scales);
        for (int64_t r = 0; r < num_rows_; ++r) {
            for (int64_t j = 0; j < tile.count; ++j) {
                scores[r * kTile + j] *= scales[j];
            }
        }
    }

    static constexpr bool kHasScales = sizeof(T) == 1;

    const AttentionArgs& args_;
    const Step& step_;
    const Piece& piece_;
    const Piece* next_piece_;
    const int64_t num_rows_;
    Scratch scratch_;
};

}  // namespace

template <typename T>
void attend_decode(const AttentionArgs& args, const Piece& piece, const Piece* next_piece, float* memory) {
    Decode<T>(args, piece, next_piece, memory).run();
}

template void attend_decode<float>(const AttentionArgs&, const Piece&, const Piece*, float*);
template void attend_decode<bf16>(const AttentionArgs&, const Piece&, const Piece*, float*);
template void attend_decode<int8_t>(const AttentionArgs&, const Piece&, const Piece*, float*);

}  // namespace lockstep
