// Attention of many query rows for each key: tiles of keys and values are converted once, the keys transposed, and
// multiplied with blocks of rows (arXiv:2205.14135, algorithm 1).
//
// Where the processor multiplies pairs of bfloat16 fast, or has a tile unit, and queries and cache have no more precision,
// they stay bfloat16, and the weights are rounded to it; sums are float32.
#include <optional>

#include "attention_tiles.h"

namespace lockstep {
namespace {

#if defined(MULTIPLY_BF16) || defined(USE_AMX)
constexpr bool kMultipliesBf16 = true;
#else
constexpr bool kMultipliesBf16 = false;
#endif

// Rows computed together, with `kColumns`: the accumulators fill the registers.
constexpr int kRows = kWidth == 16 ? 6 : 4;

template <typename N>
Vec dot(Vec left, Vec right, Vec sum) {
#ifdef MULTIPLY_BF16
    if constexpr (sizeof(N) == sizeof(bf16)) return dot_pairs(left, right, sum);
#endif
    return fma(left, right, sum);
}

// sum += left[ROWS, depth] @ right[depth, COLUMNS vectors]. Depths and strides are in words.
template <typename N, int ROWS, int COLUMNS>
__attribute__((always_inline)) inline void multiply(const float* left, int64_t left_stride, const float* right,
                                                    int64_t right_stride, int64_t depth, Vec (&sum)[ROWS][COLUMNS]) {
    for (int64_t k = 0; k < depth; ++k) {
        Vec row[COLUMNS];
        for (int c = 0; c < COLUMNS; ++c) {
            row[c] = load(right + k * right_stride + c * kWidth);
        }
        for (int r = 0; r < ROWS; ++r) {
            const Vec factor = broadcast(left[r * left_stride + k]);
            for (int c = 0; c < COLUMNS; ++c) {
                sum[r][c] = dot<N>(factor, row[c], sum[r][c]);
            }
        }
    }
}

// Scores [ROWS, kTile] of rows from `row` on with a tile's `count` keys, each multiplied by its scale.
template <typename N, int ROWS>
void score_rows(const Step& step, const Scratch& scratch, int64_t row, int64_t count, const float* scales) {
    const int64_t depth = words<N>(step.head_dim);
    for_columns(count, [&](int64_t column, auto columns) {
        Vec sum[ROWS][columns] = {};
        multiply<N>(scratch.query + row * scratch.key_width, scratch.key_width, scratch.keys + column, kTile, depth, sum);
        for (int r = 0; r < ROWS; ++r) {
            for (int c = 0; c < columns; ++c) {
                const int64_t key = column + c * kWidth;
                store(scratch.scores + r * kTile + key, mul(sum[r][c], load(scales + key)));
            }
        }
    });
}

// Adds the tile's values, weighted, to the sums of rows from `row` on, which are first multiplied by their factors.
template <typename N, int ROWS>
void add_values(const Step& step, const Scratch& scratch, int64_t row, int64_t count) {
    const int64_t width = scratch.value_width, depth = words<N>(count);
    for_columns(step.value_dim, [&](int64_t column, auto columns) {
        float* output = scratch.sum + row * width + column;
        Vec sum[ROWS][columns];
        for (int r = 0; r < ROWS; ++r) {
            for (int c = 0; c < columns; ++c) {
                sum[r][c] = mul(load(output + r * width + c * kWidth), broadcast(scratch.factors[row + r]));
            }
        }
        multiply<N>(scratch.scores, kTile, scratch.values + column, width, depth, sum);
        for (int r = 0; r < ROWS; ++r) {
            for (int c = 0; c < columns; ++c) {
                store(output + r * width + c * kWidth, sum[r][c]);
            }
        }
    });
}

// Writes [dim, kTile] words from kTile rows [.., dim].
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

// Reads kTile of the cache's heads, without their scales. Rows after `count` are 0.
template <typename N, typename T>
void read_tile(const T* cache, int64_t stride, const int64_t* heads, int64_t count, int64_t dim, N* rows, int64_t width) {
    for (int64_t j = 0; j < count; ++j) {
        const T* from = cache + heads[j] * stride;
        N* to = rows + j * width;
        if constexpr (std::is_same_v<N, T>) {
            std::copy_n(from, dim, to);
            std::fill(to + dim, to + width, N());
        } else {
            for_vectors(dim, [&](int64_t i, int64_t size) { store(to + i, load_up_to(from + i, size)); });
        }
    }
    std::fill_n(rows + count * width, (kTile - count) * width, N());
}

#if defined(MULTIPLY_BF16) || defined(USE_AMX)
// Writes [kTile / 2, width] words, each of two rows, from [kTile, width].
void pair_rows(const bf16* rows, int64_t width, float* pairs) {
    for (int64_t j = 0; j < kTile; j += 2) {
        for (int64_t i = 0; i < width; i += kWidth) {
            store(pairs + j / 2 * width + i, pair(rows + j * width + i, rows + (j + 1) * width + i));
        }
    }
}
#endif

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

// A piece with many rows for each key.
template <typename N, typename T>
class Chunk {
  public:
    Chunk(const AttentionArgs& args, const Piece& piece, float* memory)
        : args_(args), step_(*args.step), piece_(piece) {
        scratch_.lay_out(memory, piece.num_rows(), step_.head_dim, step_.value_dim, true);
        std::fill_n(key_scales_, kTile, static_cast<float>(args.scale * kLog2E));
    }

    void run() {
        begin(args_, piece_, 1.0f, scratch_);
        pack_query();
#ifdef USE_AMX
        std::optional<amx::Tiles> tiles;
        if constexpr (kUsesTiles) {
            pad_keys();
            tiles.emplace(whole_tiles());
        }
#endif
        for (int64_t first = piece_.key_begin; first < piece_.key_end; first += kTile) {
            const int64_t count = std::min<int64_t>(kTile, piece_.key_end - first);
            read_keys_and_values(first, count);
            attend_rows(rows_that_see(piece_, first, count, step_.window), first, count);
        }
        finish(args_, piece_, scratch_);
    }

  private:
    static constexpr bool kHasScales = sizeof(T) == 1;
#ifdef USE_AMX
    static constexpr bool kUsesTiles = sizeof(N) == sizeof(bf16);
#else
    static constexpr bool kUsesTiles = false;
#endif

    void attend_rows(Rows rows, int64_t first, int64_t count) {
        int64_t row = rows.first;
#ifdef USE_AMX
        if constexpr (kUsesTiles) {
            attend_blocks(rows, first, count);
            return;
        }
#endif
        if constexpr (!kUsesTiles) {
            for (; row + kRows <= rows.end; row += kRows) {
                attend<kRows>(row, first, count);
            }
            for (; row + 2 <= rows.end; row += 2) {
                attend<2>(row, first, count);
            }
            for (; row < rows.end; ++row) {
                attend<1>(row, first, count);
            }
        }
    }

    // In place: a packed row begins where the row begins.
    void pack_query() {
        if constexpr (sizeof(N) < sizeof(float)) {
            for (int64_t row = 0; row < piece_.num_rows(); ++row) {
                float* query = scratch_.query + row * scratch_.key_width;
                for (int64_t i = 0; i < scratch_.key_width; i += kWidth) {
                    store(reinterpret_cast<N*>(query) + i, load(query + i));
                }
                // A step of the tile unit may have more depth than a row does, and there is room for twice as much.
                std::fill_n(reinterpret_cast<N*>(query) + scratch_.key_width, scratch_.key_width % 32, N());
            }
        }
    }

    void read_keys_and_values(int64_t first, int64_t count) {
        int64_t heads[kTile];
        find_slots(step_.block_tables + piece_.sequence * step_.table_stride, step_.block_size, first, count, heads);
        for (int64_t j = 0; j < count; ++j) {
            heads[j] = heads[j] * step_.num_kv_heads + piece_.first_kv_head;
        }
        N* rows = reinterpret_cast<N*>(scratch_.rows);
        read_tile(static_cast<const T*>(args_.key_cache), step_.head_dim, heads, count, step_.head_dim, rows,
                  scratch_.key_width * kPerWord<N>);
        transpose(scratch_.rows, scratch_.key_width, words<N>(step_.head_dim), scratch_.keys);
        if constexpr (sizeof(N) == sizeof(float)) {
            rows = scratch_.values;
        }
        read_tile(static_cast<const T*>(args_.value_cache), args_.value_stride(), heads, count, step_.value_dim, rows,
                  scratch_.value_width);
#if defined(MULTIPLY_BF16) || defined(USE_AMX)
        if constexpr (sizeof(N) < sizeof(float)) {
            pair_rows(rows, scratch_.value_width, scratch_.values);
        }
#endif
        if constexpr (kHasScales) {
            read_scales(args_.key_scales, heads, count, static_cast<float>(args_.scale * kLog2E), key_scales_);
            read_scales(args_.value_scales, heads, count, 1.0f, value_scales_);
        }
    }

    template <int ROWS>
    void attend(int64_t row, int64_t first_key, int64_t count) {
        score_rows<N, ROWS>(step_, scratch_, row, count, key_scales_);
        for (int64_t r = 0; r < ROWS; ++r) {
            weigh_row(row + r, scratch_.scores + r * kTile, first_key, count);
        }
        add_values<N, ROWS>(step_, scratch_, row, count);
    }

    // The keys of the tile from `first_key` on that a row sees.
    Range seen_of_tile(int64_t row, int64_t first_key) const {
        const Range seen = seen_by(piece_, row / piece_.num_group_heads, step_.window);
        return {seen.begin - first_key, seen.end - first_key};
    }

    const float* value_scales() const { return kHasScales ? value_scales_ : nullptr; }

    void weigh_row(int64_t row, float* scores, int64_t first_key, int64_t count) {
        const Range seen = seen_of_tile(row, first_key);
        weigh(scores, count, seen, value_scales(), scratch_.state(row), reinterpret_cast<N*>(scores));
    }

#ifdef USE_AMX
    // A step of the tile unit may have more depth than keys do.
    void pad_keys() {
        const int64_t depth = padded(words<bf16>(scratch_.key_width));
        const int64_t written = (words<bf16>(step_.head_dim) + 3) / 4 * 4;
        std::fill_n(scratch_.keys + written * kTile, (depth - written) * kTile, 0.0f);
    }

    // As `attend`, for all rows. A block's scores are computed before the weights of the block before it, so that the tile
    // unit and the vectors work at once.
    void attend_blocks(Rows rows, int64_t first_key, int64_t count) {
        float *scores = scratch_.scores, *next_scores = scores + kChunkBlock * kTile;
        if (rows.first < rows.end) score_block(scratch_, rows.first, scores);
        for (int64_t row = rows.first; row < rows.end; row += kChunkBlock) {
            if (row + kChunkBlock < rows.end) score_block(scratch_, row + kChunkBlock, next_scores);
            weigh_block(row, std::min(kChunkBlock, rows.end - row), first_key, count, scores);
            add_block(step_, scratch_, row, scores);
            std::swap(scores, next_scores);
        }
    }

    // Turns the scores of up to kChunkBlock rows into weights, and multiplies the rows' sums by their factors.
    void weigh_block(int64_t row, int64_t num_rows, int64_t first_key, int64_t count, float* scores) {
        // Rows are in the order of their tokens: what the first and the last one see, all see.
        const bool is_whole = count == kTile && num_rows == kChunkBlock && seen_of_tile(row, first_key).end >= kTile &&
                              seen_of_tile(row + num_rows - 1, first_key).begin <= 0;
        if (is_whole) {
            if (!weigh_whole_rows(scratch_, row, scores, key_scales_, value_scales())) return;
        } else {
            weigh_part(row, num_rows, first_key, count, scores);
        }
        for (int64_t r = 0; r < num_rows; ++r) rescale(row + r);
    }

    // Turns the scores of rows that may not see all of the tile into weights: the others of the block have weights of 0.
    void weigh_part(int64_t row, int64_t num_rows, int64_t first_key, int64_t count, float* block_scores) {
        for (int64_t r = 0; r < kChunkBlock; ++r) {
            float* scores = block_scores + r * kTile;
            if (r < num_rows) {
                for (int64_t j = 0; j < kTile; j += kWidth) store(scores + j, mul(load(scores + j), load(key_scales_ + j)));
                weigh_row(row + r, scores, first_key, count);
            }
            const int64_t width = r < num_rows ? (count + kWidth - 1) / kWidth * kWidth : 0;
            std::fill_n(reinterpret_cast<bf16*>(scores) + width, kTile - width, bf16{0});
        }
    }

    void rescale(int64_t row) {
        const float factor = scratch_.factors[row];
        float* sums = scratch_.sum + row * scratch_.value_width;
        for (int64_t i = 0; i < scratch_.value_width; i += kWidth) {
            store(sums + i, mul(load(sums + i), broadcast(factor)));
        }
    }
#endif

    const AttentionArgs& args_;
    const Step& step_;
    const Piece& piece_;
    Scratch scratch_;
    // Of the tile's keys, times the scale of all scores; and of its values, if they have any.
    float key_scales_[kTile], value_scales_[kHasScales ? kTile : 1];
};

}  // namespace

template <typename T>
void attend_chunk(const AttentionArgs& args, const Piece& piece, float* memory) {
    if constexpr (kMultipliesBf16 && sizeof(T) <= sizeof(bf16)) {
        if (args.format == kBfloat16) {
            return Chunk<bf16, T>(args, piece, memory).run();
        }
    }
    Chunk<float, T>(args, piece, memory).run();
}

template void attend_chunk<float>(const AttentionArgs&, const Piece&, float*);
template void attend_chunk<bf16>(const AttentionArgs&, const Piece&, float*);
template void attend_chunk<int8_t>(const AttentionArgs&, const Piece&, float*);

}  // namespace lockstep
