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
