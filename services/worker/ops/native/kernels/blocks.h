// Products of a tile of weights with a block of rows of activations, by a tile unit.
#pragma once

#ifdef USE_AMX

#include "amx.h"
#include "tiles.h"

namespace lockstep::products {

// A tile unit multiplies a matrix whatever the number of rows, or never: its sums of bfloat16 have other bits than those
// of vectors, and rows of bytes have other codes.
inline bool uses_tile_unit(const Matrix& m) { return m.kind == Kind::kBfloat16 || has_planes(m); }

// Rows of the two tiles of activations: of both planes, or upper and lower ones.
constexpr int64_t kBlockRows = 2 * amx::kRows;
inline int64_t max_block_rows(const Matrix& m) { return has_planes(m) ? amx::kRows : kBlockRows; }

// What a tile of weights has of a step: 64 bytes of each of its 32 rows.
constexpr int64_t kStepBytes = kTileRows * amx::kRowBytes;
inline int64_t num_steps(const Matrix& m) { return has_planes(m) ? num_groups(m) : divide_up(m.num_columns, kBf16Columns); }

// The shapes of tiles for so many rows.
amx::Shapes block_shapes(const Matrix& m, int64_t num_rows);

struct BlockCall {
    const Matrix& matrix;
    const uint8_t* tile;
    const uint8_t* rows;
    int64_t row_bytes;
    int64_t num_rows;
    // Memory that is needed soon: `next_bytes` for each step.
    const uint8_t* next;
    int64_t next_bytes;
};

// Write the sums [kBlockRows, 32] of `call.num_rows` rows, for which tiles are shaped: those of bfloat16 in float32. Of
// bytes they are int32, and those of the lower plane follow after 16 rows.
void multiply_block(const BlockCall& call, uint8_t* sums);

}  // namespace lockstep::products

#endif
