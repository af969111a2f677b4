// Packs matrices into tiles.
#include <algorithm>

#include "matrix.h"
#include "pool.h"

namespace lockstep::products {

namespace {

// Rows of a matrix as they come: one after the other, in the formats of `Matrix` in Python, scales apart.
struct Source {
    const Matrix& m;
    const uint8_t* values;  // codes of more than 4 bits are one in a byte, others two
    const void* scales;     // [num_rows, num_scales]: float32, or bytes for Scales::kPower; factors as in tiles' headers
    const float* offsets;   // [num_rows, num_scales], or null: for factors these are among the scales
    int64_t num_rows;
};

// The codes of a row in the group of columns from `first` on, one in a byte; zeros in the padding.
void read_codes(const Source& source, int64_t row, int64_t first, uint8_t* codes) {
    const int64_t left = source.m.num_columns - first, count = std::min<int64_t>(left, group_columns(source.m.scales));
    std::memset(codes, 0, kMaxGroup);
    if (row >= source.num_rows) return;
    const int64_t index = row * source.m.num_columns + first;
    switch (source.m.kind) {
        case Kind::kInt8:
            for (int64_t i = 0; i < count; ++i) codes[i] = static_cast<uint8_t>(source.values[index + i] + int8_zero(source.m));
            return;
        case Kind::kInt5:
        case Kind::kInt6: std::memcpy(codes, source.values + index, static_cast<size_t>(count)); return;
        default: break;
    }
    for (int64_t i = 0; i < count; i += 2) {
        const uint8_t pair = source.values[(index + i) / 2];
        codes[i] = pair & 15;
        codes[i + 1] = pair >> 4;
    }
}

// Write the codes of a row's group, at its place in a group of a tile.
void write_bytes(const uint8_t* codes, int64_t row, int64_t num_steps, uint8_t* target) {
    for (int64_t part = 0; part < 2 * num_steps; ++part) {
        std::memcpy(target + (part * kTileRows + row) * 4, codes + part * 4, 4);
    }
}

// The low halves of codes, and those bits above them that `kBits` has: see `WideCodes` in tiles_int.h.
template <int kBits>
void write_halves(const uint8_t* codes, int64_t row, int64_t num_steps, uint8_t* target) {
    constexpr int64_t kRun = kBits == 0 ? 1 : 8 / kBits / 4, kStepBytes = kStep * kTileRows / 2;
    constexpr int64_t kRunBytes = kRun * kStepBytes + (kBits == 0 ? 0 : 2 * kTileRows);
    for (int64_t step = 0; step < num_steps; ++step) {
        uint8_t* run = target + step / kRun * kRunBytes;
        for (int column = 0; column < kStep; ++column) {
            const int code = codes[step * kStep + column], half = column / 4;
            const int64_t place = row * 4 + column % 4;
            run[step % kRun * kStepBytes + place] |= static_cast<uint8_t>((code & 15) << (4 * half));
            if constexpr (kBits > 0) {
                // A load has the places of 16 rows.
                const int64_t part = step % kRun * 4 + half * 2 + row / kLanes;
                run[kRun * kStepBytes + place % (4 * kLanes)] |= static_cast<uint8_t>(code >> 4 << (part * kBits));
            }
        }
    }
}

void pack_codes(const Source& source, int64_t first_row, int64_t first_column, uint8_t* target) {
    const Matrix& m = source.m;
    const int64_t columns = group_columns(m.scales), num_steps = columns / kStep;
    std::memset(target, 0, static_cast<size_t>(packed_bytes(m.kind, columns)));
    uint8_t codes[kMaxGroup];
    for (int64_t row = 0; row < kTileRows; ++row) {
        read_codes(source, first_row + row, first_column, codes);
        switch (m.kind) {
            case Kind::kInt8: write_bytes(codes, row, num_steps, target); break;
            case Kind::kInt5: write_halves<1>(codes, row, num_steps, target); break;
            case Kind::kInt6: write_halves<2>(codes, row, num_steps, target); break;
            default: write_halves<0>(codes, row, num_steps, target);
        }
    }
}

// Write a row's number as float16 or float32.
void write_number(float value, bool is_half, int64_t row, uint8_t* target) {
    const uint16_t half = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
    if (is_half) {
        std::memcpy(target + row * 2, &half, 2);
    } else {
        std::memcpy(target + row * 4, &value, 4);
    }
}

// Write the header of the columns from `column` on.
void pack_header(const Source& source, int64_t first_row, int64_t column, uint8_t* target) {
    const Matrix& m = source.m;
    const int64_t bytes = header_bytes(m);
    if (has_factors(m.scales)) {
        const int64_t place = first_row / kTileRows * (m.num_columns / kFactoredColumns) + column / kFactoredColumns;
        std::memcpy(target, static_cast<const uint8_t*>(source.scales) + place * bytes, static_cast<size_t>(bytes));
        return;
    }
    std::memset(target, 0, static_cast<size_t>(bytes));
    for (int64_t row = 0; bytes > 0 && row < kTileRows && first_row + row < source.num_rows; ++row) {
        const int64_t index = (first_row + row) * num_scales(m) + column / m.group_size;
        if (m.scales == Scales::kPower) {
            target[row] = static_cast<const uint8_t*>(source.scales)[index];
        } else {
            write_number(static_cast<const float*>(source.scales)[index], m.scales == Scales::kFloat16, row, target);
        }
        if (source.offsets) {
            uint8_t* offsets = target + scale_bytes(m.scales);
            write_number(source.offsets[index], m.offsets == Offsets::kFloat16, row, offsets);
        }
    }
}

template <class T>
void pack_floats(const Source& source, int64_t first_row, uint8_t* target) {
    constexpr int64_t kColumns = 4 / sizeof(T);
    const Matrix& m = source.m;
    std::memset(target, 0, static_cast<size_t>(tile_bytes(m)));
    for (int64_t row = 0; row < kTileRows && first_row + row < source.num_rows; ++row) {
        const uint8_t* values = source.values + (first_row + row) * m.num_columns * sizeof(T);
        for (int64_t column = 0; column < m.num_columns; ++column) {
            uint8_t* place = target + (column / kColumns * kTileRows + row) * 4 + column % kColumns * sizeof(T);
            std::memcpy(place, values + column * sizeof(T), sizeof(T));
        }
    }
}

// Write the tile `target` from the rows of `source` from `first_row` on.
void pack_tile(const Source& source, int64_t first_row, uint8_t* target) {
    const Matrix& m = source.m;
    if (m.kind == Kind::kFloat32) return pack_floats<float>(source, first_row, target);
    if (m.kind == Kind::kBfloat16) return pack_floats<bf16>(source, first_row, target);
    for (int64_t group = 0; group < num_groups(m); ++group) {
        const int64_t column = group * group_columns(m.scales);
        if (column % header_columns(m) == 0) {
            pack_header(source, first_row, column, target);
            target += header_bytes(m);
        }
        pack_codes(source, first_row, column, target);
        target += packed_bytes(m.kind, group_columns(m.scales));
    }
}

}  // namespace

// The size of `m.tiles` in bytes; `m` may have no memory yet.
LS_EXPORT int64_t ls_tiles_bytes(const Matrix* m) { return num_tiles(*m) * tile_bytes(*m); }

// Write the tiles from `first_tile` on that the `num_rows` rows of values, scales and offsets make, in the formats of
// `Source`.
LS_EXPORT void ls_pack(
    const Matrix* m, const void* values, const void* scales, const float* offsets, int64_t first_tile, int64_t num_rows) {
    const Source source{*m, static_cast<const uint8_t*>(values), scales, offsets, num_rows};
    for_pieces(divide_up(num_rows, kTileRows), num_threads(), [&](int64_t tile) {
        pack_tile(source, tile * kTileRows, m->tiles + (first_tile + tile) * tile_bytes(*m));
    });
}

}  // namespace lockstep::products
