// Rows of activations in the form that a matrix's products read them in.
#pragma once

#include "matrix.h"

namespace lockstep::products {

// A row for an integer product: codes [groups * columns of a group] int8, then what follows by group of columns.
struct QuantizedRow {
    int8_t* codes;
    float* scales;    // [groups]
    int32_t* starts;  // [groups]: what a sum of products starts at, minus the zero point times the sum of the codes
    float* sums;      // [num_scales]: of the dequantised activations, by group of weights; only for offsets
};

inline QuantizedRow quantized_row(const Matrix& m, uint8_t* row) {
    const int64_t groups = num_groups(m);
    auto* scales = reinterpret_cast<float*>(row + groups * group_columns(m.scales));
    auto* starts = reinterpret_cast<int32_t*>(scales + groups);
    return {reinterpret_cast<int8_t*>(row), scales, starts, reinterpret_cast<float*>(starts + groups)};
}

// A row for a product with a tile unit: the codes are 128 * high + low, and all have one scale.
struct PlanesRow {
    int8_t *high, *low;  // [groups * columns of a group]
    float* scale;
    float* sum;  // of the dequantised activations; only for offsets
};

inline PlanesRow planes_row(const Matrix& m, uint8_t* row) {
    auto* high = reinterpret_cast<int8_t*>(row);
    int8_t* low = high + num_groups(m) * group_columns(m.scales);
    auto* scale = reinterpret_cast<float*>(low + num_groups(m) * group_columns(m.scales));
    return {high, low, scale, scale + 1};
}

// The sums of a row's dequantised activations, by group of weights.
inline const float* activation_sums(const Matrix& m, const uint8_t* row) {
    auto* memory = const_cast<uint8_t*>(row);
    return has_planes(m) ? planes_row(m, memory).sum : quantized_row(m, memory).sums;
}

// The bytes from one prepared row to the next. The additional line keeps rows out of the same sets of a cache.
inline int64_t prepared_row_bytes(const Matrix& m) {
    if (has_planes(m)) return num_groups(m) * 2 * group_columns(m.scales) + 64;
    const int64_t sums = m.offsets != Offsets::kNone ? num_scales(m) * 4 : 0;
    const int64_t bytes = is_float(m) ? round_up(m.num_columns, kBf16Columns) * 4 : num_groups(m) * (group_columns(m.scales) + 8) + sums;
    return round_up(bytes, 64) + 64;
}

// Whether products read the rows of activations where they are.
bool reads_in_place(const Matrix& m);

// Write a row of activations [num_columns] in the form that products with `m` read, to 64-byte aligned memory. A group
// with a value that is not finite makes all products with the row NaN.
void prepare_row(const Matrix& m, const float* x, uint8_t* row);
void prepare_row(const Matrix& m, const bf16* x, uint8_t* row);

}  // namespace lockstep::products
