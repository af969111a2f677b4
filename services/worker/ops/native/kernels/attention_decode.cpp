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

// Asks for a row ahead of its use: in short blocks the processor does not foresee what comes next. Inlined, as g++ drops
// calls of functions that only prefetch.
template <typename T>
__attribute__((always_inline)) inline void prefetch(const T* row, int64_t dim) {
    for (int64_t i = 0; i < dim; i += 64 / sizeof(T)) {
        _mm_prefetch(row + i, _MM_HINT_T1);
    }
}

// Successive keys of a sequence.
struct Tile {
    int64_t first, count;
    int64_t slots[kTile];
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
        for (int64_t i = 0; i < piece_.num_kv_heads; ++i) {
            prefetch_head(tile, i);
        }
        begin(args_, piece_, static_cast<float>(args_.scale * kLog2E), scratch_);
        while (tile.count > 0) {
            const int64_t end = tile.first + tile.count;
            const Tile next = find_tile(piece_, end);
            if (next.count <= 0 && next_piece_ != nullptr) {
                prefetch_next();
            }
            for (int64_t i = 0; i < piece_.num_kv_heads; ++i) {
                prefetch_head(next, i);
                attend_head(tile, i);
            }
            tile = next;
        }
        finish(args_, piece_, scratch_);
    }

  private:
    // Empty after the last key.
    Tile find_tile(const Piece& piece, int64_t first) const {
        Tile tile;
        tile.first = first;
        tile.count = std::min<int64_t>(kTile, piece.key_end - first);
        const int32_t* table = step_.block_tables + piece.sequence * step_.table_stride;
        find_slots(table, step_.block_size, first, tile.count, tile.slots);
        return tile;
    }

    const T* key(int64_t head) const { return static_cast<const T*>(args_.key_cache) + head * step_.head_dim; }
    const T* value(int64_t head) const { return static_cast<const T*>(args_.value_cache) + head * args_.value_stride(); }

    __attribute__((always_inline)) void prefetch_head(const Tile& tile, int64_t i) const {
        for (int64_t j = 0; j < tile.count; ++j) {
            const int64_t head = tile.slots[j] * step_.num_kv_heads + piece_.first_kv_head + i;
            prefetch(key(head), step_.head_dim);
            prefetch(value(head), step_.value_dim);
        }
    }

    __attribute__((always_inline)) void prefetch_next() const {
        const Tile tile = find_tile(*next_piece_, next_piece_->key_begin);
        for (int64_t j = 0; j < tile.count; ++j) {
            const int64_t head = tile.slots[j] * step_.num_kv_heads + next_piece_->first_kv_head;
            prefetch(key(head), next_piece_->num_kv_heads * step_.head_dim);
            prefetch(value(head), next_piece_->num_kv_heads * step_.value_dim);
        }
    }

    // The rows of the piece's key/value head `i`.
    void attend_head(const Tile& tile, int64_t i) {
        // Keys are scored by fours; the last one fills up.
        const int64_t count = tile.count, even = (count + 3) / 4 * 4, first_row = i * num_rows_;
        int64_t heads[kTile];
        const T *keys[kTile], *values[kTile];
        for (int64_t j = 0; j < even; ++j) {
            heads[j] = tile.slots[std::min(j, count - 1)] * step_.num_kv_heads + piece_.first_kv_head + i;
            keys[j] = key(heads[j]), values[j] = value(heads[j]);
        }
        float* scores = scratch_.scores + first_row * kTile;
        for_row_blocks(num_rows_, [&](int64_t r, auto rows) {
            const float* query = scratch_.query + (first_row + r) * scratch_.key_width;
            score<T, rows>(query, scratch_.key_width, step_.head_dim, keys, even, scores + r * kTile);
        });
        float value_scales[kTile];
        if constexpr (kHasScales) {
            scale_scores(heads, count, scores);
            read_scales(args_.value_scales, heads, count, 1.0f, value_scales);
        }
        for (int64_t r = 0; r < num_rows_; ++r) {
            const Range seen = seen_by(piece_, r / piece_.num_group_heads, step_.window);
            const Range of_tile = {seen.begin - tile.first, seen.end - tile.first};
            float* row = scores + r * kTile;
            weigh(row, count, of_tile, kHasScales ? value_scales : nullptr, scratch_.state(first_row + r), row);
        }
        for_row_blocks(num_rows_, [&](int64_t r, auto rows) {
            const int64_t row = first_row + r;
            add_values<T, rows>(scores + r * kTile, scratch_.factors + row, values, count, step_.value_dim,
                                scratch_.sum + row * scratch_.value_width, scratch_.value_width);
        });
    }

    void scale_scores(const int64_t* heads, int64_t count, float* scores) const {
        float scales[kTile];
        read_scales(args_.key_scales, heads, count, 1.0f, scales);
        for (int64_t r = 0; r < num_rows_; ++r) {
            for (int64_t j = 0; j < count; ++j) {
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
