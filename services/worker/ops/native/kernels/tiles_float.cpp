#include <utility>

#include "tiles.h"

namespace lockstep::products {

namespace {

// Columns between two prefetches.
constexpr int64_t kRun = 32;

// One column, or a pair of bfloat16 columns, of a tile with all rows.
struct Float32Columns {
    static constexpr int kBytes = kTileRows * 4, kColumns = 1, kRowBytes = 4;
    template <int kRows>
    static void multiply(const uint8_t* weights, const uint8_t* x, int64_t row_bytes, Floats (&totals)[kRows][2]) {
        const auto* values = reinterpret_cast<const float*>(weights);
        const Floats upper = load(values), lower = load(values + kLanes);
        for (int r = 0; r < kRows; ++r) {
            const Floats factor = fill(*reinterpret_cast<const float*>(x + r * row_bytes));
            totals[r][0] = fma(upper, factor, totals[r][0]);
            totals[r][1] = fma(lower, factor, totals[r][1]);
        }
    }
};

struct Bfloat16Columns {
    static constexpr int kBytes = kTileRows * 4, kColumns = 2;
#ifdef MULTIPLY_BF16
    static constexpr int kRowBytes = 4;
    template <int kRows>
    static void multiply(const uint8_t* weights, const uint8_t* x, int64_t row_bytes, Floats (&totals)[kRows][2]) {
        const auto upper = (__m512bh)load_bytes(weights).v, lower = (__m512bh)load_bytes(weights + 64).v;
        for (int r = 0; r < kRows; ++r) {
            const auto factors = (__m512bh)repeat_word(x + r * row_bytes).v;
            totals[r][0].v = _mm512_dpbf16_ps(totals[r][0].v, upper, factors);
            totals[r][1].v = _mm512_dpbf16_ps(totals[r][1].v, lower, factors);
        }
    }
#else
    static constexpr int kRowBytes = 8;
    template <int kRows>
    static void multiply(const uint8_t* weights, const uint8_t* x, int64_t row_bytes, Floats (&totals)[kRows][2]) {
        const Bytes upper = load_bytes(weights), lower = load_bytes(weights + 64);
        for (int r = 0; r < kRows; ++r) {
            const auto* factors = reinterpret_cast<const float*>(x + r * row_bytes);
            const Floats even = fill(factors[0]), odd = fill(factors[1]);
            totals[r][0] = fma(odd_bf16(upper), odd, fma(even_bf16(upper), even, totals[r][0]));
            totals[r][1] = fma(odd_bf16(lower), odd, fma(even_bf16(lower), even, totals[r][1]));
        }
    }
#endif
};

template <class Columns, int kRows>
void multiply_float_tile(const TileCall& call, float* sums) {
    const int64_t count = divide_up(call.matrix.num_columns, Columns::kColumns);
    const int64_t next_bytes = divide_up(call.next_bytes, divide_up(count, kRun));
    const uint8_t *weights = call.tile, *x = call.rows, *next = call.next;
    Floats totals[kRows][2];
    for (auto& total : totals) total[0] = total[1] = zeros();
    for (int64_t first = 0; first < count; first += kRun) {
        prefetch(next, next_bytes);
        next += next_bytes;
        const int64_t stop = first + kRun < count ? first + kRun : count;
        for (int64_t column = first; column < stop; ++column) {
            Columns::multiply(weights, x, call.row_bytes, totals);
            weights += Columns::kBytes;
            x += Columns::kRowBytes;
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int half = 0; half < 2; ++half) store(sums + r * kTileRows + half * kLanes, totals[r][half]);
    }
}

template <class Columns, int... kRowsLessOne>
TileKernels kernels_by_rows(std::integer_sequence<int, kRowsLessOne...>) {
    static constexpr TileKernel kByRows[] = {multiply_float_tile<Columns, kRowsLessOne + 1>...};
    return {kByRows, kMaxFloatRows};
}

}  // namespace

TileKernels float_kernels(Kind kind) {
    constexpr std::make_integer_sequence<int, kMaxFloatRows> rows;
    return kind == Kind::kFloat32 ? kernels_by_rows<Float32Columns>(rows) : kernels_by_rows<Bfloat16Columns>(rows);
}

}  // namespace lockstep::products
