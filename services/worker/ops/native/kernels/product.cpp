#include "product.h"

#include <algorithm>
#include <type_traits>

#include "blocks.h"

namespace lockstep::products {

namespace {

constexpr int kMaxRows = kMaxIntRows > kMaxFloatRows ? kMaxIntRows : kMaxFloatRows;
// How far ahead of its loads a kernel asks for memory, when every byte is used only once.
constexpr int64_t kAhead = 8192;

// Rows whose products are stored together: they share the loads of the tile's offsets.
constexpr int64_t kStoredRows = 4;

// Blocks of rows from which on there are many: their results are in no cache.
constexpr int64_t kManyBlocks = 4;
// Blocks of rows from which on the rows themselves leave the first cache while a tile is multiplied with all of them.
constexpr int64_t kLongBlocks = 16;

// Asks for the memory of a tile's results.
template <class T>
void prefetch_results(const T* out, int64_t num_rows, int64_t out_stride) {
    for (int64_t r = 0; r < num_rows; ++r) {
        prefetch(reinterpret_cast<const uint8_t*>(out + r * out_stride), sizeof(T) * kTileRows);
    }
}

// The sums of a tile's products with rows [num_rows, 32].
struct FloatSums {
    const float* sums;

    Floats load(int64_t row, int half) const { return products::load(sums + row * kTileRows + half * kLanes); }
};

#ifdef USE_AMX

// The same in both planes of rows, whose scales are `row_words` apart.
struct PlanesSums {
    const int32_t* sums;
    const float* scales;
    int64_t row_words;

    Floats load(int64_t row, int half) const {
        const int32_t* high = sums + row * kTileRows + half * kLanes;
        const int32_t* low = high + amx::kRows * kTileRows;
        const Floats scale = fill(scales[row * row_words]);
        return mul(fma(to_floats(load_ints(high)), fill(128.0f), to_floats(load_ints(low))), scale);
    }
};

#endif

// Stores a tile's products with some rows from `first_row` on: their sums, and what those lack.
template <int kRows, class Sums, class T>
void store_rows(
    const Matrix& m,
    int64_t tile,
    const uint8_t* rows,
    int64_t row_bytes,
    const Sums& sums,
    int64_t first_row,
    T* out,
    int64_t out_stride) {
    const int64_t first = tile * kTileRows, row_words = row_bytes / 4;
    const float* x_sums = m.row_offsets ? activation_sums(m, rows + first_row * row_bytes) : nullptr;
    out += first_row * out_stride;
    Floats values[kRows][2];
    for (int half = 0; half < 2; ++half) {
        const Floats scales = m.row_scales ? load(m.row_scales + first + half * kLanes) : fill(1.0f);
        for (int r = 0; r < kRows; ++r) values[r][half] = mul(sums.load(first_row + r, half), scales);
    }
    for (int half = 0; half < 2; ++half) {
        const int64_t left = m.num_rows - first - half * kLanes;
        if (left <= 0) return;
        const int count = static_cast<int>(std::min<int64_t>(left, kLanes));
        if (m.row_offsets) {
            const Floats offsets = load(m.row_offsets + first + half * kLanes);
            for (int r = 0; r < kRows; ++r) values[r][half] = fma(fill(x_sums[r * row_words]), offsets, values[r][half]);
        }
        const Floats bias = m.bias ? load(m.bias + first + half * kLanes) : zeros();
        T* target = out + half * kLanes;
        for (int r = 0; r < kRows; ++r) store_first(target + r * out_stride, add(values[r][half], bias), count);
    }
}

// Stores a tile's products with rows.
template <class Sums, class T>
void store_block(
    const Matrix& m,
    int64_t tile,
    const uint8_t* rows,
    int64_t row_bytes,
    int64_t num_rows,
    const Sums& sums,
    T* out,
    int64_t out_stride) {
    const auto store_from = [&](int64_t row, auto num_stored) {
        store_rows<num_stored>(m, tile, rows, row_bytes, sums, row, out, out_stride);
    };
    int64_t row = 0;
    for (; row + kStoredRows <= num_rows; row += kStoredRows) {
        store_from(row, std::integral_constant<int, kStoredRows>());
    }
    for (; row < num_rows; ++row) store_from(row, std::integral_constant<int, 1>());
}

#ifdef USE_AMX

// The bytes of tiles that each of many blocks is multiplied with before the next block: they stay in a core's cache.
constexpr int64_t kCachedTileBytes = 128 << 10;

// As `multiply_tiles`, with the tile unit. A row's bits do not depend on the others in its block.
template <class T>
void multiply_blocks(
    const Matrix& m,
    const TileRun& run,
    const uint8_t* rows,
    int64_t row_bytes,
    int64_t num_rows,
    T* out,
    int64_t out_stride) {
    const int64_t bytes = tile_bytes(m), num_blocks = divide_up(num_rows, max_block_rows(m));
    // All blocks have as many rows, so that tiles keep their shapes: the last begins with rows of the one before it.
    const int64_t count = divide_up(num_rows, num_blocks);
    // While it computes, memory brings what comes next: this tile, with several blocks the next one.
    const int64_t steps = num_steps(m);
    const int64_t share = num_blocks == 1 ? kStepBytes : divide_up(bytes, num_blocks * steps * 64) * 64;
    alignas(64) uint8_t sums[kBlockRows * kTileRows * 4];
    const bool is_many = num_blocks >= kManyBlocks;
    const auto multiply = [&](int64_t tile, int64_t block) {
        const int64_t first = std::min(block * count, num_rows - count);
        const uint8_t *block_rows = rows + first * row_bytes, *weights = m.tiles + tile * bytes;
        const uint8_t* next =
            num_blocks == 1 ? weights + kAhead : m.tiles + run.after(tile) * bytes + block * steps * share;
        T* target = out + first * out_stride + tile * kTileRows;
        if (is_many) prefetch_results(target, count, out_stride);
        multiply_block({m, weights, block_rows, row_bytes, count, next, share}, sums);
        if (has_planes(m)) {
            const float* scales = planes_row(m, const_cast<uint8_t*>(block_rows)).scale;
            const PlanesSums planes{reinterpret_cast<const int32_t*>(sums), scales, row_bytes / 4};
            store_block(m, tile, block_rows, row_bytes, count, planes, target, out_stride);
        } else {
            const FloatSums floats{reinterpret_cast<const float*>(sums)};
            store_block(m, tile, block_rows, row_bytes, count, floats, target, out_stride);
        }
    };
    const amx::Tiles tiles(block_shapes(m, count));
    // A block of many is multiplied with several tiles, so that results are written side by side.
    const int64_t tiles_at_once = is_many ? std::max<int64_t>(1, kCachedTileBytes / bytes) : 1;
    for (int64_t first = run.first; first < run.end; first += tiles_at_once) {
        const int64_t end = std::min(run.end, first + tiles_at_once);
        for (int64_t block = 0; block < num_blocks; ++block) {
            for (int64_t tile = first; tile < end; ++tile) multiply(tile, block);
        }
    }
}

#endif

// One of the tiles, with vectors.
template <class T>
void multiply_tile(
    const Matrix& m,
    int64_t tile,
    int64_t next_tile,
    const uint8_t* rows,
    int64_t row_bytes,
    int64_t num_rows,
    T* out,
    int64_t out_stride) {
    const TileKernels kernels = tile_kernels(m);
    const int64_t bytes = tile_bytes(m);
    const uint8_t* weights = m.tiles + tile * bytes;
    int64_t num_blocks = divide_up(num_rows, kernels.max_rows);
    // Asking for half a tile during each of two blocks is slower than for a third during each of three: measured.
    if (num_blocks == 2 && num_rows > 8) num_blocks = 3;
    alignas(64) float sums[kMaxRows * kTileRows];
    for (int64_t block = 0; block < num_blocks; ++block) {
        // Blocks of nearly equal sizes: a block of one row would take as long as one of two.
        const int64_t first = block * num_rows / num_blocks, count = (block + 1) * num_rows / num_blocks - first;
        const uint8_t* block_rows = rows + first * row_bytes;
        T* target = out + first * out_stride + tile * kTileRows;
        if (num_blocks >= kManyBlocks) prefetch_results(target, count, out_stride);
        // While it computes, memory brings what comes next: this tile, with several blocks the next one, with very many
        // the next rows as well.
        int64_t share = divide_up(bytes, num_blocks * 64) * 64;
        const uint8_t* next = num_blocks == 1 ? weights + kAhead : m.tiles + next_tile * bytes + block * share;
        if (num_blocks >= kLongBlocks) {
            if (block * share < bytes) prefetch(next, share);
            share = count * row_bytes;
            next = block_rows + share;
        }
        kernels.by_rows[count - 1]({m, weights, block_rows, row_bytes, next, share}, sums);
        store_block(m, tile, block_rows, row_bytes, count, FloatSums{sums}, target, out_stride);
    }
}

}  // namespace

template <class T>
void multiply_tiles(
    const Matrix& m,
    const TileRun& run,
    const uint8_t* rows,
    int64_t row_bytes,
    int64_t num_rows,
    T* out,
    int64_t out_stride) {
#ifdef USE_AMX
    if (uses_tile_unit(m)) return multiply_blocks(m, run, rows, row_bytes, num_rows, out, out_stride);
#endif
    for (int64_t tile = run.first; tile < run.end; ++tile) {
        multiply_tile(m, tile, run.after(tile), rows, row_bytes, num_rows, out, out_stride);
    }
}

template void multiply_tiles(const Matrix&, const TileRun&, const uint8_t*, int64_t, int64_t, float*, int64_t);
template void multiply_tiles(const Matrix&, const TileRun&, const uint8_t*, int64_t, int64_t, bf16*, int64_t);

}  // namespace lockstep::products
