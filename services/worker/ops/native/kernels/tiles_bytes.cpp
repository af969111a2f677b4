// Products of int8 with a scale for each row of weights with a tile unit, which reads the tiles as they are packed.
//
// The sums of a group are exact, and are scaled and added up in the order of `multiply_int_tile`: a product has the same
// bits from both, so that the number of rows may choose.
#ifdef USE_AMX

#include "amx.h"
#include "rows.h"
#include "tiles.h"

namespace lockstep::products {

namespace {

constexpr int kGroup = group_columns(Scales::kRow);
// Groups whose sums are computed before they are scaled, so that they stay in the nearest cache.
constexpr int kGroups = 4;
constexpr int64_t kStride = 2 * amx::kRowBytes, kGroupBytes = kGroup * kTileRows;

// A group's sums by quarter of the block: upper and lower rows, each with both halves of the tile.
using Sums = int32_t[4][amx::kRows * kLanes];

// Sums are tiles 0 to 3, rows 4 and 5, weights 6 and 7.
template <bool kHasLower>
void multiply_group(const BlockCall& call, int64_t group, Sums& sums) {
    const uint8_t *weights = call.tile + group * kGroupBytes, *rows = call.rows + group * kGroup;
    amx::load<6>(weights, kStride);
    amx::load<4>(rows, call.row_bytes);
    amx::zero<0>();
    amx::dot_bytes<0, 4, 6>();
    amx::load<7>(weights + amx::kRowBytes, kStride);
    amx::zero<1>();
    amx::dot_bytes<1, 4, 7>();
    if constexpr (kHasLower) {
        amx::load<5>(rows + amx::kRows * call.row_bytes, call.row_bytes);
        amx::zero<2>();
        amx::dot_bytes<2, 5, 6>();
        amx::zero<3>();
        amx::dot_bytes<3, 5, 7>();
    }
    amx::store<0>(sums[0], amx::kRowBytes);
    amx::store<1>(sums[1], amx::kRowBytes);
    if constexpr (kHasLower) {
        amx::store<2>(sums[2], amx::kRowBytes);
        amx::store<3>(sums[3], amx::kRowBytes);
    }
}

// Scales a quarter's sums of the groups [first, end), and adds them to its totals. Few registers hold the addresses of all
// rows' scales and starts.
void add_groups(const BlockCall& call, int64_t first, int64_t end, int quarter, const Sums* sums, float* totals) {
    const int64_t row_words = call.row_bytes / 4, groups = num_groups(call.matrix);
    uint8_t* rows = const_cast<uint8_t*>(call.rows) + quarter / 2 * amx::kRows * call.row_bytes;
    const float* scales = quantized_row(call.matrix, rows).scales;
    float* target = totals + quarter / 2 * amx::kRows * kTileRows + quarter % 2 * kLanes;
    Floats values[amx::kRows];
#pragma GCC unroll 16
    for (int r = 0; r < amx::kRows; ++r) values[r] = first == 0 ? zeros() : load(target + r * kTileRows);
    for (int64_t group = first; group < end; ++group) {
        const int32_t* sum = sums[group - first][quarter];
        const float* scale = scales + group;
#pragma GCC unroll 4
        for (int r = 0; r < amx::kRows; r += 4, scale += 4 * row_words) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const auto* start = reinterpret_cast<const int32_t*>(scale + groups + i * row_words);
                const Ints dots = add(Ints{_mm512_load_si512(sum + (r + i) * kLanes)}, fill_ints(*start));
                values[r + i] = fma(to_floats(dots), fill(scale[i * row_words]), values[r + i]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < amx::kRows; ++r) store(target + r * kTileRows, values[r]);
}

}  // namespace

void multiply_bytes(const BlockCall& call, float* sums) {
    // Rows that a block lacks have sums of zero, or of a block before.
    alignas(64) static thread_local Sums groups_sums[kGroups];
    const int64_t groups = num_groups(call.matrix);
    const int64_t upper = call.num_rows < amx::kRows ? call.num_rows : amx::kRows, lower = call.num_rows - upper;
    amx::Shapes shapes;
    for (const int tile : {0, 1, 4}) shapes.set(tile, upper, amx::kRowBytes);
    for (const int tile : {6, 7}) shapes.set(tile, amx::kRows, amx::kRowBytes);
    if (lower > 0) {
        for (const int tile : {2, 3, 5}) shapes.set(tile, lower, amx::kRowBytes);
    }
    const amx::Tiles tiles(shapes);
    for (int64_t first = 0; first < groups; first += kGroups) {
        const int64_t end = first + kGroups < groups ? first + kGroups : groups;
        for (int64_t group = first; group < end; ++group) {
            prefetch(call.next + group * call.next_bytes, call.next_bytes);
            lower > 0 ? multiply_group<true>(call, group, groups_sums[group - first])
                      : multiply_group<false>(call, group, groups_sums[group - first]);
        }
        for (int quarter = 0; quarter < (lower > 0 ? 4 : 2); ++quarter) {
            add_groups(call, first, end, quarter, groups_sums, sums);
        }
    }
}

}  // namespace lockstep::products

#endif
