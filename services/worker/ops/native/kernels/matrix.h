// A weight matrix [num_rows, num_columns] in the form that products read it in: tiles of 32 rows, each contiguous.
//
// Rows of the matrix are outputs of the product. A tile is read once from memory, from its first byte to its last, for
// all rows of activations. The last tile is padded with rows of zeros, the last group with columns of zeros.
#pragma once

#include "lanes.h"

namespace lockstep::products {

constexpr int kTileRows = 2 * kLanes;
// Integer tiles are laid out in steps of 8 columns, the unit of one load of 4-bit codes.
constexpr int kStep = 8;

enum class Kind : int64_t {
    kFloat32,   // [K][32] float32
    kBfloat16,  // [K / 2][32][2] bfloat16
    kInt8,      // [K / 8][2][32][4] bytes: codes plus kInt8Zero
    kInt4,      // [K / 8][32][4] bytes: codes plus 8 of 4 columns in the low halves, of the next 4 in the high ones
    kMxfp4,     // likewise; codes are indices of MXFP4's values
};

// How the scales of integers are stored: in front of the codes of their columns, except those of whole rows.
enum class Scales : int64_t {
    kRow,      // one for each row, in `row_scales`
    kFloat32,  // [32] float32
    kFloat16,  // [32] float16
    kPower,    // [32] exponents of 2, plus 127
};

// Integer products: activations are quantised to 8 bits with a scale for each run of this many columns. Larger runs cost
// less time and more precision; a run never has two scales of weights.
constexpr int group_columns(Scales scales) { return scales == Scales::kRow ? 64 : 32; }
constexpr int kMaxGroup = 64;

// What added to an int8 code makes it what the processor multiplies: AVX-512's products take unsigned weights.
#ifdef __AVX512VNNI__
constexpr int kInt8Zero = 128;
#else
constexpr int kInt8Zero = 0;
#endif

// Shared with Python (`packed.py`), which owns the memory.
struct Matrix {
    Kind kind;
    Scales scales;
    Format dtype;  // of activations and results: kFloat32 or kBfloat16
    int64_t num_rows;
    int64_t num_columns;
    int64_t group_size;  // columns that share a scale and an offset: a multiple of a group of activations, or all of them
    uint8_t* tiles;
    float* row_scales;  // [tiles * 32], or null
    float* offsets;     // [tiles, groups, 32], or null for zeros: added to each element of a group
    float* bias;        // [tiles * 32], or null
};

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

inline bool is_float(const Matrix& m) { return m.kind == Kind::kFloat32 || m.kind == Kind::kBfloat16; }
inline int64_t num_tiles(const Matrix& m) { return divide_up(m.num_rows, kTileRows); }
// Runs of columns with a scale of the activations, and with a scale of the weights.
inline int64_t num_groups(const Matrix& m) { return divide_up(m.num_columns, group_columns(m.scales)); }
inline int64_t num_scales(const Matrix& m) { return divide_up(m.num_columns, m.group_size); }

inline int64_t scale_bytes(Scales scales) {
    switch (scales) {
        case Scales::kRow: return 0;
        case Scales::kFloat32: return kTileRows * 4;
        case Scales::kFloat16: return kTileRows * 2;
        case Scales::kPower: return kTileRows;
    }
    return 0;
}

inline int64_t code_bytes(const Matrix& m) {
    switch (m.kind) {
        case Kind::kFloat32: return m.num_columns * kTileRows * 4;
        case Kind::kBfloat16: return round_up(m.num_columns, 2) * kTileRows * 2;
        case Kind::kInt8: return num_groups(m) * group_columns(m.scales) * kTileRows;
        case Kind::kInt4:
        case Kind::kMxfp4: return num_groups(m) * group_columns(m.scales) * kTileRows / 2;
    }
    return 0;
}

inline int64_t tile_bytes(const Matrix& m) {
    return code_bytes(m) + (is_float(m) ? 0 : num_scales(m) * scale_bytes(m.scales));
}

// What is added to codes so that they are unsigned; activations' sums times this are subtracted again.
inline int zero_point(Kind kind) {
    switch (kind) {
        case Kind::kInt8: return kInt8Zero;
        case Kind::kInt4: return 8;
        case Kind::kMxfp4: return 12;
        default: return 0;
    }
}

// The value of a code of 1: MXFP4's are multiplied as integers, twice their values.
inline float weight_unit(Kind kind) { return kind == Kind::kMxfp4 ? 0.5f : 1.0f; }

}  // namespace lockstep::products
