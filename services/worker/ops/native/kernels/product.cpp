#include "product.h"

namespace lockstep::products {

namespace {

constexpr int kMaxRows = kMaxIntRows > kMaxFloatRows ? kMaxIntRows : kMaxFloatRows;
// How far ahead of its loads a kernel asks for memory, when every byte is used only once.
constexpr int64_t kAhead = 8192;

// What the sums of a tile's products lack.
void complete(const Matrix& m, int64_t tile, const uint8_t* rows, int64_t row_bytes, int64_t num_rows, float* sums) {
    for (int64_t row = 0; row < num_rows; ++row) {
        for (int half = 0; half < 2; ++half) {
            float* place = sums + row * kTileRows + half * kLanes;
            const int64_t first = tile * kTileRows + half * kLanes;
            Floats values = load(place);
            if (m.row_scales) values = mul(values, load(m.row_scales + first));
            if (m.offsets) {
                const float* x_sums = quantized_row(m, const_cast<uint8_t*>(rows + row * row_bytes)).sums;
                const int64_t count = num_scales(m);
                const float* offsets = m.offsets + tile * count * kTileRows + half * kLanes;
                for (int64_t scale = 0; scale < count; ++scale) {
                    values = fma(fill(x_sums[scale]), load(offsets + scale * kTileRows), values);
                }
            }
            if (m.bias) values = add(values, load(m.bias + first));
            store(place, values);
        }
    }
}

template <class T>
void store_rows(const float* sums, int64_t num_rows, int width, T* out, int64_t out_stride) {
    for (int64_t row = 0; row < num_rows; ++row) {
        for (int half = 0; half < 2 && half * kLanes < width; ++half) {
            const int count = width - half * kLanes;
            const Floats values = load(sums + row * kTileRows + half * kLanes);
            store_first(out + row * out_stride + half * kLanes, values, count < kLanes ? count : kLanes);
        }
    }
}

}  // namespace

template <class T>
void multiply_tile(
    const Matrix& m,
    int64_t tile,
    const uint8_t* rows,
    int64_t row_bytes,
    int64_t num_rows,
    T* out,
    int64_t out_stride) {
    const TileKernels kernels = tile_kernels(m);
    const int64_t bytes = tile_bytes(m);
    const uint8_t* weights = m.tiles + tile * bytes;
    const int64_t first_column = tile * kTileRows;
    const int width = static_cast<int>(m.num_rows - first_column < kTileRows ? m.num_rows - first_column : kTileRows);
    int64_t num_blocks = divide_up(num_rows, kernels.max_rows);
    // Asking for half a tile during each of two blocks is slower than for a third during each of three: measured.
    if (num_blocks == 2 && num_rows > 8) num_blocks = 3;
    alignas(64) float sums[kMaxRows * kTileRows];
    for (int64_t block = 0; block < num_blocks; ++block) {
        // Blocks of nearly equal sizes: a block of one row would take as long as one of two.
        const int64_t first = block * num_rows / num_blocks, count = (block + 1) * num_rows / num_blocks - first;
        const uint8_t* block_rows = rows + first * row_bytes;
        // While it computes, memory brings what comes next: this tile, or with several blocks the next one.
        const int64_t share = num_blocks == 1 ? bytes : num_blocks < 16 ? bytes / num_blocks : count * row_bytes;
        const uint8_t* next = num_blocks == 1 ? weights + kAhead : num_blocks < 16 ? weights + bytes + block * share : block_rows + share;
        kernels.by_rows[count - 1]({m, weights, block_rows, row_bytes, next, share}, sums);
        complete(m, tile, block_rows, row_bytes, count, sums);
        store_rows(sums, count, width, out + first * out_stride + first_column, out_stride);
    }
}

template void multiply_tile(const Matrix&, int64_t, const uint8_t*, int64_t, int64_t, float*, int64_t);
template void multiply_tile(const Matrix&, int64_t, const uint8_t*, int64_t, int64_t, bf16*, int64_t);

}  // namespace lockstep::products
