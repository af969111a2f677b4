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
    kInt8,      // [K / 8][2][32][4] bytes: codes plus int8_zero
    kInt4,      // [K / 8][32][4] bytes: codes of 4 columns in the low halves, of the next 4 in the high ones
    kMxfp4,     // likewise; codes are indices of MXFP4's values
    kIq4,       // likewise; codes are indices of kIq4Values
    kInt5,      // two steps of kInt4, then a byte for each place in a half of one: the upper bits of 8 codes
    kInt6,      // a step of kInt4, then a byte for each place in a half of it: the upper two bits of 4 codes
};

// How the scales of integers are stored: in a header in front of the codes of their columns, except those of whole rows.
enum class Scales : int64_t {
    kRow,        // one for each row, in `row_scales`
    kFloat32,    // [32] float32
    kFloat16,    // [32] float16
    kPower,      // [32] exponents of 2, plus 127
    kFactors,    // for each 256 columns [32] float16, then for each 32 of them [32] int8 that it is multiplied by
    kFactors16,  // likewise, but for each 16 of them
};

// How offsets are stored, which are added to each element of their columns: in the header after the scales, except those
// of whole rows.
enum class Offsets : int64_t {
    kNone,
    kRow,      // one for each row, in `row_offsets`
    kFloat32,  // [32] float32
    kFloat16,  // [32] float16
    kFactors,  // as the scales are
};

// Integer products by vectors: activations are quantised to 8 bits with a scale for each run of this many columns. Larger
// runs cost less time and more precision; a run never has two scales of weights.
constexpr int group_columns(Scales scales) {
    return scales == Scales::kRow ? 64 : scales == Scales::kFactors16 ? 16 : 32;
}
constexpr int kMaxGroup = 64;

// Columns that share a float16 where groups have factors of it.
constexpr int kFactoredColumns = 256;
constexpr bool has_factors(Scales scales) { return scales == Scales::kFactors || scales == Scales::kFactors16; }
// The bytes of a float16 for each row of a tile, and of the factors for so many groups.
constexpr int64_t factored_bytes(int64_t groups) { return kTileRows * (2 + groups); }

// What added to an 8-bit value makes it what vectors multiply: AVX-512's products take unsigned weights.
#ifdef __AVX512VNNI__
constexpr int kInt8Zero = 128;
#else
constexpr int kInt8Zero = 0;
#endif

// GGUF's table for IQ4_NL and IQ4_XS. Source: ggml, src/ggml-common.h, kvalues_iq4nl.
constexpr int8_t kIq4Values[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Shared with Python (`packed.py`), which owns the memory.
struct Matrix {
    Kind kind;
    Scales scales;
    Offsets offsets;
    Format dtype;  // of activations and results: kFloat32 or kBfloat16
    int64_t num_rows;
    int64_t num_columns;
    int64_t group_size;  // columns that share a scale and an offset: a multiple of a group of activations, or all of them
    int64_t zero;        // kInt4, kInt5 and kInt6: the code of zero
    uint8_t* tiles;
    float* row_scales;   // [tiles * 32], or null
    float* row_offsets;  // [tiles * 32], or null
    float* bias;         // [tiles * 32], or null
};

// bfloat16 is padded with zeros to this many columns: those of a load.
#ifdef USE_AMX
constexpr int64_t kBf16Columns = 32;
#else
constexpr int64_t kBf16Columns = 2;
#endif

// Sums of so many products of a code below 2 ** 7 and a weight up to 2 ** 7 fit in 32 bits.
constexpr int64_t kMaxPlanesColumns = 1 << 17;
// Whether a tile unit multiplies the matrix with activations of 15 bits, which are in two planes of bytes.
inline bool has_planes([[maybe_unused]] const Matrix& m) {
#ifdef USE_AMX
    return m.kind == Kind::kInt8 && m.scales == Scales::kRow && m.num_columns <= kMaxPlanesColumns;
#else
    return false;
#endif
}
// What is added to the codes of kInt8. A tile unit takes signed weights.
inline int int8_zero(const Matrix& m) { return has_planes(m) ? 0 : kInt8Zero; }

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

inline bool is_float(const Matrix& m) { return m.kind == Kind::kFloat32 || m.kind == Kind::kBfloat16; }
inline int64_t num_tiles(const Matrix& m) { return divide_up(m.num_rows, kTileRows); }
// Runs of columns with a scale of the activations, and with a scale of the weights.
inline int64_t num_groups(const Matrix& m) { return divide_up(m.num_columns, group_columns(m.scales)); }
inline int64_t num_scales(const Matrix& m) { return divide_up(m.num_columns, m.group_size); }

// The bytes of a header's scales, and of its offsets.
inline int64_t scale_bytes(Scales scales) {
    switch (scales) {
        case Scales::kRow: return 0;
        case Scales::kFloat32: return kTileRows * 4;
        case Scales::kFloat16: return kTileRows * 2;
        case Scales::kPower: return kTileRows;
        case Scales::kFactors:
        case Scales::kFactors16: return factored_bytes(kFactoredColumns / group_columns(scales));
    }
    return 0;
}
inline int64_t offset_bytes(const Matrix& m) {
    switch (m.offsets) {
        case Offsets::kNone:
        case Offsets::kRow: return 0;
        case Offsets::kFloat32: return kTileRows * 4;
        case Offsets::kFloat16: return kTileRows * 2;
        case Offsets::kFactors: return scale_bytes(m.scales);
    }
    return 0;
}
inline int64_t header_bytes(const Matrix& m) { return scale_bytes(m.scales) + offset_bytes(m); }
// The columns whose codes follow a header.
inline int64_t header_columns(const Matrix& m) { return has_factors(m.scales) ? kFactoredColumns : m.group_size; }

// The bytes of the codes of so many columns, a multiple of 16.
constexpr int64_t packed_bytes(Kind kind, int64_t columns) {
    const int64_t bits = kind == Kind::kInt8 ? 8 : kind == Kind::kInt6 ? 6 : kind == Kind::kInt5 ? 5 : 4;
    return columns * kTileRows * bits / 8;
}

inline int64_t code_bytes(const Matrix& m) {
    switch (m.kind) {
        case Kind::kFloat32: return m.num_columns * kTileRows * 4;
        case Kind::kBfloat16: return round_up(m.num_columns, kBf16Columns) * kTileRows * 2;
        default: return num_groups(m) * packed_bytes(m.kind, group_columns(m.scales));
    }
}

inline int64_t tile_bytes(const Matrix& m) {
    return code_bytes(m) + (is_float(m) ? 0 : divide_up(m.num_columns, header_columns(m)) * header_bytes(m));
}

// What is added to the multiplied values so that they are unsigned; activations' sums times this are subtracted again.
inline int zero_point(const Matrix& m) {
    switch (m.kind) {
        case Kind::kInt8: return int8_zero(m);
        case Kind::kIq4: return kInt8Zero;
        case Kind::kMxfp4: return 12;
        default: return static_cast<int>(m.zero);
    }
}

// The value of a code of 1: MXFP4's are multiplied as integers, twice their values.
inline float weight_unit(Kind kind) { return kind == Kind::kMxfp4 ? 0.5f : 1.0f; }

}  // namespace lockstep::products
