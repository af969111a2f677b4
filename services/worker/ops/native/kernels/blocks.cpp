#ifdef USE_AMX

#include "blocks.h"

#include <algorithm>

#include "rows.h"

namespace lockstep::products {

namespace {

// The two halves of a tile of weights alternate.
constexpr int64_t kStride = 2 * amx::kRowBytes;
constexpr int64_t kSumStride = kTileRows * 4;

struct Bytes64 {
    template <int kSum, int kLeft, int kRight>
    static void dot() {
        amx::dot_bytes<kSum, kLeft, kRight>();
    }
};
struct Halves32 {
    template <int kSum, int kLeft, int kRight>
    static void dot() {
        amx::dot_bf16<kSum, kLeft, kRight>();
    }
};

// Sums are tiles 0 to 3, of upper and lower rows with both halves; rows 4 and 5; weights 6 and 7.
template <class Elements, bool kHasLower>
void multiply(const BlockCall& call, const uint8_t* lower, uint8_t* sums) {
    const int64_t count = num_steps(call.matrix);
    amx::zero<0>();
    amx::zero<1>();
    if constexpr (kHasLower) {
        amx::zero<2>();
        amx::zero<3>();
    }
    for (int64_t step = 0; step < count; ++step) {
        prefetch(call.next + step * call.next_bytes, call.next_bytes);
        const uint8_t* weights = call.tile + step * kStepBytes;
        amx::load<6>(weights, kStride);
        amx::load<4>(call.rows + step * amx::kRowBytes, call.row_bytes);
        Elements::template dot<0, 4, 6>();
        amx::load<7>(weights + amx::kRowBytes, kStride);
        Elements::template dot<1, 4, 7>();
        if constexpr (kHasLower) {
            amx::load<5>(lower + step * amx::kRowBytes, call.row_bytes);
            Elements::template dot<2, 5, 6>();
            Elements::template dot<3, 5, 7>();
        }
    }
    amx::store<0>(sums, kSumStride);
    amx::store<1>(sums + amx::kRowBytes, kSumStride);
    if constexpr (kHasLower) {
        amx::store<2>(sums + amx::kRows * kSumStride, kSumStride);
        amx::store<3>(sums + amx::kRows * kSumStride + amx::kRowBytes, kSumStride);
    }
}

}  // namespace

amx::Shapes block_shapes(const Matrix& m, int64_t num_rows) {
    const int64_t upper = std::min<int64_t>(num_rows, amx::kRows), lower = has_planes(m) ? upper : num_rows - upper;
    amx::Shapes shapes;
    for (const int tile : {0, 1, 4}) shapes.set(tile, upper, amx::kRowBytes);
    for (const int tile : {6, 7}) shapes.set(tile, amx::kRows, amx::kRowBytes);
    if (lower > 0) {
        for (const int tile : {2, 3, 5}) shapes.set(tile, lower, amx::kRowBytes);
    }
    return shapes;
}

void multiply_block(const BlockCall& call, uint8_t* sums) {
    if (has_planes(call.matrix)) {
        const int8_t* low = planes_row(call.matrix, const_cast<uint8_t*>(call.rows)).low;
        return multiply<Bytes64, true>(call, reinterpret_cast<const uint8_t*>(low), sums);
    }
    const uint8_t* lower = call.rows + amx::kRows * call.row_bytes;
    call.num_rows > amx::kRows ? multiply<Halves32, true>(call, lower, sums)
                               : multiply<Halves32, false>(call, lower, sums);
}

}  // namespace lockstep::products

#endif
