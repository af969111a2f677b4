// Linear layers: `x @ weight.T + bias`.
#include <algorithm>

#include "product.h"
#include "work.h"

namespace lockstep::products {

namespace {

// Rows of activations that are prepared at once, which bounds the memory for them.
constexpr int64_t kRowsAtOnce = 1024;
// A thread multiplies a tile with this many bytes of prepared rows before it turns to the next: they stay in its cache.
constexpr int64_t kCachedBytes = 1 << 20;
// Up to this many bytes of prepared rows, each thread prepares all of them for itself rather than wait for others.
constexpr int64_t kOwnBytes = 8 << 10;
// Products with fewer elements are not worth waking threads.
constexpr int64_t kSerialElements = 1 << 15;
// Rows that a thread prepares at once.
constexpr int64_t kPreparedRows = 4;
// Weights that a thread takes at once for a single row; fewer for several.
constexpr int64_t kPieceBytes = 32 << 10;

template <class T>
struct Job {
    const Matrix& m;
    const T* x;
    int64_t x_stride;
    T* out;
    int64_t num_rows;
    int64_t row_bytes;

    void prepare(int64_t row, uint8_t* rows) const { prepare_row(m, x + row * x_stride, rows + row * row_bytes); }

    // Multiply all rows with a piece of the tiles at a time, so many rows at once that they stay in a cache.
    void multiply(const uint8_t* rows, int64_t rows_at_once, int64_t tiles_at_once, Pieces& pieces) const {
        const int64_t tiles = num_tiles(m), runs = divide_up(tiles, tiles_at_once);
        pieces.take([&](int64_t piece) {
            const int64_t first = piece / runs * rows_at_once;
            const int64_t count = first + rows_at_once < num_rows ? rows_at_once : num_rows - first;
            const int64_t start = piece % runs * tiles_at_once;
            for (int64_t tile = start; tile < start + tiles_at_once && tile < tiles; ++tile) {
                T* target = out + first * m.num_rows;
                multiply_tile(m, tile, rows + first * row_bytes, row_bytes, count, target, m.num_rows);
            }
        });
    }
};

template <class T>
void run(const Job<T>& job) {
    static thread_local Scratch own_scratch;
    const Matrix& m = job.m;
    const bool in_place = reads_in_place(m);
    const int64_t bytes = job.num_rows * job.row_bytes;
    const bool is_shared = !in_place && bytes > kOwnBytes;
    const int64_t rows_at_once = std::max<int64_t>(32, kCachedBytes / prepared_row_bytes(m));
    const int64_t tiles_at_once = std::max<int64_t>(1, kPieceBytes / tile_bytes(m) / job.num_rows);
    Pieces rows_to_prepare(divide_up(job.num_rows, kPreparedRows));
    Pieces tiles(divide_up(job.num_rows, rows_at_once) * divide_up(num_tiles(m), tiles_at_once));
    uint8_t* shared = is_shared ? own_scratch.reserve(bytes) : nullptr;
    on_threads(job.num_rows * m.num_rows * m.num_columns >= kSerialElements, [&] {
        const uint8_t* rows = reinterpret_cast<const uint8_t*>(job.x);
        if (is_shared) {
            rows_to_prepare.take([&](int64_t piece) {
                const int64_t stop = std::min(job.num_rows, (piece + 1) * kPreparedRows);
                for (int64_t row = piece * kPreparedRows; row < stop; ++row) job.prepare(row, shared);
            });
            wait_for_all();
            rows = shared;
        } else if (!in_place) {
            uint8_t* own = own_scratch.reserve(bytes);
            for (int64_t row = 0; row < job.num_rows; ++row) job.prepare(row, own);
            rows = own;
        }
        job.multiply(rows, rows_at_once, tiles_at_once, tiles);
    });
}

template <class T>
void multiply(const Matrix& m, const T* x, int64_t x_stride, T* out, int64_t num_rows) {
    const int64_t row_bytes = reads_in_place(m) ? x_stride * static_cast<int64_t>(sizeof(T)) : prepared_row_bytes(m);
    for (int64_t first = 0; first < num_rows; first += kRowsAtOnce) {
        const int64_t count = first + kRowsAtOnce < num_rows ? kRowsAtOnce : num_rows - first;
        run<T>({m, x + first * x_stride, x_stride, out + first * m.num_rows, count, row_bytes});
    }
}

}  // namespace

struct LinearCall {
    const Matrix* m;
    const void* x;     // [num_rows, m.num_columns] in m.dtype
    int64_t x_stride;  // elements from row to row
    void* out;         // [num_rows, m.num_rows] in m.dtype, contiguous; written
    int64_t num_rows;
};

// x @ m.T + bias.
LS_EXPORT void ls_linear(const LinearCall* call) {
    const Matrix& m = *call->m;
    if (m.dtype == DType::kFloat32) {
        multiply(m, static_cast<const float*>(call->x), call->x_stride, static_cast<float*>(call->out), call->num_rows);
    } else {
        multiply(m, static_cast<const bf16*>(call->x), call->x_stride, static_cast<bf16*>(call->out), call->num_rows);
    }
}

}  // namespace lockstep::products
