// Products of prepared rows with tiles, for all formats, up to the stored results.
#pragma once

#include "rows.h"
#include "tiles.h"

namespace lockstep::products {

// Tiles that a thread multiplies one after the other, [first, end), and the one that it will need after them.
struct TileRun {
    int64_t first, end, next;

    int64_t after(int64_t tile) const { return tile + 1 < end ? tile + 1 : next; }
};

// Computes `rows @ tile.T` with scales, offsets and bias, and stores it in the 32 columns of `out` that each tile has.
//
// rows: [num_rows], prepared for `m`, `row_bytes` apart.
// out: [num_rows, >= m.num_rows] of T, `out_stride` elements from row to row.
template <class T>
void multiply_tiles(
    const Matrix& m,
    const TileRun& run,
    const uint8_t* rows,
    int64_t row_bytes,
    int64_t num_rows,
    T* out,
    int64_t out_stride);

}  // namespace lockstep::products
