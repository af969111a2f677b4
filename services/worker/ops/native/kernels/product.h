// Products of prepared rows with tiles, for all formats, up to the stored results.
#pragma once

#include "rows.h"
#include "tiles.h"

namespace lockstep::products {

// Computes `rows @ tile.T` with scales, offsets and bias, and stores it in the tile's 32 columns of `out`.
//
// next_tile: The tile that this thread will need next.
// rows: [num_rows], prepared for `m`, `row_bytes` apart.
// out: [num_rows, >= m.num_rows] of T, `out_stride` elements from row to row.
template <class T>
void multiply_tile(
    const Matrix& m,
    int64_t tile,
    int64_t next_tile,
    const uint8_t* rows,
    int64_t row_bytes,
    int64_t num_rows,
    T* out,
    int64_t out_stride);

}  // namespace lockstep::products
