#include "product.h"

#include <algorithm>
#include <type_traits>

namespace lockstep::products {

namespace {

constexpr int kMaxRows = kMaxIntRows > kMaxFloatRows ? kMaxIntRows : kMaxFloatRows;
// How far ahead of its loads a kernel asks for memory, when every byte is used only once.
constexpr int64_t kAhead = 8192;

// Rows whose products are stored together: they share the loads of the tile's offsets.
constexpr int64_t kStoredRows = 4;

// Stores a tile's products with some rows: their sums, and what those lack.
template <int kRows, class T>
void store_rows(
    const Matrix& m,
    int64_t tile,
    const uint8_t* rows,
    int64_t row_bytes,
    const float* sums,
    T* out,
    int64_t out_stride) {
    const int64_t first = tile * kTileRows, row_words = row_bytes / 4;
    const float* x_sums = quantized_row(m, const_cast<uint8_t*>(rows)).sums;
    Floats values[kRows][2];
    for (int half = 0; half < 2; ++half) {
        const Floats scales = m.row_scales ? load(m.row_scales + first + half * kLanes) : fill(1.0f);
        for (int r = 0; r < kRows; ++r) values[r][half] = mul(load(sums + r * kTileRows + half * kLanes), scales);
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

// Stores a tile's products with rows from its sums [num_rows, 32].
template <class T>
void store_block(
    const Matrix& m,
    int64_t tile,
    const uint8_t* rows,
    int64_t row_bytes,
    int64_t num_rows,
    const float* sums,
    T* out,
    int64_t out_stride) {
    const auto store_from = [&](int64_t row, auto num_stored) {
        const float* stored = sums + row * kTileRows;
        store_rows<num_stored>(m, tile, rows + row * row_bytes, row_bytes, stored, out + row * out_stride, out_stride);
    };
    int64_t row = 0;
    for (; row + kStoredRows <= num_rows; row += kStoredRows) {
        store_from(row, std::integral_constant<int, kStoredRows>());
    }
    for (; row < num_rows; ++row) store_from(row, std::integral_constant<int, 1>());
}

#ifdef USE_AMX

// As `multiply_tile`, with the tile unit. A row's bits do not depend on the others in its block.
template <class T>
void multiply_blocks(
    BlockKernel kernel,
    const Matrix& m,
    int64_t tile,
    int64_t next_tile,
    const uint8_t* rows,
    int64_t row_bytes,
    int64_t num_rows,
    T* out,
    int64_t out_stride) {
    const int64_t bytes = tile_bytes(m), num_blocks = divide_up(num_rows, kBlockRows);
    // While it computes, memory brings the next tile.
    const int64_t steps = block_steps(m), share = divide_up(bytes, num_blocks * steps * 64) * 64;
    alignas(64) float sums[kBlockRows * kTileRows];
    for (int64_t block = 0; block < num_blocks; ++block) {
        const int64_t first = block * kBlockRows, count = std::min<int64_t>(kBlockRows, num_rows - first);
        const uint8_t* block_rows = rows + first * row_bytes;
        const uint8_t* next = m.tiles + next_tile * bytes + block * steps * share;
        kernel({m, m.tiles + tile * bytes, block_rows, row_bytes, count, next, share}, sums);
        store_block(m, tile, block_rows, row_bytes, count, sums, out + first * out_stride + tile * kTileRows, out_stride);
    }
}

#endif

}  // namespace

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
#ifdef USE_AMX
    if (const BlockKernel kernel = block_kernel(m, num_rows)) {
        return multiply_blocks(kernel, m, tile, next_tile, rows, row_bytes, num_rows, out, out_stride);
    }
#endif
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
        // While it computes, memory brings what comes next: this tile, with several blocks the next one, with many rows
        // the next of them.
        int64_t share = count * row_bytes;
        const uint8_t* next = block_rows + share;
        if (num_blocks < 16) {
            share = bytes / num_blocks;
            next = num_blocks == 1 ? weights + kAhead : m.tiles + next_tile * bytes + block * share;
        }
        kernels.by_rows[count - 1]({m, weights, block_rows, row_bytes, next, share}, sums);
        T* target = out + first * out_stride + tile * kTileRows;
        store_block(m, tile, block_rows, row_bytes, count, sums, target, out_stride);
    }
}

template void multiply_tile(const Matrix&, int64_t, int64_t, const uint8_t*, int64_t, int64_t, float*, int64_t);
template void multiply_tile(const Matrix&, int64_t, int64_t, const uint8_t*, int64_t, int64_t, bf16*, int64_t);

}  // namespace lockstep::products
