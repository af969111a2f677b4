// Linear layers: `x @ weight.T + bias`.
#include <algorithm>

#include "pool.h"
#include "product.h"
#include "recording.h"

namespace lockstep::products {

namespace {

// Rows of activations that are prepared at once, which bounds the memory for them.
constexpr int64_t kRowsAtOnce = 1024;
// A thread multiplies a tile with this many bytes of prepared rows before it turns to the next: they stay in its cache.
constexpr int64_t kCachedBytes = 1 << 20;
// Products with fewer elements are not worth waking threads.
constexpr int64_t kSerialElements = 1 << 15;
// Rows that a thread prepares at once.
constexpr int64_t kPreparedRows = 4;
// Pieces for each thread: more share the work more evenly, fewer let a thread know which weights it needs next.
constexpr int64_t kPieces = 8, kPiecesOfFewRows = 4;
constexpr int64_t kFewRows = 8;

// T: of activations. U: of results.
template <class T, class U>
struct Product {
    const Matrix& m;
    const T* x;
    int64_t x_stride;
    U* out;
    int64_t out_stride;
    int64_t num_rows;
    int64_t row_bytes;

    void prepare(int64_t row, uint8_t* rows) const { prepare_row(m, x + row * x_stride, rows + row * row_bytes); }

    // Multiply the rows from `first` on, `count` of them, with some of the tiles; this thread's next are `next_tile` on.
    void multiply(
        const uint8_t* rows, int64_t first, int64_t count, int64_t first_tile, int64_t end_tile, int64_t next_tile) const {
        const TileRun run{first_tile, end_tile, next_tile};
        multiply_tiles(m, run, rows + first * row_bytes, row_bytes, count, out + first * out_stride, out_stride);
    }
};

template <class T, class U>
void run(const Product<T, U>& product) {
    static thread_local Buffer buffer;
    const Matrix& m = product.m;
    const int64_t num_rows = product.num_rows, tiles = num_tiles(m);
    const int64_t rows_at_once = std::max<int64_t>(32, kCachedBytes / prepared_row_bytes(m));
    const int64_t pieces = (num_rows > kFewRows ? kPieces : kPiecesOfFewRows) * num_threads();
    // Where there are enough tiles, each thread has as many runs as the others. Their sizes differ by a tile at most.
    const int64_t runs = std::min(tiles, pieces);
    const auto run_begin = [&](int64_t run) { return std::min(run, runs) * tiles / runs; };
    const bool in_place = reads_in_place(m);
    uint8_t* const prepared = in_place ? nullptr : buffer.reserve(num_rows * product.row_bytes);
    const uint8_t* const rows = in_place ? reinterpret_cast<const uint8_t*>(product.x) : prepared;
    const Phase prepare{in_place ? 0 : divide_up(num_rows, kPreparedRows), [&](int64_t piece) {
        const int64_t end = std::min(num_rows, (piece + 1) * kPreparedRows);
        for (int64_t row = piece * kPreparedRows; row < end; ++row) product.prepare(row, prepared);
    }};
    // All rows with a piece of the tiles, so many rows at once that they stay in a cache.
    const Phase multiply{divide_up(num_rows, rows_at_once) * runs, [&](int64_t piece) {
        const int64_t first = piece / runs * rows_at_once, number = piece % runs;
        const int64_t count = std::min(rows_at_once, num_rows - first);
        // Threads take pieces in turn.
        const int64_t next_tile = std::min(run_begin(number + num_threads()), tiles - 1);
        product.multiply(rows, first, count, run_begin(number), run_begin(number + 1), next_tile);
    }};
    const bool is_large = num_rows * m.num_rows * m.num_columns >= kSerialElements;
    // A single piece needs no other thread.
    const bool is_shared = is_large && std::max(prepare.count, multiply.count) > 1;
    run_phases(is_shared ? num_threads() : 1, prepare, multiply);
}

template <class T, class U>
void multiply(const Matrix& m, const T* x, int64_t x_stride, U* out, int64_t out_stride, int64_t num_rows) {
    const int64_t row_bytes = reads_in_place(m) ? x_stride * static_cast<int64_t>(sizeof(T)) : prepared_row_bytes(m);
    for (int64_t first = 0; first < num_rows; first += kRowsAtOnce) {
        const int64_t count = first + kRowsAtOnce < num_rows ? kRowsAtOnce : num_rows - first;
        run<T, U>({m, x + first * x_stride, x_stride, out + first * out_stride, out_stride, count, row_bytes});
    }
}

}  // namespace

struct LinearCall {
    const Matrix* m;
    const void* x;      // [num_rows, m.num_columns] in m.dtype
    int64_t x_stride;   // elements from row to row
    void* out;          // [num_rows, m.num_rows] in out_format; written
    int64_t out_stride; // elements from row to row
    int64_t num_rows;
    Format out_format;  // m.dtype or kFloat32
};

namespace {

template <class T, class U>
void linear_as(const LinearCall& call) {
    const auto* x = static_cast<const T*>(call.x);
    multiply(*call.m, x, call.x_stride, static_cast<U*>(call.out), call.out_stride, call.num_rows);
}

void linear(const LinearCall& call) {
    if (call.m->dtype == kFloat32) return linear_as<float, float>(call);
    if (call.out_format == kFloat32) return linear_as<bf16, float>(call);
    linear_as<bf16, bf16>(call);
}

}  // namespace

// x @ m.T + bias.
LS_EXPORT void ls_linear(const LinearCall* call) { run_kernel<linear>(call); }

}  // namespace lockstep::products
