#include "product.h"

#include <algorithm>

namespace lockstep::products {

namespace {

constexpr int kMaxRows = kMaxIntRows > kMaxFloatRows ? kMaxIntRows : kMaxFloatRows;
// How far ahead of its loads a kernel asks for memory, when every byte is used only once.
constexpr int64_t kAhead = 8192;

// The offsets of a group of weights times the sums of its activations, for half a tile.
Floats add_offsets(const Matrix& m, const float* x_sums, const float* offsets, Floats values) {
    for (int64_t scale = 0; scale < num_scales(m); ++scale) {
        values = fma(fill(x_sums[scale]), load(offsets + scale * kTileRows), values);
    }
    return values;
}

// Stores half a tile's products: its sums, and what they lack.
template <class T>
void store_half(
    const Matrix& m,
    int64_t tile,
    int64_t half,
    const uint8_t* rows,
    int64_t row_bytes,
    int64_t num_rows,
    const float* sums,
    T* out,
    int64_t out_stride) {
    const int64_t first = tile * kTileRows + half * kLanes;
    const int count = static_cast<int>(std::min<int64_t>(m.num_rows - first, kLanes));
    if (count <= 0) return;
    const Floats scales = m.row_scales ? load(m.row_scales + first) : fill(1.0f);
    const Floats bias = m.bias ? load(m.bias + first) : zeros();
    for (int64_t row = 0; row < num_rows; ++row) {
        Floats values = load(sums + row * kTileRows + half * kLanes);
        values = mul(values, scales);
        if (m.offsets) {
            const float* x_sums = quantized_row(m, const_cast<uint8_t*>(rows + row * row_bytes)).sums;
            values = add_offsets(m, x_sums, m.offsets + tile * num_scales(m) * kTileRows + half * kLanes, values);
        }
        store_first(out + row * out_stride + half * kLanes, add(values, bias), count);
    }
}

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
        for (int64_t half = 0; half < 2; ++half) {
            T* target = out + first * out_stride + tile * kTileRows;
            store_half(m, tile, half, block_rows, row_bytes, count, sums, target, out_stride);
        }
    }
}

template void multiply_tile(const Matrix&, int64_t, int64_t, const uint8_t*, int64_t, int64_t, float*, int64_t);
template void multiply_tile(const Matrix&, int64_t, int64_t, const uint8_t*, int64_t, int64_t, bf16*, int64_t);

}  // namespace lockstep::products
