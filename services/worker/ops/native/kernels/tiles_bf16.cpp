// Products of bfloat16 with a tile unit, for any number of rows: its sums have other bits than those of vectors.
#ifdef USE_AMX

#include "amx.h"
#include "tiles.h"

namespace lockstep::products {

namespace {

// The columns of a tile of weights, and its bytes in a packed tile, where its two halves alternate.
constexpr int64_t kColumns = 32, kStride = 2 * amx::kRowBytes, kColumnsBytes = kColumns / 2 * kStride;

// Sums are tiles 0 to 3, of upper and lower rows with both halves; rows 4 and 5; weights 6 and 7.
template <bool kHasLower>
void multiply_columns(const BlockCall& call) {
    const int64_t count = divide_up(call.matrix.num_columns, kColumns);
    const uint8_t* lower = call.rows + amx::kRows * call.row_bytes;
    for (int64_t i = 0; i < count; ++i) {
        prefetch(call.next + i * call.next_bytes, call.next_bytes);
        const uint8_t* weights = call.tile + i * kColumnsBytes;
        amx::load<6>(weights, kStride);
        amx::load<4>(call.rows + i * amx::kRowBytes, call.row_bytes);
        amx::dot_bf16<0, 4, 6>();
        amx::load<7>(weights + amx::kRowBytes, kStride);
        amx::dot_bf16<1, 4, 7>();
        if constexpr (kHasLower) {
            amx::load<5>(lower + i * amx::kRowBytes, call.row_bytes);
            amx::dot_bf16<2, 5, 6>();
            amx::dot_bf16<3, 5, 7>();
        }
    }
}

}  // namespace

void multiply_bf16(const BlockCall& call, float* sums) {
    constexpr int64_t kSumStride = kTileRows * 4;
    const int64_t upper = call.num_rows < amx::kRows ? call.num_rows : amx::kRows, lower = call.num_rows - upper;
    amx::Shapes shapes;
    for (const int tile : {0, 1, 4}) shapes.set(tile, upper, amx::kRowBytes);
    for (const int tile : {6, 7}) shapes.set(tile, amx::kRows, amx::kRowBytes);
    if (lower > 0) {
        for (const int tile : {2, 3, 5}) shapes.set(tile, lower, amx::kRowBytes);
    }
    const amx::Tiles tiles(shapes);
    lower > 0 ? multiply_columns<true>(call) : multiply_columns<false>(call);
    amx::store<0>(sums, kSumStride);
    amx::store<1>(sums + kLanes, kSumStride);
    if (lower > 0) {
        amx::store<2>(sums + amx::kRows * kTileRows, kSumStride);
        amx::store<3>(sums + amx::kRows * kTileRows + kLanes, kSumStride);
    }
}

}  // namespace lockstep::products

#endif
