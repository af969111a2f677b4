// Products of a tile with a few prepared rows of activations: the innermost loops.
#pragma once

#include "matrix.h"

namespace lockstep::products {

// At most this many rows of activations at once, so that there are registers for the sums of a group of columns.
#ifdef __AVX512VNNI__
constexpr int kMaxIntRows = 8;
constexpr int kMaxFloatRows = 12;
#else
constexpr int kMaxIntRows = 4;
constexpr int kMaxFloatRows = 3;
#endif

struct TileCall {
    const Matrix& matrix;
    const uint8_t* tile;
    const uint8_t* rows;
    int64_t row_bytes;
    // Memory that is needed soon: the kernel asks for it evenly while it computes.
    const uint8_t* next;
    int64_t next_bytes;
};

// Computes sums [rows, 32]: without `row_scales`, `row_offsets` and `bias`.
using TileKernel = void (*)(const TileCall& call, float* sums);

#ifdef USE_AMX

// Rows of activations that a tile unit multiplies at once.
constexpr int kBlockRows = 32;

struct BlockCall {
    const Matrix& matrix;
    const uint8_t* tile;
    const uint8_t* rows;
    int64_t row_bytes;
    int64_t num_rows;  // at most kBlockRows
    // Memory that is needed soon: `next_bytes` for each of `block_steps`.
    const uint8_t* next;
    int64_t next_bytes;
};

// How often a block's kernel asks for memory.
inline int64_t block_steps(const Matrix& m) {
    return m.kind == Kind::kBfloat16 ? divide_up(m.num_columns, kBf16Columns) : num_groups(m);
}

// The products of a tile with a block of rows, as `TileKernel` computes them, in sums [kBlockRows, 32].
using BlockKernel = void (*)(const BlockCall& call, float* sums);
void multiply_bf16(const BlockCall& call, float* sums);
void multiply_bytes(const BlockCall& call, float* sums);

// Measured: with 64 rows of int8 or fewer vectors are as fast, as both wait for weights.
constexpr int64_t kMinByteRows = 256;

// The tile unit's kernel for so many rows; null: vectors are faster, or have to multiply all.
inline BlockKernel block_kernel(const Matrix& m, int64_t num_rows) {
    // Sums of bfloat16 have other bits than those of vectors, and must not depend on the number of rows.
    if (m.kind == Kind::kBfloat16) return multiply_bf16;
    const bool is_read_packed = m.kind == Kind::kInt8 && m.scales == Scales::kRow;
    return is_read_packed && num_rows >= kMinByteRows ? multiply_bytes : nullptr;
}

#endif

// A matrix's kernels for 1, 2, ... rows.
struct TileKernels {
    const TileKernel* by_rows;
    int max_rows;
};

TileKernels float_kernels(Kind kind);
TileKernels int8_kernels(Scales scales);
TileKernels int4_kernels(Scales scales);
TileKernels int5_kernels(Scales scales);
TileKernels int6_kernels();
TileKernels iq4_kernels(Scales scales);
TileKernels mxfp4_kernels();

inline TileKernels tile_kernels(const Matrix& m) {
    switch (m.kind) {
        case Kind::kInt8: return int8_kernels(m.scales);
        case Kind::kInt4: return int4_kernels(m.scales);
        case Kind::kInt5: return int5_kernels(m.scales);
        case Kind::kInt6: return int6_kernels();
        case Kind::kIq4: return iq4_kernels(m.scales);
        case Kind::kMxfp4: return mxfp4_kernels();
        default: return float_kernels(m.kind);
    }
}

// Asks for the memory in [next, next + bytes) before it is needed.
inline void prefetch(const uint8_t* next, int64_t bytes) {
    for (int64_t offset = 0; offset < bytes; offset += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(next + offset), _MM_HINT_T0);
    }
}

}  // namespace lockstep::products
